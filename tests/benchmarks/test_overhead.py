"""Laws of the overhead benchmark's own parts: the stream reader, the load, the figures, the report."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.overhead import report
from benchmarks.overhead.__main__ import all_up
from benchmarks.overhead.load import Figures, run_level
from benchmarks.overhead.paired import STEPS, Ratio
from benchmarks.overhead.plan import KV_BYTES, Level, Plan
from benchmarks.overhead.report import Sample
from benchmarks.overhead.systems.base import ServerProcess, StartError, free_port
from benchmarks.overhead.systems.vllm_server import command_flag
from benchmarks.result_files import read_result
from benchmarks.sse import Answer, Connection, _Stream

PLAN = Plan(model=Path("model"), level_timeout_s=5.0)


def event(**choice: object) -> bytes:
    """One SSE event with this choice."""
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def usage(prompt: int, output: int) -> bytes:
    """The event with the token counts."""
    counts = {"prompt_tokens": prompt, "completion_tokens": output}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    """`data` as one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


ROLE = event(delta={"role": "assistant", "content": ""})
TEXTS = [event(delta={"content": f"word{i}"}) for i in range(4)]
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = ROLE + b"".join(TEXTS) + usage(11, 4) + b"data: [DONE]\n\n"


def read(pieces: list[bytes]) -> Answer:
    """What the reader makes of bytes that arrive in these pieces."""

    async def run() -> Answer:
        stream = _Stream()
        answer = Answer(sent_s=0.0)
        done = stream.expect(answer)
        for piece in pieces:
            stream.data_received(piece)
        assert done.done()
        return answer

    return asyncio.run(run())


@given(chunk_sizes=st.lists(st.integers(1, 90), min_size=1), piece_sizes=st.lists(st.integers(1, 120), min_size=1))
def test_an_answer_reads_the_same_however_it_is_cut(chunk_sizes: list[int], piece_sizes: list[int]) -> None:
    wire = HEAD + b"".join(chunk(part) for part in cut(BODY, chunk_sizes)) + b"0\r\n\r\n"
    answer = read(cut(wire, piece_sizes))
    assert answer.error == ""
    assert (answer.prompt_tokens, answer.output_tokens) == (11, 4)
    assert len(answer.event_times_s) == len(TEXTS)
    assert 0 < answer.first_text_s == answer.event_times_s[0]


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """`data` in pieces of these sizes, over and over."""
    parts, at, index = [], 0, 0
    while at < len(data):
        size = sizes[index % len(sizes)]
        parts.append(data[at : at + size])
        at, index = at + size, index + 1
    return parts


@pytest.mark.parametrize(
    "wire",
    [
        b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n",
        HEAD + chunk(TEXTS[0]) + b"0\r\n\r\n",
        HEAD + b"0\r\n\r\n",
    ],
    ids=["refused", "cut short", "empty"],
)
def test_an_incomplete_answer_is_an_error(wire: bytes) -> None:
    assert read([wire]).error


@asynccontextmanager
async def server(num_answers: int | None = None, *, last_words: bytes = b"") -> AsyncIterator[str]:
    """An HTTP server that streams BODY; each connection takes one request more than `num_answers`, and breaks."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = num_answers
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                assert json.loads(await reader.readexactly(length))["stream"]
                if left == 0:
                    writer.write(last_words)
                    break
                writer.write(HEAD + chunk(BODY) + b"0\r\n\r\n")
                await writer.drain()
                left = None if left is None else left - 1
        except asyncio.IncompleteReadError:
            pass  # the client went away
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"


async def test_every_prompt_is_sent_once_and_counted() -> None:
    async with server() as one, server() as two:
        figures = await run_level(PLAN, [one, two], ["hello"] * 25, num_clients=4)
    assert (figures.completed, figures.failed) == (25, 0)
    assert figures.tokens_per_s == pytest.approx(25 * 4 / figures.wall_s)
    assert figures.prompt_tokens_mean == 11


async def test_a_connection_that_the_server_closes_as_a_request_comes_is_opened_again() -> None:
    async with server(num_answers=2) as url:
        connection = Connection(url)
        answers = [await connection.chat({"stream": True}, 5.0) for _ in range(6)]
        connection.close()
    assert [answer.error for answer in answers] == 6 * [""]
    assert all(len(answer.event_times_s) == len(TEXTS) for answer in answers)


@pytest.mark.parametrize(("num_answers", "last_words"), [(2, HEAD), (0, b"")], ids=["in mid-answer", "a new one"])
async def test_any_other_broken_connection_is_a_failure(num_answers: int, last_words: bytes) -> None:
    async with server(num_answers, last_words=last_words) as url:
        connection = Connection(url)
        answers = [await connection.chat({"stream": True}, 5.0) for _ in range(6)]
        connection.close()
    assert [bool(answer.error) for answer in answers] == (6 * [True] if not num_answers else 2 * [False, False, True])


async def test_an_unreachable_server_fails_every_request() -> None:
    figures = await run_level(PLAN, ["http://127.0.0.1:1"], ["hello"] * 3, num_clients=2)
    assert (figures.completed, figures.failed) == (0, 3)
    assert figures.first_error


def test_prompts_are_the_same_for_all_systems_and_never_repeat() -> None:
    level = Level(num_clients=8, num_requests=50)
    assert PLAN.prompts(0, level) == PLAN.prompts(0, level)
    everything = [
        prompt for round_index in range(3) for one in PLAN.levels for prompt in PLAN.prompts(round_index, one)
    ]
    assert len(set(everything)) == len(everything)


def figures(clients: int, tokens_per_s: float, failed: int = 0) -> Figures:
    """Figures with this throughput, everything else 1."""
    return Figures(
        num_clients=clients, completed=1, failed=failed, wall_s=1, tokens_per_s=tokens_per_s, ttft_p50_s=1,
        ttft_p99_s=1, itl_p50_s=0, itl_p99_s=1, tpot_p50_s=1, prompt_tokens_mean=1, machine_cpu_s=1, client_cpu_s=1,
    )  # fmt: skip


def sample(system: str, round_index: int, one: Figures) -> Sample:
    """One measurement."""
    return Sample(system=system, round_index=round_index, start_s=1.0, figures=one)


def test_ratios_are_of_medians_over_rounds(tmp_path: Path) -> None:
    samples = [sample("vllm", i, figures(8, value)) for i, value in enumerate((100, 1, 200))]
    samples += [sample("pengserve", i, figures(8, value)) for i, value in enumerate((95, 500, 50))]
    rows = report.table_rows(samples)
    assert [row[:3] for row in rows] == [["8", "vllm", "100 (x0.95)"], ["8", "pengserve", "95"]]
    json_path, text_path = report.write(tmp_path, PLAN, {"vllm": "its note"}, samples, "2026-01-01")
    record = read_result(json_path)
    assert len(record["samples"]) == 6
    assert "100 (x0.95)" in text_path.read_text()
    assert "its note" in text_path.read_text()


def test_failures_are_named() -> None:
    assert report.failures([sample("vllm", 0, figures(8, 1))]) == []
    assert "3 requests failed" in report.failures([sample("vllm", 0, figures(8, 1, failed=3))])[0]


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("enforce_eager", True, ["--enforce-eager"]),
        ("async_scheduling", False, ["--no-async-scheduling"]),
        ("block_size", 32, ["--block-size", "32"]),
        ("compilation_config", {"level": 0}, ["--compilation-config", '{"level": 0}']),
    ],
)
def test_engine_arguments_become_flags(name: str, value: object, flag: list[str]) -> None:
    assert command_flag(name, value) == flag


def test_a_server_is_a_process_group_of_its_own_in_the_session_of_the_benchmark(tmp_path: Path) -> None:
    server = ServerProcess([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    try:
        assert os.getpgid(server.pid) == server.pid, "stopping it must end all that it started"
        assert os.getsid(server.pid) == os.getsid(0), "schedulers share cores out among sessions first"
    finally:
        server.stop(timeout_s=4.0)


def test_a_paired_ratio_is_the_mean_of_the_starts_and_says_how_sure_it_is() -> None:
    bursts = [(0, 100.0, 110.0), (0, 100.0, 130.0), (1, 200.0, 180.0), (1, 200.0, 140.0)]
    ratio = Ratio.of(bursts)
    assert ratio.mean == pytest.approx(1.0) and ratio.error == pytest.approx(0.2)
    of_one_start = Ratio.of(bursts[:2])
    assert of_one_start.mean == pytest.approx(1.2) and of_one_start.error == pytest.approx(0.1)
    assert str(Ratio.of([(0, 2.0, 4.0), (1, 1.0, 2.0)])) == "2.000 ± 0.000"
    assert str(Ratio.of([(0, 0.0, 4.0), (1, 1.0, 2.0), (2, 1.0, 2.0)])) == "2.000 ± 0.000"
    assert str(Ratio.of([(0, 0.0, 4.0)])) == "nan ± nan"


def test_steps_are_counted_over_all_instances() -> None:
    name = "vllm:iteration_tokens_total_count"
    text = f'# HELP {name} x\n{name}{{engine="0",model_name="m"}} 12.0\n{name}{{engine="1",model_name="m"}} 3.0\n'
    assert [float(count) for count in STEPS.findall(text)] == [12.0, 3.0]


class Named:
    """A system that notes what is done to it."""

    notes = ""

    def __init__(self, name: str, log: list[str], is_broken: bool = False) -> None:
        self.name, self._log, self._is_broken = name, log, is_broken

    def start(self, plan: Plan) -> list[str]:
        self._log.append(f"{self.name} starts")
        if self._is_broken:
            raise StartError("no device")
        return [f"http://{self.name}"]

    def stop(self) -> None:
        self._log.append(f"{self.name} stops")


def test_systems_that_are_up_together_all_stop_in_the_end() -> None:
    log: list[str] = []
    with all_up([Named("a", log), Named("b", log)], PLAN) as up:
        assert {name: found.urls for name, found in up.items()} == {"a": ["http://a"], "b": ["http://b"]}
    assert sorted(log[:2]) == ["a starts", "b starts"] and log[2:] == ["a stops", "b stops"]
    with pytest.raises(StartError), all_up([Named("a", log), Named("c", log, is_broken=True)], PLAN):
        pytest.fail("one of them did not start")
    assert log[-2:] == ["a stops", "c stops"]


def test_systems_on_one_gpu_share_its_memory() -> None:
    alone, shared = (Plan.on_gpus(Path("m"), 3, 1, num_sharing).engine for num_sharing in (1, 3))
    assert "kv_cache_memory_bytes" not in alone
    assert shared["kv_cache_memory_bytes"] == KV_BYTES and shared["gpu_memory_utilization"] < 1 / 3
    assert len({free_port() for _ in range(20)}) == 20
