"""What a person sees while a command waits."""

import io
import time

from rich.console import Console

from pengserve.cluster.cli.progress import Steps


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_each_phase_is_shown_with_its_time() -> None:
    clock, out = Clock(), io.StringIO()
    with Steps(Console(file=out, width=200), now=clock) as steps:
        steps.waiting("instance 0", "importing vLLM")
        clock.now_s = 8.0
        steps.waiting("instance 0", "loading the model")
        steps.waiting("instance 0", "loading the model")
        clock.now_s = 9.5
        steps.done("instance 0", "cpu")
        steps.done("instance 0", "cpu")
    assert out.getvalue().splitlines() == [
        "instance 0   importing vLLM",
        "instance 0   loading the model",
        "instance 0   cpu (importing vLLM 8.0 s, loading the model 1.5 s)",
    ]


def test_what_begins_anew_is_timed_anew() -> None:
    clock, out = Clock(), io.StringIO()
    with Steps(Console(file=out, width=200), now=clock) as steps:
        steps.waiting("ray", "starting")
        clock.now_s = 5.0
        steps.failed("ray", "trying again")
        steps.waiting("ray", "starting")
        clock.now_s = 7.0
        steps.done("ray", "there")
    assert out.getvalue().splitlines()[-1] == "ray          there (2.0 s)"


def test_a_log_never_stands_still() -> None:
    out = io.StringIO()
    with Steps(Console(file=out, width=200), quiet_s=0.05) as steps:
        steps.done("ray", "there")
        steps.waiting("ingress", "importing vLLM")
        deadline_s = time.monotonic() + 40
        while out.getvalue().count("still waiting for ingress (importing vLLM)") < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    assert "waiting for ray" not in out.getvalue()


def test_a_terminal_is_redrawn_with_running_times() -> None:
    clock, out = Clock(), io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    with Steps(console, now=clock) as steps:
        steps.waiting("ray", "starting")
        clock.now_s = 3.0
    assert "starting 3 s" in out.getvalue()
