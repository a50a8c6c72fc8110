"""What a lane counts: totals that only grow, as its instance tells them."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

from pengserve.planners.types.step_cost import StepTotals
from pengserve.replicas.engine.scheduling.departures import Departures
from pengserve.replicas.engine.vllm_seam import EngineCoreEventType, EngineCoreOutputs, Request
from pengserve.replicas.engine.wire import is_copy


@dataclass(slots=True, kw_only=True)
class LaneTotals:
    """Counts of requests, tokens and steps."""

    departures: Departures  # the rules of the lane's scheduler count there
    steps: int = 0
    resumed: int = 0  # requests that came half-decoded
    generated: int = 0  # tokens
    prompted: int = 0  # tokens of prompts, counted in the step that ends each
    preempted: int = 0  # times that a request lost its blocks
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0  # ...
    come: int = 0  # requests that an ingress sent
    come_tokens: int = 0
    sent_again: int = 0  # copies of requests that had been sent before
    finished: int = 0  # answers
    finished_tokens: int = 0
    work: StepTotals = field(default_factory=StepTotals)

    def count_come(self, request: Request) -> None:
        """Counts a request that an ingress sent."""
        if is_copy(request.request_id):
            self.sent_again += 1
        else:
            self.come += 1
            self.come_tokens += request.num_tokens

    def count_step(self, batches: Iterable[EngineCoreOutputs]) -> tuple[int, int]:
        """Counts a step; its new tokens, and the pairs of a new one of a prompt and one that it attends to."""
        self.steps += 1
        num_tokens = pairs = 0
        for batch in batches:
            for output in batch.outputs:
                num_new = len(output.new_token_ids)
                self.generated += num_new
                num_tokens += num_new
                if output.prefill_stats is not None:
                    self.prompted += output.prefill_stats.num_prompt_tokens
                    num_read = output.prefill_stats.num_computed_tokens
                    num_tokens += num_read
                    pairs += num_read * (num_read + 2 * output.prefill_stats.num_cached_tokens)
                if output.events:
                    self.preempted += sum(event.type is EngineCoreEventType.PREEMPTED for event in output.events)
            stats = batch.scheduler_stats
            if stats is not None and stats.prefix_cache_stats is not None:
                self.prefix_queries += stats.prefix_cache_stats.queries
                self.prefix_hits += stats.prefix_cache_stats.hits
        return num_tokens, pairs

    def count_ended(self, num_answers: int, num_tokens: int) -> None:
        """Counts answers that ended, and the tokens of whole ones."""
        self.finished += num_answers
        self.finished_tokens += num_tokens

    def named(self) -> dict[str, int]:
        """By their names in `InstanceStats`."""
        return {
            "step": self.steps,
            "total_prompt_tokens": self.prompted,
            "total_generated_tokens": self.generated,
            "total_preemptions": self.preempted,
            "total_prefix_queries": self.prefix_queries,
            "total_prefix_hits": self.prefix_hits,
            "total_resumed": self.resumed,
            "total_requests": self.come,
            "total_request_tokens": self.come_tokens,
            "total_sent_again": self.sent_again,
            "total_finished": self.finished,
            "total_finished_tokens": self.finished_tokens,
            **self.work.named(),
            **self.departures.named(),
        }

    def copy(self) -> "LaneTotals":
        """As they are now."""
        return replace(self, work=replace(self.work), departures=replace(self.departures))

    def count_from(self, other: "LaneTotals") -> None:
        """The totals are those of `other` from now on."""
        for one in fields(self):
            if one.name not in ("work", "departures"):
                setattr(self, one.name, getattr(other, one.name))
        self.work = replace(other.work)
        self.departures.count_from(other.departures)
