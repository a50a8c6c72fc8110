"""The values that `hostile.py` makes its requests of: good bodies, and what spoils them."""

from typing import Any

MODEL = "tiny"
VOCAB_SIZE = 512
MAX_TOKENS = 3

Json = dict[str, Any]


def good_body(path: str) -> Json:
    """A body that `path` accepts."""
    match path:
        case "/v1/completions":
            return {"model": MODEL, "prompt": "hello", "max_tokens": MAX_TOKENS, "temperature": 0}
        case "/v1/chat/completions":
            messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
            return {"model": MODEL, "messages": messages, "max_tokens": MAX_TOKENS}
        case "/v1/responses":
            message = {"role": "user", "content": [{"type": "input_text", "text": "hello"}]}
            return {"model": MODEL, "input": [message], "max_output_tokens": MAX_TOKENS}
        case "/tokenize":
            return {"model": MODEL, "prompt": "hello"}
    return {"model": MODEL, "tokens": [5, 6]}


OPTIONS: Json = {
    "n": 1, "best_of": 1, "seed": 1, "stop": ["zz"], "logprobs": 1, "top_logprobs": 1, "logit_bias": {"5": 1.0},
    "frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1, "top_k": 5, "top_p": 0.9,
    "min_p": 0.01, "stream": False, "stream_options": None, "user": "u", "tools": [], "tool_choice": "none",
    "response_format": {"type": "text"}, "structured_outputs": None, "stop_token_ids": [3], "min_tokens": 1,
    "allowed_token_ids": None, "bad_words": ["no"], "ignore_eos": False, "skip_special_tokens": True,
    "prompt_logprobs": None, "truncate_prompt_tokens": None, "echo": False, "suffix": None, "priority": 0,
    "cache_salt": "x", "chat_template_kwargs": {}, "documents": None, "reasoning_effort": None, "metadata": {},
    "request_id": "r", "session_id": "s", "include": [], "text": {"format": {"type": "text"}}, "store": False,
    "background": False, "previous_response_id": None, "return_token_ids": False, "repetition_detection": None,
    "thinking_token_budget": None, "logprob_token_ids": None, "add_special_tokens": True, "instructions": "x",
}  # fmt: skip
WRONG_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 17, "", " ", "x", "1", "null", "auto", [], [[]], [None], [1, "a", None],
    [[1, 2], ["a"]], [{}], {}, {"": None}, {"a": {"b": [1, {"d": None}]}}, [-1], [511, 512], [0] * 2000,
    {"type": "json_object"}, {"type": "json_schema"}, {"type": "strange"}, {"regex": "("}, {"choice": []},
    {"json": "{"}, {"json": {"type": "object"}, "regex": "a"}, {"include_usage": True}, [{"type": "function"}],
    [{"type": "mcp", "server_label": "x", "server_url": "http://127.0.0.1:1/"}], [{"role": "user"}],
    [{"role": "nobody", "content": "x"}], [{"role": "assistant", "tool_calls": [{"id": 1}]}],
    [{"role": "tool", "content": "x"}], [{"type": "item_reference", "id": "x"}], {"effort": "high"},
]  # fmt: skip
HUGE_NUMBERS: list[Any] = [
    2**31, -(2**31), 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 2**64, 10**40, -(10**40), 10**400, 1e-300, 1e300, -1e300,
    10**6, -(10**6), [10**12], [2**40] * 5, {"100000": 1}, {"-1": 5}, {"5": 1e300}, {"99999999999999999999": 1},
]  # fmt: skip
ODD_TEXTS = [
    "\x00", "\x00" * 50, "\u202e", "\ufffd", "\ufeff", "\u2028", "\U0001f99c" * 200, "e\u0301" * 300,
    "\x1b[31mred\x1b[0m",
    "a\r\nx-evil: 1", "<|im_start|>" * 40, "<|endoftext|>", "{{ 7 * 7 }}", "{% for x in range(10**9) %}a{% endfor %}",
    "../../etc/passwd", "%00%0a", "\u0000\ud7ff", "\ue000" * 40, "\U0010ffff" * 40, "ﷺ" * 500, "a" * 2000,
]  # fmt: skip
NOT_JSON = [
    b"", b"{", b"[]", b"null", b"5", b'"x"', b'{"model": NaN}', b'{"a": Infinity}', b'{"n": 1e999}', b"\xff\xfe{}",
    b'{"a":' * 500 + b"1" + b"}" * 500, b'{"n": ' + b"9" * 6000 + b"}", b"\x00\x01", b"model=tiny", b"{'model': 1}",
    b'{"model": "tiny", "prompt": "\\ud800"}', b'{"model": "tiny", "prompt": "\xc3\x28"}', b"\xef\xbb\xbf{}",
    b'{"model": "tiny", "model": "tiny", "prompt": "a", "prompt": ["b"]}', b"{}garbage", b'{"a": 1,}', b"[" * 50_000,
]  # fmt: skip
BAD_HEADERS: list[tuple[bytes, bytes]] = [
    (b"x-request-id", b"a b\tc"), (b"x-request-id", b"z" * 4000), (b"x-request-id", b'"><script>'),
    (b"x-request-id", b"\xff\xfe"), (b"x-request-id", b"id\x1b[2J"), (b"x-data-parallel-rank", b"99"),
    (b"x-vllm-priority", b"9" * 400), (b"x-session-id", b"s\x0b" * 900), (b"authorization", b"Bearer"),
    (b"authorization", b"Bearer " + b"k" * 5000), (b"accept-encoding", b"zstd"), (b"x-pengserve-parallelism", b"tp99"),
    (b"x-pengserve-parallelism", b"\xe2\x80\xae"), (b"x-pengserve-cluster", b"another"), (b"cookie", b"c=" * 900),
    (b"x-forwarded-for", b"1.2.3.4, evil"), (b"expect", b"100-continue"), (b"content-encoding", b"gzip"),
    (b"origin", b"null"), (b"traceparent", b"00-" + b"f" * 300), (b"content-type", b"text/plain"),
    (b"content-type", b"multipart/form-data; boundary=x"), (b"content-length", b"-1"), (b"content-length", b"1e3"),
    (b"content-length", b"9" * 30), (b"transfer-encoding", b"gzip, chunked"),
]  # fmt: skip
FOREIGN_FIELDS: list[tuple[str, Any]] = [
    ("chat_template", "{% for x in range(10**9) %}{% endfor %}"), ("prompt_embeds", "AAAA"), ("use_beam_search", True),
    ("kv_transfer_params", {"do_remote_prefill": True}), ("ec_transfer_params", {"a": 1}), ("vllm_xargs", {"a": "b"}),
    ("logits_processors", ["os.system"]), ("media_io_kwargs", {"video": {"num_frames": -1}}), ("__proto__", {"a": 1}),
    ("mm_processor_kwargs", {"size": 10**9}), ("chat_template_kwargs", {"chat_template": "x", "tokenize": True}),
    ("__class__", "x"), ("", 1), ("_backend", "guidance"), ("lora_request", {"path": "/etc"}), ("guided_json", "{"),
    ("guided_regex", "(a{999}){999}"), ("guided_decoding_backend", "outlines"), ("data_parallel_rank", 9),
    ("trace_decode_token_ids", [1]), ("x" * 5000, 1),
]  # fmt: skip
COSTLY_PATTERNS = [
    "^(abcdefgh){2000}$", "(a{2000}){2000}", "a{2000}{2000}", "(" * 200 + "a" + "{9}){9}" * 100, "([a-z]{0,64}x){64}",
    "((a{0,30}){0,30}){0,30}", "(a*)*b", "(a|a)*" * 300, "(.*a){30}", "(x+x+)+y", r"(\w+\s?){0,500}", "(){1000000}",
    "(a|b)*a(a|b){900}", "[^x]{0,3900}", r"\p{L}{900}", "(?:(?:(?:a?){60}){60}){60}", "[" * 2000, "(" * 1000,
    "|" * 2000,
]  # fmt: skip
COSTLY_GRAMMARS = [
    'root ::= e\ne ::= e e | e e e | "a"', 'root ::= root "a"', "root ::= root", 'root ::= "a"{5000}',
    "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)), 'r60 ::= "a"']),
    'root ::= a\na ::= a a | a b | b a | ""\nb ::= "x" b | a', 'start: e\ne: e e | "a"', "root ::= [",
    "root ::= " * 900,
]  # fmt: skip
MEDIA = [
    {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}},
    {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data"}},
    {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}},
    {"type": "audio_url", "audio_url": {"url": "ftp://127.0.0.1:1/x"}},
    {"type": "video_url", "video_url": {"url": "http://[::1]:1/x"}},
    {"type": "input_image", "image_url": "http://127.0.0.1:1/x.png"},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
]
