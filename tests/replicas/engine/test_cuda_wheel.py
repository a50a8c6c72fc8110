"""The parser that compares two builds of vLLM finds what is missing or has other parameters."""

import pytest

from tests.support.cuda_wheel import Sources, used_members, used_names

FILES = {
    "vllm/__init__.py": "from .one import f, Base\nVERSION = '1'\n",
    "vllm/one.py": "class Base:\n    def go(self, a, b=1): ...\nclass Child(Base): ...\ndef f(x, *, y): ...\n",
}


def sources(**changes: str) -> Sources:
    files = FILES | {f"vllm/{name}.py": text for name, text in changes.items()}
    return Sources(files.get)


def test_names_are_found_through_imports() -> None:
    build = sources()
    assert build.parameters("vllm", "f") == "x, *, y"
    assert build.parameters("vllm", "VERSION") == ""
    assert build.parameters("vllm", "one") == ""
    assert build.parameters("vllm", "gone") is None


def test_members_are_found_in_bases() -> None:
    assert sources().member("vllm.one", "Child", "go") is not None
    assert sources().member("vllm.one", "Child", "stay") is None


@pytest.mark.parametrize("text", ["def f(x, y): ...", "def g(x, *, y): ..."])
def test_a_build_with_another_f_is_told_apart(text: str) -> None:
    assert sources(one=text).parameters("vllm", "f") != sources().parameters("vllm", "f")


def test_the_names_in_use_are_found() -> None:
    names, members = used_names(), set(used_members())
    assert names["Scheduler"] == "vllm.v1.core.sched.scheduler" and len(names) > 100
    assert ("Scheduler", "schedule") in members and len(members) > 50
