"""What the event of a new routing table says, and what makes one due."""

import dataclasses

from pengserve.controller import routes
from pengserve.controller import state as transitions
from pengserve.planners.types.config import ControllerConfig
from pengserve.planners.types.events import EventKind
from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey
from pengserve.planners.types.snapshot import InstanceState, Route
from tests.controller.fakes import FIRST, answer, life


def route(key: InstanceKey, shape: str = "dp", endpoint: str = "127.0.0.1:1") -> Route:
    return Route(key=key, endpoint=endpoint, members=(key.instance_id,), shape=shape)


def test_an_event_tells_of_routes_that_come_and_go_and_of_no_others() -> None:
    stays, goes, moves = route(life(0)), route(life(1)), route(life(2))
    equal, new = dataclasses.replace(stays), route(life(1), "tp2")
    moved = dataclasses.replace(moves, endpoint="127.0.0.1:2")
    assert routes.difference((stays, goes, moves), (equal, new, moved)) == {
        "num_routes": 3,
        "added": ["1.1 tp2", "2.1 dp"],
        "removed": ["1.1 dp", "2.1 dp"],
    }
    assert routes.difference((stays,), (stays,)) == {"num_routes": 1, "added": [], "removed": []}


def test_among_a_thousand_instances_the_event_of_one_that_ends_is_short() -> None:
    config = ControllerConfig(app="routes", num_instances=1000)
    state = transitions.empty(config, version=FIRST, epoch=Epoch(1))
    state = transitions.create(state, [InstanceId(i) for i in range(1000)], "begin", 0.0).state
    answers = [(slot.key, answer(slot.key, InstanceState.READY)) for slot in state.slots]
    state = transitions.observe(state, answers, 1.0).state
    told = transitions.observe(state, [*answers[1:], (life(0), answer(life(0), InstanceState.DEAD))], 2.0).changes
    (change,) = [change for change in told if change.kind is EventKind.ROUTING_CHANGED]
    assert change.data["num_routes"] == 999
    assert (change.data["added"], change.data["removed"]) == ([], ["0.1 dp"])


def test_a_member_that_says_what_the_layout_says_makes_no_new_route() -> None:
    config = ControllerConfig(app="routes", num_instances=2, degrees=(2,))
    state = transitions.empty(config, version=FIRST, epoch=Epoch(1))
    state = transitions.create(state, [InstanceId(0), InstanceId(1)], "begin", 0.0).state
    said = [answer(slot.key, InstanceState.READY, degrees=(2,)) for slot in state.slots]
    state = transitions.observe(state, [(a.key, a) for a in said], 1.0).state
    leader, follower = map(routes.part, state.slots)
    assert leader is not None and follower is not None
    follows = follower._replace(is_follower=True)
    assert routes.are_alike(follows, follower, is_wide=True)
    assert not routes.are_alike(follows, follower, is_wide=False)
    assert not routes.are_alike(leader, follower, is_wide=True)
    assert not routes.are_alike(None, follower, is_wide=True)
    assert routes.are_alike(None, None, is_wide=True)
