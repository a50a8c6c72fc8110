"""Answers as the benchmarks' clients see them."""

from benchmarks.sse import Answer


def answer(*times_s: float, tokens: int | None = None, sent_s: float = 0.0, error: str = "", server: int = 0) -> Answer:
    """A stream with events at these times; a token each, unless told otherwise."""
    return Answer(
        sent_s=sent_s,
        first_text_s=times_s[0] if times_s else 0.0,
        event_times_s=list(times_s),
        output_tokens=len(times_s) if tokens is None else tokens,
        error=error,
        server=server,
    )
