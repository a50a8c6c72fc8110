"""What is read from vLLM's source equals what the imported vLLM has. An upgrade that moves a name fails here."""

import dataclasses
import subprocess
import sys
import typing
from typing import Any, Literal

import pytest

from pengserve.cluster import vllm_source

MEND = "mend cluster/vllm_source.py"


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("max_model_len", "lots", "a whole number is expected, got 'lots'"),
        ("max_model_len", -2, "at least -1 is expected, got -2"),
        ("max_num_seqs", 0, "at least 1 is expected, got 0"),
        ("gpu_memory_utilization", 1.5, "at most 1 is expected, got 1.5"),
        ("enforce_eager", "maybe", "true or false is expected, got 'maybe'"),
        ("limit_mm_per_prompt", [1], "keys with values is expected, got [1]"),
        ("max_model_len", 512, ""),
        ("max_model_len", "512", ""),  # vLLM reads it as a number
        ("max_model_len", None, ""),
        ("limit_mm_per_prompt", {"image": 2}, ""),
        ("compilation_config", {"mode": 3}, ""),  # more than plain data: left to vLLM
        ("no_such_argument", 1, ""),
    ],
)
def test_values_are_checked_as_the_source_declares_them(name, value, problem):
    assert vllm_source.argument_problem(name, value) == problem


def test_a_choice_is_told_with_all_that_can_be_chosen():
    problem = vllm_source.argument_problem("dtype", "flaot32")
    assert "float32" in problem and "bfloat16" in problem and "'flaot32'" in problem


def test_neither_vllm_nor_torch_is_imported():
    code = (
        "import sys\n"
        "from pengserve.cluster import vllm_source as s\n"
        "assert 'max_model_len' in s.argument_names() and 'hermes' in s.tool_parsers() and s.reasoning_parsers()\n"
        "assert s.argument_problem('max_model_len', 'lots')\n"
        "assert not {'vllm', 'torch', 'ray'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_what_cannot_be_read_is_not_checked(monkeypatch):
    def unreadable(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(vllm_source, "_module", unreadable)
    for cached in (vllm_source._argument_fields, vllm_source.engine_argument, vllm_source._parsers):
        cached.cache_clear()
    assert vllm_source.argument_names() is None
    assert vllm_source.argument_problem("max_model_len", "lots") == ""
    assert vllm_source.tool_parsers() is None and vllm_source.reasoning_parsers() is None


@pytest.fixture(autouse=True)
def nothing_kept():
    """What one test has read, or failed to read, is not another's."""
    yield
    for cached in (vllm_source._argument_fields, vllm_source.engine_argument, vllm_source._parsers):
        cached.cache_clear()


@pytest.mark.slow
def test_names_are_those_of_the_imported_class():
    from vllm.engine.arg_utils import AsyncEngineArgs

    names = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert vllm_source.argument_names() == names, f"vLLM declares its engine arguments differently: {MEND}"


@pytest.mark.slow
def test_types_are_those_of_the_imported_class():
    from vllm.engine import arg_utils

    hints = _hints(arg_utils)
    for name, hint in hints.items():
        ours = vllm_source.engine_argument(name).type
        assert ours is Any or _agree(_plain(ours), _plain(hint)), f"engine.{name} is {hint} in vLLM, not {ours}: {MEND}"
    read = [name for name in hints if vllm_source.engine_argument(name).type is not Any]
    assert len(read) > len(hints) * 0.8, f"of most engine arguments the type is not understood any more: {MEND}"


@pytest.mark.slow
def test_no_default_is_refused():
    from vllm.engine.arg_utils import AsyncEngineArgs

    for field in dataclasses.fields(AsyncEngineArgs):
        for default in (field.default, field.default_factory() if callable(field.default_factory) else None):
            if default is not dataclasses.MISSING:
                problem = vllm_source.argument_problem(field.name, default)
                assert not problem, f"engine.{field.name}: vLLM's own default is refused ({problem}): {MEND}"


@pytest.mark.slow
def test_bounds_are_those_that_the_imported_configurations_hold():
    from pydantic import TypeAdapter, ValidationError
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig

    for config, name in (
        (ModelConfig, "max_model_len"),
        (ModelConfig, "max_logprobs"),
        (SchedulerConfig, "max_num_seqs"),
        (SchedulerConfig, "max_num_batched_tokens"),
        (CacheConfig, "gpu_memory_utilization"),
        (CacheConfig, "block_size"),
    ):
        field = config.__pydantic_fields__[name]
        adapter = TypeAdapter(typing.Annotated[field.annotation, *field.metadata])
        bounds = vllm_source.engine_argument(name).bounds
        assert bounds, f"the bounds of engine.{name} are not found any more: {MEND}"
        for value in {value + step for value in bounds.values() for step in (-1, 0, 1)}:
            try:
                adapter.validate_python(value)
                is_accepted = True
            except ValidationError:
                is_accepted = False
            assert (vllm_source.argument_problem(name, value) == "") == is_accepted, f"engine.{name}={value}: {MEND}"


@pytest.mark.slow
def test_parsers_are_those_that_are_registered():
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert vllm_source.tool_parsers() == set(ToolParserManager.list_registered()), f"tool parsers moved: {MEND}"
    assert vllm_source.reasoning_parsers() == set(ReasoningParserManager.list_registered()), f"reasoning: {MEND}"


def _hints(module: Any) -> dict[str, Any]:
    from vllm.config.quantization import QuantizationConfigArgs

    names = vars(module) | {"QuantizationConfigArgs": QuantizationConfigArgs}
    return typing.get_type_hints(module.AsyncEngineArgs, globalns=names, include_extras=False)


def _agree(ours: Any, theirs: Any) -> bool:
    """Whether a type as it was read equals vLLM's, but for parts that were not understood."""
    if ours is Any or ours == theirs:
        return True
    if not isinstance(ours, tuple) or not isinstance(theirs, tuple) or len(ours) != len(theirs):
        return False
    if ours[0] == "union":
        return ours[0] == theirs[0] and all(any(_agree(one, other) for other in theirs[1]) for one in ours[1])
    return all(_agree(one, other) for one, other in zip(ours, theirs, strict=True))


def _plain(kind: Any) -> Any:
    """A type as nested tuples, so that `Optional[int]` equals `int | None`; unions have no order."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is None:
        return type(None) if kind is None else kind
    if origin is Literal:
        return ("literal", *parts)
    if origin is typing.Union or str(origin) == "<class 'types.UnionType'>":
        return ("union", frozenset(_plain(part) for part in parts))
    return (origin, *(_plain(part) for part in parts))
