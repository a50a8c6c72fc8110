"""What tenants and classes have and were served, for people: bounded, however many tenants there are."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic

from pengserve.cluster.ingress.request.record import RequestRecord
from pengserve.planners.types.tenants import TenantUse

MAX_SHOWN = 64  # tenants by class; those that were served most
MAX_KEPT = 1024  # whose totals are remembered; the one that was served longest ago is added to the others
WINDOW_S = 60.0  # in which shares are looked at: older service counts 1/e and less
OTHERS = "*"

_COUNTS = ("tokens", "ended", "with_slo", "kept", "parked", "recomputed", "swapped_bytes")

_Key = tuple[str, str]


@dataclass(slots=True)
class _Total:
    tokens: int = 0
    ended: int = 0
    with_slo: int = 0
    kept: int = 0
    parked: int = 0
    recomputed: int = 0
    swapped_bytes: int = 0
    lately: float = 0.0  # tokens, decayed
    as_of_s: float = 0.0

    def add(self, other: "_Total", now_s: float) -> None:
        """Adds what another one has."""
        self.lately, self.as_of_s = self.recent(now_s) + other.recent(now_s), now_s
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def recent(self, now_s: float) -> float:
        """Tokens lately."""
        return self.lately * math.exp(-max(0.0, now_s - self.as_of_s) / WINDOW_S)


class TenantFigures:
    """Belongs to the event loop."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._totals: dict[_Key, _Total] = {}

    def ended(self, record: RequestRecord) -> None:
        """A request is over."""
        new = computed_tokens(record)
        found = _Total(tokens=new, ended=1, lately=float(new), as_of_s=self._clock())
        found.parked, found.recomputed = record.num_parks, record.num_recomputes
        found.swapped_bytes = record.swapped_bytes
        if record.kept is not None and record.kept.is_counted:
            found.with_slo, found.kept = 1, int(record.kept.outcome().is_kept)
        self._add(_key(record), found)

    def uses(self, records: Iterable[RequestRecord]) -> list[TenantUse]:
        """By tenant and class, those that were served most lately first; the rest in one. `records` are in flight."""
        now_s = self._clock()
        waiting: Counter[_Key] = Counter()
        running: Counter[_Key] = Counter()
        for record in records:
            (waiting if record.first_token_s is None else running)[_key(record)] += 1
        recent = {key: total.recent(now_s) for key, total in self._totals.items()}
        whole = sum(recent.values())
        keys = {*recent, *waiting, *running}
        busy = {key: recent.get(key, 0.0) + waiting[key] + running[key] for key in keys}
        ranked = sorted(keys, key=lambda key: (-busy[key], key))
        shown = ranked if len(ranked) <= MAX_SHOWN else ranked[: MAX_SHOWN - 1]
        found = [_use(key, [key], self._totals, waiting, running, recent, whole) for key in shown]
        if rest := ranked[len(shown) :]:
            found.append(_use((OTHERS, OTHERS), rest, self._totals, waiting, running, recent, whole))
        return found

    def _add(self, key: _Key, total: _Total) -> None:
        known = self._totals.pop(key, None)
        if known is not None:
            known.add(total, total.as_of_s)
        self._totals[key] = known or total
        if len(self._totals) > MAX_KEPT:
            oldest = next(name for name in self._totals if name != (OTHERS, OTHERS))
            self._add((OTHERS, OTHERS), self._totals.pop(oldest))


def computed_tokens(record: RequestRecord) -> int:
    """Tokens that were computed for a request: its prompt without what was cached, and its answer."""
    if record.first_token_s is None:
        return 0
    return record.num_prompt_tokens - record.num_cached_tokens + len(record.output_token_ids)


def _key(record: RequestRecord) -> _Key:
    contract = record.options.contract
    return contract.tenant, contract.service_class


def _use(
    name: _Key,
    keys: Iterable[_Key],
    totals: dict[_Key, _Total],
    waiting: Counter[_Key],
    running: Counter[_Key],
    recent: dict[_Key, float],
    whole: float,
) -> TenantUse:
    keys = list(keys)
    found = _Total()
    for total in (totals[key] for key in keys if key in totals):
        found.add(total, total.as_of_s)
    return TenantUse(
        tenant=name[0],
        service_class=name[1],
        num_waiting=sum(waiting[key] for key in keys),
        num_running=sum(running[key] for key in keys),
        share=sum(recent.get(key, 0.0) for key in keys) / whole if whole else 0.0,
        total_tokens=found.tokens,
        total_ended=found.ended,
        total_parked=found.parked,
        total_recomputed=found.recomputed,
        swapped_bytes=found.swapped_bytes,
        attainment=found.kept / found.with_slo if found.with_slo else None,
    )
