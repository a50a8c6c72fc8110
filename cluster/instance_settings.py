"""The section `instances` of the settings: how many there are, and what each one gets.

Standard library and pydantic only, as `settings.py`.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

from pengserve.planners.types.units import MIB

MAX_INSTANCES = 4096
CPU_INSTANCES = 2  # where `count` is auto and the device is cpu

CPU_ENGINE_DEFAULTS: Mapping[str, Any] = {
    "enforce_eager": True,  # compiling costs minutes and gains little for models that fit a CPU
    "enable_prefix_caching": True,
    "kv_cache_memory_bytes": 256 * MIB,
}
CHUNK_BYTES: Mapping[str, int] = {"cpu": 2 * MIB, "cuda": 64 * MIB}
CUDA_ENGINE_DEFAULTS: Mapping[str, Any] = {"enable_prefix_caching": True}


class InstanceSettings(BaseModel, extra="forbid", validate_default=True, frozen=True):
    """How many instances, and what each one gets."""

    count: Literal["auto"] | int = "auto"  # auto: as many as the CUDA devices that are there allow; 2 on cpu
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto looks at the machine that reads the settings
    cpu_threads: int = Field(default=1, ge=1)  # OpenMP threads of an instance on CPU
    cpus: float = Field(default=1, ge=0)  # logical CPUs that Ray reserves for an instance
    gpus: float | None = Field(default=None, ge=0)  # None: as many as its engine has workers on cuda, 0 on cpu
    wait_for_devices_s: float = Field(default=0, ge=0)  # for nodes with GPUs that join the Ray cluster after the head
    channel_host: str = ""
    lease_s: float = Field(default=30, gt=0)
    # For weights and KV together. 0: KV as the engine's arguments say; auto: on cuda what engine.gpu_memory_utilization
    # leaves beside activations and graphs, on cpu the weights and a fifth of what the machine has free.
    memory_bytes: Literal["auto"] | int = 0
    # Unit in which memory moves between weights and KV. None: 64 MiB on cuda, where each is a call, and 2 MiB on cpu.
    chunk_bytes: int | None = Field(default=None, ge=4096)

    @field_validator("count", mode="before")
    @classmethod
    def _auto_or_number(cls, value: Any) -> Any:
        if value == "auto":
            return value
        count = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
        if type(count) is not int or not 1 <= count <= MAX_INSTANCES:
            raise ValueError(f"give auto, or a whole number from 1 to {MAX_INSTANCES}; got {value!r}")
        return count

    @field_validator("memory_bytes", mode="before")
    @classmethod
    def _auto_or_bytes(cls, value: Any) -> Any:
        if value == "auto":
            return value
        count = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
        if type(count) is not int or count < 0:
            raise ValueError(f"give auto, or a whole number of bytes from 0 on; got {value!r}")
        return count

    @field_validator("chunk_bytes")
    @classmethod
    def _whole_pages(cls, value: int | None) -> int | None:
        if value is not None and value % 4096:
            raise ValueError(f"give a multiple of 4096 bytes, the size of a page; got {value}")
        return value
