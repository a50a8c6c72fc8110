"""The fingerprint of an application's configuration: what must be alike for token ids and KV to mean the same.

Computed once, by the process that builds the application, and carried by all others: files have other times on other
nodes. It is in the names of instances' actors and in every handshake.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pengserve.planners
import pengserve.replicas
from pengserve.planners.types.codec import to_data
from pengserve.planners.types.config import InstanceConfig
from pengserve.replicas.versions import versions

FINGERPRINT_DIGITS = 16  # hexadecimal
SMALL_FILE_BYTES = 64 << 10  # up to this size a file of the model is read; of larger ones size and time count

# Fields of `InstanceConfig` that change neither tokens nor the layout of memory.
_IMMATERIAL = ("app", "channel_token", "channel_host", "fingerprint", "lease_s", "peer_timeout_s", "drain_timeout_s")


def fingerprinted(config: InstanceConfig) -> InstanceConfig:
    """`config` with the versions that are installed here and its fingerprint."""
    config = replace(config, versions=versions())
    return replace(config, fingerprint=fingerprint_of(config))


def fingerprint_of(config: InstanceConfig) -> str:
    """Hexadecimal digits that change with the model's files, settings of the engine and shapes, code and versions."""
    data = to_data(config)
    material = {name: value for name, value in data.items() if name not in _IMMATERIAL}
    parts = [json.dumps(material, sort_keys=True, default=str), _code_digest(), *_model_files(config.model)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()[:FINGERPRINT_DIGITS]


def _model_files(model: str) -> Iterator[str]:
    """What identifies the files of a local model; nothing for a name on a hub, whose `revision` is a setting."""
    directory = Path(model)
    if not directory.is_dir():
        return
    for path in sorted(directory.rglob("*")):
        if not path.is_file() or any(part.startswith(".") for part in path.relative_to(directory).parts):
            continue
        status = path.stat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if status.st_size <= SMALL_FILE_BYTES else ""
        yield f"{path.relative_to(directory)} {status.st_size} {content or status.st_mtime_ns}"


@cache
def _code_digest() -> str:
    """Of the code that runs in instances: two checkouts of one version differ."""
    digest = hashlib.sha256()
    for package in (pengserve.planners, pengserve.replicas):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()
