"""vLLM's V2 runner with asynchronous scheduling on a CPU: `python -m tests.support.ahead_lane MODEL ENGINE_JSON`.

Requests of every kind of sampling run in one lane, then go on there from a cut, as if another instance had begun them.
Greedy ones run once more in short steps, as if members of a switch waited for the end of each.
Prints one JSON line. To be started with the variables of `ahead_host.V2_ON_CPU`.
"""

import json
import sys
from collections.abc import Iterable, Mapping

from tests.support import ahead_host

NUM_PROMPTS = 2
CUTS = (1, 17, 30)


def names(kinds: Iterable[str]) -> list[tuple[str, str, int]]:
    """(name, kind, prompt) of each request."""
    return [(f"{kind}/{prompt}", kind, prompt) for kind in kinds for prompt in range(NUM_PROMPTS)]


def main() -> None:
    """Runs all requests, cuts each, and runs the rest."""
    ahead_host.interpret_triton()
    found = ahead_host.install()
    from pengserve.planners.types.config import InstanceConfig
    from pengserve.replicas.engine.lanes.dp_lane import DpLane
    from tests.support.cut_requests import PROMPTS, SAMPLING, make_request

    lane = DpLane(InstanceConfig(app="tests", model=sys.argv[1], engine=json.loads(sys.argv[2])))

    def run(begun: Mapping[str, list[int]], kinds: Iterable[str] = SAMPLING) -> dict[str, list[int]]:
        """Output tokens of requests of these kinds, by name; `begun` has those that were made before."""
        tokens: dict[str, list[int]] = {name: [] for name, _, _ in names(kinds)}
        waiting = []
        for name, kind, prompt in names(kinds):
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
    lane.reset_prefix_cache()
    lane.keep_steps_short(True)
    first = lane.stats().step
    result = {"short": run({}, ["greedy"]), "short_steps": lane.stats().step - first}
    result |= {"whole": whole, "begun": begun, "rest": rest, "free": [num_free, lane.num_free()], **found}
    print("RESULT" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
