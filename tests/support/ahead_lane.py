"""vLLM's V2 runner with asynchronous scheduling on a CPU: `python -m tests.support.ahead_lane MODEL ENGINE_JSON`.

Requests of every kind of sampling run in one lane, then go on there from a cut, as if another instance had begun them.
Prints one JSON line. To be started with the variables of `ahead_host.V2_ON_CPU`.
"""

import json
import sys
from collections.abc import Mapping

from tests.support import ahead_host

NUM_PROMPTS = 2
CUTS = (1, 17, 30)


def names() -> list[tuple[str, str, int]]:
    """(name, kind, prompt) of each request."""
    from tests.support.cut_requests import SAMPLING

    return [(f"{kind}/{prompt}", kind, prompt) for kind in SAMPLING for prompt in range(NUM_PROMPTS)]


def main() -> None:
    """Runs all requests, cuts each, and runs the rest."""
    ahead_host.interpret_triton()
    found = ahead_host.install()
    from pengserve.planners.types.config import InstanceConfig
    from pengserve.replicas.engine.lanes.dp_lane import DpLane
    from tests.support.cut_requests import PROMPTS, SAMPLING, make_request

    lane = DpLane(InstanceConfig(app="tests", model=sys.argv[1], engine=json.loads(sys.argv[2])))

    def run(begun: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """Output tokens of all requests, by name; `begun` has those that were made before."""
        tokens: dict[str, list[int]] = {name: [] for name, _, _ in names()}
        waiting = []
        for name, kind, prompt in names():
            request = make_request(name, PROMPTS[prompt], SAMPLING[kind])
            lane.prepare(request, begun.get(name, []), waiting.append)
        while len(waiting) < len(tokens):
            pass  # grammars are being compiled
        for prepared in waiting:
            lane.add(prepared)
        while lane.has_work():
            for batch in lane.step_ahead().values():
                for output in batch.outputs:
                    tokens[output.request_id].extend(output.new_token_ids)
        return tokens

    whole = run({})
    num_free = lane.num_free()
    lane.reset_prefix_cache()
    begun = {name: tokens[: CUTS[number % len(CUTS)]] for number, (name, tokens) in enumerate(whole.items())}
    rest = run(begun)
    result = {"whole": whole, "begun": begun, "rest": rest, "free": [num_free, lane.num_free()], **found}
    print("RESULT" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
