"""What serving a request costs, in the cost model's seconds: the unit in which tenants' shares are counted.

    prompt    token_s * new + pair_s * new * (new + 2 * cached) + seq_s           new: tokens that are not cached
    decode    load_s / BATCH + token_s + seq_s + context_s * context              of each token
    memory    resident tokens / capacity * seconds                                while the request holds KV

The first two are seconds of the device's computation, the third is seconds of its memory: a request that holds all of
it for a second keeps the others out for a second. What is cached costs its tenant no computation.
"""

from dataclasses import dataclass

from pengserve.planners.types.step_cost import NOMINAL, StepCost

BATCH = 16  # sequences that share the loading of weights, where a step's real number is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCost:
    """Prices of one instance."""

    step: StepCost = NOMINAL
    capacity_tokens: int = 0  # of KV; 0: not known, and memory costs nothing

    def prompt_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Seconds of a prompt of which so many tokens are computed."""
        pairs = new_tokens * (new_tokens + 2 * cached_tokens)
        return self.step.token_s * new_tokens + self.step.pair_s * pairs + self.step.seq_s

    def decode_s(self, num_tokens: int, context_tokens: int) -> float:
        """Seconds of so many tokens of an answer, after about `context_tokens`."""
        step = self.step
        return num_tokens * (step.load_s / BATCH + step.token_s + step.seq_s + step.context_s * context_tokens)

    def memory_s(self, resident_tokens: int, seconds: float) -> float:
        """Seconds of memory of KV that is held for `seconds`."""
        return resident_tokens / self.capacity_tokens * seconds if self.capacity_tokens else 0.0
