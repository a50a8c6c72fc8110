"""Who every instance's peers are, and which groups must be ready to run: what `connect` tells them. Pure.

A directory is made anew when instances that are READY or DRAINING come or go, when their places change, and when a
group that failed is due for its next round. A group's rounds are counted for the lives of its members: new members
begin at round 0.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from pengserve.controller.slots import Slot, backoff_s
from pengserve.planners.columns import Kept, group_table
from pengserve.planners.groups import groups_for, pipelines_for
from pengserve.planners.ranks import rank_order
from pengserve.planners.types.config import ControllerConfig
from pengserve.planners.types.directory import GroupSpec, PeerAddress, PeerDirectory
from pengserve.planners.types.ids import InstanceId, InstanceKey, Version
from pengserve.planners.types.layout import Group, Layout
from pengserve.planners.types.snapshot import DeviceInfo, InstanceSnapshot, InstanceState

# Until every slot has had a place, ranks may still shift; what finds no place is not waited for longer than this.
PLACE_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Where the slots are, and the groups that this allows, whether or not their members live."""

    devices: tuple[DeviceInfo, ...] = ()  # by slot
    ranks: tuple[InstanceId, ...] = ()
    groups: tuple[Group, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """How often the communicators of one group of lives were built."""

    number: int
    failures: int = 0
    retry_at_s: float | None = None  # when the next round is due, after a failure


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerWiring:
    """The directory that counts, and what it was made from."""

    directory: PeerDirectory
    names: tuple[str, ...] = ()  # of the directory's groups: composing them again for each look is slow
    rounds: Mapping[str, Round] = field(default_factory=dict)  # by `_lives`
    strangers: tuple[Group, ...] = ()  # groups that run though places do not allow them (any more)
    is_placed: bool = False  # ranks stand
    topology: Topology = Topology()


def empty(version: Version) -> PeerWiring:
    """The wiring without peers and groups; `version` is above all that earlier controllers gave out."""
    return PeerWiring(directory=PeerDirectory(version=version, peers=(), groups=()))


def rewired(
    wiring: PeerWiring, slots: Sequence[Slot], layout: Layout, config: ControllerConfig, now_s: float
) -> PeerWiring:
    """The wiring for what is known now; the same object where nothing follows from it."""
    if not config.is_elastic:
        return wiring
    topology = _topology(wiring.topology, slots, config)
    rounds = _rounds(wiring, slots, config, now_s)
    peers = _peers(wiring.directory.peers, slots)
    is_placed = wiring.is_placed or _is_placed(slots, now_s)
    groups = topology.groups if is_placed else ()
    # What runs keeps its communicators, also where the slots' places have shifted under it.
    strangers = _strangers(layout, groups)
    is_same = topology is wiring.topology and rounds is wiring.rounds and strangers == wiring.strangers
    if is_same and is_placed == wiring.is_placed and peers is wiring.directory.peers:
        return wiring
    specs, rounds = _specs((*groups, *strangers), {p.key.instance_id: p.key for p in peers}, rounds, slots)
    directory = wiring.directory
    if (directory.peers, directory.groups) != (peers, specs):
        directory = PeerDirectory(version=directory.version.next, peers=peers, groups=specs)
    names = tuple(spec.name for spec in specs)
    return PeerWiring(
        directory=directory, names=names, rounds=rounds, strangers=strangers, is_placed=is_placed, topology=topology
    )


_as_set = Kept[tuple[Group, ...], frozenset[Group]](frozenset)


def _strangers(layout: Layout, groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """The tp and pp groups of the layout that are not among `groups`."""
    possible, running = _as_set(groups), group_table(layout.groups).of_kind
    return tuple(group for group in chain(*running.values()) if group not in possible)


def _first_retry_s(rounds: Mapping[str, Round]) -> float:
    return min((known.retry_at_s for known in rounds.values() if known.retry_at_s is not None), default=math.inf)


_next_round_s = Kept(_first_retry_s)


def is_due(wiring: PeerWiring, config: ControllerConfig, now_s: float) -> bool:
    """Whether the wiring may change by itself, with time: a round is due, or ranks do not stand yet."""
    return config.is_elastic and (now_s >= _next_round_s(wiring.rounds) or not wiring.is_placed)


def formable(wiring: PeerWiring, slots: Sequence[Slot]) -> tuple[Group, ...]:
    """The groups whose members are all READY with the lane and the communicators for it."""
    names = [frozenset(_able(slot.ready)) if slot.ready is not None else frozenset() for slot in slots]
    return tuple(
        spec.group
        for spec, name in zip(wiring.directory.groups, wiring.names, strict=True)
        if all(name in names[key.instance_id] and slots[key.instance_id].key == key for key in spec.members)
    )


def is_wired_alike(new: Slot, old: Slot) -> bool:
    """Whether nothing has changed that `rewired` goes by; what a slot runs, and its epoch, are no part of that."""
    mine, other = new.ready, old.ready
    if mine is None or other is None or new.key != old.key or new.device is not old.device:
        return False
    return mine.peer_endpoint == other.peer_endpoint and mine.groups_failed == other.groups_failed


def has_same_groups(new: Slot, old: Slot) -> bool:
    """Whether both can run the same groups: what `formable` goes by."""
    mine, other = new.ready, old.ready
    if mine is None or other is None:
        return mine is other
    return new.key == old.key and mine.groups_ready == other.groups_ready and mine.lanes == other.lanes


def _able(answer: InstanceSnapshot) -> Iterable[str]:
    """The names of the groups that are ready, and that it has the lane for."""
    shapes = {lane.shape for lane in answer.lanes if lane.capacity is not None}
    return (name for name in answer.groups_ready if name.partition("@")[0] in shapes)


def _peers(before: tuple[PeerAddress, ...], slots: Sequence[Slot]) -> tuple[PeerAddress, ...]:
    """Where instances listen that serve, or still send their requests on; the same object where nothing has changed."""
    served = [(slot.key, _serving(slot)) for slot in slots]
    found = [(key, answer.peer_endpoint) for key, answer in served if answer is not None and answer.peer_endpoint]
    if found == [(peer.key, peer.endpoint) for peer in before]:
        return before
    return tuple(PeerAddress(key=key, endpoint=endpoint) for key, endpoint in found)


def _serving(slot: Slot) -> InstanceSnapshot | None:
    return slot.snapshot if slot.state is InstanceState.DRAINING else slot.ready


def _topology(before: Topology, slots: Sequence[Slot], config: ControllerConfig) -> Topology:
    devices = tuple(slot.device for slot in slots)
    if len(devices) == len(before.devices) and all(
        new is old for new, old in zip(devices, before.devices, strict=True)
    ):
        return before
    ranks = ranks_of(slots)
    nodes = {slot.key.instance_id: slot.device.node_id for slot in slots if slot.device.pid or slot.device.node_id}
    groups = groups_for(ranks, nodes, config.degrees) + pipelines_for(ranks, nodes, config.drop.max_stages)
    return Topology(devices=devices, ranks=ranks, groups=groups)


def ranks_of(slots: Iterable[Slot]) -> tuple[InstanceId, ...]:
    """All slots in rank order; one that is empty for a while keeps its place."""
    return rank_order(InstanceSnapshot(key=s.key, state=InstanceState.READY, device=s.device) for s in slots)


def _is_placed(slots: Sequence[Slot], now_s: float) -> bool:
    """Whether ranks stand: all slots have been placed once, or those that have not are waited for no longer."""
    if all(slot.device.pid or slot.device.node_id for slot in slots):
        return True
    ready_s = [slot.since_s for slot in slots if slot.ready is not None]
    return bool(ready_s) and now_s - max(ready_s) > PLACE_PATIENCE_S


def _rounds(wiring: PeerWiring, slots: Sequence[Slot], config: ControllerConfig, now_s: float) -> Mapping[str, Round]:
    """Notes failures of this round, and begins the rounds that are due; the same object where there is neither."""
    failed = {name for slot in slots if (answer := slot.ready) is not None for name in answer.groups_failed}
    changed: dict[str, Round] = {}
    for name in failed.intersection(wiring.names):
        lives, _, number = name.rpartition("/")
        known = wiring.rounds[lives]
        if known.retry_at_s is None and known.number == int(number):
            failures = known.failures + 1
            retry_at_s = now_s + backoff_s(config, failures)
            changed[lives] = replace(known, failures=failures, retry_at_s=retry_at_s)
    for lives, known in wiring.rounds.items():
        if known.retry_at_s is not None and now_s >= known.retry_at_s:
            changed[lives] = replace(known, number=known.number + 1, retry_at_s=None)
    return {**wiring.rounds, **changed} if changed else wiring.rounds


def _specs(
    groups: Iterable[Group], peers: Mapping[InstanceId, InstanceKey], rounds: Mapping[str, Round], slots: Sequence[Slot]
) -> tuple[tuple[GroupSpec, ...], Mapping[str, Round]]:
    """Specs of the groups whose members are all there, and the rounds of those alone."""
    specs, kept = [], {}
    for group in groups:
        if not all(member in peers for member in group.members):
            continue
        spec = GroupSpec(group=group, members=tuple(peers[member] for member in group.members))
        lives = _lives(spec)
        kept[lives] = rounds[lives] if lives in rounds else Round(number=_first_round(lives, group, slots))
        specs.append(replace(spec, round=kept[lives].number))
    return tuple(specs), kept


def _lives(spec: GroupSpec) -> str:
    """A spec's name without its round, e.g. "tp2@(0,1)/0.1-1.3"."""
    return spec.name.rpartition("/")[0]


def _first_round(lives: str, group: Group, slots: Sequence[Slot]) -> int:
    """Where an earlier controller left off: a name that has failed once is never used again."""
    newest = 0
    for member in group.members:
        answer = slots[member].snapshot
        if answer is not None:
            ready = [_number(name) for name in answer.groups_ready if name.startswith(f"{lives}/")]
            failed = [_number(name) + 1 for name in answer.groups_failed if name.startswith(f"{lives}/")]
            newest = max([newest, *ready, *failed])
    return newest


def _number(name: str) -> int:
    """The round in a spec's name."""
    tail = name.rpartition("/")[2]
    return int(tail) if tail.isdecimal() else 0
