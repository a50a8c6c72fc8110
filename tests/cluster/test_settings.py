"""Laws of the configuration: precedence, refusal by name, and secrets that stay secret."""

from pathlib import Path
from typing import get_args

import pytest

from pengserve.cluster.demo.shipped import shipped_model
from pengserve.cluster.settings import Settings
from pengserve.cluster.settings_sources import (
    load_settings,
    parse_settings,
    refuse_unsafe_environment,
    unsafe_environment,
)
from pengserve.cluster.shape_settings import Strategy
from pengserve.planners.types.config import DropConfig, InstanceConfig, MergeConfig, MicrobatchPolicy
from pengserve.planners.types.errors import ConfigError
from pengserve.planners.types.strategy import SwitchStrategy

SECRET = "s3cret-of-the-test"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Whatever the shell that runs the tests has set must not decide them."""
    import os

    for name in list(os.environ):
        if name.upper().startswith("PENGSERVE_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr("pengserve.cluster.settings.has_cuda_driver", lambda: False)


@pytest.fixture
def yaml_file(tmp_path):
    """Writes YAML text, returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "serve.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_environment_wins_over_file_and_override_over_both(yaml_file, monkeypatch):
    path = yaml_file("model: m\ninstances: {count: 3, cpu_threads: 4}\nhttp: {port: 1111}")
    monkeypatch.setenv("PENGSERVE_INSTANCES__COUNT", "5")
    monkeypatch.setenv("PENGSERVE_HTTP__PORT", "2222")
    settings = load_settings(path, http={"port": 3333})
    assert (settings.instances.cpu_threads, settings.instances.count, settings.http.port) == (4, 5, 3333)


def test_an_override_of_none_says_nothing(yaml_file):
    settings = load_settings(yaml_file("model: m\nhttp: {port: 1111}"), model=None, http={"port": None})
    assert (settings.model, settings.http.port) == ("m", 1111)


def test_engine_arguments_from_the_environment_have_yaml_types(monkeypatch):
    monkeypatch.setenv("PENGSERVE_ENGINE__MAX_MODEL_LEN", "2048")
    monkeypatch.setenv("PENGSERVE_ENGINE__ENFORCE_EAGER", "true")
    monkeypatch.setenv("PENGSERVE_ENGINE__DTYPE", "float32")
    assert load_settings(None, model="m").engine == {"max_model_len": 2048, "enforce_eager": True, "dtype": "float32"}


@pytest.mark.parametrize(
    ("data", "named", "meant"),
    [
        ({"modle": "m"}, "modle", "model"),
        ({"instance": {"count": 1}}, "instance", "instances"),
        ({"http": {"prot": 1}}, "http.prot", "http.port"),
        ({"port": 1}, "port", "http.port"),
        ({"security": {"api_key": SECRET}}, "security.api_key", "security.api_keys"),
    ],
)
def test_an_unknown_key_is_named_with_the_one_that_was_meant(data, named, meant):
    with pytest.raises(ConfigError) as caught:
        load_settings(None, **{"model": "m", **data})
    assert f"unknown key {named!r}; did you mean {meant}?" in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("PENGSERVE_PORT", "PENGSERVE_HTTP__PORT"), ("PENGSERVE_INSTANCE__COUNT", "PENGSERVE_INSTANCES__COUNT")],
)
def test_an_unknown_variable_is_named_with_the_one_that_was_meant(monkeypatch, name, meant):
    monkeypatch.setenv(name, "8001")
    with pytest.raises(ConfigError, match=f"{name} sets nothing; did you mean {meant}"):
        load_settings(None, model="m")


def test_variables_that_kubernetes_and_the_command_line_set_are_left_alone(monkeypatch):
    monkeypatch.setenv("PENGSERVE_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("PENGSERVE_SERVE_SVC_PORT_8000_TCP_ADDR", "10.0.0.1")
    monkeypatch.setenv("PENGSERVE_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("PENGSERVE_URL", "http://10.0.0.1:8000")
    monkeypatch.setenv("PENGSERVE_ADMIN_KEY", SECRET)
    assert load_settings(None, model="m").http.port == 8000


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"instances": {"device": "gpu"}}, ["instances.device", "'cpu'", "'cuda'", "'gpu'"]),
        ({"instances": {"count": 0}}, ["instances.count", "auto", "a whole number from 1 to 4096", "got 0"]),
        ({"instances": {"count": "all"}}, ["instances.count", "auto", "a whole number from 1 to 4096", "'all'"]),
        ({"instances": {"count": 1.5}}, ["instances.count", "a whole number", "1.5"]),
        ({"shape": {"cuda": "on"}}, ["shape.cuda", "'off'", "'experimental'", "'on'"]),
        ({"engine": {"tensor_parallel_size": "two"}}, ["engine", "tensor_parallel_size", "whole number", "'two'"]),
        ({"http": {"port": "web"}}, ["http.port", "integer", "'web'"]),
        ({"http": {"ssl_keyfile": "k"}}, ["http", "ssl_certfile"]),
        ({"http": {"ssl_keyfile": "k", "ssl_certfile": "c"}}, ["proxy: serve"]),
        ({"engine": {"model": "other"}}, ["engine", "model"]),
        ({"shape": {"degrees": [3]}}, ["shape.degrees", "powers of two", "[3]"]),
        ({"shape": {"degrees": [1]}}, ["shape.degrees", "powers of two"]),
        ({"shape": {"degrees": "all"}}, ["shape.degrees", "auto", "'all'"]),
        ({"shape": {"degrees": [2, True]}}, ["shape.degrees", "powers of two"]),
        ({"shape": {"degrees": [4]}, "instances": {"count": 2}}, ["shape.degrees", "a group of 4", "count is 2"]),
        ({"shape": {"merge_below": 0.5, "split_above": 0.5}}, ["split_above (0.5) must be above merge_below (0.5)"]),
        ({"shape": {"load_strategy": "quick"}}, ["shape.load_strategy", "'carry'", "'quick'"]),
        ({"shape": {"strategy": "carry"}}, ["unknown key", "did you mean"]),
        ({"shape": {"drop": {"max_stages": 3}}}, ["shape.drop.max_stages", "a power of two", "got 3"]),
        ({"shape": {"drop": {"microbatches": "evenly"}}}, ["shape.drop.microbatches", "lookahead", "tokens"]),
        ({"shape": {"drop": {"max_in_flight": -1}}}, ["shape.drop.max_in_flight", "greater than or equal to 0"]),
        ({"shape": {"drop": {"max_stages": 0}}}, ["shape.drop.max_stages", "greater than or equal to 1"]),
        ({"shape": {"drop": {"max_stages": 4}}}, ["shape.drop.max_stages", "a pipeline of 4", "count is 2"]),
        ({"shape": {"drop": {"max_stages": 2}}}, ["shape.drop.max_stages of 2 needs instances.memory_bytes"]),
        ({"shape": {"drop": {"target": 0.99}}}, ["shape.drop", "target (0.99) must not be above drop_above (0.95)"]),
        ({"shape": {"drop": {"restore_below": 0.95}}}, ["restore_below (0.95) must be below drop_above (0.95)"]),
        ({"shape": {"drop": {"drop_above": 2}}}, ["shape.drop.drop_above", "less than or equal to 1"]),
        ({"shape": {"drop": {"restore_above": 0.5}}}, ["unknown key", "did you mean"]),
        ({"instances": {"chunk_bytes": 5000}}, ["instances.chunk_bytes", "a multiple of 4096", "5000"]),
        (
            {"instances": {"memory_bytes": 1 << 30}, "engine": {"kv_cache_memory_bytes": 1 << 20}},
            ["engine.kv_cache_memory_bytes", "leave it out", "instances.memory_bytes"],
        ),
        ({"instances": {"memory_bytes": 4096}}, ["instances.memory_bytes (4096)", "chunk_bytes (2097152)"]),
        ({"instances": {"memory_bytes": "2 GiB"}}, ["instances.memory_bytes", "auto, or a whole number", "'2 GiB'"]),
        ({"memory": {"host_bytes": "2 GiB"}}, ["memory.host_bytes", "give auto, or a number of bytes", "'2 GiB'"]),
        ({"memory": {"host_bytes": -1}}, ["memory.host_bytes", "give auto, or a number of bytes"]),
        ({"memory": {"link_bytes_per_s": 0}}, ["memory.link_bytes_per_s", "greater than 0"]),
        ({"memory": {"place_by_slo": True}}, ["place_by_slo needs a host tier", "memory.host_bytes"]),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_its_key_and_what_is_accepted(data, words):
    with pytest.raises(ConfigError) as caught:
        load_settings(None, model="m", **data)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_missing_model_says_how_to_get_one():
    with pytest.raises(ConfigError, match=r"model is missing.*`demo`"):
        load_settings(None)


@pytest.mark.parametrize("text", ["- a list", "model: [", "1: 2"])
def test_a_file_that_is_no_mapping_is_refused_by_name(yaml_file, text):
    with pytest.raises(ConfigError, match=r"serve\.yaml"):
        load_settings(yaml_file(text))


def test_a_missing_file_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.yaml: No such file"):
        load_settings("nowhere.yaml")


def test_secrets_show_in_no_representation_but_travel_to_the_builder():
    security = {"api_keys": [SECRET], "admin_key": SECRET + "2", "metrics_key": SECRET + "3"}
    settings = load_settings(None, model="m", security=security)
    shown = [repr(settings), str(settings), str(settings.model_dump()), settings.model_dump_json()]
    assert not any(SECRET in text for text in shown)
    assert Settings.model_validate(settings.to_args()) == settings
    assert settings.to_args()["security"].items() >= security.items()


def test_a_refused_secret_is_not_repeated():
    for security in ({"api_keys": {"a": SECRET}}, {"admin_key": [SECRET]}, {"api_keys": [[SECRET]]}):
        with pytest.raises(ConfigError) as caught:
            load_settings(None, model="m", security=security)
        assert SECRET not in str(caught.value)


def test_settings_from_data_do_not_read_the_environment(monkeypatch):
    monkeypatch.setenv("PENGSERVE_HTTP__PORT", "2222")
    assert parse_settings({"model": "m"}).http.port == 8000
    assert Settings.model_validate({"model": "m"}).http.port == 8000


@pytest.mark.parametrize(
    "origin",
    ["", "example.org", "https://example.org/", "https://example.org/chat", "https://*.org", "https://", "null", "a b"],
)
def test_what_is_no_origin_is_refused(origin: str):
    with pytest.raises(ConfigError, match=r"http\.allowed_origins"):
        load_settings(None, model="m", http={"allowed_origins": [origin]})


def test_origins_are_taken_as_browsers_send_them():
    given = ["https://Chat.example.org", "http://localhost:3000", "http://[::1]:3000", "tauri://localhost"]
    settings = load_settings(None, model="m", http={"allowed_origins": given})
    assert settings.http.allowed_origins == [origin.lower() for origin in given]
    assert load_settings(None, model="m", http={"allowed_origins": "*"}).http.allowed_origins == ["*"]
    assert load_settings(None, model="m").http.allowed_origins == []
    with pytest.raises(ConfigError, match="alone"):
        load_settings(None, model="m", http={"allowed_origins": ["*", "http://localhost:3000"]})


def test_an_open_address_needs_a_key():
    with pytest.raises(ConfigError, match=r"security\.api_keys"):
        load_settings(None, model="m", http={"host": "0.0.0.0"})
    for security in ({"api_keys": "k", "admin_key": "a"}, {"api_keys_file": "/k", "admin_key_file": "/a"}):
        assert load_settings(None, model="m", http={"host": "0.0.0.0"}, security=security).http.host == "0.0.0.0"


@pytest.mark.parametrize("security", [{"api_keys": ["k"]}, {"api_keys_file": "/k"}])
def test_api_keys_need_an_admin_key_beside_them(security):
    with pytest.raises(ConfigError, match=r"security: admin_key is missing.*`openssl rand -hex 32`"):
        load_settings(None, model="m", security=security)


@pytest.mark.parametrize("name", ["admin_key", "metrics_key"])
def test_a_key_opens_one_thing_and_is_given_once(name):
    with pytest.raises(ConfigError, match=f"{name} and {name}_file"):
        load_settings(None, model="m", security={name: SECRET, f"{name}_file": "/k"})
    with pytest.raises(ConfigError, match="must differ") as caught:
        load_settings(None, model="m", security={"admin_key": "a", name: SECRET, "api_keys": [SECRET]})
    assert SECRET not in str(caught.value)


def test_files_of_keys_are_found_from_where_the_command_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "api").write_text("one\ntwo\n")
    (tmp_path / "admin").write_text("three\n")
    security = load_settings(None, model="m", security={"api_keys_file": "api", "admin_key_file": "admin"}).security
    assert security.files == {
        "security.api_keys_file": str(tmp_path / "api"),
        "security.admin_key_file": str(tmp_path / "admin"),
    }
    assert (security.any_api_key(), security.any_admin_key()) == ("one", "three")
    assert security.given_in_the_open == []


def test_an_empty_key_is_refused():
    with pytest.raises(ConfigError, match="empty key"):
        load_settings(None, model="m", security={"api_keys": [" "]})


def test_a_relative_model_directory_becomes_absolute_and_names_the_model(tmp_path, monkeypatch):
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    settings = load_settings(None, model="./tiny")
    assert (settings.model, settings.served_model_name) == (str(tmp_path / "tiny"), ["tiny"])
    assert load_settings(None, model="org/name").served_model_name == ["name"]
    assert load_settings(None, model="./tiny", served_model_name="demo").served_model_name == ["demo"]


def test_engine_defaults_of_a_cpu_give_way_to_the_user():
    settings = load_settings(
        None, model="m", instances={"device": "cpu"}, engine={"enforce_eager": False, "max-model-len": 64}
    )
    engine = settings.instance_config("token").engine
    assert (engine["enforce_eager"], engine["max_model_len"]) == (False, 64)
    assert engine["kv_cache_memory_bytes"] == 256 << 20


def test_gpus_follow_the_device_unless_given():
    def gpus(**instances) -> float:
        settings = load_settings(None, model="m", instances={"count": 2, **instances})
        return settings.controller_config().gpus_per_instance

    assert (gpus(device="cpu"), gpus(device="cuda"), gpus(device="cuda", gpus=0.5)) == (0.0, 1.0, 0.5)


CUDA = {"instances": {"device": "cuda", "count": 2}}
EXPERIMENTAL = {"cuda": "experimental"}
PAIRS = {"engine": {"tensor_parallel_size": 2}}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (CUDA | {"shape": {"degrees": [2]}}, ["shape.degrees of [2]", "`shape.cuda: experimental`"]),
        (
            {"instances": {**CUDA["instances"], "memory_bytes": 1 << 30}, "shape": {"drop": {"max_stages": 2}}},
            ["shape.drop.max_stages of 2", "`shape.cuda: experimental`"],
        ),
        (
            {"instances": {**CUDA["instances"], "memory_bytes": 1 << 30}},
            ["instances.memory_bytes of 1073741824", "`shape.cuda: experimental`"],
        ),
        (PAIRS | {"shape": {"degrees": [2]}}, ["engine.tensor_parallel_size", "2 processes", "shape.degrees of [2]"]),
        (
            PAIRS | {"instances": {"memory_bytes": 1 << 30}, "shape": {"drop": {"max_stages": 2}}},
            ["engine.tensor_parallel_size", "shape.drop.max_stages of 2"],
        ),
        (
            {"engine": {"pipeline_parallel_size": 2}, "shape": {"degrees": [2]}},
            ["engine.pipeline_parallel_size", "shape.degrees of [2]"],
        ),
        (
            {**CUDA, **PAIRS, "shape": {"degrees": [2], **EXPERIMENTAL}},
            ["engine.tensor_parallel_size", "shape.degrees of [2]"],
        ),
        (
            {"instances": {**CUDA["instances"], "gpus": 1}, **PAIRS},
            ["instances.gpus is 1", "engine.tensor_parallel_size makes the engine use 2"],
        ),
        (
            {"instances": {**CUDA["instances"], "gpus": 2}},
            ["instances.gpus is 2", "engine.tensor_parallel_size makes the engine use 1"],
        ),
    ],
)
def test_what_cannot_go_together_is_refused_with_both_keys(data, words):
    with pytest.raises(ConfigError) as caught:
        load_settings(None, model="m", **data)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("data", "degrees", "max_stages", "gpus"),
    [
        (CUDA, (), 1, 1.0),
        (CUDA | {"shape": {"cuda": False}}, (), 1, 1.0),  # YAML reads `off` as false
        (CUDA | {"shape": {"degrees": []}}, (), 1, 1.0),
        (CUDA | {"shape": EXPERIMENTAL}, (2,), 1, 1.0),
        (
            {
                "instances": {**CUDA["instances"], "memory_bytes": 1 << 30},
                "shape": {**EXPERIMENTAL, "drop": {"max_stages": 2}},
            },
            (2,),
            2,
            1.0,
        ),
        (PAIRS, (), 1, 0.0),
        ({**CUDA, "shape": EXPERIMENTAL, "engine": {"async_scheduling": True}}, (2,), 1, 1.0),
        ({**CUDA, **PAIRS}, (), 1, 2.0),
        ({**CUDA, "engine": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}}, (), 1, 4.0),
    ],
)
def test_instances_change_their_shape_where_device_and_engine_allow_it(data, degrees, max_stages, gpus):
    settings = load_settings(None, model="m", **data)
    instance, controller = settings.instance_config(""), settings.controller_config()
    assert (instance.degrees, instance.max_stages) == (degrees, max_stages)
    assert (controller.degrees, controller.drop.max_stages, controller.gpus_per_instance) == (degrees, max_stages, gpus)
    assert Settings.model_validate(settings.to_args()) == settings


def test_configurations_inside_carry_what_the_user_wrote():
    settings = load_settings(
        None, model="m", app="a", instances={"count": 3, "lease_s": 9}, controller={"tick_s": 0.1}, event_log="e.jsonl"
    )
    controller, instance = settings.controller_config(), settings.instance_config("token")
    assert (controller.app, controller.num_instances, controller.tick_s, controller.event_log_path) == (
        "a",
        3,
        0.1,
        "e.jsonl",
    )
    assert (instance.app, instance.lease_s, instance.channel_token) == ("a", 9.0, "token")


@pytest.mark.parametrize("name", ["VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_INSECURE_SERIALIZATION"])
def test_an_unsafe_variable_is_refused_by_name(monkeypatch, name):
    monkeypatch.setenv(name, "0")
    assert unsafe_environment() == []
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=name):
        refuse_unsafe_environment()


@pytest.mark.parametrize(
    ("count", "shape", "degrees"),
    [
        (1, {}, ()),
        (2, {}, (2,)),
        (7, {"degrees": "auto"}, (2, 4)),
        (64, {}, (2, 4, 8)),
        (64, {"max_degree": 16}, (2, 4, 8, 16)),
        (4, {"degrees": []}, ()),
        (4, {"degrees": 2}, (2,)),
        (4, {"degrees": [4, 2, 2]}, (2, 4)),
    ],
)
def test_degrees_reach_instances_controller_and_builder(count, shape, degrees):
    settings = load_settings(None, model="m", instances={"count": count}, shape=shape)
    instance, controller = settings.instance_config(""), settings.controller_config()
    assert (instance.degrees, controller.degrees) == (degrees, degrees)
    assert Settings.model_validate(settings.to_args()) == settings


def test_defaults_of_the_shape_are_the_planners_own():
    settings = load_settings(None, model="m")
    assert settings.controller_config().merge == MergeConfig()
    assert settings.instance_config("").peer_timeout_s == InstanceConfig(app="a", model="m").peer_timeout_s


def test_the_shape_is_set_by_file_and_by_environment(yaml_file, monkeypatch):
    path = yaml_file("model: m\ninstances: {count: 4}\nshape: {degrees: [4], auto: false, peer_timeout_s: 9}")
    merge = load_settings(path).controller_config().merge
    assert (load_settings(path).degrees, merge.is_auto) == ((4,), False)
    assert load_settings(path).instance_config("").peer_timeout_s == 9
    for value, degrees in (("[2]", (2,)), ("[]", ()), ("auto", (2, 4)), ("2", (2,))):
        monkeypatch.setenv("PENGSERVE_SHAPE__DEGREES", value)
        assert load_settings(path).degrees == degrees
    monkeypatch.setenv("PENGSERVE_SHAPE__AUTO", "true")
    assert load_settings(path).controller_config().merge.is_auto


def test_defaults_of_drops_are_the_planners_own_and_off():
    settings = load_settings(None, model="m")
    assert settings.controller_config().drop == DropConfig()
    instance, plain = settings.instance_config(""), InstanceConfig(app="a", model="m")
    assert (instance.max_stages, instance.memory_bytes, instance.chunk_bytes) == (1, 0, plain.chunk_bytes)


def test_drops_are_set_by_file_and_by_environment_alike_for_instances_and_controller(yaml_file, monkeypatch):
    path = yaml_file(
        "model: m\ninstances: {count: 4, memory_bytes: 1073741824, chunk_bytes: 65536}\n"
        "shape: {drop: {max_stages: 4, auto: false, drop_above: 0.9}}"
    )
    settings = load_settings(path)
    instance, drop = settings.instance_config(""), settings.controller_config().drop
    assert (instance.max_stages, instance.memory_bytes, instance.chunk_bytes) == (4, 1 << 30, 1 << 16)
    assert "kv_cache_memory_bytes" not in instance.engine, "the budget says what KV may have"
    assert drop == DropConfig(max_stages=4, is_auto=False, drop_above=0.9)
    assert Settings.model_validate(settings.to_args()) == settings
    monkeypatch.setenv("PENGSERVE_SHAPE__DROP__MAX_STAGES", "2")
    settings = load_settings(path)
    assert settings.instance_config("").max_stages == settings.controller_config().drop.max_stages == 2


def test_memory_may_be_what_is_free_and_chunks_are_those_of_the_device():
    asked = {"count": 2, "memory_bytes": "auto"}
    on_cpu = load_settings(None, model="m", instances={**asked, "device": "cpu"}, shape={"drop": {"max_stages": 2}})
    on_cuda = load_settings(None, model="m", instances={**asked, "device": "cuda"}, shape={"cuda": "experimental"})
    for settings, chunk_bytes in ((on_cpu, 2 << 20), (on_cuda, 64 << 20)):
        instance = settings.instance_config("")
        assert (instance.memory_bytes, instance.chunk_bytes) == (-1, chunk_bytes)
        assert "kv_cache_memory_bytes" not in instance.engine
        assert Settings.model_validate(settings.to_args()) == settings


def test_microbatches_are_formed_by_lookahead_unless_tokens_are_asked_for():
    assert load_settings(None, model="m").instance_config("").microbatches is MicrobatchPolicy.LOOKAHEAD
    settings = load_settings(None, model="m", shape={"drop": {"microbatches": "tokens"}})
    assert settings.instance_config("").microbatches is MicrobatchPolicy.TOKENS
    assert Settings.model_validate(settings.to_args()) == settings


def test_as_many_microbatches_are_in_flight_as_are_asked_for():
    assert load_settings(None, model="m").instance_config("").max_in_flight == 0, "as processors allow"
    settings = load_settings(None, model="m", shape={"drop": {"max_in_flight": 3}})
    assert settings.instance_config("").max_in_flight == 3
    assert Settings.model_validate(settings.to_args()) == settings


def test_strategies_are_those_that_switches_have():
    assert set(get_args(Strategy)) == set(SwitchStrategy)


def test_demo_names_the_shipped_model_unless_a_directory_is_called_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = load_settings(None, model="demo")
    assert Path(settings.model) == shipped_model()
    assert settings.served_model_name == ["demo"]
    (tmp_path / "demo").mkdir()
    assert Path(load_settings(None, model="demo").model) == tmp_path / "demo"


def test_a_host_tier_goes_with_groups() -> None:
    settings = parse_settings({"model": "m", "memory": {"host_bytes": "auto", "link_bytes_per_s": 1e9}})
    instance = settings.instance_config("t")
    assert (instance.host_bytes, instance.link_bytes_per_s, instance.degrees) == (-1, 1e9, (2,))
    assert parse_settings({"model": "m"}).instance_config("t").host_bytes == 0
