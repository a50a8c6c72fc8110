"""`pengserve up`: start, wait until answers flow, stay, drain, stop."""

import importlib.util
import json
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType

from rich.console import Console

from pengserve.client import PengServe, PengServeAPIError, PengServeError
from pengserve.cluster.cli import ray_local
from pengserve.cluster.cli.doctor import is_port_free
from pengserve.cluster.cli.output import error_console
from pengserve.cluster.cli.progress import Steps
from pengserve.cluster.cli.scratch import Scratch, remove_leftovers
from pengserve.cluster.cli.supervisor import StopRequest, supervise
from pengserve.cluster.placement import cluster_devices, local_devices, remarks, settle
from pengserve.cluster.preflight import refuse_mistakes
from pengserve.cluster.settings import Settings
from pengserve.cluster.settings_sources import refuse_unsafe_environment
from pengserve.planners.types.errors import ConfigError, EngineError
from pengserve.planners.types.events import EventKind
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceState

POLL_PERIOD_S = 0.3
HOPELESS_STARTS = 3  # failed starts of one slot, with no instance ready, after which waiting on is no use
INSIST_TIMEOUT_S = 2.0
JOIN_TIMEOUT_S = 10.0  # Serve's call asks once a second


def run_foreground(settings: Settings, timeout_s: float) -> int:
    """Start a local Ray and the application, stay until a signal, drain and stop. The process's exit code.

    Returns in two processes: this one, and a child that has served.
    """
    _check_before_start(settings, is_local=True)
    if not is_port_free(settings.http.host, settings.http.port):
        raise ConfigError(
            f"{settings.http.host}:{settings.http.port} is taken: stop what listens there, or choose another --port"
        )
    settings = _with_loopback_channels(settle(settings, local_devices))

    def serve(scratch: Scratch, stop: StopRequest) -> int:
        console = error_console()
        try:
            return _serve_locally(settings, timeout_s, console, scratch, stop)
        except KeyboardInterrupt:
            console.print("Stopped at once.")
            return 130

    _remark(settings, Console(stderr=True))
    remove_leftovers()
    return supervise(serve)


def run_detached(settings: Settings, timeout_s: float) -> int:
    """Deploy onto a running Ray cluster, wait until an instance is ready, and leave it running."""
    _check_before_start(settings, is_local=False)
    console = Console(stderr=True)
    stop = StopRequest()
    with Steps(console) as steps:
        steps.waiting("ray", "connecting")
        ray_local.join_ray()
        steps.done("ray", "connected")
        settings = settle(settings, cluster_devices, settings.instances.wait_for_devices_s)
        _remark(settings, console)
        with stop.listening(), _client(settings) as client:
            _bring_up(settings, _Deployment(settings), client, steps, stop, timeout_s)
    if stop.is_asked:
        console.print(f"Deploying goes on in the cluster; remove it with `pengserve down --app {settings.app}`.")
        return 130
    _print_hint(settings, console, steps.elapsed_s)
    return 0


def curl_line(settings: Settings) -> str:
    """A line to paste into a shell that streams a chat answer. Keys stay out of it: it is printed."""
    body = {
        "model": settings.served_model_name[0],
        "stream": True,
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "What does a dictionary do?"}],
    }
    tls = "-k " if settings.http.ssl_certfile else ""
    key = ' -H "Authorization: Bearer $PENGSERVE_API_KEY"' if settings.security.has_api_keys else ""
    return (
        f"curl -N {tls}{local_url(settings)}/v1/chat/completions -H 'Content-Type: application/json'{key}"
        f" -d '{json.dumps(body)}'"
    )


def local_url(settings: Settings) -> str:
    """Where this machine finds the application."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.http.host, settings.http.host)
    scheme = "https" if settings.http.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.http.port}"


def _serve_locally(settings: Settings, timeout_s: float, console: Console, scratch: Scratch, stop: StopRequest) -> int:
    with ExitStack() as cluster:
        with Steps(console) as steps:
            steps.waiting("ray", "importing and starting a local cluster")
            logs = cluster.enter_context(ray_local.local_ray(settings, scratch))
            deployment = _Deployment(settings)
            cluster.callback(deployment.join)
            cluster.push(_stop_serve)
            stop.listen()  # again: Ray took SIGTERM for itself while it started
            steps.done("ray", "local cluster")
            client = cluster.enter_context(_client(settings))
            try:
                is_up = _bring_up(settings, deployment, client, steps, stop, timeout_s)
            except PengServeError:
                console.print(f"Logs of every process: {logs}", soft_wrap=True, highlight=False)
                raise
        if not stop.is_asked:
            _print_hint(settings, console, steps.elapsed_s)
            while not stop.wait(1.0):
                pass
        if is_up:
            _drain(settings, client, console)
        console.print("Stopping.")
    console.print("Stopped.")
    return 0


def _stop_serve(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
    # One who insists gets no graceful end: Ray's processes are killed right after this.
    ray_local.stop_serve(INSIST_TIMEOUT_S if kind is KeyboardInterrupt else ray_local.SHUTDOWN_TIMEOUT_S)


def _bring_up(
    settings: Settings,
    deployment: "_Deployment",
    client: PengServe,
    steps: Steps,
    stop: StopRequest,
    timeout_s: float,
) -> bool:
    """Deploy, and show what is missing until every instance is ready or a signal asks to stop.

    Whether the application answers: if it does not, there is nothing to drain.

    Raises:
        EngineError: the deployment failed, or no instance became ready.
    """
    deadline_s = time.monotonic() + timeout_s
    deployment.start()
    ready, failures, is_up = 0, dict[str, list[str]](), False
    steps.waiting("ingress", "starting Ray Serve, importing vLLM")
    while not stop.wait(POLL_PERIOD_S):
        if why := deployment.failure():
            raise EngineError(f"the application did not start: {why}") from deployment.error
        snapshot = _snapshot(client)
        if snapshot is not None:
            is_up = True
            steps.done("ingress", local_url(settings))
            failures = _start_failures(client)
            ready = _show_instances(snapshot, failures, steps)
            if ready == settings.num_instances and deployment.is_over and _is_ready(client):
                return True
        if time.monotonic() > deadline_s:
            if ready:
                return True  # answers flow; the slow ones join when they are ready
            whys = [why for slot in failures.values() for why in slot]
            raise EngineError(f"no instance was ready after {timeout_s:g} s: {whys[-1] if whys else 'still loading'}")
    return is_up


class _Deployment:
    """`ray_local.deploy` in a thread of its own: Serve's call blocks, and signals reach the main thread alone."""

    def __init__(self, settings: Settings) -> None:
        self.error: Exception | None = None
        self._app = settings.app
        self._thread = threading.Thread(target=self._run, args=(settings,), name="pengserve-deploy", daemon=True)

    def start(self) -> None:
        """Begin to deploy."""
        ray_local.forget_start_failure(self._app)
        self._thread.start()

    def join(self) -> None:
        """Wait until Serve's call has returned, as it does when Serve is gone; call before Ray is shut down.

        Ray ends the process of a thread that calls it afterwards, and nothing more would be told.
        """
        if self._thread.ident is not None:
            self._thread.join(JOIN_TIMEOUT_S)

    @property
    def is_over(self) -> bool:
        """Whether Serve is done, one way or the other."""
        return not self._thread.is_alive()

    def failure(self) -> str:
        """Why the application does not start; empty while it may. Its processes tell at once, Serve much later."""
        if self.error is None:
            return "" if self.is_over else ray_local.start_failure(self._app)
        return ray_local.start_failure(self._app) or ray_local.serve_failure(self._app) or _one_line(self.error)

    def _run(self, settings: Settings) -> None:
        try:
            ray_local.deploy(settings)
        except Exception as error:  # what Serve or the builder raised is shown by the main thread
            self.error = error


def _is_ready(client: PengServe) -> bool:
    try:
        return client.ready()
    except PengServeError:
        return False


def _show_instances(snapshot: ClusterSnapshot, failures: Mapping[str, Sequence[str]], steps: Steps) -> int:
    """One line an instance; the number of ready ones.

    Raises:
        EngineError: none is ready and one slot failed so often that it always will.
    """
    num_ready = sum(i.state is InstanceState.READY for i in snapshot.instances)
    for instance in snapshot.instances:
        name = f"instance {instance.instance_id}"
        whys = failures.get(str(instance.instance_id), ())
        if instance.state is InstanceState.READY:
            steps.done(name, f"{instance.device.device} on {instance.device.node_ip}")
        elif not whys:
            was_begun = instance.key.incarnation > 0
            steps.waiting(name, instance.phase or ("starting a process" if was_begun else "waiting for its turn"))
        elif num_ready or not (is_hopeless(failures) or len(whys) >= HOPELESS_STARTS):
            steps.failed(name, f"trying again after: {whys[-1]}")
        else:
            raise EngineError(f"{name} does not start: {whys[-1]}")
    return num_ready


def is_hopeless(failures: Mapping[str, Sequence[str]]) -> bool:
    """Whether starts, of one slot or of several, have failed for the same reason: the next one will too."""
    whys = [why for slot in failures.values() for why in slot]
    return len(set(whys)) < len(whys)


def _start_failures(client: PengServe) -> dict[str, list[str]]:
    """Why starts failed, by slot, the newest last."""
    failures: dict[str, list[str]] = {}
    try:
        events = client.events(limit=500)
    except PengServeError:
        return {}  # the ingress is busy starting; the next poll asks again
    for event in events:
        if event.kind in (EventKind.INSTANCE_ERROR, EventKind.INSTANCE_LOST):
            slot = event.span.removeprefix("instance:").partition(".")[0]
            failures.setdefault(slot, []).append(event.why)
    return failures


def _snapshot(client: PengServe) -> ClusterSnapshot | None:
    try:
        return client.status()
    except PengServeAPIError as error:
        if error.status_code in (401, 403, 421):
            raise
        return None  # a proxy answers before the ingress does
    except PengServeError:
        return None


def _drain(settings: Settings, client: PengServe, console: Console) -> None:
    timeout_s = settings.controller.drain_timeout_s
    console.print(
        f"Draining: running answers finish, new ones are refused (at most {timeout_s:g} s; Ctrl-C stops at once).",
        soft_wrap=True,
        highlight=False,
    )
    try:
        if not client.drain(timeout_s):
            console.print(f"Some answers were not finished after {timeout_s:g} s.")
    except PengServeError as error:
        console.print(f"Could not drain: {error}", soft_wrap=True, highlight=False)


def _client(settings: Settings) -> PengServe:
    """A client of this application alone, on the Ray cluster that this process is connected to."""
    # The certificate is the user's own and names a host, not this machine's loopback address.
    return PengServe(
        local_url(settings),
        api_key=settings.security.any_api_key(),
        admin_key=settings.security.any_admin_key(),
        verify=settings.http.ssl_certfile is None,
        cluster_id=ray_local.identity(settings.app),
    )


def _check_before_start(settings: Settings, *, is_local: bool) -> None:
    refuse_unsafe_environment()
    for package in ("ray", "vllm"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{package} is not installed: run `pip install 'pengserve[cpu]'`, or `[gpu]` with CUDA")
    refuse_mistakes(settings, is_local=is_local)


def _with_loopback_channels(settings: Settings) -> Settings:
    """A local cluster has one node: no other machine needs to reach its instances."""
    instances = settings.instances
    local = instances.model_copy(update={"channel_host": instances.channel_host or "127.0.0.1"})
    return settings.model_copy(update={"instances": local})


def _remark(settings: Settings, console: Console) -> None:
    for remark in remarks(settings):
        console.print(f"Note: {remark}.", soft_wrap=True, highlight=False, markup=False)


def _print_hint(settings: Settings, console: Console, took_s: float) -> None:
    console.print(f"\nReady after {took_s:.1f} s. Paste this into another shell:\n")
    # The line itself goes to stdout, so that a script can read it.
    Console().print(curl_line(settings), soft_wrap=True, highlight=False, markup=False)
    key = " (the admin key opens it)" if settings.security.has_admin_key else ""
    page = f"{local_url(settings)}/ui{key}"
    console.print(f"\nWatch it: {page}, or `pengserve top`. Stop with Ctrl-C.", soft_wrap=True, highlight=False)


def _one_line(error: BaseException) -> str:
    # Ray wraps an error in the whole remote traceback; its last line is the error itself.
    return ray_local.last_error(str(error)) or type(error).__name__
