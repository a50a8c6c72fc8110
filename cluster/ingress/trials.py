"""Which request of a dead instance killed it: suspects are tried apart from each other and from new requests.

link lost --> suspects --placed where few suspects are--> on trial --PROVEN_TOKENS, or the end--> acquitted
                 ^                                            |
                 +-------------- link lost -------------------+--> twice the only possible cause: condemned
"""

from collections.abc import Callable, Sequence
from time import monotonic

from pengserve.cluster.ingress.record import RequestRecord
from pengserve.cluster.ingress.suspicion import PROVEN_TOKENS, Suspicion
from pengserve.replicas.engine.link import InstanceLink

TRIAL_S = 10.0  # a suspect keeps others away from its instance for so long: it may wait for memory there


class Trials:
    """The suspects of one ingress that are on an instance, and what their trials have shown so far."""

    def __init__(self, max_deaths_alone: int, clock: Callable[[], float] = monotonic) -> None:
        """A request is guilty of so many deaths of which it is the only possible cause."""
        self._clock = clock
        self._max_deaths_alone = max_deaths_alone
        self._on_trial: set[RequestRecord] = set()
        self._evidence = 0  # deaths of instances, less suspects that were acquitted

    def __contains__(self, record: RequestRecord) -> bool:
        return record in self._on_trial

    def instance_died(self, link: InstanceLink, on_board: Sequence[RequestRecord]) -> None:
        """`link` was lost with these requests of this ingress on it."""
        for record in on_board:
            if record.suspicion is not None:
                record.suspicion.num_aboard += 1
        unproven = [record for record in on_board if not record.is_proven]
        possible = [record for record in on_board if record in self._on_trial] or unproven or on_board
        is_alone = len(unproven) == 1 and unproven == possible and not _has_others(link, on_board)
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

    def is_guilty(self, record: RequestRecord) -> bool:
        """Whether it is known by now that `record` kills instances."""
        return record.suspicion is not None and record.suspicion.is_guilty(self._evidence, self._max_deaths_alone)

    def condemned(self, record: RequestRecord) -> None:
        """`record` is given up: the deaths that it caused say nothing about others."""
        if record.suspicion is not None:
            self._evidence -= record.suspicion.num_alone

    def begin(self, record: RequestRecord) -> None:
        """`record` was sent; a suspect is on trial from now on."""
        if record.is_suspect:
            record.trial_ends_at = len(record.output_token_ids) + PROVEN_TOKENS
            self._on_trial.add(record)

    def acquit(self, record: RequestRecord) -> None:
        """`record` was computed for long enough, or to its end, and its instance lives."""
        self.leave(record)
        self._evidence -= 1

    def leave(self, record: RequestRecord) -> None:
        """`record` is on no instance any more, for a reason that tells nothing."""
        self._on_trial.discard(record)
        record.trial_ends_at = None

    def open_links(self, record: RequestRecord, links: Sequence[InstanceLink]) -> Sequence[InstanceLink]:
        """Those of `links` where `record` may go without making a trial tell less."""
        if not self._on_trial:
            return links
        limits: dict[InstanceLink | None, list[int]] = {}
        since_s = self._clock() - TRIAL_S
        for other in self._on_trial:
            # After one death a first token is enough to let the next one in: a burst must not wait for each other.
            if other.sent_s > since_s and not (other.is_first_trial and other.has_tokens_here):
                assert other.suspicion is not None
                limits.setdefault(other.link, []).append(other.suspicion.most_together)
        if not record.is_suspect:
            return [link for link in links if min(limits.get(link, (2,))) > 1]
        assert record.suspicion is not None
        own = record.suspicion.most_together
        return [link for link in links if min([own, *limits.get(link, ())]) > len(limits.get(link, ()))]


def _has_others(link: InstanceLink, on_board: Sequence[RequestRecord]) -> bool:
    """Whether the instance also ran requests of other ingresses, by its last statistics."""
    return link.stats.num_running + link.stats.num_waiting > len(on_board)
