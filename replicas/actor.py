"""The Ray shell of an instance: a detached, named, threaded actor. The only file of this floor that knows Ray."""

import logging
import os
import threading
import time

import ray
from ray.util import get_current_placement_group, remove_placement_group

from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.directory import PeerDirectory
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.planners.types.snapshot import DeviceInfo, InstanceSnapshot
from pengserve.replicas.instance import Instance
from pengserve.replicas.lease import Lease

logger = logging.getLogger(__name__)


class InstanceActor:
    """One instance as an actor. The constructor returns at once; `status` tells when the engine is ready."""

    def __init__(self, config: InstanceConfig, key: InstanceKey) -> None:
        logging.basicConfig(level=logging.INFO)
        node_ip = ray.util.get_node_ip_address()
        device = DeviceInfo(
            node_id=ray.get_runtime_context().get_node_id(), node_ip=node_ip, device=_device(config), pid=os.getpid()
        )
        self._instance = Instance(config, key, device, bind_host=config.channel_host or node_ip)
        self._lease = Lease(config.lease_s, now=time.monotonic, application_exists=lambda: _has_app(config.app))
        self._instance.start()
        threading.Thread(target=self._watch_lease, name="lease", daemon=True).start()

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

    def shutdown(self) -> None:
        """Ends the engine; the process stays for Ray to end."""
        self._instance.stop()

    def _obey(self, term: int) -> None:
        self._instance.terms.require(term)
        self._lease.renew()

    def _watch_lease(self) -> None:
        config = self._instance.config
        while not self._lease.ended():
            time.sleep(config.lease_s / 5)
        logger.warning("application %s is gone; instance %s drains and exits", config.app, self._instance.key)
        self._instance.drain(config.drain_timeout_s)
        self._instance.stop()
        group = get_current_placement_group()
        if group is not None:
            remove_placement_group(group)
        os._exit(0)  # from a thread; Ray's own exit works in an actor's method alone


def _device(config: InstanceConfig) -> str:
    gpu_ids = ray.get_gpu_ids()
    return f"cuda:{gpu_ids[0]}" if config.device == "cuda" and gpu_ids else config.device


def _has_app(app: str) -> bool:
    """Whether Serve still knows the application. True where the cluster cannot be asked."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        return app in serve.status().applications
    except RayServeException:
        return False  # Serve itself was shut down
    except Exception:
        logger.exception("cannot ask Serve for application %s", app)
        return True
