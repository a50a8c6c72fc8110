"""Which instance takes a request that an ingress keeps, and what all its requests want of the cluster."""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace

from pengserve.cluster.ingress.config import LimitConfig
from pengserve.cluster.ingress.in_flight.trials import Trials
from pengserve.cluster.ingress.request.record import Links, RequestRecord
from pengserve.cluster.ingress.routing.dispatcher import Dispatcher, QueuedBefore
from pengserve.cluster.ingress.routing.prefixes import Prefixes
from pengserve.planners.dispatch import DispatchOptions
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.snapshot import Demand
from pengserve.replicas.engine.link import InstanceLink


class Placing:
    """Chooses among the links that are ready, by wishes, length, urgency and suspicion."""

    def __init__(
        self,
        limits: LimitConfig,
        links: Links,
        trials: Trials,
        max_model_len: Callable[[], int],
        clock: Callable[[], float],
        prefixes: Prefixes,
        queued_before: QueuedBefore | None = None,
    ) -> None:
        """
        Args:
            max_model_len: tokens that the widest group this cluster can form holds for one request.
            queued_before: see `Dispatcher`.
        """
        self._limits, self._links, self._trials = limits, links, trials
        self._max_model_len, self._clock = max_model_len, clock
        self._dispatcher = Dispatcher(clock, prefixes, queued_before)
        self.urgent: set[RequestRecord] = set()  # of all records

    def choose(
        self, record: RequestRecord, *, to: InstanceKey | None = None, avoid: InstanceLink | None = None
    ) -> InstanceLink | None:
        """The link for a request: to the named instance where that fits, or to the best other than `avoid`.

        None where no instance takes it now.
        """
        total_tokens = record.total_tokens(self._max_model_len())
        named = self._links.find(to) if to is not None else None
        if named is not None and not record.is_suspect and self._dispatcher.max_tokens(named) >= total_tokens:
            return named
        links = self._trials.open_links(record, [link for link in self._links.ready() if link is not avoid])
        options = DispatchOptions(degree=record.options.degree, total_tokens=total_tokens, is_priority=record.is_urgent)
        num_priority = Counter(urgent.link.key for urgent in self.urgent if urgent.link is not None)
        link = self._dispatcher.choose(links, record, options, num_priority)
        # A wish is worth a wait, for the controller to form the group; but it never fails a request.
        is_patient = self._clock() - record.created_s < self._limits.parallelism_wait_s
        if link is None and options.degree is not None and not is_patient:
            options = replace(options, degree=None)
            link = self._dispatcher.choose(links, record, options, num_priority)
        return link

    def hit_tokens(self, link: InstanceLink, record: RequestRecord) -> int:
        """Tokens of the request's prompt that are probably in the prefix cache of the link's instance."""
        return self._dispatcher.hit_tokens(link, record)

    def sent(self, record: RequestRecord, link: InstanceLink, hit_tokens: int) -> None:
        """A copy went out over `link`, to where so many tokens of it probably are."""
        self._dispatcher.sent(link, record, hit_tokens)

    def first_token(self, record: RequestRecord, wait_s: float) -> None:
        """A request's first token came so long after it was sent."""
        self._dispatcher.first_token(record, wait_s)

    def predict_ttft_s(self, record: RequestRecord) -> float | None:
        """Seconds until the first token of a request that is sent now; None where that is not known."""
        link = self.choose(record)
        return None if link is None else self._dispatcher.predict_ttft_s(link, record)

    def ended(self, record: RequestRecord) -> None:
        """A request ended where it is now."""
        self._dispatcher.ended(record)

    def forget(self, key: InstanceKey) -> None:
        """That life of an instance is gone."""
        self._dispatcher.forget(key)

    def demand(self, records: Collection[RequestRecord]) -> Demand:
        """What the requests in flight want, for the planners."""
        limit = self._max_model_len()
        held = max((self._dispatcher.max_tokens(link) for link in self._links.ready()), default=0)
        waiting = [record for record in records if record.link is None]
        longest = max((record.total_tokens(limit) for record in waiting), default=0)
        wanted = Counter(record.options.degree for record in records if record.options.degree is not None)
        return Demand(
            num_running=len(records) - len(waiting),
            num_waiting=len(waiting),
            longest_waiting_tokens=longest if longest > held else 0,
            wanted_degrees=tuple(sorted(wanted.items())),
            num_priority=len(self.urgent),
        )
