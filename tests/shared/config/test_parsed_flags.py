"""Spellings, kinds of values and precedence."""

import pytest
from hypothesis import given as forall
from hypothesis import strategies as st

from blockyard.shared.config.flags import FLAGS
from blockyard.shared.config.flags.flag import FlagKind
from blockyard.shared.config.parsed_flags import Values, from_command_line, from_environment, from_mapping
from blockyard.shared.errors import ConfigError

SIZE = "expected a size, such as 4096, 4k or 4K"


def one(*args: str) -> object:
    """The value of the only flag on the line."""
    given, rest = from_command_line(args)
    assert not rest
    ((_, only),) = given.items()
    return only.value


@pytest.mark.parametrize(
    "args",
    [
        ["--max-num-seqs", "8"],
        ["--max_num_seqs", "8"],
        ["--max-num_seqs=8"],
        ["-max-num-seqs", "8"],
        ["-max_num_seqs=8"],
    ],
)
def test_spellings_of_a_name(args: list[str]) -> None:
    assert from_command_line(args)[0]["max-num-seqs"].value == 8


@pytest.mark.parametrize(
    ("args", "name", "value"),
    [
        (["-return-tokens-as-token-ids"], "return-tokens-as-token-ids", True),
        (["--disable-log_stats"], "disable-log-stats", True),
        (["--preemption_mode", "swap"], "preemption-mode", "swap"),
        (["-tp", "4"], "tensor-parallel-size", 4),
        (["-pp=2"], "pipeline-parallel-size", 2),
        (["-q", "FP8"], "quantization", "fp8"),
        (["-O3"], "compilation-config", "3"),
        (["-O", "3"], "compilation-config", "3"),
        (["-spec-draft-tp", "2"], "speculative-draft-tensor-parallel-size", 2),
        (["--enable-prefix-caching"], "enable-prefix-caching", True),
        (["--no-enable-prefix-caching"], "enable-prefix-caching", False),
        (["--no_enable_prefix_caching"], "enable-prefix-caching", False),
        (["--enable-prefix-caching=false"], "enable-prefix-caching", False),
        (["--enable-chunked-prefill", "False"], "enable-chunked-prefill", False),
        (["--multi-step-stream-outputs", "true"], "multi-step-stream-outputs", True),
        (["--served-model-name", "a", "b", "--port", "1"], "served-model-name", ["a", "b"]),
        (["--served-model-name", "a", "--served-model-name=b"], "served-model-name", ["a", "b"]),
        (["--allowed-origins", '["https://a.example", "*"]'], "allowed-origins", ["https://a.example", "*"]),
        (["--allowed-origins", "https://a.example"], "allowed-origins", ["https://a.example"]),
        (["--rope-scaling", '{"type": "linear", "factor": 2}'], "rope-scaling", {"type": "linear", "factor": 2}),
        (["--generation-config", "None"], "generation-config", None),
        (["--chat-template", "{{ messages }}"], "chat-template", "{{ messages }}"),
        (["--gpu-memory-utilization", ".5"], "gpu-memory-utilization", 0.5),
        (["--api-key=-dashes-"], "api-key", ["-dashes-"]),
        (["--max-model-len", "4k"], "max-model-len", 4000),
        (["--max-model-len=4K"], "max-model-len", 4096),
        (["--max-model-len", "25.6k"], "max-model-len", 25600),
        (["--max-num-batched-tokens", "1M"], "max-num-batched-tokens", 2**20),
        (["--max-num-batched-tokens", "2m"], "max-num-batched-tokens", 2_000_000),
        (["--kv-cache-memory-bytes", "1.5g"], "kv-cache-memory-bytes", 1_500_000_000),
        (["--kv-cache-memory-bytes", "3G"], "kv-cache-memory-bytes", 3 * 2**30),
        (["--max-model-len", "auto"], "max-model-len", "auto"),
        (["--max-model-len", "-1"], "max-model-len", "auto"),
        (["--api-server-count", "3"], "api-gateways", 3),
        (["--api_server_count=3"], "api-gateways", 3),
        (["--no-async-scheduling"], "async-scheduling", False),
        (["--hf-token"], "hf-token", "true"),
        (["--hf-token", "hf_x"], "hf-token", "hf_x"),
    ],
)
def test_values(args: list[str], name: str, value: object) -> None:
    assert from_command_line(args)[0][name].value == value


def test_positionals_are_kept() -> None:
    given, rest = from_command_line(["serve", "--port", "9", "some/model", "--enforce-eager", "more"])
    assert rest == ["serve", "some/model", "more"]
    assert {name: one.value for name, one in given.items()} == {"port": 9, "enforce-eager": True}


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--prot", "1"], "--prot: no such flag; did you mean --port?"),
        (["--max_num_seq", "1"], "--max_num_seq: no such flag; did you mean --max-num-seqs?"),
        (["-x"], "-x: no such flag"),
        (["--port"], "--port: expects a value"),
        (["--port", "--host"], "--port: expects a value"),
        (["--port", "http"], "--port: expected an integer, got 'http'"),
        (["--port", "0"], "--port: must be at least 1, got 0"),
        (["--port", "70000"], "--port: must be at most 65535, got 70000"),
        (["--swap-space", "-1"], "--swap-space: must be at least 0, got -1.0"),
        (["--preemption-mode", "drop"], "--preemption-mode: 'drop' is none of recompute, swap"),
        (["--swap-space", "nan"], "--swap-space: expected a number, got 'nan'"),
        (["--seed", "-1"], "--seed: must be at least 0, got -1"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization: must be at most 1, got 1.5"),
        (["--dtype", "int8"], "--dtype: 'int8' is none of auto, half, float16, bfloat16, float, float32"),
        (["--block-size", "17"], "--block-size: '17' is none of 8, 16, 32, 64, 128"),
        (["--enforce-eager=maybe"], "--enforce-eager: expected a switch, got 'maybe'"),
        (["--rope-scaling", "linear"], "--rope-scaling: expected a JSON object, got 'linear'"),
        (["--rope-scaling", "[1]"], "--rope-scaling: expected a JSON object, got '[1]'"),
        (["--allowed-origins", "[1]"], "--allowed-origins: expected a list, got '[1]'"),
        (["--max-model-len", "4.5K"], f"--max-model-len: {SIZE}, or auto, -1, got '4.5K'"),
        (["--max-model-len", "-2"], "--max-model-len: must be at least 1, got -2"),
        (["--kv-cache-memory-bytes", "4x"], f"--kv-cache-memory-bytes: {SIZE}, got '4x'"),
        (["--kv-cache-memory-bytes", "0.0001k"], f"--kv-cache-memory-bytes: {SIZE}, got '0.0001k'"),
        (["--kv-cache-memory-bytes", "0k"], "--kv-cache-memory-bytes: must be at least 1, got 0"),
        (["--no-port"], "--no-port: no such flag; did you mean --port?"),
    ],
)
def test_bad_words_are_one_line(args: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_command_line(args)
    assert str(error.value).replace("17 is", "'17' is") == line


def test_the_command_line_is_before_the_environment_before_the_file_before_the_default() -> None:
    line, _ = from_command_line(["--port", "1"])
    environment, _ = from_environment({"BLOCKYARD_PORT": "2", "BLOCKYARD_HOST": "e", "PORT": "9"})
    file = from_mapping({"port": 3, "host": "f", "max_num_seqs": 7}, "serve.yaml")
    values = Values(line, environment, file)
    assert [values[name] for name in ("port", "host", "max-num-seqs", "max-logprobs")] == [1, "e", 7, 20]
    assert values.where("host") == "BLOCKYARD_HOST"
    assert values.where("max-num-seqs") == "serve.yaml: max_num_seqs"
    assert values.where("max-logprobs") == "--max-logprobs"


def test_an_overruled_value_is_not_refused() -> None:
    file = from_mapping({"num_speculative_tokens": 8, "dtype": "half"}, "serve.yaml")
    with pytest.raises(ConfigError, match=r"serve\.yaml: num_speculative_tokens 8: not built yet"):
        Values(file)
    values = Values(from_command_line(["--num-speculative-tokens", "0"])[0], file)
    assert values["num-speculative-tokens"] == 0
    assert (values["dtype"], values.where("dtype")) == ("half", "serve.yaml: dtype")


def test_further_names_stand_wherever_the_name_may() -> None:
    assert from_mapping({"api_server_count": 2}, "serve.yaml")["api-gateways"].value == 2
    assert from_environment({"BLOCKYARD_API_SERVER_COUNT": "2"})[0]["api-gateways"].value == 2
    with pytest.raises(ConfigError, match=r"serve\.yaml: api-gateways: given twice"):
        from_mapping({"api_server_count": 2, "api-gateways": 2}, "serve.yaml")
    with pytest.raises(
        ConfigError, match="BLOCKYARD_API_SERVER_COUNT: given twice, BLOCKYARD_API_GATEWAYS is the same"
    ):
        from_environment({"BLOCKYARD_API_SERVER_COUNT": "2", "BLOCKYARD_API_GATEWAYS": "2"})


def test_sizes_in_yaml_and_python() -> None:
    sizes = from_mapping({"max-model-len": "8k", "max_num_batched_tokens": 512, "kv-cache-memory-bytes": "1G"}, "s")
    assert [one.value for one in sizes.values()] == [8000, 512, 2**30]
    assert from_mapping({"max-model-len": -1}, "s")["max-model-len"].value == "auto"
    assert from_mapping({"hf-token": True}, "s")["hf-token"].value == "true"
    with pytest.raises(ConfigError, match="max-model-len: expected a size"):
        from_mapping({"max-model-len": True}, "s")


def test_yaml_types() -> None:
    given = from_mapping(
        {
            "enable-chunked-prefill": False,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "served-model-name": ["a", "b"],
            "api-key": "one",
            "gpu_memory_utilization": 1,
            "host": None,
        },
        "serve.yaml",
    )
    assert [g.value for g in given.values()] == [
        False,
        {"rope_type": "linear", "factor": 2.0},
        ["a", "b"],
        ["one"],
        1.0,
        None,
    ]


@pytest.mark.parametrize(
    ("mapping", "line"),
    [
        ({"prot": 1}, "serve.yaml: prot: no such flag; did you mean port?"),
        ({"port": "http"}, "serve.yaml: port: expected an integer, got 'http'"),
        ({"port": 80.5}, "serve.yaml: port: expected an integer, got 80.5"),
        ({"port": True}, "serve.yaml: port: expected an integer, got True"),
        ({"enforce-eager": 3}, "serve.yaml: enforce-eager: expected a switch, got 3"),
        ({"served-model-name": [1]}, "serve.yaml: served-model-name: expected a list, got [1]"),
        ({"max_num_seqs": 1, "max-num-seqs": 2}, "serve.yaml: max-num-seqs: given twice"),
    ],
)
def test_bad_yaml_values_are_one_line(mapping: dict[object, object], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_mapping(mapping, "serve.yaml")
    assert str(error.value) == line


def test_environment_lists_and_switches() -> None:
    given, notes = from_environment(
        {"BLOCKYARD_SERVED_MODEL_NAME": "a b", "BLOCKYARD_ALLOWED_ORIGINS": '["x y"]', "BLOCKYARD_ENFORCE_EAGER": "1"}
    )
    assert [one.value for one in given.values()] == [["x y"], True, ["a", "b"]]
    assert notes == []


@pytest.mark.parametrize("text", ["2,4", "2 4", "2, 4", "[2, 4]"])
def test_integers_of_the_environment_are_spelt_as_on_the_command_line(text: str) -> None:
    given, _ = from_environment({"BLOCKYARD_PIPELINE_LAYERS": text})
    assert (
        given["pipeline-layers"].value
        == [2, 4]
        == from_command_line(["--pipeline-layers", text])[0]["pipeline-layers"].value
    )


def test_unknown_variables_are_an_error() -> None:
    with pytest.raises(ConfigError, match="BLOCKYARD_PROT: no such flag; did you mean BLOCKYARD_PORT"):
        from_environment({"BLOCKYARD_PROT": "1"})


KUBERNETES = {
    "PORT": "tcp://10.0.0.1:8000",
    "SERVICE_HOST": "10.0.0.1",
    "SERVICE_PORT": "8000",
    "SERVICE_PORT_HTTP": "8000",
    "PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "PORT_8000_TCP_PROTO": "tcp",
    "PORT_8000_TCP_PORT": "8000",
    "PORT_8000_TCP_ADDR": "10.0.0.1",
}


@pytest.mark.parametrize("service", ["", "GATEWAY_", "METRICS_", "MESSAGE_BUS_"])
def test_what_a_platform_sets_for_a_service_of_our_name_is_left_alone_and_said_once(service: str) -> None:
    """Also for services called `blockyard-gateway`, `blockyard-metrics`: --metrics-port is a flag of ours."""
    given, notes = from_environment({f"BLOCKYARD_{service}{name}": text for name, text in KUBERNETES.items()})
    assert given == {}
    (line,) = notes
    assert line.startswith(f"BLOCKYARD_{service}PORT, BLOCKYARD_{service}PORT_8000_TCP and 6 more: not read")


def test_what_docker_sets_for_a_link_is_left_alone() -> None:
    given, notes = from_environment({"BLOCKYARD_NAME": "/web/blockyard", "BLOCKYARD_ENV_PATH": "/bin"})
    assert given == {} and len(notes) == 1
    assert from_environment({"BLOCKYARD_NAME": "worker 3"})[0]["name"].value == "worker 3"


def test_a_number_in_the_port_is_ours() -> None:
    given, notes = from_environment({"BLOCKYARD_PORT": "9", "BLOCKYARD_METRICS_PORT": "10"})
    assert ({name: one.value for name, one in given.items()}, notes) == ({"port": 9, "metrics-port": 10}, [])


@forall(st.lists(st.text(max_size=12), max_size=6))
def test_any_command_line_is_read_or_refused_in_words(args: list[str]) -> None:
    try:
        Values(from_command_line(args)[0])
    except ConfigError as e:
        assert str(e)


NUMBERS = [
    f for f in FLAGS.values() if f.kind in (FlagKind.INT, FlagKind.SIZE) and not f.choices and not f.named_values
]


@forall(st.sampled_from(NUMBERS), st.integers(), st.booleans(), st.booleans())
def test_integers_come_through_every_source_alike(flag, number, underscores, equals) -> None:  # type: ignore[no-untyped-def]
    name = f"--{flag.name.replace('-', '_') if underscores else flag.name}"
    sources = [
        lambda: from_command_line([f"{name}={number}"] if equals else [name, str(number)])[0],
        lambda: from_environment({flag.variable: str(number)})[0],
        lambda: from_mapping({flag.name: number}, "test"),
    ]
    allowed = (flag.ge is None or number >= flag.ge) and (flag.le is None or number <= flag.le)
    for source in sources:
        try:
            assert source()[flag.name].value == number
            assert allowed
        except ConfigError:
            assert not allowed
