"""SLOs for requests that go out through the openai package, and what their answers say of them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import openai

GENERATION_URLS = ("/chat/completions", "/completions", "/responses")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latencies that a request is to keep; None leaves a field to its class.

    The server checks them; `docs/slo.md` has the limits.
    """

    ttft_ms: float | None = None  # from arrival to the first token
    tbt_ms: float | None = None  # between two tokens
    policy: str | None = None  # where a miss is predicted: "best_effort" or "reject"
    pacing: str | None = None  # of tokens that are computed early: "none" or "steady"

    def body(self) -> dict[str, float | str]:
        """`slo` of a request's body."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What an answer got of its SLO: `usage.pengserve`."""

    ttft_ms: float | None
    tbt_p99_ms: float | None  # None: the answer has one token
    paused_ms: float
    slo_met: bool


def kept_of(answer: Any) -> Kept | None:
    """What an answer, or the last chunk of a stream with `include_usage`, got of its SLO; None where it had none."""
    response = getattr(answer, "response", None)  # of the Responses API's last event
    usage = getattr(answer, "usage", None) or getattr(response, "usage", None)
    data = getattr(usage, "pengserve", None)
    if not isinstance(data, Mapping):
        return None
    return Kept(
        ttft_ms=data.get("ttft_ms"),
        tbt_p99_ms=data.get("tbt_p99_ms"),
        paused_ms=float(data.get("paused_ms") or 0.0),
        slo_met=bool(data.get("slo_met")),
    )


def openai_client(options: dict[str, Any], slo: Slo | None) -> "openai.OpenAI":
    """An `openai.OpenAI` whose requests for text bring `slo`, unless one has its own in `extra_body`."""
    import openai

    if slo is None:
        return openai.OpenAI(**options)
    asked = slo.body()

    class OpenAI(openai.OpenAI):
        def _prepare_options(self, options: Any) -> Any:
            return _with_slo(super()._prepare_options(options), asked)

    return OpenAI(**options)


def async_openai_client(options: dict[str, Any], slo: Slo | None) -> "openai.AsyncOpenAI":
    """As `openai_client`, for asyncio."""
    import openai

    if slo is None:
        return openai.AsyncOpenAI(**options)
    asked = slo.body()

    class AsyncOpenAI(openai.AsyncOpenAI):
        async def _prepare_options(self, options: Any) -> Any:
            return _with_slo(await super()._prepare_options(options), asked)

    return AsyncOpenAI(**options)


def _with_slo(options: Any, slo: Mapping[str, float | str]) -> Any:
    if options.url in GENERATION_URLS and isinstance(options.json_data, Mapping):
        own = (options.extra_json or {}).get("slo")
        if own is None:
            options.json_data = {**options.json_data, "slo": slo}
    return options
