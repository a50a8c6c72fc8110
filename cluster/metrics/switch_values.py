"""Counts decisions about the layout, what became of them, and switches, from the controller's event log."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pengserve.cluster.metrics import catalog
from pengserve.cluster.metrics.facade import Metrics
from pengserve.planners.types.events import Event, EventKind

PAGE = 1000
PHASES = ("prepare", "drain", "meet", "cutover")
OUTCOMES = ("carried", "recomputed", "paused", "redirected")
_DONE = {EventKind.TRANSITION_END: "done", EventKind.TRANSITION_ERROR: "aborted"}


class SwitchValues:
    """Follows the event log. What had happened before the first look is not counted: another ingress may have."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._errors = metrics.histogram(catalog.PREDICTION_ERROR)  # from zero on, so that the first one is a rise
        self._after = 0  # number of the newest event seen
        self._time_s = 0.0  # and its time
        self._controller_s = 0.0  # when the controller that numbered it was started
        self._is_counting = False

    async def follow(
        self, events: Callable[[int, int], Awaitable[Sequence[Event]]], controller_started_s: float
    ) -> None:
        """Reads on, with `events(after, limit)`, to the end of the log of the controller that began then."""
        is_same = controller_started_s == self._controller_s
        if not is_same:
            # A new controller without a log file numbers from 1 again; with one it goes on. Times tell what is new.
            self._after, self._controller_s = 0, controller_started_s
        known_s = self._time_s
        while True:
            page = await events(self._after, PAGE)
            for event in page:
                self._after, self._time_s = event.seq, max(self._time_s, event.time_s)
                if self._is_counting and (is_same or event.time_s > known_s):
                    self.count(event)
            if len(page) < PAGE:
                self._is_counting = True
                return

    def count(self, event: Event) -> None:
        """Counts one event; those of other kinds say nothing."""
        outcome, data = _DONE.get(event.kind), event.data
        if event.kind is EventKind.PLAN_DECIDED:
            self._metrics.counter(catalog.DECISIONS, action=str(data.get("action", ""))).inc()
        elif event.kind is EventKind.PLAN_OUTCOME:
            self._compare(data)
        if outcome is None:
            return
        kind, strategy = str(data.get("switch", "")), str(data.get("strategy", ""))
        self._metrics.counter(catalog.SWITCHES, kind=kind, strategy=strategy, outcome=outcome).inc()
        if outcome != "done":
            return
        for phase in PHASES:
            seconds = float(data.get(f"{phase}_s", 0.0))
            if seconds > 0 or phase != "drain":  # most strategies have no drain
                self._metrics.histogram(catalog.SWITCH_PHASE_SECONDS, phase=phase).observe(seconds)
        for name in OUTCOMES:
            if (number := int(data.get(f"num_{name}", 0))) > 0:
                self._metrics.counter(catalog.SWITCHED_REQUESTS, outcome=name).inc(number)
        if (carried_bytes := int(data.get("carried_bytes", 0))) > 0:
            self._metrics.counter(catalog.CARRIED_BYTES).inc(carried_bytes)

    def _compare(self, data: Mapping[str, Any]) -> None:
        """What was predicted of a decision, beside what was measured."""
        for figure in ("predicted", "measured"):
            seconds = float(data.get(figure, {}).get("ttft_s", 0.0))
            self._metrics.gauge(catalog.DECISION_TTFT, figure=figure).set(seconds)
        self._errors.observe(float(data.get("error", 1.0)))
