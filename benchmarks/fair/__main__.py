"""`python -m benchmarks.fair`, from the root of the repository: measures systems under a flood.

workload DIR [--NAME VALUE ...]     writes a workload; names are those of `benchmarks.fair.workload.Plan`
play DIR --url URL --model NAME     sends it to a server, writes what came of it
score DIR OUTCOMES                  prints the score
bench                               plain vLLM and PengServe, one after the other (`make bench-fair`)
"""

import argparse
import asyncio
import dataclasses
import json
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.fair import files
from benchmarks.fair.scoring import Limits, score
from benchmarks.fair.workload import Plan
from benchmarks.harness import has_model, option_parser, tell_written, today


def main(arguments: list[str]) -> int:
    """Runs one command; without one, the benchmark."""
    is_named = bool(arguments) and arguments[0] in COMMANDS
    try:
        return COMMANDS[arguments[0]](arguments[1:]) if is_named else bench(arguments)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def workload(arguments: list[str]) -> int:
    """Writes a workload."""
    parser = argparse.ArgumentParser("benchmarks.fair workload")
    parser.add_argument("directory", type=Path)
    for field in dataclasses.fields(Plan):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    given = vars(parser.parse_args(arguments))
    directory = given.pop("directory")
    found = files.write(directory, Plan(**given))
    sys.stdout.write(f"{directory}: {len(found.turns)} requests, {len(found.updates)} updates of priorities\n")
    return 0


def play(arguments: list[str]) -> int:
    """Sends a workload."""
    from benchmarks.fair.play import Target, write_outcomes  # with httpx
    from benchmarks.fair.play import play as send

    parser = argparse.ArgumentParser("benchmarks.fair play")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--vocabulary", type=int, default=1000, help="token ids below this are plain")
    parser.add_argument("--outcomes", type=Path, default=Path("outcomes.jsonl"))
    parser.add_argument("--admin-key", default="", help="for changes of priorities")
    parser.add_argument("--api-key", default="")
    for name in ("priorities", "tenants", "updates"):
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args(arguments)
    plan, found = files.read(given.directory)
    headers = {"authorization": f"Bearer {given.api_key}"} if given.api_key else {}
    headers |= {"x-pengserve-admin-key": given.admin_key} if given.admin_key else {}
    target = Target(
        url=given.url,
        model=given.model,
        vocabulary=given.vocabulary,
        block_tokens=plan.block_tokens,
        has_priorities=given.priorities,
        has_tenants=given.tenants,
        has_updates=given.updates,
        headers=headers,
    )
    write_outcomes(given.outcomes, asyncio.run(send(found, target)))
    return 0


def judge(arguments: list[str]) -> int:
    """Prints the score of outcomes, of all and by tenant."""
    parser = argparse.ArgumentParser("benchmarks.fair score")
    parser.add_argument("directory", type=Path)
    parser.add_argument("outcomes", type=Path)
    parser.add_argument("--ttft-s", type=float, default=Limits().ttft_s)
    parser.add_argument("--tbt-s", type=float, default=Limits().tbt_s)
    parser.add_argument("--swapped-bytes", type=int, default=0, help="as the system's metrics count them")
    given = parser.parse_args(arguments)
    _, found = files.read(given.directory)
    outcomes, limits = files.rows(given.outcomes), Limits(ttft_s=given.ttft_s, tbt_s=given.tbt_s)
    pairs = list(zip(outcomes, (turn.input_length for turn in found.turns), strict=True))
    for name in ("", *sorted({outcome["tenant"] for outcome in outcomes})):
        chosen = [pair for pair in pairs if not name or pair[0]["tenant"] == name]
        swapped = 0 if name else given.swapped_bytes
        figures = score([outcome for outcome, _ in chosen], [tokens for _, tokens in chosen], limits, swapped)
        sys.stdout.write(json.dumps({"tenant": name or "all"} | dataclasses.asdict(figures)) + "\n")
    return 0


def bench(arguments: list[str]) -> int:
    """Measures the systems."""
    from benchmarks.fair import report  # with vLLM
    from benchmarks.fair.measure import CASES, SWITCHING, SYSTEMS, Run, measure, record
    from benchmarks.fair.measure import Plan as BenchPlan
    from benchmarks.result_files import write_result

    parser = option_parser("fair", __doc__)
    systems, names = (*SYSTEMS, *SWITCHING), [case.name for case in CASES]
    parser.add_argument("--systems", nargs="*", default=list(systems), choices=systems)
    parser.add_argument("--works", nargs="*", default=names, choices=names)
    parser.add_argument("--rounds", type=int, default=1, help="of all systems in turn; tables show medians")
    parser.add_argument(
        "--slower",
        type=float,
        default=1.0,
        metavar="TIMES",
        help="requests come so many times slower, for as many times as long: where a demo step takes TIMES "
        "times 2.6 ms, two places serve as large a share of the load",
    )
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    plan = BenchPlan(
        model=options.model.resolve(),
        systems=tuple(options.systems),
        cases=tuple(case.slowed(options.slower) for case in CASES if case.name in options.works),
        num_rounds=options.rounds,
    )
    if not has_model(plan.model, console):
        return 2
    runs: list[Run] = []

    def on_run(run: Run) -> None:
        runs.append(run)
        figures = (*report.row(run.system, run.everyone), *report.waits_row("urgent", run.urgent), f"{run.load:.1f}")
        console.print(" | ".join((run.work, *figures)), highlight=False)

    measure(plan, on_run)
    text = report.markdown(plan, runs, today())
    sys.stdout.write(text)
    tell_written(console, write_result(options.output, "fair", today(), record(plan, runs), text))
    return 0


COMMANDS = {"workload": workload, "play": play, "score": judge, "bench": bench}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
