"""`usage.pengserve` in answers: what was kept of the SLO of a request that has one."""

from collections.abc import Callable
from typing import Any

from pengserve.cluster.ingress.request.kept import current_kept
from pengserve.cluster.ingress.vllm_openai_seam import USAGE_MAKERS


def tell_what_was_kept() -> None:
    """Has vLLM's serving modules add it to each `usage` that they make once an answer is complete. Once a process."""
    for module, name in USAGE_MAKERS:
        kind = getattr(module, name)
        if isinstance(kind, type):
            setattr(module, name, _telling(kind))


def _telling(kind: type) -> Callable[..., Any]:
    def make(*args: Any, **fields: Any) -> Any:
        usage = kind(*args, **fields)
        kept = current_kept.get()
        if kept is not None and kept.is_over:
            usage.pengserve = kept.usage()  # its models accept further fields
        return usage

    return make
