"""The tokenizer loses nothing, and the chat template writes what the model was trained on."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.cluster.demo.corpus import read_docstrings
from pengserve.cluster.demo.dialogue import conversation
from pengserve.cluster.demo.tokenizer import BOS, END, START, train_tokenizer

transformers = pytest.importorskip("transformers")
VOCAB_SIZE = 512


@pytest.fixture(scope="module")
def docs():
    return [doc for doc in read_docstrings(modules=("json", "argparse", "textwrap")) if "\n" not in doc.text]


@pytest.fixture(scope="module")
def tokenizer(docs):
    texts = [doc.text for doc in read_docstrings(modules=("json", "argparse", "textwrap"))]
    return train_tokenizer(texts, vocab_size=VOCAB_SIZE, max_len=2048)


def test_vocabulary_has_the_size_of_the_embedding(tokenizer) -> None:
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCAB_SIZE))


@given(text=st.text(max_size=80))
def test_every_text_comes_back(tokenizer, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text


def test_raw_text_begins_with_one_bos_and_chat_too(tokenizer) -> None:
    assert tokenizer("hello").input_ids.count(tokenizer.bos_token_id) == 1
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], return_dict=True)["input_ids"]
    assert chat[0] == tokenizer.bos_token_id
    assert chat.count(tokenizer.bos_token_id) == 1


def test_training_text_is_what_the_template_writes(tokenizer, docs) -> None:
    for seed in range(len(docs) - 1):
        text = conversation(docs[seed : seed + 2], random.Random(seed))
        messages = []
        for part in text.split(START)[1:]:
            role, content = part.removesuffix(f"{END}\n").split("\n", 1)
            messages.append({"role": role, "content": content})
        assert tokenizer.apply_chat_template(messages, tokenize=False) == BOS + text


def test_generation_prompt_is_where_an_answer_begins(tokenizer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith(f"{START}assistant\n")
    assert text.startswith(tokenizer.apply_chat_template(messages, tokenize=False))


def test_tools_calls_and_answers_are_all_written(tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "one and one?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "two"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True)
    assert text.count("Be exact.") == 1
    assert json.dumps(tool["function"]["name"]) in text
    called = text.split("<tool_call>")[-1].split("</tool_call>")[0]
    assert json.loads(called) == {"name": "add", "arguments": {"a": 1}}
    assert f"{START}tool\ntwo{END}" in text
