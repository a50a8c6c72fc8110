"""First tokens in time under too much load, where requests say what time they want, and where they do not.

`python -m benchmarks.late` serves with one real instance. It measures what a request alone takes and how many the
instance serves, and sends `LOAD` times as many: the same requests at the same times, in turn with `slo.ttft_ms` and
without. Without it an instance serves as vLLM does, first come, first served. Counted are first tokens within `SCALE`
times what a request alone takes; a request that is late is served all the same.
"""

import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rich.console import Console

from benchmarks.client import Client, Request
from benchmarks.figures import percentile, ttfts_s
from benchmarks.harness import engine_flags, has_model, option_parser, progress_bar, tell_written, text, today
from benchmarks.ingress import settled_ingress
from benchmarks.result_files import facts_line, table, write_result
from tests.support.elastic import elastic_cluster
from tests.support.ingress import MODEL_NAME

SCALE, LOAD = 5.0, 2.0
SECONDS, MOST_REQUESTS, ROUNDS = 20.0, 1500, 3  # of a load
NUM_WORDS, NUM_TOKENS = 350, 4  # of a prompt, of an answer: reading is what takes time
NUM_ALONE, NUM_SATURATED, CLIENTS = 10, 80, 16
ENDS_WITHIN_S = 300.0
TOLD, UNTOLD = "told", "not told"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came of one load."""

    how: str
    num_requests: int
    in_time: float  # share
    ttft_p50_s: float
    ttft_p99_s: float


def main() -> int:
    """Measures and writes the result; the exit code."""
    options = option_parser("late", __doc__).parse_args()
    console = Console(stderr=True)
    if not has_model(options.model, console):
        return 2
    flags = engine_flags(enable_prefix_caching=False)
    with (
        elastic_cluster(options.model.resolve(), 1, engine=flags) as cluster,
        settled_ingress(cluster) as url,
        Client(url, MODEL_NAME) as client,
    ):
        alone_s, rate = _measured(client)
        limit_s, requests = SCALE * alone_s, _load(LOAD * rate)
        console.print(f"alone {alone_s * 1e3:.0f} ms, {rate:.1f} requests a second", highlight=False)
        runs = list(_runs(client, requests, limit_s, console))
    record = {"alone_s": alone_s, "served_per_s": rate, "limit_s": limit_s, "runs": [asdict(run) for run in runs]}
    tell_written(console, write_result(options.output, "late", today(), record, _text(runs, alone_s, rate)))
    return 0


def _runs(client: Client, requests: Sequence[Request], limit_s: float, console: Console) -> Sequence[Run]:
    told = [replace(request, ttft_ms=max(1, round(limit_s * 1e3))) for request in requests]
    found = []
    with progress_bar(console) as progress:
        bar = progress.add_task("loads", total=2 * ROUNDS)
        for _ in range(ROUNDS):
            for how, load in ((UNTOLD, requests), (TOLD, told)):
                times_s = ttfts_s(client.send(load).result(ENDS_WITHIN_S))
                found.append(
                    Run(
                        how=how,
                        num_requests=len(load),
                        in_time=sum(time_s <= limit_s for time_s in times_s) / len(load),
                        ttft_p50_s=percentile(times_s, 50),
                        ttft_p99_s=percentile(times_s, 99),
                    )
                )
                progress.advance(bar)
    return found


def _measured(client: Client) -> tuple[float, float]:
    """Seconds to the first token of a request alone, and requests that are served in a second."""
    requests = _load(float("inf"), NUM_ALONE + NUM_SATURATED)
    client.send(requests[:2]).result(ENDS_WITHIN_S)
    alone_s = statistics.median(ttfts_s(client.send(requests[:NUM_ALONE], clients=1).result(ENDS_WITHIN_S)))
    started_s = time.perf_counter()
    client.send(requests[NUM_ALONE:], clients=CLIENTS).result(ENDS_WITHIN_S)
    return alone_s, NUM_SATURATED / (time.perf_counter() - started_s)


def _load(rate: float, count: int = MOST_REQUESTS) -> list[Request]:
    """Requests that come at chance, `rate` a second, for `SECONDS`; `count` at most."""
    source, at_s, found = random.Random(5), 0.0, list[Request]()
    while len(found) < count and at_s < SECONDS:
        found.append(Request(prompt=text(source, NUM_WORDS), max_tokens=NUM_TOKENS, at_s=at_s))
        at_s += source.expovariate(1.0) / rate
    return found


def _text(runs: Sequence[Run], alone_s: float, rate: float) -> str:
    heading = ["requests say what they want", "in time", "TTFT P50", "TTFT P99"]
    body = []
    for how in (UNTOLD, TOLD):
        mine = [run for run in runs if run.how == how]
        times_s = [statistics.median(getattr(run, name) for run in mine) for name in ("ttft_p50_s", "ttft_p99_s")]
        shares = ", ".join(f"{run.in_time:.0%}" for run in mine)
        body.append([how, shares, *(f"{time_s:.2f} s" for time_s in times_s)])
    lines = [
        "# First tokens in time under too much load", "",
        f"`python -m benchmarks.late`: one instance with the demo model, {facts_line()}", "",
        f"A request alone has its first token after {alone_s * 1e3:.0f} ms, and {rate:.1f} are served in a second."
        f" {LOAD:g} times as many come for {SECONDS:g} s ({runs[0].num_requests} requests, prompts of about"
        f" {NUM_WORDS * 1.2:.0f} tokens). In time is a first token within {SCALE:g} times what one alone takes. Each"
        " load was sent as often as it has shares below, in turn; times are medians of these loads.", "",
        *table(heading, body), "",
    ]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
