"""The section `memory` of the settings: where the KV of an instance is, beside its device.

Standard library and pydantic only, as `settings.py`.
"""

from typing import Any, Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator

MAX_PIN_S = 3600.0
AUTO_BYTES = -1  # what an instance understands as "a share of what the node has free"


class MemorySettings(BaseModel, extra="forbid", validate_default=True, frozen=True):
    """The host tier: KV of requests that wait, and of layers that a step does not compute yet, in the host's memory."""

    # Of each instance. 0: no host tier; auto: a quarter of what the node has free.
    host_bytes: Literal["auto"] | int = 0
    # Between device and host, emulated: copies take at least as long as over such a link. None: as fast as they are.
    link_bytes_per_s: float | None = Field(default=None, gt=0)
    host_file: str = ""  # a file that holds the host tier instead of memory; its name gets the instance's process id
    # Which layers and requests are on the host follows from SLOs (LayerKV, OrbitFlow). Off: it is not shown to be
    # better than the host tier alone with the models measured so far (benchmarks/notes/slo.md).
    place_by_slo: bool = False
    # Seconds for which the KV of a session's newest answer is kept from being dropped, where there is room. 0: off.
    session_pin_s: float = Field(default=0.0, ge=0, le=MAX_PIN_S)

    @field_validator("host_bytes", mode="before")
    @classmethod
    def _auto_or_number(cls, value: Any) -> Any:
        if value == "auto":
            return value
        count = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
        if type(count) is not int or count < 0:
            raise ValueError(f"give auto, or a number of bytes from 0 on; got {value!r}")
        return count

    @model_validator(mode="after")
    def _of_a_tier_that_is_there(self) -> Self:
        """What concerns the host tier alone would do nothing without one, and its user would not know."""
        if self.num_bytes == 0:
            for name in ("place_by_slo", "host_file", "link_bytes_per_s"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} needs a host tier: set memory.host_bytes to a number of bytes, or to auto"
                    )
        return self

    @property
    def num_bytes(self) -> int:
        """As `InstanceConfig.host_bytes`."""
        return AUTO_BYTES if self.host_bytes == "auto" else self.host_bytes
