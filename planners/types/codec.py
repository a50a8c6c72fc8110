"""Frozen values to plain JSON data and back, for the event log, the HTTP routes and the SDK."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def to_data(value: Any) -> Any:
    """Dataclasses, enums, tuples and mappings as dicts, strings and lists that `json.dumps` takes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): to_data(v) for k, v in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [to_data(v) for v in value]
    return value


def from_data(kind: type[T], data: Any) -> T:
    """The value of `kind` that `to_data` made `data` from. Unknown keys are left out, so that old readers survive.

    Raises:
        ValueError: a required field is missing or has the wrong form; names the type and field.
    """
    result: T = _decode(kind, data, kind.__name__)
    return result


@cache
def _fields(kind: type) -> tuple[tuple[str, Any, bool], ...]:
    hints = typing.get_type_hints(kind)
    return tuple(
        (f.name, hints[f.name], f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING)
        for f in dataclasses.fields(kind)
    )


def _decode(kind: Any, data: Any, where: str) -> Any:
    if isinstance(kind, typing.NewType):
        return _decode(kind.__supertype__, data, where)
    if kind is Any:
        return data
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None:
            return None
        return _decode(next(a for a in args if a is not type(None)), data, where)
    if origin is tuple:
        if not isinstance(data, list | tuple):
            raise ValueError(f"{where} must be a list")
        return tuple(_decode(args[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin is not None and issubclass(origin, Mapping):
        return dict(data)
    if dataclasses.is_dataclass(kind):
        if not isinstance(data, Mapping):
            raise ValueError(f"{where} must be an object")
        values = {}
        for name, hint, required in _fields(typing.cast(type, kind)):
            if name in data:
                values[name] = _decode(hint, data[name], f"{where}.{name}")
            elif required:
                raise ValueError(f"{where}.{name} is missing")
        return typing.cast(type, kind)(**values)
    try:
        return kind(data)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} must be {kind.__name__}, got {data!r}") from error
