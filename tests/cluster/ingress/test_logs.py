"""No text of a client looks like a line of the log, in messages and in tracebacks."""

import io
import logging

import pytest

from pengserve.cluster.ingress.logs import without_control_characters

FORGED = "x\nWARNING forged\r\n\x1b[31mred\x1b[0m \u2028 \x00 \x9b \u202eend"


def logged(**how: object) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    handler.addFilter(without_control_characters)
    record_logger = logging.Logger("tests")
    record_logger.addHandler(handler)
    record_logger.error("request %s failed", how.pop("value", "r"), **how)  # type: ignore[arg-type]
    return stream.getvalue()


def test_a_message_is_one_line_of_the_log() -> None:
    text = logged(value=FORGED)
    assert text.splitlines() == [text.rstrip("\n")], "no other kind of line break either"
    assert text.startswith("ERROR request x\\nWARNING forged\\r\\n\\x1b[31mred")
    assert "\x1b" not in text and "\x00" not in text and "\x9b" not in text and "\u202e" not in text


def test_the_lines_of_a_traceback_are_indented() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        text = logged(exc_info=error)
    first, *rest = text.rstrip("\n").split("\n")
    assert first == "ERROR request r failed"
    assert any("Traceback" in line for line in rest) and any("ValueError: x" in line for line in rest)
    assert all(line.startswith("    ") for line in rest)
    assert "\x1b" not in text


@pytest.mark.parametrize("value", ["my-id_1.2:3", "ü\t", "日本語", "{}%s"])
def test_other_text_stays_as_it_is(value: str) -> None:
    assert logged(value=value) == f"ERROR request {value} failed\n"
