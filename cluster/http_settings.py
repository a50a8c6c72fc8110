"""The section `http` of the settings: where the OpenAI API listens, and what is in front of it.

Standard library and pydantic only, as `settings.py`.
"""

from typing import Literal

from pydantic import BaseModel, Field, model_validator

_LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})


class HttpSettings(BaseModel, extra="forbid", validate_default=True, frozen=True):
    """Where the OpenAI API listens."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    ingress_replicas: int = Field(default=1, ge=1)
    proxy: Literal["haproxy", "serve"] = "haproxy"
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None

    @model_validator(mode="after")
    def _both_ssl_files(self) -> "HttpSettings":
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile go together: give both or neither")
        if self.ssl_keyfile is not None and self.proxy == "haproxy":
            raise ValueError("TLS needs `proxy: serve`: HAProxy as Ray Serve runs it speaks none")
        return self

    @property
    def is_loopback(self) -> bool:
        """Whether nobody outside this machine can connect."""
        return self.host in _LOOPBACK_HOSTS
