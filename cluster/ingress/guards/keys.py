"""The keys that an ingress accepts, and the files that some of them come from.

A changed file counts within `CHECK_PERIOD_S`, without a restart. A file that has become unreadable or empty changes
nothing: the keys from before stay, and the log says so.
"""

import asyncio
import hashlib
import hmac
import logging
import os
from collections.abc import Sequence

from pengserve.cluster.ingress.config import IngressConfig
from pengserve.cluster.security_settings import read_keys
from pengserve.planners.types.errors import ConfigError

logger = logging.getLogger(__name__)

CHECK_PERIOD_S = 5.0


def key_id(key: str) -> str:
    """Names a key without telling it."""
    return _digest(key).hex()[:16]


class Keys:
    """A set of keys that is compared in constant time."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.digests = tuple(_digest(key) for key in keys if key)

    def __bool__(self) -> bool:
        return bool(self.digests)

    def accept(self, key: str) -> bool:
        """Whether `key` is one of them."""
        return self.find(key) is not None

    def find(self, key: str) -> bytes | None:
        """The digest of `key` where it is one of them, else None."""
        digest = _digest(key)
        found = False
        for known in self.digests:
            found |= hmac.compare_digest(digest, known)
        return digest if found else None


class KeyRing:
    """The API keys, the admin keys, and the keys of `/metrics`, which admin keys open as well."""

    def __init__(self, config: IngressConfig) -> None:
        """Reads the files.

        Raises:
            ConfigError: one of them cannot be read or has no key.
        """
        self._config = config
        self._files = {
            "security.api_keys_file": config.api_keys_file,
            "security.admin_key_file": config.admin_key_file,
            "security.metrics_key_file": config.metrics_key_file,
        }
        self._seen: tuple[object, ...] = ()
        self.api, self.admin, self.metrics = Keys(()), Keys(()), Keys(())
        self._seen = self._stamps()
        self._read()

    @property
    def has_files(self) -> bool:
        """Whether there is anything to follow."""
        return any(self._files.values())

    async def follow(self) -> None:
        """Reads changed files again, for ever."""
        while True:
            await asyncio.sleep(CHECK_PERIOD_S)
            self.refresh()

    def refresh(self) -> bool:
        """Reads the files again where one has changed; whether other keys count now."""
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        self._seen = stamps
        try:
            self._read()
        except ConfigError as error:
            logger.warning("%s; the keys from before stay in force", error)
            return False
        logger.info("the keys were read again from their files")
        return True

    def _read(self) -> None:
        api, admin, metrics = (read_keys(field, path) for field, path in self._files.items())
        admin_keys = [self._config.admin_key, *admin]
        self.api, self.admin = Keys([*self._config.api_keys, *api]), Keys(admin_keys)
        self.metrics = Keys([*admin_keys, self._config.metrics_key, *metrics])

    def _stamps(self) -> tuple[object, ...]:
        return tuple(_stamp(path) for path in self._files.values() if path)


def _stamp(path: str) -> object:
    """What changes with the file's content. Kubernetes replaces a link to a directory above it."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
