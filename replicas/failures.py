"""How a failure of an engine is told: one line, whose beginning says which setting or what kind of error it is."""

from typing import Any

from pengserve.planners.types.errors import PengServeError

MAX_CHARACTERS = 600
MAX_HINT_CHARACTERS = 200


def describe_failure(error: BaseException) -> str:
    """`error` in one line. vLLM's configuration errors name the engine argument where vLLM does.

    "engine.max_model_len: input should be a valid integer", "ConfigError: ...", "SafetensorError: ..."
    """
    problems = _validation_problems(error)
    if problems:
        text = "; ".join(problems)
    else:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    line = " ".join(text.split())
    return line if len(line) <= MAX_CHARACTERS else f"{line[:MAX_CHARACTERS]} ..."


def told_failure(error: BaseException) -> str:
    """As `describe_failure`; an error of PengServe's own is a whole sentence and goes without its type."""
    return str(error) if isinstance(error, PengServeError) else describe_failure(error)


def _validation_problems(error: BaseException) -> list[str]:
    # pydantic is no import of this floor: an error with its `errors` is known by that.
    errors: Any = getattr(error, "errors", None)
    if type(error).__name__ != "ValidationError" or not callable(errors):
        return []
    problems = []
    for item in errors():
        name = ".".join(["engine", *(str(part) for part in item["loc"])])
        message = str(item["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
        # vLLM's hints on what else one could set, and why not, are several sentences long.
        problems.append(f"{name}: {message if len(message) <= MAX_HINT_CHARACTERS else message.partition('. ')[0]}")
    return list(dict.fromkeys(problems))
