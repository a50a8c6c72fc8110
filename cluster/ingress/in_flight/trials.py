"""Which request of a dead instance killed it: suspects are tried one by one, each alone on its instance.

link lost --> suspects --placed where no other is--> at the gate --the rest there is proven--> alone
                 ^                                        |                                      |
                 |                           took too long, or was moved           PROVEN_TOKENS, or the end
                 |                                        v                                      v
                 +-------------- link lost --------- among others                            acquitted

A request that dies twice as the only possible cause is guilty. Suspects of many at once are tried together, in groups.
"""

from collections.abc import Sequence
from enum import Enum, auto

from pengserve.cluster.ingress.request.record import RequestRecord
from pengserve.cluster.ingress.request.suspicion import PROVEN_TOKENS, Suspicion
from pengserve.replicas.engine.link import InstanceLink


class Stage(Enum):
    """Where the trial of a suspect is."""

    AT_GATE = auto()  # its instance does not compute it yet (`replicas.trial_gate`)
    ALONE = auto()  # nothing unproven runs beside it
    IN_GROUP = auto()  # nothing but other suspects of this ingress is meant to die beside it
    AMONG_OTHERS = auto()  # its trial tells no more than a new request's first steps


class Trials:
    """The suspects of one ingress that are on an instance, and what their trials have shown so far."""

    def __init__(self, max_deaths_alone: int, *, is_only_ingress: bool = True) -> None:
        """A request is guilty of so many deaths of which it is the only possible cause.

        Where other ingresses send requests to the same instances, that is so in trials alone.
        """
        self._max_deaths_alone, self._is_only_ingress = max_deaths_alone, is_only_ingress
        self._on_trial: dict[RequestRecord, Stage] = {}
        self._evidence = 0  # deaths of instances, less suspects that were acquitted

    def __contains__(self, record: RequestRecord) -> bool:
        return record in self._on_trial

    def instance_died(self, link: InstanceLink, on_board: Sequence[RequestRecord]) -> None:
        """`link` was lost with these requests of this ingress on it."""
        for record in on_board:
            if record.suspicion is not None:
                record.suspicion.num_aboard += 1
        alone = [record for record in on_board if self._on_trial.get(record) is Stage.ALONE]
        in_group = [record for record in on_board if self._on_trial.get(record) is Stage.IN_GROUP]
        unproven = [record for record in self._begun(on_board) if not record.is_proven]
        possible = alone or in_group or unproven or on_board
        is_alone = bool(alone) or (
            self._is_only_ingress and len(unproven) == 1 and unproven == possible and not _has_others(link, on_board)
        )
        for record in possible:
            if record.suspicion is None:
                record.suspicion = Suspicion(evidence_before=self._evidence, num_aboard=1)
            record.suspicion.note(
                num_together=len(possible),
                is_alone=is_alone,
                was_proven=record.is_proven,
                num_tokens=len(record.output_token_ids),
            )
        self._evidence += 1

    def _begun(self, on_board: Sequence[RequestRecord]) -> Sequence[RequestRecord]:
        """Those of `on_board` that the instance computed: it holds all that comes after a suspect at its gate.

        A suspect that has the instance for itself does not wait there.
        """
        if len(on_board) == 1:
            return on_board
        since_s = min((r.sent_s for r in on_board if self._on_trial.get(r) is Stage.AT_GATE), default=None)
        if since_s is None:
            return on_board
        return [record for record in on_board if record.sent_s < since_s or record.has_tokens_here]

    def is_guilty(self, record: RequestRecord) -> bool:
        """Whether it is known by now that `record` kills instances."""
        return record.suspicion is not None and record.suspicion.is_guilty(self._evidence, self._max_deaths_alone)

    def condemned(self, record: RequestRecord) -> None:
        """`record` is given up: the deaths that it caused say nothing about others."""
        if record.suspicion is not None:
            self._evidence -= record.suspicion.num_alone

    def is_tried_alone(self, record: RequestRecord) -> bool:
        """Whether `record`, which is about to be sent, is a suspect that nothing may run beside."""
        return record.is_suspect and record.suspicion is not None and record.suspicion.most_together == 1

    def begin(self, record: RequestRecord) -> None:
        """`record` was sent; a suspect is on trial from now on."""
        if record.is_suspect:
            record.trial_ends_at = len(record.output_token_ids) + PROVEN_TOKENS
            self._on_trial[record] = Stage.AT_GATE if self.is_tried_alone(record) else Stage.IN_GROUP

    def told(self, record: RequestRecord, *, is_alone: bool) -> None:
        """The instance has let `record` in, alone or among others; or it was moved among others."""
        if record in self._on_trial:
            self._on_trial[record] = Stage.ALONE if is_alone else Stage.AMONG_OTHERS

    def acquit(self, record: RequestRecord) -> None:
        """`record` was computed for long enough, or to its end, and its instance lives."""
        self.leave(record)
        self._evidence -= 1

    def leave(self, record: RequestRecord) -> None:
        """`record` is on no instance any more, for a reason that tells nothing."""
        self._on_trial.pop(record, None)
        record.trial_ends_at = None

    def open_links(self, record: RequestRecord, links: Sequence[InstanceLink]) -> Sequence[InstanceLink]:
        """Those of `links` where `record` waits for no trial. A new request that would wait everywhere has all."""
        if not self._on_trial:
            return links
        limits: dict[InstanceLink | None, list[int]] = {}
        for other, stage in self._on_trial.items():
            if stage is not Stage.AMONG_OTHERS:
                assert other.suspicion is not None
                limits.setdefault(other.link, []).append(other.suspicion.most_together)
        if not record.is_suspect:
            return [link for link in links if min(limits.get(link, (2,))) > 1] or links
        assert record.suspicion is not None
        own = record.suspicion.most_together
        return [link for link in links if min([own, *limits.get(link, ())]) > len(limits.get(link, ()))]


def _has_others(link: InstanceLink, on_board: Sequence[RequestRecord]) -> bool:
    """Whether the instance also ran requests of other ingresses, by its last statistics."""
    return link.stats.num_running + link.stats.num_waiting > len(on_board)
