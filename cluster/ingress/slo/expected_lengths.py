"""How long answers are expected to be: learned from those that end here, and sent along where there is an SLO."""

from dataclasses import replace

from pengserve.cluster.ingress.request.record import RequestRecord
from pengserve.planners.lengths import LengthPredictor
from pengserve.planners.types.contract import Contract

LEARNED_ENDS = frozenset({"stop", "length"})  # others say nothing of the length that an answer would have had


class ExpectedLengths:
    """What one ingress has learned. Each ingress learns from its own requests."""

    def __init__(self) -> None:
        self._predictor = LengthPredictor()

    def contract_of(self, record: RequestRecord, now_s: float) -> Contract:
        """What goes out with a copy of a request: its contract, and with an SLO what is expected of its answer, and how
        long it has waited.
        """
        contract, params = record.options.contract, record.request.sampling_params
        if contract.slo is None:
            return contract
        found = self._predictor.predict(
            contract.service_class,
            record.num_prompt_tokens,
            len(record.output_token_ids),
            params.max_tokens if params is not None and params.max_tokens is not None else 1 << 30,
        )
        record.expected = record.expected or found
        waited_s = max(0.0, now_s - record.created_s)
        return replace(contract, low_tokens=found.low, median_tokens=found.median, waited_s=waited_s)

    def ended(self, record: RequestRecord, finish: str) -> None:
        """An answer has ended as `finish` says."""
        if finish in LEARNED_ENDS and record.output_token_ids:
            service_class = record.options.contract.service_class
            self._predictor.learn(service_class, record.num_prompt_tokens, len(record.output_token_ids))
