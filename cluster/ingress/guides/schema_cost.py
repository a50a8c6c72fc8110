"""What the schemas, patterns and grammars of one request would cost, estimated in linear time and without compiling.

Libraries write the counts of patterns out: three patterns such as `^(abcdefgh){2000}$` in a schema of 378 bytes take
seconds to compile. So one budget holds for the whole request, wherever its patterns stand. What passes is compiled
under limits of time and memory (`guide_check.py`) before an instance sees it.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from pengserve.cluster.ingress.errors import RequestRefused

MAX_SCHEMA_CHARS = 64 << 10  # schemas, tools, patterns and grammars of one request together
MAX_PATTERN_CHARS = 2048  # one pattern
MAX_STATES = 4096  # all patterns of one request together, with their counts written out
MAX_UNROLLED = 4096  # how often a part of a schema may be repeated when its counts are written out

SCHEMAS = ("response_format", "structured_outputs", "tools", "text")
GRAMMARS_ARE_OFF = "grammars are not accepted by this server: use json, regex or choice, or set limits.allow_grammars"

_JSON_TEXT = frozenset({"json", "structural_tag", "schema", "json_schema"})  # may hold JSON as a string
_COUNTING_KEYWORDS = frozenset(
    {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "minContains", "maxContains"}
)
# An escape, a class (one that is never closed ends with the pattern), a count, or one character.
_TOKEN = re.compile(r"\\.|\[(?:\\.|[^\]\\])*(?:\]|\\?\Z)|\{(?P<low>\d*),?(?P<high>\d*)\}|.", re.DOTALL)
_REPEAT = re.compile(r"\{\d*,?\d*\}")


def check_schemas(data: Mapping[str, Any], *, allow_grammars: bool) -> None:
    """Checks all that guides the answer to this body.

    Raises:
        RequestRefused: 400, naming the field and the limit.
    """
    for name in ("response_format", "structured_outputs"):
        if not isinstance(data.get(name), dict | None):
            _refuse(name, "an object is expected")
    budget = _Budget(allow_grammars)
    for name in SCHEMAS:
        if data.get(name):
            budget.spend(name, data[name])


class _Budget:
    """What one request has left."""

    def __init__(self, allow_grammars: bool) -> None:
        self._allow_grammars = allow_grammars
        self._chars, self._states = MAX_SCHEMA_CHARS, MAX_STATES

    def spend(self, name: str, root: Any) -> None:
        """Takes what `root`, the field `name` of the body, costs."""
        pending: list[tuple[str, Any, int]] = [("", root, 1)]  # (key, value, how often it is repeated)
        while pending:
            key, value, times = pending.pop()
            if isinstance(value, dict):
                times = self._spend_object(name, key, value, times)
                pending.extend((k, v, times) for k, v in value.items())
            elif isinstance(value, list):
                self._spend_chars(name, len(value) + sum(len(item) for item in value if isinstance(item, str)))
                pending.extend((key, item, times) for item in value if isinstance(item, dict | list))
            elif isinstance(value, str):
                self._spend_text(name, key, value, times)
                if key in _JSON_TEXT and value.lstrip().startswith("{"):
                    pending.append((key, _parsed(name, value), times))

    def _spend_object(self, name: str, key: str, value: dict[str, Any], times: int) -> int:
        self._spend_chars(name, sum(map(len, value)) + len(value))
        if value.get("type") == "grammar" and not self._allow_grammars:
            _refuse(name, GRAMMARS_ARE_OFF)
        if key == "patternProperties":
            for pattern in value:
                self._spend_pattern(name, "a key of patternProperties", pattern)
        counts = [abs(c) for k, c in value.items() if k in _COUNTING_KEYWORDS and isinstance(c, int)]
        times *= max([1, *counts])
        if times > MAX_UNROLLED:
            _refuse(name, f"counts such as maxItems may multiply to at most {MAX_UNROLLED}")
        return times

    def _spend_text(self, name: str, key: str, text: str, times: int) -> None:
        self._spend_chars(name, len(text))
        if key in ("pattern", "regex"):
            states = self._spend_pattern(name, key, text)
        elif key == "grammar":
            if not self._allow_grammars:
                _refuse(name, GRAMMARS_ARE_OFF)
            states = self._spend_states(name, key, unrolled_size(text) - len(text) if _REPEAT.search(text) else 0)
        else:
            return
        if times * states > MAX_UNROLLED * 4 and _REPEAT.search(text):
            _refuse(name, f"the counts in {key} and around it, such as maxItems, unroll to too much")

    def _spend_pattern(self, name: str, key: str, pattern: str) -> int:
        if len(pattern) > MAX_PATTERN_CHARS:
            _refuse(name, f"{key} may have at most {MAX_PATTERN_CHARS} characters")
        return self._spend_states(name, key, unrolled_size(pattern))

    def _spend_states(self, name: str, key: str, states: int) -> int:
        self._states -= states
        if self._states < 0:
            _refuse(name, f"the patterns of a request may have at most {MAX_STATES} states, with {key} they have more")
        return states

    def _spend_chars(self, name: str, count: int) -> None:
        self._chars -= count
        if self._chars < 0:
            _refuse(name, f"at most {MAX_SCHEMA_CHARS} characters are accepted in all schemas of a request")


def unrolled_size(pattern: str) -> int:
    """About how many states `pattern` has once its counts are written out: `(ab{3}){2}` has 8."""
    groups = [[0]]  # sizes of the atoms in each open group; the last one is what a count applies to
    for token in _TOKEN.finditer(pattern):
        text = token[0]
        if text == "(":
            groups.append([0])
        elif text == ")" and len(groups) > 1:
            size = sum(groups.pop())
            groups[-1].append(size)
        elif token["low"] is not None or token["high"] is not None:
            count = max(1, int(token["low"][:9] or 0), int((token["high"] or "")[:9] or 0))
            groups[-1][-1] = min(max(1, groups[-1][-1]) * count, MAX_STATES + 1)
        else:
            groups[-1].append(1)
    return sum(map(sum, groups))


def _parsed(name: str, text: str) -> Any:
    """The JSON in `text`; None where there is none, which vLLM then says."""
    try:
        return json.loads(text)
    except RecursionError:
        _refuse(name, "it is nested too deeply")
    except ValueError:
        return None


def _refuse(param: str, why: str) -> NoReturn:
    raise RequestRefused(400, f"{param}: {why}", param=param)
