"""`make_demo` writes a checkpoint that others can load, once, the same for the same seed."""

from pathlib import Path

import pytest

from pengserve.cluster.demo.checkpoint import LlamaShape
from pengserve.cluster.demo.corpus import read_docstrings, words
from pengserve.cluster.demo.make import DEMO, PLAN, make_demo
from pengserve.cluster.demo.shipped import shipped_model
from pengserve.cluster.demo.train import TrainPlan, learning_rate

torch = pytest.importorskip("torch")
SHAPE = LlamaShape(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    max_len=128,
    tie_embeddings=True,
)
SHORT = TrainPlan(num_steps=3, batch_size=2, seq_len=32, peak_lr=1e-3)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo(tmp_path_factory.mktemp("demo") / "model", shape=SHAPE, plan=SHORT)


def _weights(path: Path):
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


def test_learning_rate_rises_then_falls_to_its_share() -> None:
    rates = [learning_rate(PLAN, step) for step in range(PLAN.num_steps)]
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert max(rates) == pytest.approx(PLAN.peak_lr)
    assert rates[-1] == pytest.approx(PLAN.peak_lr * PLAN.final_lr_share, rel=0.01)


def test_demo_has_three_to_ten_million_parameters_and_a_head_size_that_cpus_take() -> None:
    attention = DEMO.hidden_size * DEMO.head_dim * 2 * (DEMO.num_heads + DEMO.num_kv_heads)
    layer = attention + 3 * DEMO.hidden_size * DEMO.intermediate_size
    assert 3e6 < DEMO.vocab_size * DEMO.hidden_size + DEMO.num_layers * layer < 10e6
    assert DEMO.head_dim in (32, 64)


@pytest.mark.slow
def test_a_second_call_trains_nothing(small: Path) -> None:
    phases: set[str] = set()
    assert make_demo(small, shape=SHAPE, plan=SHORT, progress=lambda phase, done: phases.add(phase)) == small
    assert phases == {"corpus"}


@pytest.mark.slow
def test_progress_runs_from_zero_to_one_in_every_phase(tmp_path: Path) -> None:
    seen: dict[str, list[float]] = {}
    make_demo(tmp_path, shape=SHAPE, plan=SHORT, progress=lambda phase, done: seen.setdefault(phase, []).append(done))
    assert list(seen) == ["corpus", "tokenizer", "train", "save"]
    assert all(done == sorted(done) and done[0] == 0.0 and done[-1] == 1.0 for done in seen.values())


@pytest.mark.slow
def test_the_seed_decides_the_model_and_the_caller_keeps_its_generator(small: Path, tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    same = _weights(make_demo(tmp_path / "same", shape=SHAPE, plan=SHORT))
    other = _weights(make_demo(tmp_path / "other", shape=SHAPE, plan=SHORT, seed=1))
    first = _weights(small)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.slow
def test_transformers_loads_it(small: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(small)
    model = transformers.AutoModelForCausalLM.from_pretrained(small)
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.dtype == torch.bfloat16
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id


@pytest.mark.slow
def test_most_words_the_shipped_model_writes_are_words_of_the_corpus() -> None:
    transformers = pytest.importorskip("transformers")
    path = shipped_model()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    vocabulary = {word for doc in read_docstrings() for word in words(doc.text)}
    written: list[str] = []
    ended = 0
    questions = ["What does json.dumps do?", "Tell me about asyncio.", "Hello!", "Explain threading.Lock."]
    torch.manual_seed(0)
    for question in questions * 5:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        answer = model.generate(**ids, max_new_tokens=256)[0, ids["input_ids"].shape[1] :]
        ended += int(answer[-1]) in model.generation_config.eos_token_id
        written += words(tokenizer.decode(answer, skip_special_tokens=True))
    assert len(written) > 100
    assert sum(word in vocabulary for word in written) / len(written) > 0.85
    assert ended >= 0.9 * 5 * len(questions)
