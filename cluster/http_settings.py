"""The section `http` of the settings: where the OpenAI API listens, and what is in front of it.

Standard library and pydantic only, as `settings.py`.
"""

import re
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from pengserve.cluster.haproxy.limits import MAX_PER_SOURCE, MAX_TIMEOUT_S, ConnectionLimits, parse_sources

_LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})

# As browsers send it: no path, and no slash at the end.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/?#@:\[\]*]+)(:\d{1,5})?")

_LIMITS = ConnectionLimits()


class HttpSettings(BaseModel, extra="forbid", validate_default=True, frozen=True):
    """Where the OpenAI API listens."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    ingress_replicas: int = Field(default=1, ge=1)
    proxy: Literal["haproxy", "serve"] = "haproxy"
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    allowed_origins: list[str] = []  # of web pages that may call the API from browsers (CORS); ["*"]: all
    # Under `serve deploy` the next four are variables of `ray start` (PENGSERVE_HTTP__HEADER_TIMEOUT_S, ...).
    header_timeout_s: int = Field(default=_LIMITS.header_timeout_s, ge=1, le=MAX_TIMEOUT_S)  # for a request's headers
    client_timeout_s: int = Field(default=_LIMITS.client_timeout_s, ge=1, le=MAX_TIMEOUT_S)  # without a byte moved
    max_connections_per_source: int = Field(default=_LIMITS.max_connections_per_source, ge=1, le=MAX_PER_SOURCE)
    trusted_sources: list[str] = list(_LIMITS.trusted_sources)  # networks without that limit: load balancers

    @field_validator("allowed_origins", "trusted_sources", mode="before")
    @classmethod
    def _one_value_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("trusted_sources")
    @classmethod
    def _networks(cls, value: list[str]) -> list[str]:
        return list(parse_sources(value))

    @field_validator("allowed_origins")
    @classmethod
    def _origins(cls, value: list[str]) -> list[str]:
        origins = [origin.strip().lower() for origin in value]
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is no origin: give the scheme, the host and, where it is not the usual one, the port,"
                    ' such as "https://chat.example.org" or "http://localhost:3000", or "*" for all'
                )
        if "*" in origins and len(origins) > 1:
            raise ValueError('"*" lets all origins in: give it alone, or leave it out')
        return origins

    @model_validator(mode="after")
    def _both_ssl_files(self) -> "HttpSettings":
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile go together: give both or neither")
        if self.ssl_keyfile is not None and self.proxy == "haproxy":
            raise ValueError("TLS needs `proxy: serve`: HAProxy as Ray Serve runs it speaks none")
        return self

    @property
    def connection_limits(self) -> ConnectionLimits:
        """What one connection and one source may take."""
        return ConnectionLimits(
            header_timeout_s=self.header_timeout_s,
            client_timeout_s=self.client_timeout_s,
            max_connections_per_source=self.max_connections_per_source,
            trusted_sources=tuple(self.trusted_sources),
        )

    @property
    def is_loopback(self) -> bool:
        """Whether only processes on this machine can connect."""
        return self.host in _LOOPBACK_HOSTS
