"""One instance: its lanes, step loop, request channel and peers. Knows neither Ray nor the controller's policies."""

import logging
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.directory import PeerDirectory
from pengserve.planners.types.errors import EngineError, PengServeError, StepError, one_line
from pengserve.planners.types.ids import Epoch, InstanceKey
from pengserve.planners.types.orders import Migrate, Park, Place, Redirect, RequestOrder, Resume
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.planners.types.snapshot import DeviceInfo, InstanceSnapshot, InstanceState, InstanceStats
from pengserve.replicas.contracts import KnownContracts
from pengserve.replicas.domain import domains_by_slot
from pengserve.replicas.failures import describe_failure
from pengserve.replicas.parking import ParkOrders
from pengserve.replicas.request_channel import RequestChannel
from pengserve.replicas.revisions import Revisions
from pengserve.replicas.step_loop import StepLoop
from pengserve.replicas.step_watch import StepWatch
from pengserve.replicas.terms import TermFence
from pengserve.replicas.versions import versions

if TYPE_CHECKING:
    from pengserve.replicas.engine.instance_lanes import Lanes
    from pengserve.replicas.engine.vllm_seam import EngineCoreOutputs
    from pengserve.replicas.migration.migrations import Migrations
    from pengserve.replicas.switching.agent import Agent

logger = logging.getLogger(__name__)

RETIRE_POLL_S = 0.2
COMPILES_WITHIN_S = 900.0  # a model in another shape
SEND_AGAIN_S = 5.0  # before an instance that leaves has to be empty: what is still here is sent again elsewhere

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Instance:
    """Hosts one engine in this process. Every public method is thread-safe and returns quickly.

    Threads: the step loop's owns the lanes, and encodes and sends their outputs; the channel's receives requests; one
    for each peer receives what other instances say.
    """

    def __init__(
        self,
        config: InstanceConfig,
        key: InstanceKey,
        device: DeviceInfo | None = None,
        *,
        bind_host: str = "",
        domains: tuple[str, ...] = (),
    ) -> None:
        """
        Args:
            bind_host: address for the request channel; the configured one, or loopback, where it is empty.
            domains: of the node's devices, by their numbers; empty where they are not known.
        """
        self.config, self.key = config, key
        self._host = bind_host or config.channel_host or "127.0.0.1"
        self._device = device or DeviceInfo(device=config.device, pid=os.getpid())
        self._domains = domains_by_slot(self._device.device, key.instance_id, domains)
        self._state = InstanceState.STARTING
        self._phase = "importing vLLM"  # while STARTING
        self._failure = ""
        self._stats = InstanceStats()
        self._revisions = Revisions()
        self._park_orders = ParkOrders(key)
        self.terms = TermFence()  # of the controllers that call
        self._lanes: Lanes | None = None
        self._agent: Agent | None = None  # where elasticity is on
        self._migrations: Migrations | None = None  # there too
        self._idle = threading.Event()
        self._idle.set()
        self._loop = StepLoop(
            build=self._build_lanes, on_ready=self._ready, on_step=self._stepped, on_failed=self._failed
        )
        self._channel = RequestChannel(
            key,
            config,
            self._host,
            lanes=self._require_lanes,
            agent=lambda: self._agent,
            newest_stats=self._newest_stats,
            submit=self._loop.submit_beside,
            on_busy=self._idle.clear,
            note_idle=self._note_idle,
        )
        self._requests, self._server, self._gate = self._channel.requests, self._channel.server, self._channel.gate
        self._watch = StepWatch(self._loop, on_stuck=lambda why: self._failed(EngineError(why)))

    def start(self) -> None:
        """Begins to load the model, in another thread; `status` tells when it is ready."""
        self._loop.start()
        self._watch.start()

    @property
    def endpoint(self) -> str:
        """Where ingresses connect, "host:port"; empty until ready."""
        if self._state not in (InstanceState.READY, InstanceState.DRAINING):
            return ""
        return f"{self._reachable_host}:{self._server.port}"

    @property
    def _reachable_host(self) -> str:
        return self._device.node_ip if self._host == "0.0.0.0" else self._host

    def failure(self) -> str:
        """Why the instance is DEAD, else an empty string."""
        return self._failure

    def status(self) -> InstanceSnapshot:
        """All that is known of this instance now."""
        lanes, agent = self._lanes, self._agent
        running = lanes.running if lanes else None
        answer = InstanceSnapshot(
            key=self.key,
            state=self._state,
            endpoint=self.endpoint,
            device=self._device,
            capacity=lanes.capacity if lanes else None,
            stats=self._newest_stats(),
            lanes=lanes.registry.infos() if lanes else (),
            lane=running.name if running else "dp",
            epoch=agent.epoch if agent else Epoch(0),
            peer_endpoint=agent.endpoint if agent else "",
            groups_ready=agent.groups_ready() if agent else (),
            groups_failed=agent.groups_failed() if agent else (),
            rss_bytes=_rss_bytes(),
            phase=self._phase if self._state is InstanceState.STARTING else "",
            failure=self._failure,
            term=self.terms.newest,
            placements=lanes.dp.placement_notes.newest if lanes else (),
        )
        return self._revisions.numbered(answer)

    def drain(self, timeout_s: float) -> bool:
        """Waits until nothing runs or waits here; True when that is so. Requests that still come are served."""
        if self._state is InstanceState.READY:
            self._state = InstanceState.DRAINING
        # Requests that came from other instances are no news to the event.
        self._idle.clear()
        self._loop.submit(self._note_idle)
        return self._idle.wait(timeout_s)

    def leave(self, timeout_s: float) -> bool:
        """Empties this instance, because its process must end; waits until nothing is here, or for `timeout_s`.

        The controller sees that it is DRAINING, takes its route away, and says where its requests may go with their
        KV. What has not moved or ended shortly before the end is sent again elsewhere, from its tokens.
        """
        if self._state in (InstanceState.STARTING, InstanceState.DEAD):
            return True
        if self._migrations is not None:
            self._loop.submit(self._migrations.begin_leaving)
        grace_s = min(SEND_AGAIN_S, timeout_s / 2)
        if self.drain(timeout_s - grace_s):
            return True
        logger.warning("instance %s: what is here is sent again elsewhere", self.key)
        self._loop.submit(self._send_all_again)
        return self._idle.wait(grace_s)

    def _send_all_again(self) -> None:
        """In the step thread."""
        assert self._lanes is not None
        if self._migrations is not None:
            self._migrations.give_way()
        ids = self._requests.ids()
        self._lanes.abort(ids)
        self._gate.forget(ids)
        self._requests.moved(ids, None, carried=False)
        self._shape_changed()

    def retire(self, timeout_s: float) -> bool:
        """Waits until every ingress has left and nothing runs here; True when nothing runs, also at the time-out.

        The state stays READY: ingresses of this instance's own configuration send requests until they leave.
        """
        deadline_s = time.monotonic() + timeout_s
        while not (self._idle.is_set() and not self.is_used()) and time.monotonic() < deadline_s:
            time.sleep(RETIRE_POLL_S)
        return self._idle.is_set()

    def is_used(self) -> bool:
        """Whether an ingress is connected."""
        return bool(self._server.client_indices())

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the instance; requests in flight are lost to it and resumed elsewhere by the ingress."""
        self._state = InstanceState.DEAD
        self._watch.stop()
        self._server.stop()
        if self._agent is not None:
            self._agent.close()
        if not self._loop.stop(timeout_s):
            logger.warning("the step loop did not end within %g s", timeout_s)

    # The controller's calls about shape -------------------------------------------------------------------------------

    def connect(self, directory: PeerDirectory) -> None:
        """Takes a newer directory of peers; returns at once."""
        if self._agent is not None:
            self._agent.connect(directory)

    def prepare(self, plan: SwitchPlan) -> None:
        """Checks whether this instance can take part, and remembers `plan`. Raises StepError where it cannot."""
        self._elastic().prepare(plan)

    def commit(self, plan: SwitchPlan) -> SwitchReport:
        """Carries out a prepared plan that this instance leads. Idempotent.

        Raises:
            StepError: nothing was changed, and why.
            EngineError: it failed half-way; all members are in dp, and no request is lost.
        """
        return self._elastic().commit(plan)

    def abort(self, plan_id: str) -> None:
        """Forgets a prepared plan, and calls off one that is still draining or meeting."""
        if self._agent is not None:
            self._agent.abort(plan_id)

    def order(self, orders: Sequence[RequestOrder]) -> None:
        """Takes orders about requests; returns at once. One that was taken before is left alone.

        Raises:
            FenceError: one is for another life.
            StepError: an order needs connections to others, or a host tier; it has none.
        """
        moves = [order for order in orders if isinstance(order, Migrate | Redirect)]
        parks = [order for order in orders if not isinstance(order, Migrate | Redirect)]
        if moves and self._migrations is None:
            raise StepError(f"instance {self.key} has no peers to send requests to; set shape.degrees to connect them")
        if parks:
            self._park(parks)
        if moves and self._migrations is not None:
            self._migrations.order(moves)

    def _park(self, orders: Sequence[Park | Resume | Place]) -> None:
        lanes = self._lanes
        if lanes is None or lanes.dp.residency is None:
            raise StepError(f"instance {self.key} has no host tier to park requests in; set memory.host_bytes")
        self._park_orders.require_own(orders)
        self._loop.submit(lambda: self._park_orders.take(orders, lanes))

    def check(self, timeout_s: float = 10.0) -> tuple[str, ...]:
        """Laws of memory that are broken here, as sentences; empty when all hold. Taken between two steps."""
        found: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
        lanes = self._lanes
        if lanes is None:
            return ()
        self._loop.submit(lambda: found.put(lanes.check()))
        try:
            return found.get(timeout=timeout_s)
        except queue.Empty:
            return (f"instance {self.key} came to no step boundary within {timeout_s:g} s",)

    def _require_lanes(self) -> "Lanes":
        assert self._lanes is not None, "no frame comes before the instance is ready"
        return self._lanes

    def _elastic(self) -> "Agent":
        if self._agent is None or self._state is not InstanceState.READY:
            raise StepError(f"instance {self.key} is not ready to change its shape")
        return self._agent

    # The step loop's side -------------------------------------------------------------------------------------

    def _build_lanes(self) -> "Lanes":
        if self.config.versions and self.config.versions != (own := versions()):
            raise EngineError(f"this node has {own}, the application runs {self.config.versions}; install that here")
        # vLLM takes seconds to import and needs its environment set first: only a process with an engine imports it.
        from pengserve.replicas.engine.instance_lanes import Lanes

        started_s = time.perf_counter()
        self._phase = "loading the model"
        self._channel.load()
        lanes = Lanes(self.config)
        lanes.num_sent_back = lambda: self._requests.num_sent_back
        lanes.on_stranded = lambda request_ids, leader: self._requests.moved(request_ids, leader, carried=False)
        lanes.dp.use_contracts(KnownContracts(self._requests, self._channel.deposits))
        if self.config.changes_shape:
            self._try_to_build_agent(lanes)
        if self._agent is not None:
            self._phase = "compiling the model in its other shapes"
            lanes.registry.build_ahead(self.key.instance_id, self._domains)
            lanes.registry.on_slow = lambda: self._loop.excuse(COMPILES_WITHIN_S)
        logger.info("instance %s: engine built in %.1f s", self.key, time.perf_counter() - started_s)
        return lanes

    def _try_to_build_agent(self, lanes: "Lanes") -> None:
        """Without an agent this instance works alone, and its lanes say why."""
        try:
            self._agent = self._build_agent(lanes)
        except Exception as error:
            why = f"this instance works alone ({one_line(error)})"
            logger.warning("instance %s: %s", self.key, why, exc_info=not isinstance(error, PengServeError))
            lanes.registry.refuse_all(why)

    def _build_agent(self, lanes: "Lanes") -> "Agent":
        from pengserve.replicas.migration.migrations import Migrations
        from pengserve.replicas.switching.agent import Agent

        agent = Agent.build(
            key=self.key,
            config=self.config,
            lanes=lanes,
            bind_host=self._host,
            reachable_host=self._reachable_host,
            owner=self._requests,
            submit=self._loop.submit,
            on_changed=self._shape_changed,
        )
        migrations = Migrations(agent.member, self._loop.submit, lambda: agent.is_switching, self._shape_changed)
        lanes.stepper.needs_boundaries = lambda: agent.is_switching or migrations.is_busy
        agent.before_switch, agent.before_break = migrations.give_way, migrations.break_off
        lanes.before_tiers_end = lambda: migrations.give_up_all(f"the host tier of instance {self.key} has ended")
        lanes.before_abort = migrations.let_go
        self._migrations = migrations
        return agent

    def _ready(self, lanes: "Lanes") -> None:
        self._lanes = lanes
        self._stats = lanes.stats()
        self._server.start()
        if self._state is InstanceState.STARTING:
            self._state = InstanceState.READY

    def _shape_changed(self) -> None:
        assert self._lanes is not None
        self._stats = self._lanes.stats()
        # A former follower makes no steps until an ingress sends it requests. The beat tells them that it takes some.
        self._server.beat()
        self._loop.submit(self._gate.requests_moved)
        self._note_idle()

    def _stepped(self, outputs: Mapping[int, "EngineCoreOutputs"], stats: InstanceStats) -> None:
        self._stats = self._with_held(stats)
        self._channel.send(outputs, self._stats)
        if self._requests.num_paced:
            now_s = time.monotonic()
            self._channel.deposits.note(chain.from_iterable(batch.outputs for batch in outputs.values()), now_s)
        if (pauses := self._lanes.take_pauses()) if self._lanes is not None else None:
            self._channel.tell_pauses(pauses)
        if self._lanes is not None and not self._lanes.is_mid_step:
            self._reach_boundary()
        self._gate.stepped(chain.from_iterable(batch.outputs for batch in outputs.values()), stats)
        self._note_idle()

    def _reach_boundary(self) -> None:
        if self._agent is not None:
            self._agent.boundary()
        if self._migrations is not None and self._migrations.is_busy:
            self._migrations.boundary()

    def _with_held(self, stats: InstanceStats) -> InstanceStats:
        """`stats` with the requests that are held at the gate among the waiting ones."""
        num_held = self._gate.num_held
        return replace(stats, num_waiting=stats.num_waiting + num_held) if num_held else stats

    def _newest_stats(self) -> InstanceStats:
        return self._watch.aged(self._lanes.up_to_date(self._stats)) if self._lanes is not None else self._stats

    def _failed(self, error: BaseException) -> None:
        self._failure = self._failure or describe_failure(error)  # what comes later follows from the first
        self._state = InstanceState.DEAD
        self._server.stop()  # every ingress sees the end at once and resumes elsewhere

    def _note_idle(self) -> None:
        if self._lanes is None or self._lanes.num_requests() or self._gate.num_held:
            return
        if self._migrations is None or not self._migrations.is_moving:
            self._idle.set()


def _rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def require_ready(instance: Instance, timeout_s: float) -> None:
    """Waits until `instance` is ready.

    Raises:
        EngineError: it failed, or took longer than `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    while instance.status().state is InstanceState.STARTING:
        if time.monotonic() > deadline_s:
            raise EngineError(f"instance {instance.key} was not ready after {timeout_s:g} s")
        time.sleep(0.05)
    if instance.status().state is InstanceState.DEAD:
        raise EngineError(f"instance {instance.key} failed to start: {instance.failure()}")
