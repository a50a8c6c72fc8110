"""Loaders: every format gives the same values, and a wrong row says where it is wrong."""

import gzip
from pathlib import Path

import pytest

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.traces.loading import FORMATS, load, load_lengths, read

# Two requests of each format: (10 prompt, 4 output tokens) and, 1.5 s later, (1025, 2).
FILES = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,10,4\n2023-11-16 18:15:48.1805900,1025,2\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "100,GPT-4,10,4,14,API log\n101.5,GPT-4,1025,2,1027,API log\n",
    "mooncake": '{"timestamp": 0, "input_length": 10, "output_length": 4, "hash_ids": [7]}\n'
    '{"timestamp": 1500, "input_length": 1025, "output_length": 2, "hash_ids": [7, 8, 9]}\n',
    "orbitflow": "trace_id,req,category,arrival_step,input_tokens,output_tokens,slo_s\n"
    "0,a,x,0,10,4,1\n0,b,x,3,1025,2,1\n",
    "servegen": "arrival_s,client,input_tokens,output_tokens\n0,65,10,4\n1.5,23,1025,2\n",
    "plain": "arrival_s,input_tokens,output_tokens\n0,10,4\n1.5,1025,2\n",
    "serving_sim": '{"request_id": "a", "input_toks": 10, "output_toks": 4, "arrival_time": 1787267980.5}\n'
    '{"request_id": "b", "input_toks": 1025, "output_toks": 2, "arrival_time": 1787267982.0}\n',
    "pengserve": '{"at_s": 0, "prompt_tokens": 10, "output_tokens": 4, "ttft_s": 0.1}\n'
    '{"at_s": 1.5, "prompt_tokens": 1025, "output_tokens": 2, "priority": -1, "degree": 4}\n',
}


def written(folder: Path, text: str, name: str = "trace.txt") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_every_format_is_tried_here() -> None:
    assert set(FILES) == {known.name for known in FORMATS}


@pytest.mark.parametrize("name", FILES)
def test_every_format_is_detected_and_gives_the_same_requests(name: str, tmp_path: Path) -> None:
    loaded = read(written(tmp_path, FILES[name]), step_s=0.5)
    assert loaded.format == name
    assert [(r.at_s, r.prompt_tokens, r.output_tokens) for r in loaded.arrivals] == [(0.0, 10, 4), (1.5, 1025, 2)]


@pytest.mark.parametrize("name", FILES)
def test_gzipped_and_by_name_it_is_the_same_trace(name: str, tmp_path: Path) -> None:
    plain = written(tmp_path, FILES[name])
    zipped = tmp_path / "trace.gz"
    zipped.write_bytes(gzip.compress(FILES[name].encode()))
    assert load(zipped, format=name, step_s=0.5) == load(plain, step_s=0.5)


def test_requests_come_out_by_time(tmp_path: Path) -> None:
    path = written(tmp_path, "arrival_s,input_tokens,output_tokens\n5,1,1\n2,2,2\n9,3,3\n")
    assert [(r.at_s, r.request_id) for r in load(path)] == [(2.0, "r3"), (5.0, "r2"), (9.0, "r4")]


def test_requests_that_generated_nothing_are_left_out_and_counted(tmp_path: Path) -> None:
    header = "Timestamp,Model,Request tokens,Response tokens\n"
    loaded = read(written(tmp_path, header + "3,GPT-4,0,0\n5,GPT-4,8,0\n7,GPT-4,8,1\n"))
    assert (len(loaded.arrivals), loaded.num_left_out) == (1, 2)
    assert loaded.arrivals[0].at_s == 0.0  # the first request that is in it


def test_mooncake_keeps_the_ids_of_full_blocks(tmp_path: Path) -> None:
    first, second = load(written(tmp_path, FILES["mooncake"]))
    assert (first.prefix_ids, first.prefix_block) == ((), 512)
    assert second.prefix_ids == (7, 8)


def test_a_request_log_keeps_priority_and_degree(tmp_path: Path) -> None:
    first, second = load(written(tmp_path, FILES["pengserve"]))
    assert (first.priority, first.degree) == (0, None)
    assert (second.priority, second.degree) == (-1, 4)


def test_one_of_several_traces_in_a_file(tmp_path: Path) -> None:
    path = written(tmp_path, FILES["orbitflow"] + "1,a,x,9,3,3,1\n")
    assert [r.at_s for r in load(path, step_s=2.0, trace_id="1")] == [18.0]
    with pytest.raises(ConfigError, match="several traces: give trace_id"):
        load(path, step_s=2.0)
    with pytest.raises(ConfigError, match=r"trace\.txt holds no row with trace_id '2'"):
        load(path, step_s=2.0, trace_id="2")


def test_steps_need_their_seconds(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give step_s"):
        load(written(tmp_path, FILES["orbitflow"]))


@pytest.mark.parametrize(
    ("name", "good", "bad", "field"),
    [
        ("azure", "2023-11-16 18:15:48.1805900", "yesterday", "TIMESTAMP"),
        ("azure", "1025", "-3", "ContextTokens"),
        ("burstgpt", "101.5", "nan", "Timestamp"),
        ("burstgpt", "1025,2,", "1025,two,", "Response tokens"),
        ("mooncake", "1500", '"soon"', "timestamp"),
        ("mooncake", "[7, 8, 9]", "[7]", "hash_ids"),
        ("mooncake", "[7, 8, 9]", '[7, 8, "9"]', "hash_ids"),
        ("mooncake", "1025", "true", "input_length"),
        ("orbitflow", "x,3,", "x,-3,", "arrival_step"),
        ("orbitflow", "1025", "1025.5", "input_tokens"),
        ("servegen", "1.5", "inf", "arrival_s"),
        ("plain", "1025", "", "input_tokens"),
        ("plain", "1.5", "-1", "arrival_s"),
        ("serving_sim", "1787267982.0", "null", "arrival_time"),
        ("serving_sim", '"b"', "[]", "request_id"),
        ("pengserve", '"priority": -1', '"priority": 0.5', "priority"),
        ("pengserve", '"degree": 4', '"degree": -4', "degree"),
    ],
)
def test_a_wrong_field_is_named_with_its_row(name: str, good: str, bad: str, field: str, tmp_path: Path) -> None:
    head, _, tail = FILES[name].rpartition(good)
    assert tail, "the test must change the second request"
    number = FILES[name].rstrip("\n").count("\n") + 1
    path = written(tmp_path, head + bad + tail)
    with pytest.raises(ConfigError) as error:
        load(path, step_s=0.5)
    assert str(error.value).startswith(f"{path}, row {number}: field {field} must be ")
    assert ", got " in str(error.value)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_field_is_named_with_its_row(name: str, tmp_path: Path) -> None:
    is_csv = not FILES[name].startswith("{")
    text = "a,b\n1,2\n" if is_csv else '{"a": 1}\n'
    with pytest.raises(ConfigError, match=rf"row {2 if is_csv else 1}: field .* is missing, give it; the row has a"):
        load(written(tmp_path, text), format=name, step_s=0.5)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty"),
        ("arrival_s,input_tokens,output_tokens\n", "holds no request"),
        ("arrival_s,input_tokens,output_tokens\n1,5,0\n", "no request that generated a token"),
        ("arrival_s,input_tokens,output_tokens\n1,5\n", "row 2: the row has 2 fields and the header 3"),
        ("arrival_s,input_tokens,output_tokens\n1,0,5\n", "row 2: a request with 5 output tokens has no prompt"),
        ("arrival_s,arrival_s,output_tokens\n1,0,5\n", "names a column twice"),
        ('{"at_s": 1, "prompt_tokens": 1, "output_tokens": 1}\nnull\n', "row 2: the line must be one JSON object"),
        ("{broken\n", "row 1: the line must be one JSON object"),
        ("num_prefill_tokens,num_decode_tokens\n3,4\n", "lengths and no arrivals"),
        ("when,what\n1,2\n", "no known format, it has when, what; known formats are azure"),
        (
            '{"request_id": "a", "at_s": 1, "prompt_tokens": 1, "output_tokens": 1}\n' * 2,
            "two requests named 'a'",
        ),
    ],
)
def test_a_file_that_is_no_trace_says_why(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(written(tmp_path, text))
    assert str(tmp_path / "trace.txt") in str(error.value)
    assert sentence in str(error.value)


def test_files_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the trace"):
        load(tmp_path / "none.csv")
    with pytest.raises(ConfigError, match="no whole gzip file"):
        load(written(tmp_path, FILES["plain"], "trace.csv.gz"))
    (tmp_path / "cut.gz").write_bytes(gzip.compress(FILES["plain"].encode())[:-12])
    with pytest.raises(ConfigError, match="no whole gzip file"):
        load(tmp_path / "cut.gz")
    (tmp_path / "zipped.csv").write_bytes(gzip.compress(FILES["plain"].encode()))
    with pytest.raises(ConfigError, match="no UTF-8 text"):
        load(tmp_path / "zipped.csv")


def test_an_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown trace format 'azzure'; known formats are azure .*servegen"):
        load(written(tmp_path, FILES["plain"]), format="azzure")


def test_lengths_come_from_length_files_and_from_traces(tmp_path: Path) -> None:
    lengths = written(tmp_path, "num_prefill_tokens,num_decode_tokens\n3,4\n5,6\n", "lengths.csv")
    assert load_lengths(lengths) == ((3, 4), (5, 6))
    assert load_lengths(written(tmp_path, FILES["plain"])) == ((10, 4), (1025, 2))
    zero = written(tmp_path, "num_prefill_tokens,num_decode_tokens\n3,4\n5,0\n", "zero.csv")
    with pytest.raises(ConfigError, match="row 3: field num_decode_tokens must be a whole number above 0, got '0'"):
        load_lengths(zero)
