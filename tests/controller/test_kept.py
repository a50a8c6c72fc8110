"""What a tick keeps of the one before is what it would make anew."""

import dataclasses
import pickle

from hypothesis import given, settings
from hypothesis import strategies as st

from pengserve.controller import directory as wirings
from pengserve.controller import routes
from pengserve.controller import state as transitions
from pengserve.controller.slots import Answered, Gone, Killed, Observation, Slot
from pengserve.controller.slots import _heard as heard
from pengserve.planners.types.config import ControllerConfig, DropConfig
from pengserve.planners.types.ids import Epoch, InstanceKey
from pengserve.planners.types.snapshot import InstanceSnapshot, InstanceState, InstanceStats
from tests.controller.fakes import answer, life

CONFIG = ControllerConfig(app="kept", num_instances=4, degrees=(2, 4), drop=DropConfig(max_stages=2))
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
        groups_ready=tuple(ready),
        groups_failed=tuple(draw(st.sampled_from([[], [], names[:1]]))),
    )


@st.composite
def observations(draw: st.DrawFn, state: transitions.ClusterState) -> list[tuple[InstanceKey, Observation]]:
    found: list[tuple[InstanceKey, Observation]] = [(key, Killed()) for slot in state.slots for key in slot.doomed]
    for slot in state.slots:
        mine = [spec.name for spec in state.wiring.directory.groups if slot.key in spec.members]
        kind = draw(st.sampled_from(["same", "same", "new", "new", "silent", "gone"]))
        if kind == "gone":
            found.append((slot.key, Gone("it has ended")))
        elif kind == "same" and slot.snapshot is not None:
            stats = InstanceStats(num_running=draw(st.integers(0, 9)))
            found.append(
                (slot.key, Answered(pickle.loads(pickle.dumps(dataclasses.replace(slot.snapshot, stats=stats)))))
            )
        elif kind != "silent":
            found.append((slot.key, Answered(draw(answers(slot.key, mine)))))
    return found


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_what_is_kept_is_what_would_be_made_anew(data: st.DataObject) -> None:
    state = transitions.empty(CONFIG, version=1, epoch=Epoch(0))
    for now_s in range(0, 60, 5):
        replacement = transitions.plan(state, now_s).replace
        if replacement is not None:
            state = transitions.create(state, replacement.slots, replacement.why, now_s).state
        state = transitions.observe(state, data.draw(observations(state)), now_s).state
        assert state.parts == tuple(routes.part(slot) for slot in state.slots)
        assert state.formable == wirings.formable(state.wiring, state.slots)
        peers = {slot.key: slot.ready.peer_endpoint for slot in state.slots if slot.ready and slot.ready.peer_endpoint}
        assert {peer.key: peer.endpoint for peer in state.wiring.directory.peers} == peers
        assert [spec.name for spec in state.wiring.directory.groups] == list(state.wiring.names)
        for slot in state.slots:
            if slot.snapshot is not None:
                assert slot.face is not None
                loads = {"stats": slot.snapshot.stats, "rss_bytes": slot.snapshot.rss_bytes}
                assert dataclasses.replace(slot.face, **loads) == slot.snapshot


def test_an_answer_changes_nothing_of_a_slot_but_what_it_says() -> None:
    values = {f.name: object() for f in dataclasses.fields(Slot)}
    said = answer(life(0), InstanceState.READY)
    slot = Slot(**{**values, "key": life(0), "face": None, "device": said.device})  # type: ignore[arg-type]
    after = heard(slot, said, 7.0)
    expected = {**values, "key": life(0), "device": said.device, "snapshot": said, "face": said, "seen_s": 7.0}
    assert {f.name: getattr(after, f.name) for f in dataclasses.fields(Slot)} == expected
