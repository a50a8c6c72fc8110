"""The controller's calls to instances: begun for what the state calls for, and taken in as what they say.

ask      a status call to each life
collect  what the calls that have ended have to say
act      creates, drains, retires and kills instances
connect  tells each instance who its peers are
order    tells instances where their requests may go
redirect tells stuck instances where what waits there can begin
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from pengserve.controller import drains
from pengserve.controller import state as transitions
from pengserve.controller.calls import CallKind, Calls
from pengserve.controller.coordinator import Keeper
from pengserve.controller.ports import ReplicaPort
from pengserve.controller.slots import DrainEnded, Gone, Killed, Observation
from pengserve.controller.terms import Term
from pengserve.planners.migrate import plan_rebalance
from pengserve.planners.redirect import plan_redirects
from pengserve.planners.types.config import ControllerConfig
from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.ids import InstanceId, InstanceKey, Version
from pengserve.planners.types.orders import Migrate, Redirect
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceSnapshot

logger = logging.getLogger(__name__)

_CREATE_TIMEOUT_S = 60.0  # reserving and registering; placing and loading come after it
KILL_TIMEOUT_S = 30.0
_DRAIN_GRACE_S = 5.0  # for the answer to a drain, beyond the time the drain itself has
_TERM_PERIOD_S = 5.0  # between two looks for a newer controller, where nothing is created or killed
_TERM_TIMEOUT_S = 5.0
_ORDER_PERIOD_S = 0.5  # between two orders to an instance that is being drained, or stuck


class Supervision:
    """Runs on the controller's event loop, and blocks it never. Keeps nothing of the cluster but calls under way."""

    def __init__(
        self,
        config: ControllerConfig,
        port: ReplicaPort,
        term: Term,
        keeper: Keeper,
        *,
        on_news: Callable[[], None],
        clock: Callable[[], float],
        paying: Callable[[tuple[Migrate, ...]], tuple[Migrate, ...]] = lambda orders: orders,
    ) -> None:
        """
        Args:
            on_news: called for what cannot wait for the next tick.
            paying: those of the orders of a rebalancing that are worth it.
        """
        self._config, self._port, self._term, self._keeper = config, port, term, keeper
        self._on_news, self._clock, self._paying = on_news, clock, paying
        self.calls = Calls(on_end=on_news)
        self._looked_s = clock()  # for a newer term
        self._life: asyncio.Task[None] | None = None  # shows in the store of terms that this controller acts
        self._told: dict[InstanceId, tuple[InstanceKey, Version]] = {}  # lives by slot, and their directories' versions
        self._ordered_s, self._num_orders = -math.inf, 0  # orders of drains: when the newest went out; rounds of orders
        self._rebalanced_s = self._redirected_s = -math.inf

    async def close(self) -> None:
        """Cancels what is under way."""
        await self.calls.close()
        if self._life is not None:
            self._life.cancel()

    async def ask(self) -> None:
        """Begins a status call to each life that is created, and waits a tick for the answers; gives up old calls."""
        now_s, state = self._clock(), self._keeper.state()
        self.calls.forget(lambda call, key, begun_s: call is CallKind.STATUS and self._is_old(key, now_s - begun_s))
        living = [slot for slot in state.slots if slot.alive]
        known = [slot.key for slot in living if slot.answered]
        self.calls.begin_all(CallKind.STATUS, known, self._port.statuses, now_s)
        for slot in living if len(known) < len(living) else ():
            # One that has never answered may be under way to its place: no tick waits for that.
            if not slot.answered and not self.calls.under_way(CallKind.CREATE, slot.key):
                self.calls.begin(CallKind.STATUS, slot.key, self._port.status, now_s, patient=True)
        await self.calls.settle(self._config.tick_s)

    def _is_old(self, key: InstanceKey, age_s: float) -> bool:
        """Whether a status call should be given up. One to an instance that waits for its place waits with it."""
        slots = self._keeper.state().slots
        slot = slots[key.instance_id] if key.instance_id < len(slots) else None
        if slot is None or slot.key != key or not slot.alive:
            return True
        return slot.answered and age_s > self._config.status_timeout_s

    def collect(self) -> list[tuple[InstanceKey, Observation]]:
        """What the calls that ended have to say; a failure that says nothing certain is silence."""
        seen: list[tuple[InstanceKey, Observation]] = []
        for call, key, result, error in self.calls.collect():
            if isinstance(result, InstanceSnapshot):
                if result.term > self._term.newest:
                    self._term.hear(result.term)
                    self._on_news()
                seen.append((key, result))
            elif call is CallKind.CONNECT:
                # Whether the instance lives is for its status to tell: one that cannot connect still serves in dp.
                if error is None:
                    self._told[key.instance_id] = key, result
                else:
                    logger.warning("instance %s was not told its peers: %s: %s", key, type(error).__name__, error)
            elif error is None:
                observation = _meaning(call, result)
                if observation is not None:
                    seen.append((key, observation))
            elif isinstance(error, EngineError) and call is not CallKind.KILL:
                seen.append((key, Gone(str(error))))
            elif call is CallKind.CREATE:
                seen.append((key, Gone(f"it could not be created: {type(error).__name__}: {error}")))
            else:
                logger.warning("%s of instance %s failed: %s: %s", call, key, type(error).__name__, error)
        return seen

    async def act(self, now_s: float) -> None:
        """Begins what the state calls for: to create, drain, retire and kill instances."""
        actions = transitions.plan(self._keeper.state(), now_s)
        if actions.kills or actions.replace is not None or now_s - self._looked_s > _TERM_PERIOD_S:
            may_act = await self._is_newest(now_s)
            actions = transitions.plan(self._keeper.state(), now_s)  # `drain` may have run meanwhile
            if not may_act:
                actions = replace(actions, kills=(), replace=None)
        if self._term.is_over:
            self._on_news()  # `run` ends the loop
            return
        for key in actions.kills:
            self._begin(CallKind.KILL, key, self._port.kill, KILL_TIMEOUT_S)
        for key in actions.drains:
            timeout_s = max(0.0, self._keeper.state().slots[key.instance_id].deadline_s - now_s)
            self._begin(
                CallKind.DRAIN,
                key,
                partial(self._port.drain, timeout_s=timeout_s),
                timeout_s + _DRAIN_GRACE_S,
                patient=True,
            )
        for life in actions.retirements:
            timeout_s = max(0.0, life.deadline_s - now_s)
            retire = partial(self._port.retire, timeout_s=timeout_s)
            self._begin(CallKind.RETIRE, life.key, retire, timeout_s + _DRAIN_GRACE_S, patient=True)
        if actions.replace is not None:
            plan = actions.replace
            await self._keeper.update(lambda state: transitions.create(state, plan.slots, plan.why, now_s))
            for instance_id in plan.slots:
                key = self._keeper.state().slots[instance_id].key
                self._begin(CallKind.CREATE, key, self._port.create, _CREATE_TIMEOUT_S)

    async def _is_newest(self, now_s: float) -> bool:
        """Whether the store of terms knows no newer controller; False also where it does not answer."""
        try:
            async with asyncio.timeout(_TERM_TIMEOUT_S):
                await self._term.look()
        except Exception as error:
            why = str(error) or "no answer"
            logger.warning("nothing is created or killed until the store of terms answers: %s", why)
            return False
        self._looked_s = now_s
        if self._term.is_over:
            return False
        if self._life is None or self._life.done():
            self._life = asyncio.get_running_loop().create_task(self._show_life(), name="sign of life")
        return True

    async def _show_life(self) -> None:
        try:
            async with asyncio.timeout(_TERM_TIMEOUT_S):
                await self._term.show_life()
        except Exception as error:
            logger.info("no sign of life could be left in the store of terms: %s", error or "no answer")

    def connect(self) -> None:
        """Tells its peers to each READY instance that has not heard of the newest directory."""
        state = self._keeper.state()
        directory = state.wiring.directory
        if not self._config.is_elastic or state.closing:
            return

        async def tell(key: InstanceKey) -> Version:
            await self._port.connect(key, directory)
            return directory.version

        version, told = directory.version, self._told
        for slot in state.slots:
            if slot.ready is not None and told.get(slot.key.instance_id) != (slot.key, version):
                self._begin(CallKind.CONNECT, slot.key, tell, self._config.status_timeout_s, news=False, patient=True)

    def order(self, now_s: float) -> None:
        """Tells instances that are being drained, or are full, where their requests may go now."""
        if not self._config.is_elastic or now_s - self._ordered_s < _ORDER_PERIOD_S:
            return
        self._num_orders += 1
        name = f"{self._term.number}-{self._num_orders}"
        for given in drains.orders(self._keeper.state(), name, now_s).values():
            self._ordered_s = now_s
            self._give(given)
        self._rebalance(name, now_s)

    def _rebalance(self, name: str, now_s: float) -> None:
        """Has requests move from full instances to free ones, where that is wanted."""
        config, state = self._config.migrate, self._keeper.state()
        if not config.is_auto or state.closing or now_s - self._rebalanced_s < config.interval_s:
            return
        self._rebalanced_s = now_s
        for order in self._paying(plan_rebalance(drains.leaders(state), config, name=f"{name}-balance")):
            self._give((order,))

    def redirect(self, look: Callable[[], ClusterSnapshot], now_s: float) -> None:
        """Has waiting requests leave instances without room for those with some."""
        state = self._keeper.state()
        if not self._config.migrate.redirects or state.closing or now_s - self._redirected_s < _ORDER_PERIOD_S:
            return
        excluded = state.busy_members.union(state.leaving)
        orders = plan_redirects(look(), name=f"{self._term.number}-redirect-{self._num_orders}", excluded=excluded)
        if orders:
            self._num_orders, self._redirected_s = self._num_orders + 1, now_s
        for order in orders:
            self._give((order,))

    def _give(self, orders: tuple[Migrate, ...] | tuple[Redirect]) -> None:
        """Orders of one source, to that."""
        if orders:
            order = partial(self._port.order, orders=orders)
            self._begin(
                CallKind.ORDER, orders[0].source, order, self._config.status_timeout_s, news=False, patient=True
            )

    def _begin(
        self,
        call: CallKind,
        key: InstanceKey,
        work: Callable[[InstanceKey], Coroutine[Any, Any, Any]],
        timeout_s: float,
        *,
        news: bool = True,
        patient: bool = False,
    ) -> None:
        async def bounded(key: InstanceKey) -> Any:
            async with asyncio.timeout(timeout_s):
                return await work(key)

        self.calls.begin(call, key, bounded, news=news, patient=patient)


def _meaning(call: CallKind, result: object) -> Observation | None:
    if call in (CallKind.DRAIN, CallKind.RETIRE):
        return DrainEnded(complete=bool(result))
    return Killed() if call is CallKind.KILL else None
