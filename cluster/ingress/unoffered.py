"""What vLLM's `EngineClient` asks of an engine and a cluster has not, or answers always alike."""

from collections.abc import AsyncGenerator
from typing import Any, NoReturn

from pengserve.cluster.ingress.vllm_openai_seam import EngineClient


class UnofferedCalls(EngineClient):
    """No route leads to what raises NotImplementedError here."""

    async def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Pooling models are not served."""
        _unsupported("encode")
        yield

    async def notify_kv_transfer_request_rejected(self, *args: Any, **kwargs: Any) -> None:
        """No request carries KV transfer parameters."""

    async def start_profile(self, *args: Any, **kwargs: Any) -> None:
        """Not offered."""
        _unsupported("start_profile")

    async def stop_profile(self) -> None:
        """Not offered."""
        _unsupported("stop_profile")

    async def reset_mm_cache(self) -> None:
        """Not offered."""
        _unsupported("reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        """Not offered."""
        _unsupported("reset_encoder_cache")

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Not offered."""
        _unsupported("reset_prefix_cache")

    async def sleep(self, level: int = 1, mode: Any = "abort") -> None:
        """Not offered."""
        _unsupported("sleep")

    async def release_kv_cache_memory(self) -> None:
        """Not offered."""
        _unsupported("release_kv_cache_memory")

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """Not offered."""
        _unsupported("wake_up")

    async def is_sleeping(self) -> bool:
        """Never."""
        return False

    async def add_lora(self, lora_request: Any) -> bool:
        """Not offered."""
        _unsupported("add_lora")

    async def pause_generation(self, *, mode: Any = "abort", clear_cache: bool = True) -> None:
        """Not offered."""
        _unsupported("pause_generation")

    async def resume_generation(self) -> None:
        """Not offered."""
        _unsupported("resume_generation")

    async def is_paused(self) -> bool:
        """Never."""
        return False

    async def is_tracing_enabled(self) -> bool:
        """No traces are exported."""
        return False

    async def do_log_stats(self) -> None:
        """Metrics are recorded with every batch."""

    async def check_health(self) -> None:
        """Always healthy; `/ready` tells whether there are instances."""


def _unsupported(name: str) -> NoReturn:
    raise NotImplementedError(f"a PengServe ingress has no {name}")
