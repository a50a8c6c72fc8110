"""Every OpenAI route, through the official client, over real instances."""

import json
from collections.abc import Iterator

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.ingress import FixedRoutes, ingress_config, serving, wait_ready
from tests.support.processes import InstanceProcess

MODEL = "tiny"
CHAT = [{"role": "user", "content": "What does a dictionary do?"}]

pytestmark = pytest.mark.slow


def greedy_text(client: openai.OpenAI, prompt: str, num_tokens: int) -> str:
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=num_tokens, temperature=0)
    return answer.choices[0].text


@pytest.fixture(scope="module")
def newest(instances: list[InstanceProcess]) -> Iterator[httpx.Client]:
    """A client of an ingress of this module: vLLM's metrics in a process are those of its newest ingress."""
    with serving(ingress_config(instances), FixedRoutes(instances)) as url:
        wait_ready(url)
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            yield client


def test_models_lists_the_served_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_model_is_found_by_its_name(client: openai.OpenAI) -> None:
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("org/unknown")
    assert error.value.body == {
        "message": "The model `org/unknown` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }


def test_what_vllm_serves_beside_the_api_is_here(http: httpx.Client) -> None:
    for answer in (http.get("/health"), http.get("/ping"), http.post("/ping")):
        assert (answer.status_code, answer.content) == (200, b"")
    assert set(http.get("/version").json()) == {"version"}


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/live", f"/v1/models/{MODEL}"])
def test_a_slash_at_the_end_changes_nothing(http: httpx.Client, path: str) -> None:
    with_slash, without = http.get(f"{path}/"), http.get(path)
    assert with_slash.status_code == without.status_code == 200
    if "models" in path:
        ids = [card["id"] for card in with_slash.json().get("data", [with_slash.json()])]
        assert ids == [MODEL]


@pytest.mark.parametrize("path", ["/", "/nowhere", "/nowhere/", "/v1", "/v1/", "/v1/nowhere", "/docs", "/invocations"])
def test_an_unknown_path_is_404_in_shape(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == answer.json()["error"]["code"] == 404
    assert len(answer.headers.get_list("x-request-id")) == 1


FULL = 1024  # the model's length


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/v1/completions", "prompt", {"prompt": [5] * FULL}),
        ("/v1/completions", "prompt", {"prompt": [5] * FULL, "max_tokens": 8, "stream": True}),
        ("/v1/completions", "prompt", {"prompt": [[5], [5] * FULL]}),
        ("/v1/chat/completions", "messages", {}),
        ("/v1/chat/completions", "messages", {"stream": True}),
        ("/v1/responses", "input", {}),
    ],
)
def test_a_prompt_that_leaves_no_room_is_named(http: httpx.Client, path: str, field: str, body: dict) -> None:
    if field == "messages":
        body = {**body, field: chat_of(http, FULL)}
    elif field == "input":
        usage = http.post(path, json={"model": MODEL, "input": "Hi", "max_output_tokens": 1}).json()["usage"]
        more_than_chat = usage["input_tokens"] - count_tokens(http, [{"role": "user", "content": "Hi"}])
        body = {**body, field: chat_of(http, FULL - more_than_chat)[0]["content"]}
    error = http.post(path, json={"model": MODEL, **body}).json()["error"]
    assert (error["code"], error["param"], error["type"]) == (400, field, "BadRequestError")
    assert f"has {FULL} tokens" in error["message"]
    assert f"at most {FULL} including at least one token of output" in error["message"]


def count_tokens(http: httpx.Client, messages: list[dict[str, str]]) -> int:
    """Tokens of `messages`, with the template around them."""
    return http.post("/tokenize", json={"model": MODEL, "messages": messages}).json()["count"]


def chat_of(http: httpx.Client, num_tokens: int) -> list[dict[str, str]]:
    """Messages of so many tokens, with the template around them."""
    text = ""
    for _ in range(50):
        messages = [{"role": "user", "content": text}]
        missing = num_tokens - count_tokens(http, messages)
        if missing == 0:
            return messages
        text = text + "a " * max(missing // 2, 1) if missing > 0 else text[:missing]
    raise AssertionError("no text of this length was found")


def test_n_is_counted_as_vllm_counts_it(newest: httpx.Client) -> None:
    """As `AsyncLLM` of vLLM 0.32 does: each sequence is a request with a prompt of its own, and `n` is noted once."""

    def counted() -> dict[str, float]:
        families = text_string_to_metric_families(newest.get("/metrics").text)
        sums: dict[str, float] = {}
        for sample in (sample for family in families for sample in family.samples):
            sums[sample.name] = sums.get(sample.name, 0) + sample.value
        return sums

    body = {"model": MODEL, "prompt": [5] * 40, "n": 4, "max_tokens": 7, "ignore_eos": True}
    expected = {
        "vllm:request_success_total": 4,
        "vllm:prompt_tokens_total": 160,
        "vllm:generation_tokens_total": 28,
        "vllm:time_to_first_token_seconds_count": 4,
        "vllm:request_params_n_count": 1,
        "vllm:request_params_n_sum": 4,
        "vllm:request_max_num_generation_tokens_count": 1,
        "vllm:request_max_num_generation_tokens_sum": 7,
    }
    before = counted()
    assert newest.post("/v1/completions", json=body).status_code == 200
    after = counted()
    assert {name: after[name] - before.get(name, 0) for name in expected} == expected


def test_chat_streams_what_it_answers_whole(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": CHAT, "max_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 40


def test_completion_streams_what_it_answers_whole(client: openai.OpenAI) -> None:
    chunks = client.completions.create(model=MODEL, prompt="def f(", max_tokens=30, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == greedy_text(client, "def f(", 30)


def test_completion_takes_token_ids_and_lists(client: openai.OpenAI, http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"model": MODEL, "prompt": "return"}).json()["tokens"]
    by_text = greedy_text(client, "return", 8)
    answer = client.completions.create(model=MODEL, prompt=["return", "import"], max_tokens=8, temperature=0)
    assert [choice.text for choice in answer.choices] == [by_text, greedy_text(client, "import", 8)]
    assert client.completions.create(model=MODEL, prompt=ids, max_tokens=8, temperature=0).choices[0].text == by_text


def test_logprobs_of_the_greedy_token_are_the_best(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == 6
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(other.logprob for other in token.top_logprobs)


def test_echo_returns_prompt_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="hello world", max_tokens=2, echo=True, logprobs=1)
    assert answer.choices[0].text.startswith("hello world")
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.total_tokens


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    text = greedy_text(client, "hello", 40)
    stop = text[10:14]
    answer = client.completions.create(model=MODEL, prompt="hello", max_tokens=40, temperature=0, stop=[stop])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    chunks = list(
        client.completions.create(model=MODEL, prompt="hello", max_tokens=40, temperature=0, stop=[stop], stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]


def test_n_choices_differ_and_all_arrive(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="hello", max_tokens=12, n=4, temperature=1.0, seed=7)
    assert sorted(choice.index for choice in answer.choices) == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) > 1
    ended = {}
    for chunk in client.completions.create(model=MODEL, prompt="hello", max_tokens=12, n=4, stream=True):
        for choice in chunk.choices:
            ended[choice.index] = choice.finish_reason or ended.get(choice.index)
    assert ended == dict.fromkeys(range(4), "length")


def test_a_seed_repeats_the_text(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "prompt": "hello", "max_tokens": 24, "temperature": 1.0}
    texts = [client.completions.create(**options, seed=seed).choices[0].text for seed in (11, 11, 12)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("stream", [False, True])
def test_responses(client: openai.OpenAI, stream: bool) -> None:
    options = {"model": MODEL, "input": "What is a list?", "max_output_tokens": 16, "temperature": 0}
    whole = client.responses.create(**options)
    assert whole.usage.output_tokens == 16
    if stream:
        events = list(client.responses.create(**options, stream=True))
        assert events[0].type == "response.created"
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == whole.output_text


def test_a_json_schema_binds_the_answer(client: openai.OpenAI, no_blanks: dict[str, int]) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "size": {"enum": [1, 2, 3]}},
        "required": ["colour", "size"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        max_tokens=100,
        temperature=0,
        logit_bias=no_blanks,
        response_format={"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}},
    )
    thing = json.loads(answer.choices[0].message.content)
    assert thing["colour"] in ("red", "green")
    assert thing["size"] in (1, 2, 3)


def test_a_named_tool_is_called_with_its_arguments(client: openai.OpenAI, no_blanks: dict[str, int]) -> None:
    parameters = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters, "strict": True}}
    options = {"model": MODEL, "messages": CHAT, "tools": [tool], "max_tokens": 100, "logit_bias": no_blanks}
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = client.chat.completions.create(**options, tool_choice=choice)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    client.chat.completions.create(**{**options, "max_tokens": 8}, tool_choice="auto")


def test_tokenize_and_detokenize_are_inverse(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"model": MODEL, "prompt": "hello", "add_special_tokens": False}).json()
    text = http.post("/detokenize", json={"model": MODEL, "tokens": tokens["tokens"]}).json()
    assert text["prompt"] == "hello"


def test_a_client_that_leaves_frees_its_place(client: openai.OpenAI, http: httpx.Client) -> None:
    stream = client.completions.create(model=MODEL, prompt="hello", max_tokens=900, stream=True)
    next(iter(stream))
    stream.close()
    for _ in range(200):
        running = [
            float(line.split()[-1])
            for line in http.get("/metrics").text.splitlines()
            if line.startswith("pengserve_requests_running{")
        ]
        if running == [0.0]:
            return
    pytest.fail(f"still in flight: {running}")


def test_metrics_count_tokens_by_instance(newest: httpx.Client) -> None:
    def generated() -> float:
        lines = newest.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total{"))

    before = generated()
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 9, "temperature": 0}
    assert newest.post("/v1/completions", json=body).status_code == 200
    assert generated() == before + 9
