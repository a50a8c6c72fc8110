"""Rows of a trace file: CSV with a header or JSON lines, gzipped where the name ends with .gz; read as a stream."""

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

from pengserve.planners.types.errors import ConfigError


class Row:
    """One row. Numbers come out checked; a wrong one raises a ConfigError that names file, row and field."""

    __slots__ = ("fields", "number", "path")

    def __init__(self, path: Path, number: int, fields: dict[str, Any]) -> None:
        self.path = path
        self.number = number  # of its line in the file, from 1: what an editor shows
        self.fields = fields

    @property
    def request_id(self) -> str:
        """A name for the request of a row that gives it none."""
        return f"r{self.number}"

    def tokens(self, name: str) -> int:
        """A length: a whole number, 0 or more."""
        value = self._whole(name, "a whole number, 0 or more")
        if value < 0:
            raise self.wrong(name, "a whole number, 0 or more")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        """Any whole number. With a default the field may be absent, null or empty."""
        if default is not None and self.fields.get(name) in (None, ""):
            return default
        return self._whole(name, "a whole number")

    def number_of(self, name: str) -> float:
        """A number, 0 or more: seconds, milliseconds or steps, as the format has it."""
        value = self._get(name)
        if not isinstance(value, bool):
            try:
                number = float(value)
            except (TypeError, ValueError):
                number = math.nan
            if 0.0 <= number < math.inf:
                return number
        raise self.wrong(name, "a number, 0 or more")

    def moment(self, name: str) -> float:
        """A date and time as seconds since 1970; without a zone it is UTC."""
        try:
            moment = datetime.fromisoformat(self._get(name).strip())
        except (AttributeError, ValueError):
            raise self.wrong(name, "a date and time such as 2023-11-16 18:15:46.68") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()

    def text(self, name: str) -> str:
        """A text or a number as text."""
        value = self._get(name)
        if isinstance(value, str | int) and not isinstance(value, bool):
            return str(value)
        raise self.wrong(name, "a text")

    def ids(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        values = self._get(name)
        if isinstance(values, list) and all(type(value) is int for value in values):
            return tuple(values)
        raise self.wrong(name, "a list of whole numbers")

    def wrong(self, name: str, expected: str) -> ConfigError:
        """The error for a field that is not what it must be."""
        value = repr(self.fields.get(name))
        got = value if len(value) <= 60 else f"{value[:57]}..."
        return ConfigError(f"{self.path}, row {self.number}: field {name} must be {expected}, got {got}")

    def _get(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            known = ", ".join(self.fields)
            raise ConfigError(
                f"{self.path}, row {self.number}: field {name} is missing, give it; the row has {known or 'none'}"
            ) from None

    def _whole(self, name: str, expected: str) -> int:
        value = self._get(name)
        if type(value) is int:
            return value
        if isinstance(value, str):
            try:
                return int(value)
            except ValueError:
                with suppress(ValueError):
                    value = float(value)  # "12.0", as pandas writes a column with gaps
        if isinstance(value, float) and value.is_integer():
            return int(value)
        raise self.wrong(name, expected)


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a CSV or JSON-lines file, which the first character that is no blank tells apart.

    Raises:
        ConfigError: the file cannot be read, or a row is malformed.
    """
    with _opened(path) as lines:
        numbered = enumerate(lines, start=1)
        first = next(((number, line) for number, line in numbered if line.strip()), None)
        if first is None:
            raise ConfigError(f"{path} is empty: give a trace with at least one request")
        if first[1].lstrip().startswith("{"):
            yield from _json_rows(path, first, numbered)
        else:
            yield from _csv_rows(path, first[1], lines, first[0])


def _csv_rows(path: Path, header_line: str, lines: Iterable[str], header_number: int) -> Iterator[Row]:
    header = [name.strip() for name in next(csv.reader([header_line]))]
    if len(set(header)) != len(header):
        raise ConfigError(f"{path}, row {header_number}: the header names a column twice, name each column once")
    reader = csv.reader(lines)
    width = len(header)
    try:
        for values in reader:
            number = header_number + reader.line_num
            if len(values) != width:
                if not values:
                    continue
                raise ConfigError(
                    f"{path}, row {number}: the row has {len(values)} fields and the header {width}, give {width}"
                )
            yield Row(path, number, dict(zip(header, values, strict=True)))
    except csv.Error as error:
        raise ConfigError(f"{path}, row {header_number + reader.line_num}: this is no CSV row: {error}") from None


def _json_rows(path: Path, first: tuple[int, str], lines: Iterable[tuple[int, str]]) -> Iterator[Row]:
    for number, line in chain([first], lines):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise ConfigError(f"{path}, row {number}: the line must be one JSON object, got {line.strip()[:60]!r}")
        yield Row(path, number, fields)


@contextmanager
def _opened(path: Path) -> Iterator[io.TextIOBase]:
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8-sig", newline="") as lines:
                yield lines
        else:
            with path.open(encoding="utf-8-sig", newline="") as lines:
                yield lines
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no UTF-8 text: name a gzipped trace with .gz at its end") from None
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise ConfigError(f"{path} is no whole gzip file: name a trace that is not gzipped without .gz") from None
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror or error}") from None
