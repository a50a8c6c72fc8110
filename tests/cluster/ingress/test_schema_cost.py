"""What the schemas of a request may cost: one budget, wherever the patterns stand, counted in linear time."""

import json
from typing import Any

import pytest

from pengserve.cluster.ingress.config import LimitConfig
from pengserve.cluster.ingress.errors import RequestRefused
from pengserve.cluster.ingress.guards.body import check_generation, parse_object
from pengserve.cluster.ingress.guides.schema_cost import MAX_STATES, unrolled_size
from tests.support.speed import least_cpu_s, slowness

COSTLY = "^(abcdefgh){2000}$"
MAX_LAG_S = 0.1

Body = dict[str, Any]


def text(pattern: str, **more: Any) -> Body:
    return {"type": "string", "pattern": pattern, **more}


def of_properties(*schemas: Body) -> Body:
    return {"type": "object", "properties": {f"p{i}": schema for i, schema in enumerate(schemas)}}


def format_of(schema: Any) -> Body:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def tool_of(schema: Body) -> Body:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}


def nested(depth: int) -> Body:
    schema: Body = text("^(ab){200}$")
    for _ in range(depth):
        schema = {"anyOf": [schema, {"type": "array", "items": text("^(ab){200}$")}]}
    return schema


COSTLY_BODIES: dict[str, Body] = {
    "three patterns": format_of(of_properties(*[text(COSTLY)] * 3)),
    "700 patterns": format_of(of_properties(*[text("^(abcdefgh){2000}$")] * 700)),
    "700 patterns of which each is cheap": format_of(of_properties(*[text("^(abcdefgh)$")] * 700)),
    "a pattern in a tool": tool_of(of_properties(*[text(COSTLY)] * 3)),
    "a pattern in a text format": {"text": {"format": {"type": "json_schema", "name": "x", "schema": text(COSTLY)}}},
    "patternProperties": format_of({"type": "object", "patternProperties": {COSTLY: {}, "^(x){4000}$": {}}}),
    "patternProperties in $defs": format_of({"$defs": {"a": {"patternProperties": {COSTLY: {}}}}, "$ref": "#/$defs/a"}),
    "a schema as text": {"structured_outputs": {"json": json.dumps(text(COSTLY))}},
    "a structural tag as text": {
        "structured_outputs": {
            "structural_tag": json.dumps({"type": "structural_tag", "format": {"type": "regex", "pattern": COSTLY}})
        }
    },
    "nested counts": {"structured_outputs": {"regex": "(a{2000}){2000}"}},
    "counts after counts": {"structured_outputs": {"regex": "a{2000}{2000}"}},
    "empty groups": {"structured_outputs": {"regex": "(){1000000}"}},
    "300 nested counts": {"structured_outputs": {"regex": "(" * 300 + "a" + "{99})" * 300}},
    "anyOf of patterns": format_of(nested(12)),
    "huge counts around": format_of({"type": "array", "maxItems": 5000, "items": {"type": "string"}}),
    "a huge enum": format_of({"enum": [f"value-{i}" for i in range(20_000)]}),
    "an enum of numbers": format_of({"enum": list(range(200_000))}),
    "a huge choice": {"structured_outputs": {"choice": ["x" * 100] * 5000}},
    "many names": format_of({"type": "object", "properties": {f"property-{i}": {} for i in range(7000)}}),
    "many small patterns": format_of(of_properties(*[text("a[b-z]{9}")] * 600)),
    "a grammar": {"structured_outputs": {"grammar": 'root ::= e\ne ::= e e | e e e | "a"'}},
    "a Lark grammar": {"structured_outputs": {"grammar": 'start: "a"'}},
    "a grammar in a tag": {
        "response_format": {"type": "structural_tag", "format": {"type": "grammar", "grammar": 'root ::= "a"'}}
    },
    "a grammar of a custom tool": {
        "tools": [{"type": "custom", "name": "x", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}]
    },
}

ALLOWED_BODIES: dict[str, Body] = {
    "dates": format_of(of_properties(*[text(r"^\d{4}-\d{2}-\d{2}$")] * 100)),
    "long words": format_of(text("^.{1,4000}$")),
    "a list of codes": format_of({"type": "array", "maxItems": 100, "items": text("^[A-Z]{3}-[0-9]{6}$")}),
    "an enum of a thousand": format_of({"enum": [f"value-{i}" for i in range(1000)]}),
    "names that are keywords": format_of(
        {"type": "object", "properties": {k: {"type": "string"} for k in ("pattern", "regex", "grammar", "type")}}
    ),
    "a regex": {"structured_outputs": {"regex": "(([a-f]{3}|[u-z]{2})[0-9] ){8}"}},
    "choices": {"structured_outputs": {"choice": ["yes", "no"]}},
}


def check(body: Body) -> None:
    data = parse_object(json.dumps({"model": "tiny", "prompt": "x", **body}).encode())
    check_generation(data, LimitConfig(), vocab_size=512)


@pytest.mark.parametrize("body", COSTLY_BODIES.values(), ids=COSTLY_BODIES)
def test_a_costly_schema_is_refused_at_once_and_its_field_named(body: Body) -> None:
    with pytest.raises(RequestRefused) as refused:
        check(body)
    assert (refused.value.status, refused.value.param) == (400, next(iter(body)))
    assert any(word in refused.value.message for word in ("at most", "unroll", "limits.allow_grammars"))

    def again() -> None:
        with pytest.raises(RequestRefused):
            check(body)

    assert least_cpu_s(again, times=3) < MAX_LAG_S * slowness()


@pytest.mark.parametrize("body", ALLOWED_BODIES.values(), ids=ALLOWED_BODIES)
def test_an_ordinary_schema_passes(body: Body) -> None:
    check(body)


def test_a_grammar_passes_where_the_operator_allows_it() -> None:
    grammar = {"structured_outputs": {"grammar": 'root ::= "a" | "b"{3}'}}
    check_generation({"prompt": "x", **grammar}, LimitConfig(allow_grammars=True), vocab_size=512)
    with pytest.raises(RequestRefused, match="grammars are not accepted"):
        check_generation({"prompt": "x", **grammar}, LimitConfig(), vocab_size=512)


def test_the_slowest_body_that_passes_is_quick_to_check() -> None:
    patterns = [text("[a-z]" * 400)] * 10  # 4,000 states
    names = {f"n{i}": {"type": "string", "description": "d" * 12} for i in range(900)}
    body = format_of({"type": "object", "properties": {**of_properties(*patterns)["properties"], **names}})
    check(body)
    assert least_cpu_s(lambda: check(body), times=3) < MAX_LAG_S * slowness()


def test_a_class_that_never_closes_is_read_once() -> None:
    pattern = "[" * 60_000
    assert unrolled_size(pattern) == 1
    assert least_cpu_s(lambda: unrolled_size(pattern), times=3) < MAX_LAG_S * slowness()


@pytest.mark.parametrize(
    ("pattern", "states"),
    [("abc", 3), ("(ab{3}){2}", 8), ("a{2,5}", 5), ("a{2,}", 2), ("[a-z]{7}", 7), (r"\d{4}", 4), ("", 0), ("(){9}", 9)],
)
def test_counts_are_written_out(pattern: str, states: int) -> None:
    assert unrolled_size(pattern) == states


def test_a_size_stays_a_small_number() -> None:
    assert MAX_STATES < unrolled_size("(" * 200 + "a" + "{999999999})" * 200) < 1 << 20
