"""The application's one name: Ray Serve's. Two applications of one name would take each other's instances over."""

import re

from pengserve.planners.types.errors import ConfigError

_ACCEPTED = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def agreed(configured: str, given_by_serve: str) -> str:
    """The name of the Serve application that runs this, where the settings name no other.

    Args:
        configured: `app` of the settings; empty where they leave it out.
        given_by_serve: `name` of the application in Serve's configuration.

    Raises:
        ConfigError: the two differ, or Serve's has characters that names of instances cannot have.
    """
    if configured and configured != given_by_serve:
        raise ConfigError(
            f"args.app is {configured!r} and the Serve application's name is {given_by_serve!r}: leave args.app out, or"
            " give both the same name"
        )
    if not _ACCEPTED.fullmatch(given_by_serve):
        raise ConfigError(
            f"the Serve application's name {given_by_serve!r} cannot be used: take letters, digits, '_', '.' and '-',"
            " with a letter or digit first"
        )
    return given_by_serve
