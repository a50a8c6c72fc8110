"""The Ray shell of an instance: a detached, named, threaded actor. The only file of this floor that knows Ray."""

import logging
import os
import time
from collections.abc import Sequence

import ray
from ray.experimental.internal_kv import _internal_kv_get
from ray.util import get_current_placement_group, remove_placement_group

from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.directory import PeerDirectory
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.names import NAMESPACE, fingerprint_name
from pengserve.planners.types.orders import RequestOrder
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.planners.types.snapshot import DeviceInfo, InstanceSnapshot
from pengserve.replicas.domain import device_index, domain_of, node_domains
from pengserve.replicas.ending import GentleEnd, LeaseWatch, answer_within
from pengserve.replicas.instance import Instance
from pengserve.replicas.lease import Lease

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 10.0  # for the question whether the application is still there


class InstanceActor:
    """One instance as an actor. The constructor returns at once; `status` tells when the engine is ready."""

    def __init__(self, config: InstanceConfig, key: InstanceKey) -> None:
        logging.basicConfig(level=logging.INFO)
        node_ip, name = ray.util.get_node_ip_address(), _device(config)
        is_linked = config.changes_shape and device_index(name) is not None
        domains = node_domains() if is_linked else ()
        device = DeviceInfo(
            node_id=ray.get_runtime_context().get_node_id(),
            node_ip=node_ip,
            device=name,
            pid=os.getpid(),
            domain=domain_of(name, domains),
        )
        self._instance = Instance(config, key, device, bind_host=config.channel_host or node_ip, domains=domains)
        own = (ray.get_runtime_context().get_actor_name() or "").rpartition(":")[2]
        self._lease = Lease(
            config.lease_s,
            now=time.monotonic,
            application_exists=lambda: application_exists(config.app, own),
            is_used=self._instance.is_used,
        )
        self._instance.start()
        end = GentleEnd(self._instance, drain_timeout_s=config.drain_timeout_s, release=_release)
        LeaseWatch(self._lease, end).start()
        end.on_sigterm()  # in place of Ray's, which ends the process at once

    # Each call carries the term of its controller (`controller/terms.py`); orders of an older one raise FenceError.

    def status(self, term: int = 0) -> InstanceSnapshot:
        """All that is known of the instance; renews its lease."""
        self._lease.renew()
        self._instance.terms.hear(term)
        return self._instance.status()

    def failure(self) -> str:
        """Why the instance is DEAD, else an empty string."""
        return self._instance.failure()

    def drain(self, timeout_s: float, term: int = 0) -> bool:
        """Waits until nothing runs or waits here; True when that is so."""
        self._obey(term)
        return self._instance.drain(timeout_s)

    def retire(self, timeout_s: float, term: int = 0) -> bool:
        """Waits until the ingresses of this configuration have left; True when nothing runs here."""
        self._obey(term)
        return self._instance.retire(timeout_s)

    def connect(self, directory: PeerDirectory, term: int = 0) -> None:
        """Takes a newer directory of peers. The status shows which groups are ready."""
        self._obey(term)
        self._instance.connect(directory)

    def prepare(self, plan: SwitchPlan, term: int = 0) -> None:
        """Whether this member can take part in `plan`; raises StepError where it cannot."""
        self._obey(term)
        self._instance.prepare(plan)

    def commit(self, plan: SwitchPlan, term: int = 0) -> SwitchReport:
        """Carries out `plan` as its leader."""
        self._obey(term)
        return self._instance.commit(plan)

    def abort(self, plan_id: str, term: int = 0) -> None:
        """Forgets a prepared plan."""
        self._obey(term)
        self._instance.abort(plan_id)

    def order(self, orders: Sequence[RequestOrder], term: int = 0) -> None:
        """Takes orders about requests; returns at once."""
        self._obey(term)
        self._instance.order(orders)

    def shutdown(self) -> None:
        """Ends the engine; the process stays for Ray to end."""
        self._instance.stop()

    def _obey(self, term: int) -> None:
        self._instance.terms.require(term)
        self._lease.renew()


def _device(config: InstanceConfig) -> str:
    gpu_ids = ray.get_gpu_ids()
    return f"cuda:{gpu_ids[0]}" if config.device == "cuda" and gpu_ids else config.device


def _release() -> None:
    """Gives the reserved resources back."""
    group = get_current_placement_group()
    if group is not None:
        remove_placement_group(group)


def application_exists(app: str, fingerprint: str) -> bool | None:
    """Whether Serve still runs the application, with instances of this fingerprint; None where it cannot be asked."""
    return answer_within(ASK_TIMEOUT_S, lambda: _ask(app, fingerprint))


def _ask(app: str, fingerprint: str) -> bool:
    """Not `serve.status()`: that keeps its handle, so after a shutdown of Serve it would fail for ever."""
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE  # takes a second

    try:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False  # Serve itself was shut down
    details = ray.get(controller.get_serve_instance_details.remote(), timeout=ASK_TIMEOUT_S)
    if app not in details["applications"]:
        return False
    newest: bytes | None = _internal_kv_get(fingerprint_name(app), namespace=NAMESPACE)
    return newest is None or not fingerprint or newest.decode() == fingerprint
