"""Where settings come from: a YAML file, then `PENGSERVE_` variables, then explicit overrides; the later one wins.

    instances: {count: 4}                          in the file
    PENGSERVE_INSTANCES__COUNT=4                   in the environment
    load_settings(path, instances={"count": 4})    in code

Only `load_settings` (and `unsafe_environment`) look at the environment, and this is the one file that does;
`devices.py` reads CUDA_VISIBLE_DEVICES, which is CUDA's own. `parse_settings(data)` takes the data as it is. That
matters to the Serve builder, which runs on another machine: the values travel there once, made by
`Settings.to_args()`, and a stray variable over there changes nothing.

Standard library and pydantic only: the command line imports this for `--help`.
"""

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict, SettingsError

from pengserve.cluster.settings import Settings
from pengserve.planners.types.errors import ConfigError

ENV_PREFIX = "PENGSERVE_"

# Read by the command line (typer) for commands that talk to a running application; no setting of one.
CLI_VARIABLES = frozenset({"PENGSERVE_URL", "PENGSERVE_API_KEY", "PENGSERVE_ADMIN_KEY"})

# Kubernetes puts these into every pod beside a service called "pengserve..."; they are no settings of the user's.
_KUBERNETES_VARIABLE = re.compile(r"(^|_)(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)$")


def load_settings(path: str | os.PathLike[str] | None, **overrides: Any) -> Settings:
    """Settings from the YAML file at `path` (None: no file), then the environment, then `overrides`.

    Overrides are nested as in the file (`instances={"count": 4}`); a None among them says nothing.

    Raises:
        ConfigError: names the key or variable, and what would be accepted.
    """
    data = _merge(_merge(_read_yaml(path), _read_environment()), _without_none(overrides))
    return parse_settings(data, source=str(path) if path is not None else "")


def parse_settings(data: Mapping[str, Any], source: str = "") -> Settings:
    """Settings from data alone; the environment is not read.

    Raises:
        ConfigError: names the key, and what would be accepted.
    """
    try:
        return Settings.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(dict.fromkeys(_explain(e) for e in error.errors(include_url=False)))
        raise ConfigError(f"{problems}{f' (in {source})' if source else ''}") from None


def unsafe_environment() -> list[str]:
    """One sentence for each variable that makes vLLM accept what a server must not; empty when all is well."""
    traps = {
        "VLLM_SERVER_DEV_MODE": "it opens routes that reset, sleep and collectively call the engine",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "it lets pickled code in over the network",
    }
    return [
        f"{name} is set, and {why}: unset it and start again"
        for name, why in traps.items()
        if os.environ.get(name, "").strip().lower() not in ("", "0", "false")
    ]


def refuse_unsafe_environment() -> None:
    """Raise ConfigError where `unsafe_environment` finds anything."""
    if traps := unsafe_environment():
        raise ConfigError("; ".join(traps))


class _Environment(Settings, BaseSettings):
    # Lends its fields to pydantic-settings' environment reader; never instantiated.
    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid")


def _read_yaml(path: str | os.PathLike[str] | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{path} must hold keys and values, such as `model: ./my-model`")
    return data


def _read_environment() -> dict[str, Any]:
    _refuse_unknown_variables()
    try:
        data = EnvSettingsSource(_Environment, case_sensitive=False)()
    except SettingsError as error:
        raise ConfigError(
            f"{error}: lists and whole sections are given as JSON, for example"
            f" {ENV_PREFIX}SERVED_MODEL_NAME='[\"demo\"]'"
        ) from None
    # Engine arguments have no declared types here, so "2048" and "true" are read as YAML reads them.
    if isinstance(engine := data.get("engine"), dict):
        data["engine"] = {k: yaml.safe_load(v) if isinstance(v, str) else v for k, v in engine.items()}
    return data


def _refuse_unknown_variables() -> None:
    # A misspelt variable would be ignored silently, so it is refused as a misspelt key is. What follows a
    # section's `__` is checked by the model.
    known = [ENV_PREFIX + path.replace(".", "__").upper() for path in _paths(Settings)]
    for name in sorted(os.environ):
        upper = name.upper()
        rest = upper.removeprefix(ENV_PREFIX)
        if rest == upper or upper in CLI_VARIABLES or _KUBERNETES_VARIABLE.search(rest):
            continue
        if rest == "PORT" and "://" in os.environ[name]:  # Kubernetes again
            continue
        if rest.split("__")[0].lower() not in Settings.model_fields:
            raise ConfigError(f"the variable {name} sets nothing{_did_you_mean(upper, known)}")


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _paths(field.annotation, f"{prefix}{name}.")


def _did_you_mean(key: str, known: list[str]) -> str:
    by_end = [
        name for name in known if re.split(r"__|\.", name)[-1] == re.split(r"__|\.", key.removeprefix(ENV_PREFIX))[-1]
    ]
    guesses = by_end[:1] or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return (
        f"; did you mean {guesses[0]}?"
        if guesses
        else f"; known: {', '.join(k for k in known if '__' not in k and '.' not in k)}"
    )


def _explain(error: Mapping[str, Any]) -> str:
    # Values are left out under `security`: an error message ends up in logs.
    key = ".".join(str(part) for part in error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return f"unknown key {key!r}{_did_you_mean(key, list(_paths(Settings)))}"
    if error["type"] == "missing":
        hint = (
            ", a local Hugging Face directory, or `demo` for the model that comes with PengServe"
            if key == "model"
            else ""
        )
        return f"{key} is missing: give it{hint}"
    if error["type"] == "value_error":
        return f"{key}: {message}" if key else message
    got = "" if key.startswith("security") or isinstance(error["input"], Mapping) else f", got {error['input']!r}"
    return f"{key}: {message[:1].lower()}{message[1:]}{got}"


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _without_none(data: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _without_none(v) if isinstance(v, Mapping) else v for k, v in data.items() if v is not None}
