"""The section `security` of the settings: keys, in the settings themselves or in files.

A file keeps keys out of the arguments of an application, which Ray's dashboard and `serve config` show, and a key in it
can be replaced while the application runs. Standard library and pydantic only, as `settings.py`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, SecretStr, field_validator, model_validator

from pengserve.planners.types.errors import ConfigError

MAX_KEY_FILE_BYTES = 1 << 20
MAKE_A_KEY = "make one with `openssl rand -hex 32`"
FILE_FIELDS = ("api_keys_file", "admin_key_file", "metrics_key_file")


class SecuritySettings(BaseModel, extra="forbid", validate_default=True, frozen=True):
    """Keys. Without API keys the API is open, which is accepted on a loopback address alone."""

    api_keys: list[SecretStr] = []
    admin_key: SecretStr | None = None  # for /cluster/... and /metrics; needed where there are API keys
    metrics_key: SecretStr | None = None  # for /metrics alone: Prometheus needs no more
    # Each holds one key a line; empty lines and those after "#" say nothing. Read again when they change.
    api_keys_file: str = Field(default="", max_length=4096)
    admin_key_file: str = Field(default="", max_length=4096)
    metrics_key_file: str = Field(default="", max_length=4096)
    # A proxy in front names the tenant of each request in `x-pengserve-tenant`, and lets no client's own through.
    trust_tenant_header: bool = False

    @field_validator("api_keys", mode="before")
    @classmethod
    def _one_key_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator(*FILE_FIELDS)
    @classmethod
    def _absolute(cls, value: str) -> str:
        # As the model's directory: ingresses run elsewhere.
        return str(Path(value).expanduser().absolute()) if value else value

    @model_validator(mode="after")
    def _keys_are_whole(self) -> "SecuritySettings":
        single = [key for key in (self.admin_key, self.metrics_key) if key is not None]
        if any(not key.get_secret_value().strip() for key in [*self.api_keys, *single]):
            raise ValueError("an empty key would let every client in: leave it out or give it a value")
        for name in ("admin_key", "metrics_key"):
            if getattr(self, name) is not None and getattr(self, f"{name}_file"):
                raise ValueError(f"{name} and {name}_file name the same key: give one of them")
        if self.has_api_keys and not self.has_admin_key:
            raise ValueError(
                "admin_key is missing: with API keys, /cluster/... and /metrics need a key of their own, in admin_key"
                f" or in the file admin_key_file; {MAKE_A_KEY}"
            )
        if any(key.get_secret_value() in {api.get_secret_value() for api in self.api_keys} for key in single):
            raise ValueError(f"admin_key and metrics_key must differ from every key in api_keys: {MAKE_A_KEY}")
        return self

    @property
    def has_api_keys(self) -> bool:
        """Whether the API asks for a key."""
        return bool(self.api_keys or self.api_keys_file)

    @property
    def has_admin_key(self) -> bool:
        """Whether the cluster's routes ask for a key."""
        return bool(self.admin_key or self.admin_key_file)

    @property
    def given_in_the_open(self) -> list[str]:
        """Names of the fields that hold a key themselves."""
        return [f"security.{name}" for name in ("api_keys", "admin_key", "metrics_key") if getattr(self, name)]

    @property
    def files(self) -> dict[str, str]:
        """Paths of the files, by the name of the field."""
        return {f"security.{name}": getattr(self, name) for name in FILE_FIELDS if getattr(self, name)}

    def to_args(self) -> dict[str, Any]:
        """The fields WITH the keys in the clear."""

        def reveal(key: SecretStr | None) -> str | None:
            return key.get_secret_value() if key else None

        return {
            "api_keys": [key.get_secret_value() for key in self.api_keys],
            "admin_key": reveal(self.admin_key),
            "metrics_key": reveal(self.metrics_key),
            "trust_tenant_header": self.trust_tenant_header,
            **{name: getattr(self, name) for name in FILE_FIELDS},
        }

    def any_api_key(self) -> str | None:
        """A key that the API accepts; None where it asks for none. Reads the file."""
        keys = [key.get_secret_value() for key in self.api_keys]
        keys = keys or list(read_keys("security.api_keys_file", self.api_keys_file))
        return keys[0] if keys else None

    def any_admin_key(self) -> str | None:
        """A key that the cluster's routes accept; None where they ask for none. Reads the file."""
        if self.admin_key:
            return self.admin_key.get_secret_value()
        return next(iter(read_keys("security.admin_key_file", self.admin_key_file)), None)


def read_keys(field: str, path: str) -> Sequence[str]:
    """The keys in a file; none where `path` is empty.

    Raises:
        ConfigError: the file cannot be read, or has no key.
    """
    if not path:
        return ()
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_KEY_FILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ConfigError(f"{field}: cannot read the file {path} ({why})") from None
    keys = [line.strip() for line in text.splitlines()]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise ConfigError(f"{field}: the file {path} holds no key: write one key a line; {MAKE_A_KEY}")
    return tuple(keys)
