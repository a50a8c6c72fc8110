"""What a tick keeps of the one before is what it would make anew."""

import dataclasses
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pengserve.controller import directory as wirings
from pengserve.controller import layout as layouts
from pengserve.controller import routes
from pengserve.controller import state as transitions
from pengserve.controller.slots import Gone, Killed, Observation
from pengserve.planners.types.config import ControllerConfig, DropConfig
from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey
from pengserve.planners.types.snapshot import DeviceInfo, InstanceSnapshot, InstanceState, InstanceStats
from pengserve.replicas.revisions import Revisions
from tests.controller.fakes import FIRST, answer, lanes, life
from tests.support.effort import examples

CONFIG = ControllerConfig(app="kept", num_instances=4, degrees=(2, 4), drop=DropConfig(max_stages=2))
Observations = list[tuple[InstanceKey, Observation]]
DEGREES = st.sampled_from([(2, 4), (2, 4), (2,), ()])


@st.composite
def answers(draw: st.DrawFn, key: InstanceKey, names: list[str]) -> InstanceSnapshot:
    """What a life may say of itself; the names of groups are those of the newest directory."""
    said = answer(
        key,
        draw(st.sampled_from([InstanceState.READY] * 6 + [InstanceState.STARTING, InstanceState.DRAINING])),
        degrees=draw(DEGREES),
        max_stages=draw(st.sampled_from([2, 2, 1])),
    )
    ready = draw(st.sampled_from([names, names, names[::2], []]))
    return dataclasses.replace(
        said,
        stats=InstanceStats(num_running=draw(st.integers(0, 9))),
        lane=draw(st.sampled_from(["dp", "dp", "tp2@(0,1)", "tp2@(2,3)", "pp2@(0,1)"])),
        epoch=Epoch(draw(st.sampled_from([0, 0, 1]))),
        peer_endpoint=draw(st.sampled_from([said.peer_endpoint] * 3 + ["127.0.0.1:9"])),
        groups_ready=tuple(ready),
        groups_failed=tuple(draw(st.sampled_from([[], [], names[:1]]))),
    )


@st.composite
def observations(draw: st.DrawFn, state: transitions.ClusterState) -> Observations:
    found: Observations = [(key, Killed()) for slot in state.slots for key in slot.doomed]
    for slot in state.slots:
        mine = [spec.name for spec in state.wiring.directory.groups if slot.key in spec.members]
        kind = draw(st.sampled_from(["same", "same", "new", "new", "silent", "gone"]))
        if kind == "gone":
            found.append((slot.key, Gone("it has ended")))
        elif kind == "same" and slot.snapshot is not None:
            stats = InstanceStats(num_running=draw(st.integers(0, 9)))
            found.append((slot.key, pickle.loads(pickle.dumps(dataclasses.replace(slot.snapshot, stats=stats)))))
        elif kind != "silent":
            found.append((slot.key, draw(answers(slot.key, mine))))
    return found


def numbering() -> Callable[[Observations], Observations]:
    """Numbers answers as the instances would that give them."""
    revisions: defaultdict[InstanceKey, Revisions] = defaultdict(Revisions)

    def number(seen: Observations) -> Observations:
        return [(key, revisions[key].numbered(o) if isinstance(o, InstanceSnapshot) else o) for key, o in seen]

    return number


@settings(max_examples=examples(150))
@given(st.data())
def test_what_is_kept_is_what_would_be_made_anew(data: st.DataObject) -> None:
    state = transitions.empty(CONFIG, version=FIRST, epoch=Epoch(0))
    number = numbering() if data.draw(st.booleans()) else lambda seen: seen
    for now_s in range(0, 60, 5):
        replacement = transitions.plan(state, now_s).replace
        if replacement is not None:
            state = transitions.create(state, replacement.slots, replacement.why, now_s).state
        state = transitions.observe(state, number(data.draw(observations(state))), now_s).state
        assert state.parts == tuple(routes.part(slot) for slot in state.slots)
        assert state.formable == wirings.formable(state.wiring, state.slots)
        # One that drains sends its requests on: it keeps its peers.
        serving = [slot for slot in state.slots if slot.state in (InstanceState.READY, InstanceState.DRAINING)]
        found = {slot.key: slot.snapshot.peer_endpoint for slot in serving if slot.snapshot is not None}
        peers = {key: endpoint for key, endpoint in found.items() if endpoint}
        assert {peer.key: peer.endpoint for peer in state.wiring.directory.peers} == peers
        assert [spec.name for spec in state.wiring.directory.groups] == list(state.wiring.names)
        placed = state.wiring.topology.groups if state.wiring.is_placed else ()
        running = [group for group in state.layout.groups if len(group.members) > 1]
        known = {key.instance_id for key in peers}
        wired = {group for group in (*placed, *running) if known.issuperset(group.members)}
        assert {spec.group for spec in state.wiring.directory.groups} == wired
        table = routes.table(state.routing, state.parts, state.layout, placed, is_draining=state.closing)
        assert (state.routing.routes, state.routing.addresses) == (table.routes, table.addresses)
        busy = {member for plan in state.switches for member in plan.group.members}
        assert layouts.follow(state.layout, state.slots, busy) == (state.layout, "")
        for slot, newest in zip(state.slots, state.answers, strict=True):
            if slot.snapshot is not None:
                assert newest is not None
                loads = {"stats": newest.stats, "rss_bytes": newest.rss_bytes, "revision": newest.revision}
                assert dataclasses.replace(slot.snapshot, **loads) == newest


@settings(max_examples=examples(50))
@given(st.data())
def test_the_newest_answer_of_each_life_is_shown(data: st.DataObject) -> None:
    state = transitions.empty(CONFIG, version=FIRST, epoch=Epoch(0))
    for now_s in range(0, 30, 5):
        replacement = transitions.plan(state, now_s).replace
        if replacement is not None:
            state = transitions.create(state, replacement.slots, replacement.why, now_s).state
        seen = data.draw(observations(state))
        state = transitions.observe(state, seen, now_s).state
        shown = {i.key: i for i in transitions.snapshot(state, time_s=now_s, started_s=0).instances}
        for key, observation in seen:
            slot = state.slots[key.instance_id]
            if isinstance(observation, InstanceSnapshot) and slot.key == key and slot.alive:
                assert shown[key] == dataclasses.replace(observation, state=slot.state, failure=slot.failure)


def test_other_loads_leave_a_slot_the_same_object() -> None:
    ready = answer(life(0), InstanceState.READY)
    state = transitions.create(
        transitions.empty(CONFIG, version=FIRST, epoch=Epoch(0)), [InstanceId(0)], "begin", 0
    ).state
    state = transitions.observe(state, [(life(0), ready)], 1).state
    busy = dataclasses.replace(ready, stats=InstanceStats(num_running=3), rss_bytes=7)
    after = transitions.observe(state, [(life(0), pickle.loads(pickle.dumps(busy)))], 2).state
    assert after.slots is state.slots
    others: dict[str, Any] = {
        "lane": "tp2@(0,1)",
        "epoch": Epoch(7),
        "endpoint": "127.0.0.1:1",
        "peer_endpoint": "127.0.0.1:2",
        "groups_ready": ("tp2@(0,1)/0.1-1.1/0",),
        "groups_failed": ("tp2@(0,1)/0.1-1.1/0",),
        "device": DeviceInfo(pid=7),
        "lanes": lanes((2,)),
    }
    for name, other in others.items():
        told = dataclasses.replace(ready, **{name: other})
        news = transitions.observe(state, [(life(0), told)], 2).state
        assert getattr(news.slots[0].snapshot, name) == getattr(told, name)
