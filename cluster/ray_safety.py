"""Where the Ray and the Serve that run already are less safe than the settings say: found at start, and refused.

The settings say where HTTP should listen, and Ray Serve listens where its own `http_options` say. Ray asks for a token
only where it was started so. Both are looked up in the processes of the application.
"""

import ipaddress

import ray

from pengserve.planners.types.errors import ConfigError

CONTROLLER_TIMEOUT_S = 60.0
ALL_ADDRESSES = "0.0.0.0"


def refuse_open_ray() -> None:
    """Check that this process belongs to a Ray that asks for a token.

    Raises:
        ConfigError: it does not, and says what to do.
    """
    mode = auth_mode()
    if mode != "token":
        raise ConfigError(
            f"Ray runs without a token (RAY_AUTH_MODE is {mode!r}), so that all who reach its ports can run code: stop"
            " it, run `ray get-auth-token --generate`, and start it again with RAY_AUTH_MODE=token in the environment"
        )


def auth_mode() -> str:
    """How Ray checks who talks to it, as this process knows it: the processes of a cluster inherit it."""
    from ray._private.authentication import authentication_utils

    return str(authentication_utils.get_authentication_mode_name(authentication_utils.get_authentication_mode()))


def serve_http_host() -> str:
    """The address that Ray Serve listens on, of the Serve that runs.

    Raises:
        ray.exceptions.GetTimeoutError: Serve's controller does not answer.
    """
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    options = ray.get(controller.get_http_config.remote(), timeout=CONTROLLER_TIMEOUT_S)
    return options.host or ALL_ADDRESSES


def refuse_open_serve(host: str, *, has_keys: bool) -> None:
    """Check the address that Ray Serve listens on.

    Raises:
        ConfigError: other machines reach it, and the API asks for no key.
    """
    if not has_keys and not _is_loopback(host):
        raise ConfigError(
            f"Ray Serve listens on {host} (http_options.host), which other machines can reach, so security.api_keys or"
            " security.api_keys_file must name at least one key; or set http_options.host to 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
