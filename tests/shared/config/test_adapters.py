"""The flags of LoRA adapters."""

from pathlib import Path

import pytest

from blockyard.shared.config import adapters, parsed_flags
from blockyard.shared.config.flags.features import LORA
from blockyard.shared.config.flags.flag import Flag
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.config.services.lora import AdapterSource, LoraConfig, PromptConfig
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
    of_experts = [AdapterSource(name="a", path="/a"), AdapterSource(name="b", path="/b", has_experts=True)]
    assert adapters.worker_config(values("--enable-lora"), of_experts) == LoraConfig(with_experts=True)
    with pytest.raises(ConfigError, match="--max-cpu-loras 1: at least --max-loras, 2"):
        adapters.worker_config(values("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "1"))
    with pytest.raises(ConfigError):
        values("--max-lora-rank", "513")


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    adapters.check_folder(values("--lora-dir", str(tmp_path)))
    for path in (tmp_path / "none", "x" * 5000):
        with pytest.raises(ConfigError, match=r"--lora-dir .*: no such folder"):
            adapters.check_folder(values("--lora-dir", str(path)))


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


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--pipeline-parallel-size"])
def test_workers_of_several_ranks_serve_adapters(flag: str) -> None:
    assert adapters.worker_config(values("--enable-lora", flag, "2")) == LoraConfig()
    assert adapters.worker_config(values(flag, "2")) is None


def test_prefill_and_decode_workers_serve_adapters() -> None:
    flags = ("--prefill-workers", "1", "--decode-workers", "1", "--kv-transfer-config", '{"kv_connector": "shm"}')
    assert adapters.worker_config(values("--enable-lora", *flags)) == LoraConfig()


PROMPTS = ["--enable-prompt-adapter", "--max-prompt-adapter-token", "9"]
# arguments that give each flag, besides --enable-lora, a value other than its default
GIVEN = {
    "enable-lora": [],
    "enable-lora-bias": ["--enable-lora-bias"],
    "lora-modules": ["--lora-modules", "a=/a"],
    "max-loras": ["--max-loras", "3"],
    "max-lora-rank": ["--max-lora-rank", "8"],
    "lora-dtype": ["--lora-dtype", "float16"],
    "lora-extra-vocab-size": ["--lora-extra-vocab-size", "8"],
    "max-cpu-loras": ["--max-cpu-loras", "7"],
    "qlora-adapter-name-or-path": ["--qlora-adapter-name-or-path", "org/q"],
    "fully-sharded-loras": ["--fully-sharded-loras"],
    "long-lora-scaling-factors": ["--long-lora-scaling-factors", "4.0"],
    "lora-target-modules": ["--lora-target-modules", "q_proj"],
    "lora-max-wait": ["--lora-max-wait", "0.5"],
    "enable-prompt-adapter": PROMPTS,
    "prompt-adapters": ["--prompt-adapters", "p=/p", *PROMPTS[1:]],
    "max-prompt-adapters": [*PROMPTS, "--max-prompt-adapters", "2"],
    "max-prompt-adapter-token": [*PROMPTS[:1], "--max-prompt-adapter-token", "8"],
}


def settings(*args: str) -> tuple[object, ...]:
    """What the services get."""
    given = values(*args)
    scheduler = adapters.scheduler_settings(given, adapters.sources(given))
    return adapters.worker_config(given), adapters.prompt_config(given), scheduler, given.maybe("lora-dir", str)


@pytest.mark.parametrize("flag", LORA, ids=lambda flag: flag.name)
def test_each_flag_has_an_effect_or_is_refused_by_name(flag: Flag) -> None:
    assert not flag.refused
    if flag.mapped:
        assert any(f"--{flag.name}" in note for note in values("--enable-lora", f"--{flag.name}").notes())
    elif flag.name == "lora-dir":
        assert flag.to == ("gateway.lora_dir",)
    else:
        without = [] if flag.name == "enable-lora" else ["--enable-lora"]
        without += PROMPTS if flag.name.startswith("max-prompt-") else []
        assert settings("--enable-lora", *GIVEN[flag.name]) != settings(*without)


def test_factors_of_longer_contexts() -> None:
    for given in ("4.0,2", "2 4", "(2.0, 4.0)"):
        config = adapters.worker_config(values("--enable-lora", "--long-lora-scaling-factors", given))
        assert config is not None and config.long_factors == [2, 4]
    for given, text in (("x", "numbers are expected"), ("1.5", "1.5 is not a whole number"), ("1", "at least 2")):
        with pytest.raises(ConfigError, match=text):
            adapters.worker_config(values("--enable-lora", "--long-lora-scaling-factors", given))


def test_prompt_adapters() -> None:
    assert adapters.prompt_config(values()) is None
    given = values("--prompt-adapters", "p=/p", "q=org/q", "--max-prompt-adapter-token", "20")
    assert adapters.prompt_config(given) == PromptConfig(max_tokens=20)
    assert adapters.worker_config(given) is None, "it is another flag that serves LoRA adapters"
    assert adapters.sources(given) == [
        AdapterSource(name="p", path="/p", is_prompt=True),
        AdapterSource(name="q", path="org/q", is_prompt=True),
    ]
    assert adapters.notes(values("--max-prompt-adapters", "2")) == [
        "--max-prompt-adapters: nothing without --enable-prompt-adapter"
    ]
    assert not adapters.notes(values(*PROMPTS, "--lora-dir", "/x")), "it has folders of both kinds"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--enable-prompt-adapter"], "--enable-prompt-adapter: needs --max-prompt-adapter-token"),
        ([*PROMPTS, "--prompt-adapters", "a=/a", "b=/b", "--max-prompt-adapters", "1"], "2 adapters; .*is 1"),
        ([*PROMPTS, "--prompt-adapters", "a"], "--prompt-adapters: 'a' is not name=path"),
        ([*PROMPTS, "--prompt-adapters", "a="], "has no name or no path"),
        ([*PROMPTS, "--prompt-adapters", "a=/a", "--lora-modules", "a=/b"], "--prompt-adapters: 'a' is given twice"),
    ],
)
def test_wrong_prompt_adapters(flags: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        given = values(*flags)
        adapters.prompt_config(given)
        adapters.sources(given)


def test_an_adapter_of_qlora_is_served_under_its_text() -> None:
    given = values("--qlora-adapter-name-or-path", "org/q")
    assert adapters.sources(given) == [AdapterSource(name="org/q", path="org/q")]
    assert adapters.worker_config(given) == LoraConfig()
