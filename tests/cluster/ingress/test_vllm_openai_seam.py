"""One check per vLLM name that the ingress uses: an upgrade that moves one fails here, with a sentence."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import pengserve.cluster.ingress

pytestmark = pytest.mark.slow

SEAM = Path(next(iter(pengserve.cluster.ingress.__path__))) / "vllm_openai_seam.py"
IMPORTS = [
    (node.module or "", alias.name)
    for node in ast.walk(ast.parse(SEAM.read_text()))
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm")
    for alias in node.names
]


@pytest.mark.parametrize(("module", "name"), IMPORTS, ids=lambda value: value)
def test_vllm_still_has_the_name(module: str, name: str) -> None:
    found = hasattr(importlib.import_module(module), name)
    assert found, (
        f"vLLM no longer has {name} in {module}: find where it went and mend cluster/ingress/vllm_openai_seam.py"
    )


def test_members_are_where_they_were() -> None:
    from pengserve.cluster.ingress.vllm_openai_seam import ATTRIBUTES

    for kind, members in ATTRIBUTES.items():
        for member in members:
            assert hasattr(kind, member), f"vLLM's {kind.__name__} no longer has {member}, which the ingress calls"


def test_parameters_are_called_as_they_were() -> None:
    from pengserve.cluster.ingress.vllm_openai_seam import PARAMETERS

    for function, names in PARAMETERS.items():
        parameters = inspect.signature(function).parameters
        for name in names:
            assert name in parameters, f"vLLM's {function.__qualname__} no longer takes {name}"


def test_nothing_of_vllm_is_imported_past_the_table() -> None:
    for source in SEAM.parent.glob("*.py"):
        if source == SEAM:
            continue
        for node in ast.walk(ast.parse(source.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(m == "vllm" or m.startswith("vllm.") for m in modules), f"{source.name} passes the table by"


def test_every_abstract_method_of_the_engine_client_is_there() -> None:
    from pengserve.cluster.ingress.engine_client import ClusterEngineClient

    missing = ClusterEngineClient.__abstractmethods__
    assert not missing, f"vLLM's EngineClient asks for {', '.join(sorted(missing))} now"


def test_only_allow_listed_routes_are_served() -> None:
    from fastapi.routing import APIRoute

    from pengserve.cluster.ingress import vllm_openai_seam as seam
    from pengserve.cluster.ingress.openai_front import ROUTES

    routers = (
        seam.models_router,
        seam.chat_router,
        seam.completion_router,
        seam.responses_router,
        seam.tokenize_router,
    )
    offered = {(m, r.path) for router in routers for r in router.routes if isinstance(r, APIRoute) for m in r.methods}
    assert offered >= ROUTES, f"vLLM no longer offers {ROUTES - offered}"


def test_every_handler_of_a_post_is_wrapped_as_it_was() -> None:
    """`leaving.py` puts its own wrapper in the place of vLLM's, which it must find to do so."""
    from fastapi.routing import APIRoute

    from pengserve.cluster.ingress import vllm_openai_seam as seam
    from pengserve.cluster.ingress.leaving import is_wrapped_by_vllm
    from pengserve.cluster.ingress.openai_front import ROUTES

    routers = (seam.chat_router, seam.completion_router, seam.responses_router, seam.tokenize_router)
    handlers = [
        r for router in routers for r in router.routes if isinstance(r, APIRoute) and ("POST", r.path) in ROUTES
    ]
    assert len(handlers) == sum(method == "POST" for method, _ in ROUTES)
    for route in handlers:
        assert is_wrapped_by_vllm(route.endpoint), f"vLLM no longer wraps {route.path} in with_cancellation"
