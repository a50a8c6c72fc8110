"""How many prompts may begin without breaking the time per output token of requests that decode (LayerKV section 3.1).

A request that decodes has had so many tokens in so long, and is expected to make so many more. What its SLO leaves of
that time may go to prompts:

    allow  =  slo * (past + future tokens)  -  (past + future seconds)                                      Eq. 1

Prompts begin in their order as long as all of them together take less than the least `allow` (Eq. 2, Algorithm 1).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """A request that decodes and has an SLO for its time per output token (TPOT)."""

    slo_s: float
    past_tokens: int  # that it has made
    past_s: float  # in so long, waiting included
    future_tokens: int  # that it will make at least; the lower bound of a prediction

    def allow_prefill_s(self, tpot_s: float) -> float:
        """Seconds that prompts may take of it, where a token takes `tpot_s` now (Eq. 1)."""
        future_tokens = max(1, self.future_tokens)
        return self.slo_s * (self.past_tokens + future_tokens) - (self.past_s + tpot_s * future_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """Seconds that a prompt takes: linear in its length, and quadratic for attention (Eq. 3)."""

    token_s: float
    pair_s: float = 0.0  # of a token and one before it

    @classmethod
    def of_model(cls, num_params: int, hidden_size: int, flop_per_s: float, alpha: float = 1.0) -> "PrefillCost":
        """As the paper writes it: `alpha * seqlen * (2 * params + 2 * seqlen * hidden) / flop_per_s`."""
        return cls(token_s=alpha * 2 * num_params / flop_per_s, pair_s=alpha * 2 * hidden_size / flop_per_s)

    def prefill_s(self, num_tokens: int) -> float:
        """Of a prompt with so many tokens to compute."""
        return num_tokens * (self.token_s + num_tokens * self.pair_s)


def worth_waiting_for(decoding: Iterable[Decoding], tpot_s: float) -> list[Decoding]:
    """Those of `decoding` that holding prompts back can help.

    One that is late already, and whose tokens take longer than its SLO without any prompt, misses it in any case.
    """
    return [request for request in decoding if tpot_s < request.slo_s or request.allow_prefill_s(tpot_s) > 0]


def least_allow_s(decoding: Iterable[Decoding], tpot_s: float) -> float:
    """Seconds that prompts may take of all requests that decode; infinite where none of them has an SLO."""
    return min((request.allow_prefill_s(tpot_s) for request in decoding), default=inf)


def num_prefills(prefills_s: Sequence[float], decoding: Iterable[Decoding], tpot_s: float, begun_s: float = 0.0) -> int:
    """How many of the waiting prompts, in their order, may begin now (Algorithm 1).

    `begun_s` is what prompts that have begun still take: the paper computes a prompt in one step, vLLM in several.
    """
    allow_s, total_s = least_allow_s(decoding, tpot_s), begun_s
    for count, prefill_s in enumerate(prefills_s):
        total_s += prefill_s
        if total_s >= allow_s:
            return count
    return len(prefills_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadCost:
    """Seconds that KV of a prompt takes to the host (Eq. 4)."""

    bytes_per_token: float  # of one layer: `2 * head size * heads * bytes of a number`
    link_bytes_per_s: float
    beta: float = 1.0

    def offload_s(self, num_tokens: int, num_layers: int) -> float:
        """Of so many layers of a prompt of so many tokens."""
        return self.beta * num_tokens * num_layers * self.bytes_per_token / self.link_bytes_per_s

    def kept_layers(self, num_tokens: int, num_layers: int, prefill_s: float) -> int:
        """x: the fewest layers to keep on the device, so that the others leave while the prompt is computed.

        A long prompt keeps none; see section 3.1.1.
        """
        layer_s = self.offload_s(num_tokens, 1)
        if layer_s <= 0:
            return 0
        return num_layers - min(num_layers, int(prefill_s / layer_s * (1 + 1e-12)))


def spread_away(num_layers: int, num_away: int) -> tuple[int, ...]:
    """Layers on the host, evenly between those on the device, the first one among them (section 3.1.2).

    Of 8 layers 4 are away: 0, 2, 4 and 6.
    """
    return tuple(index * num_layers // num_away for index in range(num_away)) if num_away else ()
