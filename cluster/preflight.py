"""Mistakes in the settings that can be told before anything starts. `pengserve up` refuses them, `doctor` lists them.

Nothing here imports Ray, torch or vLLM. A setting is refused only where it certainly cannot work on this machine.
"""

import difflib
import importlib
import json
import os
import ssl
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pengserve.cluster import vllm_source
from pengserve.cluster.security_settings import read_keys
from pengserve.cluster.settings import Settings
from pengserve.planners.types.errors import ConfigError
from pengserve.replicas.own_arguments import OWN_ARGUMENTS

MODEL_HINT = "`--model demo` serves the small model that comes with PengServe"
CONFIG_FILES = ("config.json", "params.json")  # Hugging Face's and Mistral's
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
TOKENIZER_FILES = ("*token*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
TEMPLATE_SIGNS = "{}\n"  # a text with one of these is a template itself, as vLLM reads it, and no path


def refuse_mistakes(settings: Settings, *, is_local: bool = True) -> None:
    """Raise ConfigError where `mistakes` finds any."""
    if found := list(mistakes(settings, is_local=is_local)):
        raise ConfigError("; ".join(found))


def mistakes(settings: Settings, *, is_local: bool = True) -> Iterator[str]:
    """One sentence for each mistake, with the name of the field and what would be accepted.

    Args:
        is_local: this machine is the one that will serve, so that its files are those that will be read.
    """
    yield from setting_mistakes(settings)
    yield from check_model_files(settings)
    if is_local:
        yield from check_key_files(settings)
        yield from check_tls_files(settings)
        yield from check_logs(settings)


def setting_mistakes(settings: Settings) -> Iterator[str]:
    """Mistakes that are the same on every machine of a cluster."""
    yield from check_engine_arguments(settings)
    yield from check_parsers(settings)
    yield from check_chat_template(settings)


def check_engine_arguments(settings: Settings) -> Iterator[str]:
    """Unknown names under `engine:`, those that PengServe sets itself, and values of a wrong type."""
    known = vllm_source.argument_names()
    for name, value in settings.engine.items():
        if name in OWN_ARGUMENTS:
            yield f"engine.{name} is set by PengServe: leave it out"
        elif known is not None and name not in known:
            yield f"engine.{name} is no vLLM engine argument{_nearest(name, known, 'see `vllm serve --help`')}"
        elif problem := vllm_source.argument_problem(name, value):
            yield f"engine.{name}: {problem}"


def check_parsers(settings: Settings) -> Iterator[str]:
    """Names of parsers that vLLM does not have."""
    openai, engine = settings.openai, settings.engine
    for field, name, known in (
        ("openai.tool_call_parser", openai.tool_call_parser, vllm_source.tool_parsers),
        ("openai.reasoning_parser", openai.reasoning_parser, vllm_source.reasoning_parsers),
        ("engine.reasoning_parser", engine.get("reasoning_parser"), vllm_source.reasoning_parsers),
    ):
        if not name or ("reasoning" in field and engine.get("reasoning_parser_plugin")):
            continue
        names = known()
        if names is not None and name not in names:
            yield f"{field}: vLLM has no parser {name!r}{_nearest(str(name), names, f'there are {_listed(names)}')}"
    if openai.enable_auto_tool_choice and openai.tool_call_parser is None:
        yield "openai.enable_auto_tool_choice needs openai.tool_call_parser: name the parser of the model's tool calls"


def check_chat_template(settings: Settings) -> Iterator[str]:
    """A template's file that is not there, and a template that Jinja cannot read."""
    template = settings.openai.chat_template
    if template is None:
        return
    text = template
    if not any(sign in template for sign in TEMPLATE_SIGNS):
        try:
            text = Path(template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            yield f"openai.chat_template: cannot read the file {template} ({_why(error)})"
            return
    if "generation" in text:
        return  # `{% generation %}` is a tag of transformers, which Jinja alone does not know
    try:
        jinja2 = importlib.import_module("jinja2")
    except ImportError:
        return
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except jinja2.TemplateSyntaxError as error:
        yield f"openai.chat_template: line {error.lineno} is no valid Jinja: {error.message}"


def check_model_files(settings: Settings) -> Iterator[str]:
    """A model directory that is not there, or lacks its configuration, its weights or its tokenizer."""
    engine, directory = settings.engine, Path(settings.model).expanduser()
    if not directory.is_dir():
        if not directory.is_file() and "://" not in settings.model:
            yield from _check_elsewhere(settings)
        return
    if not engine.get("hf_config_path"):
        if not any((directory / name).is_file() for name in CONFIG_FILES):
            yield f"model: {directory} has no config.json: give a Hugging Face model directory; {MODEL_HINT}"
            return
        yield from _check_config(directory)
    if not (engine.get("load_format") or engine.get("model_weights")) and not _has(directory, WEIGHT_FILES):
        yield f"model: {directory} has no weights (*.safetensors): the download is incomplete"
    if not (engine.get("tokenizer") or engine.get("skip_tokenizer_init")) and not _has(directory, TOKENIZER_FILES):
        yield f"model: {directory} has no tokenizer: copy tokenizer.json beside config.json"


def check_key_files(settings: Settings) -> Iterator[str]:
    """Files of keys that cannot be read, or hold no key."""
    for field, path in settings.security.files.items():
        try:
            read_keys(field, path)
        except ConfigError as error:
            yield str(error)


def check_tls_files(settings: Settings) -> Iterator[str]:
    """TLS files that are not there, cannot be read, or do not belong together."""
    key, certificate = settings.http.ssl_keyfile, settings.http.ssl_certfile
    if key is None or certificate is None:
        return
    problems = []
    for field, path in (("http.ssl_keyfile", key), ("http.ssl_certfile", certificate)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            problems.append(f"{field}: cannot read the file {path} ({_why(error)})")
    yield from problems
    if problems:
        return
    try:
        # Without a password an encrypted key would ask for it on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        yield (
            f"http.ssl_certfile {certificate} and http.ssl_keyfile {key} are no pair of PEM certificate and unencrypted"
            f" key ({getattr(error, 'reason', None) or error})"
        )


def check_logs(settings: Settings) -> Iterator[str]:
    """Log files that cannot be written."""
    for field, name in (("event_log", settings.event_log), ("request_log", settings.request_log)):
        if not name:
            continue
        path = Path(name)
        if path.is_dir():
            yield f"{field}: {name} is a directory: give the path of a file"
            continue
        above = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        if not os.access(above, os.W_OK) or (above != path and not above.is_dir()):
            yield f"{field}: cannot write {name}: {above} is no writable {'file' if above == path else 'directory'}"


def _check_config(directory: Path) -> Iterator[str]:
    path = directory / "config.json"
    if not path.is_file():
        return
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield f"model: {path} is no valid JSON ({_why(error)})"
        return
    if not isinstance(data, dict):
        yield f"model: {path} must hold the fields of a model's configuration"


def _check_elsewhere(settings: Settings) -> Iterator[str]:
    """A model that is no directory here: a mistyped path, or a hub name that may not be fetched and is not here."""
    model = settings.model
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        yield f"the model directory {model} does not exist: {MODEL_HINT}"
        return
    try:
        hub = importlib.import_module("huggingface_hub")
        is_offline = bool(importlib.import_module("huggingface_hub.constants").HF_HUB_OFFLINE)
        revision = settings.engine.get("revision")
        found = [hub.try_to_load_from_cache(model, name, revision=revision) for name in CONFIG_FILES]
    except (ImportError, AttributeError, ValueError):
        return
    if is_offline and not any(isinstance(path, str) for path in found):
        yield (
            f"model: {model} is neither a directory nor in the cache of Hugging Face's hub, and HF_HUB_OFFLINE forbids"
            f" fetching it: {MODEL_HINT}"
        )


def _has(directory: Path, patterns: Iterable[str]) -> bool:
    return any(True for pattern in patterns for _ in directory.glob(pattern))


def _nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    guesses = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f": did you mean {guesses[0]}?" if guesses else f": {otherwise}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _why(error: Any) -> str:
    return str(getattr(error, "strerror", None) or error)
