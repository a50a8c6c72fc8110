"""Two members of one group in this process: real agents and peers, lanes that only remember what they were told."""

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from pengserve.planners.types.directory import GroupSpec, PeerAddress, PeerDirectory
from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey, Version
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.plans import SwitchPlan
from pengserve.planners.types.strategy import SwitchStrategy
from pengserve.replicas.comm.peers import PeerNetwork
from pengserve.replicas.kv.ledger import CellLedger
from pengserve.replicas.kv.transfers import Transfers
from pengserve.replicas.memory.weight_views import Shard
from pengserve.replicas.switching.agent import Agent
from pengserve.replicas.switching.member import Member

KEYS = tuple(InstanceKey(instance_id=InstanceId(i), incarnation=1) for i in range(2))
GROUP = Group(kind=GroupKind.TP, members=(InstanceId(0), InstanceId(1)))


class FakeLane:
    """A lane of either kind; `running_ids` are requests that run in it."""

    def __init__(self, rank: int) -> None:
        self.rank, self.shard, self.leads = rank, Shard(rank, 2), rank == 0
        self.is_held, self.num_in_flight, self.is_settled, self.is_exchanging = False, 0, True, False
        self.name = str(GROUP)
        self.table = SimpleNamespace(leased=list)
        self.capacity, self.num_held = SimpleNamespace(max_model_len=1024, num_blocks=8), 0
        self.running_ids: set[str] = set()
        self.waiting_ids: set[str] = set()
        self.is_paused = self.is_short = False
        self.residency = self.tiers = None

    @property
    def shape(self) -> str:
        return GROUP.shape

    def kv(self, dp_view: Any) -> Any:
        """No KV moves between these lanes."""

    def unpin(self) -> None:
        """Nothing is pinned."""

    def is_parked(self, request: Any) -> bool:
        return False

    def carriable(self) -> list[Any]:
        return [SimpleNamespace(request_id=i, num_computed_tokens=1, priority=0) for i in sorted(self.running_ids)]

    def block_ids(self, request_id: str) -> list[int]:
        return [0, *sorted(map(ord, request_id))]

    def blocks_freed(self, request_ids: Sequence[str]) -> dict[str, Any]:
        return {}

    def requests(self) -> list[Any]:
        ids = self.running_ids | self.waiting_ids
        return [SimpleNamespace(request_id=i, num_prompt_tokens=1, max_tokens=1) for i in sorted(ids)]

    def knows(self, request_id: str) -> bool:
        return request_id in self.running_ids

    def may_hold(self, num_blocks: int) -> None:
        self.num_lendable = num_blocks

    def hold(self, is_held: bool) -> None:
        self.is_held = is_held

    def pause_new(self, paused: bool) -> None:
        self.is_paused = paused

    def keep_steps_short(self, is_on: bool) -> None:
        self.is_short = is_on

    def num_free(self) -> int:
        return 8 - len(self.running_ids)

    def num_requests(self) -> int:
        return len(self.running_ids)

    num_running = num_requests

    def shrink_all(self) -> list[int]:
        return []

    known_ids = shrink_all

    def release(self, request_ids: Iterable[str]) -> None:
        ids = set(request_ids)
        self.running_ids -= ids
        self.waiting_ids -= ids

    forget = release


class FakeLanes:
    """What an agent asks of `Lanes`."""

    def __init__(self, rank: int) -> None:
        self.dp, self._tp = FakeLane(rank), FakeLane(rank)
        self.running: FakeLane | None = None
        self.on_broken: Callable[[BaseException], None] = lambda error: None
        self.num_here = 0
        self.refused: dict[str, str] = {}
        self.registry = self.leases = self.stepper = self
        self.transfers = Transfers(CellLedger(9, "dp"))

    @property
    def current(self) -> FakeLane:
        return self.running or self.dp

    def tp(self, group: Group) -> FakeLane:
        return self._tp

    require = tp

    def dp_view(self) -> Any:
        return SimpleNamespace(layout=SimpleNamespace(num_heads=2, num_tokens=16), num_layers=4)

    def build(self, group: Group, rank: int) -> None: ...

    def refuse(self, shape: str, why: str) -> None:
        self.refused[shape] = why

    def share_machine(self, num_instances: int) -> None:
        self.num_here = num_instances

    def enter(self, lane: FakeLane, run: object) -> None:
        self.running = lane

    def leave(self) -> None:
        self.running = None

    def abandon(self) -> list[str]:
        lost = [request.request_id for request in self.current.requests()]
        self.running = None
        return lost

    def discard(self, lane: FakeLane) -> None: ...

    def reclaim(self, lane: FakeLane, logical_ids: Sequence[int]) -> None: ...


class FakePool:
    """All groups of the directory are ready until they fail."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.names: set[str] = set()
        self.failed_names: set[str] = set()
        self.fault_text = ""

    def build(self, specs: Sequence[GroupSpec]) -> None:
        self.names = {spec.name for spec in specs}

    def ready(self) -> tuple[str, ...]:
        return tuple(self.names - self.failed_names)

    def failed(self) -> tuple[str, ...]:
        return tuple(self.failed_names)

    def fault(self, name: str) -> str:
        return self.fault_text

    def get(self, name: str) -> Any:
        return SimpleNamespace(name=name, members=KEYS, rank=self.rank, timeout_s=1.0)

    def mark_failed(self, name: str) -> None:
        self.failed_names.add(name)

    def close(self) -> None: ...


class FakeMember:
    """One member and its step thread; what raises there would end a real instance."""

    def __init__(self, key: InstanceKey, timeout_s: float) -> None:
        self.lanes, self.pool = FakeLanes(KEYS.index(key)), FakePool(KEYS.index(key))
        self.network = PeerNetwork(key, "127.0.0.1", "token", lambda *_: None, lambda _: None, timeout_s)
        self.moved: list[str] = []  # requests that ingresses were told of
        self.owner = SimpleNamespace(
            handoff=lambda request: None,
            welcome=lambda h: None,
            moved=lambda ids, to, carried: self.moved.extend(ids),
        )
        self.errors: list[BaseException] = []
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        member: Any = Member(key, self.lanes, self.network, self.pool, self.owner, timeout_s)  # type: ignore[arg-type]
        self.agent = Agent(member, self._work.put, lambda: None)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], object]) -> None:
        """Runs `work` in the step thread."""
        self._work.put(work)

    def has_work(self) -> bool:
        """Whether something waits for the step thread."""
        return not self._work.empty()

    def close(self) -> None:
        self.agent.close()
        self._work.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)


def directory(members: Sequence[FakeMember], version: int = 1, *, with_group: bool = True) -> PeerDirectory:
    """Both members, and their group."""
    return PeerDirectory(
        version=Version(term=1, counter=version),
        peers=tuple(PeerAddress(key=m.network.key, endpoint=m.network.endpoint) for m in members),
        groups=(GroupSpec(group=GROUP, members=KEYS),) if with_group else (),
    )


def plan(number: int, *, is_merge: bool = True, strategy: SwitchStrategy = SwitchStrategy.CARRY) -> SwitchPlan:
    """A switch of the group; its number is its epoch as well."""
    return SwitchPlan(
        plan_id=str(number), epoch=Epoch(number), group=GROUP, members=KEYS, is_merge=is_merge, strategy=strategy
    )
