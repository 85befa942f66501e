"""The flags of LoRA adapters."""

import pytest

from blockyard.shared.config import adapters, parsed_flags
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.config.services.lora import AdapterSource, LoraConfig
from blockyard.shared.errors import ConfigError


def values(*args: str) -> Values:
    return Values(parsed_flags.from_command_line(["--model", "m", *args])[0])


def test_without_adapters_a_worker_has_none_and_flags_that_do_nothing_are_told() -> None:
    assert adapters.worker_config(values()) is None and not adapters.notes(values())
    given = values("--max-loras", "4", "--lora-dir", "/x")
    assert adapters.worker_config(given) is None
    assert adapters.notes(given) == ["--max-loras, --lora-dir: nothing without --enable-lora"]
    assert not adapters.notes(values("--enable-lora", "--max-loras", "4"))


def test_limits() -> None:
    assert adapters.worker_config(values("--enable-lora")) == LoraConfig()
    given = values(
        *("--lora-modules", "a=/a", "--max-loras", "3", "--max-cpu-loras", "5", "--max-lora-rank", "64"),
        *("--lora-dtype", "bfloat16", "--enable-lora-bias", "--lora-target-modules", "q_proj", "v_proj"),
    )
    assert adapters.worker_config(given) == LoraConfig(
        max_loras=3,
        max_cpu_loras=5,
        max_rank=64,
        dtype="bfloat16",
        with_bias=True,
        target_modules=["q_proj", "v_proj"],
    )
    with pytest.raises(ConfigError, match="--max-cpu-loras 1: at least --max-loras, 2"):
        adapters.worker_config(values("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "1"))
    with pytest.raises(ConfigError):
        values("--max-lora-rank", "513")


def test_modules() -> None:
    given = values("--lora-modules", "a=/x=y", '{"name": "b", "path": "org/b", "base_model_name": "base"}')
    assert adapters.sources(given) == [
        AdapterSource(name="a", path="/x=y"),
        AdapterSource(name="b", path="org/b", parent="base"),
    ]
    assert adapters.sources(values("--qlora-adapter-name-or-path", "org/q")) == [
        AdapterSource(name="org/q", path="org/q")
    ]


def test_modules_are_mappings_in_yaml_python_and_json_lists() -> None:
    modules = ["a=/x", {"name": "b", "path": "/b"}]
    of_file = Values(parsed_flags.from_mapping({"model": "m", "lora-modules": modules}, "serve.yaml"))
    of_line = values("--lora-modules", '["a=/x", {"name": "b", "path": "/b"}]')
    expected = [AdapterSource(name="a", path="/x"), AdapterSource(name="b", path="/b")]
    assert adapters.sources(of_file) == adapters.sources(of_line) == expected
    with pytest.raises(ConfigError, match="expected a list, got"):
        parsed_flags.from_mapping({"lora-modules": [5]}, "serve.yaml")


@pytest.mark.parametrize(
    ("modules", "text"),
    [
        (["a"], "neither name=path nor a JSON object"),
        (["=x"], "has no name or no path"),
        (["a="], "has no name or no path"),
        (['{"name": "a"}'], "path"),
        (['{"name": "a", "path": "x", "rank": 1}'], "rank"),
        (["a=x", "a=y"], "'a' is given twice"),
        (["m=x"], "'m' is the name of the model itself"),
    ],
)
def test_wrong_modules(modules: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        adapters.sources(values("--lora-modules", *modules))


@pytest.mark.parametrize(
    "flags",
    [
        ["--prefill-workers", "1", "--decode-workers", "1"],
        ["--tensor-parallel-size", "2"],
        ["--kv-transfer-config", '{"kv_connector": "x", "kv_role": "kv_both"}'],
    ],
    ids=lambda flags: flags[0],
)
def test_workers_that_serve_no_adapters_are_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"{flags[0]}.*: not built yet with LoRA adapters"):
        adapters.worker_config(values("--enable-lora", *flags))
    assert adapters.worker_config(values(*flags)) is None
