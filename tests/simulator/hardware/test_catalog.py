"""The catalog finds rows by the names people use, and says in one sentence what is wrong with theirs."""

from dataclasses import replace

import pytest

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.hardware.catalog import gpu, load_catalog, model

CATALOG = load_catalog()
MINE = """
gpus:
  my-gpu: {memory_bytes: 24_000_000_000, hbm_bytes_per_s: 1.0e12, flops: 1.65e14, pcie_bytes_per_s: 3.2e10,
           nic_bytes_per_s: 1.25e10, source: data sheet}
"""


@pytest.mark.parametrize(
    ("written", "name"),
    [("h100", "H100-SXM"), ("H100_SXM", "H100-SXM"), ("RTX 4090", "RTX-4090"), ("A800", "A800-80"), ("CPU", "cpu")],
)
def test_gpus_are_found_however_they_are_written(written, name):
    assert gpu(written).name == name


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Qwen/Qwen2.5-14B-Instruct", "qwen2.5-14b"),
        ("meta-llama/Llama-3.1-8B", "llama3.1-8b"),
        ("meta-llama/Meta-Llama-3-70B-Instruct", "llama3-70b"),
        ("Llama-2-7b-chat-hf", "llama2-7b"),
    ],
)
def test_models_are_found_by_their_hub_names(written, name):
    assert model(written).name == name


def test_no_two_rows_answer_to_one_name():
    for rows in (CATALOG.gpus, CATALOG.models, CATALOG.profiles):
        for name, row in rows.items():
            assert row.name == name
            find = {id(CATALOG.gpus): gpu, id(CATALOG.models): model}.get(id(rows), CATALOG.profile)
            assert all(find(written) is row for written in (name, *row.aliases))


def test_every_row_has_a_source():
    rows = [*CATALOG.gpus.values(), *CATALOG.models.values(), *CATALOG.profiles.values()]
    assert all(len(row.source) > 10 for row in rows)


def test_bytes_of_a_known_model():
    llama = model("llama3-8b")
    assert llama.kv_bytes_per_token == 131_072
    assert llama.weight_bytes == 16_060_000_000
    assert llama.activation_bytes_per_token == 8192


@pytest.mark.parametrize(("wrong", "near"), [("h10", "H100-SXM"), ("a80", "A800-80"), ("gaudi", "take one of A10,")])
def test_an_unknown_gpu_lists_near_names(wrong, near):
    with pytest.raises(ConfigError, match=near):
        gpu(wrong)


def test_an_unknown_model_lists_near_names():
    with pytest.raises(ConfigError, match=r"near it are .*qwen2.5-14b"):
        model("qwen14b")


def test_rows_of_the_user_are_added(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    catalog = load_catalog(path)
    assert catalog.gpu("MyGPU").hbm_bytes_per_s == 1e12
    assert catalog.gpu("h100") is gpu("h100")


def test_rows_of_the_user_replace_those_of_the_package(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(MINE.replace("my-gpu", "H100-SXM"))
    assert load_catalog(path).gpu("H100-SXM").flops == 1.65e14


def test_a_row_of_the_user_takes_an_alias_of_the_package(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(MINE.replace("my-gpu", "h100"))
    assert load_catalog(path).gpu("h100").flops == 1.65e14


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (MINE.replace("1.65e14", "fast"), r"mine\.yaml: gpus\.my-gpu\.flops: input should be a valid number.*'fast'"),
        (MINE.replace("flops: 1.65e14, ", ""), r"mine\.yaml: gpus\.my-gpu\.flops: is missing"),
        (MINE.replace("flops", "tops"), r"mine\.yaml: gpus\.my-gpu\.(flops: is missing|tops: is no field)"),
        (MINE.replace("1.0e12", "-1"), r"gpus\.my-gpu\.hbm_bytes_per_s: input should be greater than 0"),
        ("gpu: {}", r"mine\.yaml has 'gpu': a catalog has gpus, models and profiles"),
        ("gpus: [1]", r"mine\.yaml: gpus must be a mapping"),
        ("gpus: {a: 1}", r"mine\.yaml: gpus\.a must be a mapping"),
        ("gpus: {a: [}", r"mine\.yaml is not YAML in line 1"),
        ("- a", r"mine\.yaml is no mapping"),
    ],
)
def test_a_bad_file_is_one_sentence_that_names_file_row_and_field(tmp_path, text, sentence):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=sentence) as error:
        load_catalog(path)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the catalog"):
        load_catalog(tmp_path / "none.yaml")


def test_an_empty_file_adds_nothing(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("")
    assert load_catalog(path) == CATALOG


@pytest.mark.parametrize(("ties", "read"), [(False, 900), (True, 1000)])
def test_a_step_reads_all_weights_but_an_input_embedding_of_its_own(ties, read):
    spec = replace(model("llama3-8b"), params=1000, embedding_params=200, bytes_per_param=2, ties_embeddings=ties)
    assert spec.read_bytes == 2 * read
    assert spec.layer_params == 800
