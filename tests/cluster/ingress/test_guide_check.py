"""The process that compiles guides: what it lets pass, what it refuses, and that a costly guide ends its fork alone."""

import asyncio
import json
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from pengserve.cluster.ingress.errors import OverloadedError
from pengserve.cluster.ingress.guides.guide_check import MAX_WAITING, GuideChecker
from pengserve.cluster.ingress.vllm_openai_seam import VLLMClientError
from tests.support.speed import slowness

LAG_S = 0.1
CPU_S = 0.25
# xgrammar 0.2.8 compiles this only without its cache, and vLLM's engine has one.
REFUSED_WITH_A_CACHE = json.dumps(
    {
        "triggers": ["<"],
        "structures": [
            {
                "begin": "<",
                "end": ">",
                "schema": {
                    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "string", "pattern": r"(\w+\s?){0,500}"}},
                    "$ref": "#/$defs/a",
                },
            }
        ],
    }
)


class Params:
    """Sampling parameters as far as they are looked at."""

    def __init__(self, **guide: Any) -> None:
        from vllm.sampling_params import StructuredOutputsParams

        self.structured_outputs = StructuredOutputsParams(**guide)


def alphabet() -> dict[str, Any]:
    """A tokenizer of single characters."""
    import xgrammar

    vocabulary = [chr(code) for code in range(32, 127)] + ["</s>"]
    info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[len(vocabulary) - 1])
    return {"tokenizer": info.serialize_json(), "any_whitespace": True}


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with asyncio.Runner() as runner:
        yield runner.get_loop()


@pytest.fixture(scope="module")
def checker(loop: asyncio.AbstractEventLoop) -> Iterator[GuideChecker]:
    """One checker, so that its process imports xgrammar once."""
    checker = GuideChecker(alphabet, CPU_S)
    yield checker
    checker.close()


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process(os.getpid()).children() if "guide_process" in " ".join(p.cmdline())]


async def longest_silence(work: Any) -> float:
    """The most processor time that the event loop spent between two of its turns while `work` ran, in seconds."""
    worst_s, task = 0.0, asyncio.ensure_future(work)
    while not task.done():
        start_s = time.thread_time()
        await asyncio.sleep(0.001)
        worst_s = max(worst_s, time.thread_time() - start_s)
    await task
    return worst_s


def test_what_needs_no_compiling_starts_no_process(loop: asyncio.AbstractEventLoop) -> None:
    idle = GuideChecker(alphabet, CPU_S)
    loop.run_until_complete(idle.check(Params(json_object=True)))
    assert not children()
    idle.close()


def test_what_compiles_passes(loop: asyncio.AbstractEventLoop, checker: GuideChecker) -> None:
    async def run() -> None:
        await checker.check(Params(json={"type": "object", "properties": {"a": {"enum": ["x", "y"]}}}))
        await checker.check(Params(json='{"type": "string", "pattern": "^[a-z]{4,9}$"}'))
        await checker.check(Params(regex="[0-9]{50}"))
        await checker.check(Params(grammar='root ::= "a" | "b" root'))
        await checker.check(Params(grammar='start: "a"'))
        await checker.check(Params(json_object=True))
        tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"type": "string"}}}
        await checker.check(Params(structural_tag=json.dumps(tag)))
        old = {"structures": [{"begin": "<f>", "schema": {"type": "string"}, "end": "</f>"}], "triggers": ["<f"]}
        await checker.check(Params(structural_tag=json.dumps(old)))

    loop.run_until_complete(run())
    assert len(children()) == 1


@pytest.mark.parametrize(
    "guide",
    [
        {"regex": "a**"},
        {"json": {"$ref": "#/$defs/missing"}},
        {"grammar": "root ::= "},
        {"structural_tag": '{"type": "structural_tag", "format": {"type": "strange"}}'},
        {"structural_tag": "[]"},
        {"grammar": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000},
        {"structural_tag": REFUSED_WITH_A_CACHE},
    ],
    ids=lambda guide: str(guide)[:40],
)
def test_what_does_not_compile_is_refused(
    loop: asyncio.AbstractEventLoop, checker: GuideChecker, guide: dict[str, Any]
) -> None:
    for _ in range(2):  # the second time from memory
        with pytest.raises(VLLMClientError, match="cannot be compiled") as refused:
            loop.run_until_complete(checker.check(Params(**guide)))
        assert not re.search(r"/project/|\.cc:|Check failed|\d\d:\d\d:\d\d", str(refused.value.args[0]))


def test_a_costly_guide_ends_its_fork_and_holds_no_stream_up(
    loop: asyncio.AbstractEventLoop, checker: GuideChecker
) -> None:
    patterns = {f"p{i}": {"type": "string", "pattern": f"^(abcdefg{i}){{2000}}$"} for i in range(9)}
    costly = Params(json={"type": "object", "properties": patterns})  # 9 s on a fast machine

    async def refuse() -> None:
        with pytest.raises(VLLMClientError, match=r"more than 0\.25 s of processor time"):
            await checker.check(costly)

    assert loop.run_until_complete(longest_silence(refuse())) < LAG_S * slowness()
    start_s = time.thread_time()
    loop.run_until_complete(refuse())
    assert time.thread_time() - start_s < 0.05 * slowness(), "the refusal is remembered"
    (process,) = children()
    assert not process.children(), "the fork is gone"
    loop.run_until_complete(checker.check(Params(regex="after the costly one")))


def test_those_that_ask_the_same_share_one_compilation_and_others_are_bounded(
    loop: asyncio.AbstractEventLoop, checker: GuideChecker
) -> None:
    async def run() -> list[Any]:
        same = [checker.check(Params(regex="the same")) for _ in range(MAX_WAITING * 2)]
        different = [checker.check(Params(regex=f"different {i}")) for i in range(MAX_WAITING)]
        return await asyncio.gather(*same, *different, return_exceptions=True)

    answers = loop.run_until_complete(run())
    refused = [answer for answer in answers if answer is not None]
    assert answers[: MAX_WAITING * 2] == [None] * MAX_WAITING * 2
    assert len(refused) == 1, "one guide and as many as may wait beside it"
    assert isinstance(refused[0], OverloadedError) and int(refused[0].http_status) == 429


def test_a_client_that_leaves_does_not_spoil_the_answer_of_the_next(
    loop: asyncio.AbstractEventLoop, checker: GuideChecker
) -> None:
    async def run() -> None:
        leaving = asyncio.create_task(checker.check(Params(regex="left alone")))
        await asyncio.sleep(0.001)
        leaving.cancel()
        with pytest.raises(VLLMClientError, match="cannot be compiled"):
            await checker.check(Params(regex="b**"))
        await checker.check(Params(regex="left alone"))

    loop.run_until_complete(run())


def test_a_process_that_was_killed_is_replaced(loop: asyncio.AbstractEventLoop, checker: GuideChecker) -> None:
    children()[0].kill()

    async def run() -> None:
        with pytest.raises(OverloadedError) as error:
            await checker.check(Params(regex="while it is dead"))
        assert int(error.value.http_status) == 503
        await checker.check(Params(regex="while it is dead"))

    loop.run_until_complete(run())
    (process,) = children()
    checker.close()
    assert not process.is_running()


@pytest.mark.slow
def test_no_fork_outlives_its_process(loop: asyncio.AbstractEventLoop) -> None:
    checker = GuideChecker(alphabet, cpu_s=60.0)
    patterns = {f"p{i}": {"type": "string", "pattern": f"^(abcdefg{i}){{4000}}$"} for i in range(9)}

    async def run() -> psutil.Process:
        checking = asyncio.create_task(checker.check(Params(json={"type": "object", "properties": patterns})))
        while not (forks := [fork for process in children() for fork in process.children()]):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        checker.close()
        with pytest.raises(asyncio.CancelledError):
            await checking
        return forks[0]

    fork = loop.run_until_complete(run())
    psutil.wait_procs([fork], timeout=30)
    assert not fork.is_running() or fork.status() == psutil.STATUS_ZOMBIE
