"""The public workload: the same plan makes the same files, which other tools read; scores are what they say."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fair import files
from benchmarks.fair.hosts import times
from benchmarks.fair.scoring import Limits, covered_s, jain, percentile, satisfaction, score
from benchmarks.fair.urgency import waits
from benchmarks.fair.workload import Plan, Turn, Update, Workload, make

PLAN = Plan(duration_s=120.0, pattern="markov")


def test_the_same_plan_makes_the_same_workload() -> None:
    assert make(PLAN) == make(PLAN)
    assert make(PLAN) != make(Plan(duration_s=120.0, pattern="markov", seed=2))


def test_files_hold_all_of_it_and_have_mooncakes_fields(tmp_path: Path) -> None:
    written = files.write(tmp_path, PLAN)
    plan, found = files.read(tmp_path)
    assert plan == PLAN and [turn.session for turn in found.turns] == [turn.session for turn in written.turns]
    rows = [json.loads(line) for line in (tmp_path / files.TRACE).read_text().splitlines()]
    assert all(set(row) == {"timestamp", "input_length", "output_length", "hash_ids"} for row in rows)
    assert [row["timestamp"] for row in rows] == sorted(row["timestamp"] for row in rows)
    assert all(len(row["hash_ids"]) == -(-row["input_length"] // PLAN.block_tokens) for row in rows)


def test_vllms_own_benchmark_reads_the_trace(tmp_path: Path) -> None:
    datasets = pytest.importorskip("vllm.benchmarks.datasets.datasets")
    files.write(tmp_path, Plan(duration_s=20.0))

    class Tokenizer:
        all_special_ids = (0,)

        def get_vocab(self) -> dict[str, int]:
            return {str(index): index for index in range(50)}

        def decode(self, ids: list[int], **_: object) -> str:
            return " ".join(map(str, ids))

    labels = {f"timed_trace_label_{name}": name for name in ("input_length", "output_length", "hash_ids")}
    trace = datasets.TimedTrace(
        dataset_path=str(tmp_path / files.TRACE),
        timed_trace_chunk_hash_size=16,
        timed_trace_sec_multiplier=0.001,
        timed_trace_label_timestamp="timestamp",
        **labels,
    )
    found = trace.sample(Tokenizer(), 5, no_oversample=True)
    expected = [json.loads(line) for line in (tmp_path / files.TRACE).read_text().splitlines()[:5]]
    assert [request.prompt_len for request in found] == [row["input_length"] for row in expected]
    assert [request.expected_output_len for request in found] == [row["output_length"] for row in expected]


def test_turns_of_a_session_begin_with_what_was_said_before() -> None:
    by_session: dict[str, list[tuple[int, ...]]] = {}
    for turn in make(PLAN).turns:
        by_session.setdefault(turn.session, []).append(turn.hash_ids)
    assert any(len(turns) > 2 for turns in by_session.values())
    for turns in by_session.values():
        for earlier, later in itertools.pairwise(turns):
            assert later[: len(earlier)] == earlier


def test_one_tenant_floods_for_a_while() -> None:
    turns = make(Plan(duration_s=300.0, flood=10.0)).turns
    flood = [turn.at_s for turn in turns if turn.tenant == "flood" and turn.turn == 0]
    inside = sum(100 <= at_s < 200 for at_s in flood)
    assert inside > 3 * (len(flood) - inside)
    assert len({turn.tenant for turn in turns}) == 4


def test_a_slower_machine_gets_the_same_requests_later() -> None:
    measure = pytest.importorskip("benchmarks.fair.measure", reason="vLLM is not installed")
    churn = next(case for case in measure.CASES if case.name == "churn")
    usual, slowed = make(churn.work), make(churn.slowed(2.0).work)
    assert [turn.input_length for turn in slowed.turns] == [turn.input_length for turn in usual.turns]
    assert [turn.at_s for turn in slowed.turns] == pytest.approx([2.0 * turn.at_s for turn in usual.turns], abs=1e-2)
    assert len(slowed.updates) == len(usual.updates)


@pytest.mark.parametrize("pattern", ["random", "markov"])
def test_priorities_change_and_turns_have_the_newest(pattern: str) -> None:
    found = make(Plan(duration_s=120.0, pattern=pattern))  # type: ignore[arg-type]
    assert found.updates and {update.priority for update in found.updates} == {0, 1, 2, 3}
    for turn in found.turns[:50]:
        before = [u for u in found.updates if u.session == turn.session and u.at_s <= turn.at_s]
        assert turn.priority == (before[-1].priority if before else 2)


def test_markov_changes_less_often_than_random() -> None:
    random, markov = (make(Plan(duration_s=120.0, pattern=p)) for p in ("random", "markov"))  # type: ignore[arg-type]
    assert len(markov.updates) < 0.5 * len(random.updates)


def test_fixed_priorities_are_of_sessions_and_never_change() -> None:
    found = make(Plan(duration_s=120.0, pattern="fixed"))
    by_session = {turn.session: turn.priority for turn in found.turns}
    assert not found.updates and set(by_session.values()) == {0, 1, 2, 3}
    assert all(turn.priority == by_session[turn.session] for turn in found.turns)


def test_only_the_time_in_which_a_request_was_urgent_counts() -> None:
    turn = Turn(at_s=1.0, tenant="a", session="s", turn=0, input_length=16, output_length=2, hash_ids=(1,), priority=0)
    updates = [Update(at_s=at_s, session="s", priority=priority) for at_s, priority in ((0.5, 3), (2.0, 3), (5.0, 1))]
    work = Workload(turns=(turn, turn), updates=tuple(updates))
    late, soon = {"token_s": [5.5, 6.0]}, {"token_s": [1.25, 2.0]}
    found = waits(work, [late, soon], 2)
    assert (found.requests, found.longest_s, found.total_s) == (2, 1.5, 1.75)
    assert waits(work, [late, {"token_s": []}], 2).longest_s == pytest.approx(2.0), "it waits to the end"
    assert waits(work, [late, soon], 1).total_s == pytest.approx(1.25)


@pytest.mark.parametrize(("name", "value"), [("duration_s", 0.0), ("pattern", "odd"), ("flood_from", 0.9)])
def test_a_plan_that_cannot_be_says_which_field(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        Plan(**{name: value})  # type: ignore[arg-type]


def test_what_an_instance_has_counted_is_read_while_it_counts(tmp_path: Path) -> None:
    times.make(tmp_path / "times")
    totals = np.memmap(tmp_path / "times", dtype=np.float64, mode="r+")
    before = times.read(tmp_path / "times")
    totals[:] = (4.0, 1.0, 0.5, 7.0)
    expected = times.Times(steps_s=4.0, manager_s=1.0, waits_s=0.5, copies=7.0)
    assert times.read(tmp_path / "times").since(before) == expected


@pytest.mark.parametrize("to_host", [True, False])
def test_block_by_block_the_same_is_copied(to_host: bool) -> None:
    parts = pytest.importorskip("benchmarks.fair.hosts.parts", reason="vLLM is not installed")
    cells, rows = np.array([3, 4, 5, 1]), np.array([2, 3, 6, 0])
    copied = []
    for move in (parts.move_by_blocks, parts.copies._move_by_runs):
        device, host = torch.arange(32).reshape(8, 4), -torch.arange(32).reshape(8, 4)
        before = device.tolist(), host.tolist()
        num_copies = move(device, host, cells, rows, to_host=to_host)
        copied.append((device.tolist(), host.tolist()))
        assert 0 < num_copies <= len(cells)
    assert copied[0] == copied[1] != before


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=9))
def test_jains_index_is_one_for_equals_and_less_otherwise(values: list[float]) -> None:
    assert 1 / len(values) - 1e-9 <= jain(values) <= 1 + 1e-9
    assert jain([values[0]] * len(values)) == pytest.approx(1.0)


def test_a_score_is_what_it_says() -> None:
    good = {"tenant": "a", "sent_s": 0.0, "token_s": [0.5, 0.6, 0.7], "error": ""}
    late = {"tenant": "b", "sent_s": 0.0, "token_s": [3.0, 3.1, 4.0], "error": ""}
    lost = {"tenant": "b", "sent_s": 1.0, "token_s": [], "error": "500"}
    found = score([good, late, lost], [10, 10, 10], Limits(ttft_s=1.0, tbt_s=0.2))
    assert (found.requests, found.failed, found.attainment) == (3, 1, pytest.approx(1 / 3))
    assert found.tokens_per_s == pytest.approx(6 / 4) and found.effective_tokens_per_s == pytest.approx(3 / 4)
    assert found.paused_s == pytest.approx(0.7) and found.ttft_p99_s == 3.0
    assert found.jain < 0.7 and percentile([], 0.5) == 0.0


def test_a_tenant_that_waits_behind_itself_is_as_satisfied_as_one_that_does_not_wait() -> None:
    one_by_one = [{"tenant": "a", "sent_s": float(i), "token_s": [i + 0.5, i + 1.0]} for i in range(4)]
    at_once = [{"tenant": "b", "sent_s": 0.0, "token_s": [i + 0.5, i + 1.0]} for i in range(4)]
    found = satisfaction(one_by_one + at_once, [10] * 8)
    assert found["a"] == pytest.approx(found["b"])
    assert covered_s([(0, 2), (5, 6), (1, 3), (1, 2)]) == 4 and covered_s([]) == 0
