"""Ray and Ray Serve from the command line: a local cluster that lives as long as the command, or one that runs already.

Ray is imported inside the functions, after the variables it reads at import are in place.
"""

import contextlib
import getpass
import io
import logging
import math
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from pengserve.cluster.cli.ports import PortBlock, http_port, port_block
from pengserve.cluster.cli.scratch import Scratch
from pengserve.cluster.haproxy.launcher import BINARY_VARIABLE, find_haproxy, write_launcher
from pengserve.cluster.settings import Settings
from pengserve.planners.types.cluster_id import cluster_id
from pengserve.planners.types.errors import ConfigError
from pengserve.planners.types.units import MIB

NAMESPACE = "pengserve"
SPARE_CPUS = 4  # logical CPUs for the ingress, the controller and Serve's own actors; they are bookkeeping, not cores
OBJECT_STORE_BYTES = 128 * MIB  # tokens and KV do not travel through it
SHUTDOWN_TIMEOUT_S = 20.0
CONNECT_TIMEOUT_S = 5.0
STATUS_TIMEOUT_S = 30.0  # for Serve to say what it runs
DELETE_TIMEOUT_S = 120.0  # ... and to delete an application

logger = logging.getLogger(__name__)


def ray_environment(settings: Settings, scratch: str, ports: PortBlock) -> dict[str, str]:
    """Variables of a local cluster's processes. `scratch` is a private directory with a short path."""
    from pengserve.cluster.ingress import serve_front

    environment = {
        serve_front.VARIABLE: serve_front.IMPORT_PATH,  # Serve's own proxies read its headers as ingresses do
        "RAY_USAGE_STATS_ENABLED": "0",
        # Also on loopback: any local user who may talk to Ray runs code as this one.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # Ray of one machine: all its servers listen on loopback, as they do on macOS and Windows.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Ray would start an idle Python process for each logical CPU.
        "RAY_prestart_worker_first_driver": "0",
        # The application was drained before Serve stops it: nothing is left that 30 s of grace could save.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",
        "RAY_SERVE_LOG_TO_STDERR": "0",
    } | settings.http.connection_limits.to_environment()
    if settings.http.proxy == "haproxy":
        environment |= {
            # Serve's defaults are fixed ports, and fixed paths in /tmp: two applications on a machine would collide,
            # and the HAProxy of one would send requests to the other.
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports.fallback),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(ports.statistics[0]),  # the launcher makes Unix sockets of them
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports.statistics[1]),
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ports.ingresses.start),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports.ingresses.stop - 1),
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_HAPROXY_NBTHREAD": "1",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{scratch}/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{scratch}/admin.sock",
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{scratch}/metrics.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": scratch,
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{scratch}/server-state",
        }
    return environment


@contextlib.contextmanager
def local_ray(settings: Settings, scratch: Scratch) -> Iterator[str]:
    """A Ray cluster of this machine alone, and its log directory; everything in it ends with the block."""
    with http_port(settings.http.port), port_block() as ports:
        environment = ray_environment(settings, scratch.directory, ports)
        if settings.http.proxy == "haproxy":
            environment[BINARY_VARIABLE] = write_launcher(scratch.directory, haproxy_binary())
        _keep_outlasting_directories()
        os.environ.update(environment | {"TMPDIR": scratch.temporary})
        try:
            yield _start_ray(settings)
        finally:
            import ray

            with _ray_unheard():
                ray.shutdown()


def _keep_outlasting_directories() -> None:
    # Ray's logs and what torch has compiled are of use after the cluster; both would be under TMPDIR.
    directory = tempfile.gettempdir()
    os.environ.setdefault("RAY_TMPDIR", directory)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{directory}/torchinductor_{getpass.getuser()}")


def _start_ray(settings: Settings) -> str:
    """Start the cluster; its log directory."""
    import ray

    num_cpus = math.ceil(settings.num_instances * settings.instances.cpus + settings.http.ingress_replicas) + SPARE_CPUS
    context = ray.init(
        address="local",
        num_cpus=num_cpus,
        num_gpus=0 if settings.device == "cpu" else None,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    quiet_ray()
    return os.path.join(str(context.address_info["session_dir"]), "logs")


def haproxy_binary() -> str:
    """The HAProxy executable that Serve would take.

    Raises:
        ConfigError: there is none.
    """
    found = find_haproxy()
    if not found:
        raise ConfigError("HAProxy is not installed: run `pip install 'ray[serve]'`, or set http.proxy to serve")
    return found


def join_ray() -> None:
    """Connect to the cluster at RAY_ADDRESS, or to the one that runs on this machine.

    Raises:
        ConfigError: there is none.
    """
    import ray
    from ray._private.services import get_ray_address_from_environment

    try:
        address = get_ray_address_from_environment("auto", None)
        # Ray itself tries for minutes, and the file it finds the address in outlives the cluster.
        if "://" not in address:
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        logger.debug("no Ray cluster", exc_info=error)
        raise ConfigError(
            "found no Ray cluster to work on: set RAY_ADDRESS, or run `ray start --head`; without --detach,"
            " `pengserve up` starts its own"
        ) from None
    quiet_ray()


def quiet_ray() -> None:
    """Leave Ray's and Serve's own news to their log files."""
    import ray.serve  # noqa: F401  importing it sets its logger's level, so it comes first

    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)


def deploy(settings: Settings) -> None:
    """Run the application on the connected cluster; returns when Serve calls it running.

    Raises:
        Exception: what Serve or the application's builder raised.
    """
    from ray import serve

    from pengserve.cluster.app import application

    http = settings.http
    serve.start(
        proxy_location="EveryNode",
        http_options={
            "host": http.host,
            "port": http.port,
            "ssl_keyfile": http.ssl_keyfile,
            "ssl_certfile": http.ssl_certfile,
        },
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )
    serve.run(application(settings, settings.app), name=settings.app, route_prefix="/")


def identity(app: str) -> str:
    """What tells this application from those of other Ray clusters, for `PengServe(cluster_id=...)`."""
    from pengserve.controller.ray_shell import channel_token

    return cluster_id(channel_token(app))


def forget_start_failure(app: str) -> None:
    """Forget what an earlier deployment of the same name failed of."""
    from pengserve.cluster import start_failures

    start_failures.forget(app)


def start_failure(app: str) -> str:
    """What a process of the application said about why it does not start; empty where none did."""
    from pengserve.cluster import start_failures

    return start_failures.told(app)


def serve_failure(app: str) -> str:
    """What Serve knows about why a deployment of the application failed; may be empty."""
    try:
        status = serve_status().applications.get(app)
    except ConfigError:
        return ""  # Serve is gone
    messages = [deployment.message for deployment in status.deployments.values()] if status else []
    return "; ".join(dict.fromkeys(last_error(message) for message in messages if message))


def serve_status() -> Any:
    """Serve's own view of itself, a `ray.serve.schema.ServeStatus`.

    Raises:
        ConfigError: it does not answer within `STATUS_TIMEOUT_S`, or is gone.
    """
    from ray import serve

    found: list[Any] = []
    if not run_with_timeout(lambda: found.append(serve.status()), STATUS_TIMEOUT_S) or not found:
        raise ConfigError(f"Ray Serve gave no answer within {STATUS_TIMEOUT_S:g} s; look at its controller's log")
    return found[0]


def last_error(text: str) -> str:
    """The line of a remote traceback that names the error: its last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def is_deployed(app: str) -> bool:
    """Whether the connected cluster's Serve has an application of this name."""
    return app in serve_status().applications


def remove_application(app: str) -> int:
    """Delete a Serve application, its secret, and the instances it left behind; the number of those.

    Serve itself goes with the last application, or the next one could not choose another port.
    """
    from ray import serve

    from pengserve.controller.ray_shell import forget_channel_token

    if app in serve_status().applications and not run_with_timeout(lambda: serve.delete(app), DELETE_TIMEOUT_S):
        raise ConfigError(f"Ray Serve did not delete the application {app} within {DELETE_TIMEOUT_S:g} s; try again")
    num_left = _remove_instances(app)
    forget_channel_token(app)
    if not serve_status().applications:
        stop_serve()
    return num_left


def stop_serve(timeout_s: float = SHUTDOWN_TIMEOUT_S) -> bool:
    """Shut Serve down, with its proxies; False when it took longer than `timeout_s` and goes on alone."""
    from ray import serve

    with _ray_unheard():
        return run_with_timeout(serve.shutdown, timeout_s)


def run_with_timeout(action: Any, timeout_s: float) -> bool:
    """Run `action` in a thread; False when it was not over in `timeout_s`. Its errors are logged, not raised."""

    def run() -> None:
        try:
            action()
        except Exception:  # the caller is stopping everything: no error may keep it from the next step
            logger.debug("while stopping", exc_info=True)

    thread = threading.Thread(target=run, name="pengserve-stop", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


@contextlib.contextmanager
def _ray_unheard() -> Iterator[None]:
    # Ray prints errors of actors to the driver's stdout, and being killed is one; here it is what was asked for.
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def _remove_instances(app: str) -> int:
    # Detached actors outlive their application when its controller was killed before it could stop them.
    import ray
    from ray import PlacementGroupID
    from ray.util import list_named_actors, placement_group_table, remove_placement_group
    from ray.util.placement_group import PlacementGroup

    prefix = f"pengserve:{app}:"
    left = [a["name"] for a in list_named_actors(all_namespaces=True) if a["namespace"] == NAMESPACE]
    left = [name for name in left if name.startswith(prefix)]
    for name in left:
        with contextlib.suppress(ValueError):  # gone by itself meanwhile
            ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    for group_id, group in placement_group_table().items():
        if group["name"].startswith(prefix) and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))))
    return len(left)
