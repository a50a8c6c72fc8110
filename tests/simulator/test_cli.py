"""Laws of `pengserve simulate`, `replay` and `compare`: what they write, and one sentence for a mistake."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from pengserve.planners.types.codec import to_data
from pengserve.planners.types.errors import ConfigError
from pengserve.planners.types.events import Event, EventKind
from pengserve.simulator import cli
from pengserve.simulator.reports.json_report import read_json

CONFIG = """\
cluster: {gpu: a800, model: qwen2.5-14b, instances: 2, max_stages: 2, kv_tokens: 20000}
scheduler: fast
trace: {generator: poisson, rate_per_s: 4, duration_s: 15, lengths: {prompt: [50, 500], output: [5, 40]}}
"""
Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in an empty folder with `c.yaml` and, for a mistake, raises what `main` would print."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG)
    app = typer.Typer()
    for command in (cli.simulate, cli.replay, cli.compare):
        app.command()(command)

    def call(*arguments: str) -> Result:
        found = CliRunner().invoke(app, arguments)
        if isinstance(found.exception, ConfigError):
            raise found.exception
        return found

    return call


def saved(folder: str = "simulations") -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def request_log(path: Path, count: int = 30) -> Path:
    rows: list[dict[str, Any]] = [
        {
            "at_s": 1_795_263_698.0 + number / 4, "prompt_tokens": 200, "output_tokens": 20, "priority": 0,
            "degree": None, "ttft_s": 0.5, "e2e_s": 2.0, "finish": "stop", "instance": f"{number % 2}.0",
        }
        for number in range(count)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_simulation_is_a_file_a_page_and_a_table(run: Run) -> None:
    found = run("simulate", "c.yaml")
    assert found.exit_code == 0, found.output
    assert saved() == ["c.html", "c.json"]
    assert "TTFT P99" in found.stdout and "simulations" not in found.stdout
    assert found.stderr.split() == ["simulations/c.json", "simulations/c.html"]
    result = read_json(Path("simulations/c.json"))
    assert result.outcomes and all(outcome.end_s is not None for outcome in result.outcomes)


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(run: Run) -> None:
    for folder, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        run("simulate", "c.yaml", "-o", folder, "--seed", seed)
    for name in ("c.json", "c.html"):
        texts = [Path(folder, name).read_bytes() for folder in ("a", "b", "c")]
        assert texts[0] == texts[1] != texts[2]


def test_several_policies_are_several_files_and_one_page(run: Run) -> None:
    found = run("simulate", "c.yaml", "-p", "vllm_dp", "-p", "vllm_pp:stages=2", "-o", "out")
    assert found.exit_code == 0, found.output
    assert saved("out") == ["c-vllm_dp.json", "c-vllm_pp-stages-2.json", "c.html"]
    assert "c-vllm_dp" in found.stdout and "c-vllm_pp:stages=2" in found.stdout


def test_runs_are_compared_with_the_first(run: Run) -> None:
    run("simulate", "c.yaml", "-p", "vllm_dp", "-p", "pengserve")
    found = run("compare", "simulations/c-pengserve.json", "simulations/c-vllm_dp.json", "--name", "both")
    assert found.exit_code == 0, found.output
    assert "both.html" in saved()
    assert found.stdout.splitlines()[0].split() == ["c-pengserve", "c-vllm_dp"]


def test_runs_of_one_name_are_told_apart_by_their_files(run: Run) -> None:
    for folder in ("a", "b"):
        run("simulate", "c.yaml", "-o", folder)
    found = run("compare", "a/c.json", "b/c.json")
    assert "a/c.json" in found.stdout and "b/c.json" in found.stdout


def test_a_trace_is_replayed_on_what_the_options_describe(run: Run) -> None:
    rows = "".join(f"{number / 2},100,10\n" for number in range(20))
    Path("t.csv").write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    options = ["--gpu", "a800", "--model", "qwen2.5-14b", "--instances", "2", "--scheduler", "fast", "-p", "vllm_dp"]
    found = run("replay", "t.csv", *options, "--window", "0:5", "--slo-ttft", "0.5")
    assert found.exit_code == 0, found.output
    assert saved() == ["t.html", "t.json"]
    result = read_json(Path("simulations/t.json"))
    assert len(result.outcomes) == 10 and result.policy == "vllm_dp" and result.num_instances == 2
    assert "Limits at scale 1: TTFT 0.500 s (the command line)" in Path("simulations/t.html").read_text()


def test_a_real_run_stands_before_the_policies_that_replay_it(run: Run, tmp_path: Path) -> None:
    request_log(tmp_path / "r.jsonl")
    events = [(1, -9.0, "dp@(0), dp@(1)"), (2, 3.0, "pp2@(0,1)"), (3, 5.0, "dp@(0), dp@(1)")]
    (tmp_path / "e.jsonl").write_text(
        "".join(
            json.dumps(to_data(Event(seq=seq, time_s=1_795_263_698.0 + at_s, kind=EventKind.LAYOUT_CHANGED,
                                     data={"groups": groups}))) + "\n"
            for seq, at_s, groups in events
        )
    )  # fmt: skip
    found = run("replay", "r.jsonl", "--events", "e.jsonl", "-c", "c.yaml", "-p", "vllm_dp", "-p", "pengserve")
    assert found.exit_code == 0, found.output
    assert found.stdout.splitlines()[0].split() == ["real", "r-vllm_dp", "r-pengserve"]
    assert saved() == ["r-pengserve.json", "r-vllm_dp.json", "r.html", "real.json"]
    real, other = read_json(Path("simulations/real.json")), read_json(Path("simulations/r-vllm_dp.json"))
    assert [o.arrived_s for o in real.outcomes] == [o.arrived_s for o in other.outcomes]
    (dropped,) = [line for line in found.stdout.splitlines() if line.startswith("time with parameters dropped")]
    assert dropped.split()[4:6] == ["2.00", "s"]


def test_a_real_run_is_left_out_where_its_traffic_is_changed(run: Run, tmp_path: Path) -> None:
    request_log(tmp_path / "r.jsonl")
    found = run("replay", "r.jsonl", "-c", "c.yaml", "--scale", "2")
    assert saved() == ["r.html", "r.json"]
    assert "The real run is left out" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["simulate", "nowhere.yaml"], r"nowhere\.yaml"),
        (["simulate", "c.yaml", "-p", "vllm"], "vllm"),
        (["simulate", "c.yaml", "-p", "vllm_tp:degree"], "NAME:option=value"),
        (["simulate", "c.yaml", "-o", "c.yaml/x"], "--output"),
        (["replay", "c.yaml", "-c", "c.yaml"], r"c\.yaml"),
        (["replay", "r.jsonl", "-c", "c.yaml", "--window", "9"], "START:STOP"),
        (["replay", "r.jsonl", "-c", "c.yaml", "--degrees", "two"], "--degrees two"),
        (["replay", "r.jsonl", "--gpu", "a801", "--model", "qwen2.5-14b"], "a801"),
        (["replay", "r.jsonl"], "gpu and model"),
        (["replay", "r.jsonl", "-c", "c.yaml", "--profile", "nope"], "nope"),
        (["replay", "r.jsonl", "-c", "c.yaml", "--events", "c.yaml"], "row 1"),
        (["replay", "plain.jsonl", "-c", "c.yaml", "--events", "e.jsonl"], "--events belongs to a request log"),
        (["compare", "c.yaml"], r"c\.yaml is not valid JSON"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_no_file(
    run: Run, tmp_path: Path, arguments: list[str], says: str
) -> None:
    request_log(tmp_path / "r.jsonl", 3)
    (tmp_path / "plain.jsonl").write_text('{"at_s": 0, "prompt_tokens": 5, "output_tokens": 5}\n')
    with pytest.raises(ConfigError, match=says) as caught:
        run(*arguments)
    assert "\n" not in str(caught.value)
    assert not Path("simulations").exists()


@pytest.mark.parametrize("command", ["simulate", "replay", "compare"])
def test_help_teaches_by_example(run: Run, command: str) -> None:
    found = run(command, "--help")
    assert found.exit_code == 0 and f"pengserve {command} " in found.stdout
