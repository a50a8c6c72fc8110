"""Every question to Ray or Serve has an end: an answer that never comes must not hold a process for ever."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("planners", "replicas", "controller", "cluster", "simulator")

# Files that may call Serve or look actors up, and how each of them bounds that.
SEAMS = {
    "cluster/app.py",  # names and contexts of its own process; `RayRoutingSource` bounds the look-up of the controller
    "cluster/controller_actor.py",  # the context of its own process
    "cluster/cli/ray_local.py",  # `run_with_timeout`; `up` watches over the start
    "controller/ray_shell.py",  # in threads; the control loop bounds each call
    "replicas/actor.py",  # `answer_within`
    "cluster/ray_safety.py",  # a look-up at the start of a replica, which Serve bounds
    "cluster/serve_seam.py",
}
CALLS_OF_SERVE = {
    "delete", "get_app_handle", "get_deployment_actor", "get_deployment_handle", "run", "shutdown", "start", "status",
}  # fmt: skip


def sources() -> list[Path]:
    return [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Calls as "module.function", where both are plain names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if isinstance(node.func.value, ast.Name):
            yield f"{node.func.value.id}.{node.func.attr}", node


def unbounded(path: Path) -> list[str]:
    """What a file asks of Ray or Serve without an end, with its line."""
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    found = []
    for called, node in calls(path):
        has_timeout = any(keyword.arg in ("timeout", "timeout_s") for keyword in node.keywords)
        is_serve = called.startswith("serve.") and called.removeprefix("serve.") in CALLS_OF_SERVE
        if (called in ("ray.get", "ray.wait") and not has_timeout) or (
            (is_serve or called == "ray.get_actor") and name not in SEAMS
        ):
            found.append(f"{name}:{node.lineno}: {called}")
    return found


@pytest.mark.parametrize("floor", FLOORS)
def test_every_question_to_ray_and_serve_has_an_end(floor: str) -> None:
    found = [line for path in sources() if path.is_relative_to(ROOT / floor) for line in unbounded(path)]
    assert found == [], "give it a timeout, or ask through a seam that has one"


def test_status_of_serve_is_asked_in_one_place_and_bounded() -> None:
    askers = {
        (str(path.relative_to(ROOT)), function.name)
        for path in sources()
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "serve.status"
    }
    assert askers == {("cluster/cli/ray_local.py", "serve_status")}


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("ray.get(x)", True),
        ("ray.wait([x], num_returns=1)", True),
        ("ray.get(x, timeout=3)", False),
        ("serve.status()", True),
        ("ray.get_actor('a')", True),
        ("ray.put(x)", False),
    ],
)
def test_the_search_finds_what_it_should(line: str, is_found: bool, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(line)
    assert bool(unbounded(tmp_path / "module.py")) is is_found
