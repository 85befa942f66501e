"""The keywords of LLM are the flags of the command line, checked by the same code."""

from pathlib import Path
from typing import Any

import pytest
import torch

from blockyard.services.offline.engine_args import SERVER_ONLY, read
from blockyard.shared.config import parsed_flags
from blockyard.shared.config.flags import FLAGS
from blockyard.shared.config.worker_fields import graph_fields
from blockyard.shared.errors import ConfigError


def test_every_flag_is_a_keyword_unless_it_is_the_servers() -> None:
    assert FLAGS.keys() >= SERVER_ONLY
    for flag in FLAGS.values():
        name = flag.name.replace("-", "_")
        if flag.name in SERVER_ONLY:
            with pytest.raises(ConfigError, match="is for `blockyard serve`"):
                read("m", {name: flag.default}, {})
        elif flag.name not in ("model", "config"):
            values, _ = read("m", {name: flag.default}, {})
            assert values[flag.name] == flag.default


def test_values_have_pythons_types() -> None:
    arguments: dict[str, Any] = {
        "max_num_seqs": 8,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": True,
        "hf_overrides": {"rope_theta": 1},
        "ignore_patterns": ["*.bin"],
        "download_dir": Path("/models"),
    }
    values, notes = read(Path("/a/model"), arguments, {})
    assert [values[name.replace("_", "-")] for name in arguments] == [
        8,
        0.5,
        True,
        {"rope_theta": 1},
        ["*.bin"],
        "/models",
    ]
    assert values["model"] == "/a/model" and isinstance(notes, list)


def test_forms_of_values_that_scripts_pass() -> None:
    values, _ = read("m", {"dtype": torch.bfloat16, "compilation_config": {"level": 3}, "max_model_len": "4k"}, {})
    assert (values["dtype"], values["compilation-config"]) == ("bfloat16", '{"level":3}')
    assert graph_fields(values)["fused_steps"] and values["max-model-len"] == 4000
    assert read("m", {"compilation_config": 3, "max_model_len": -1}, {})[0]["max-model-len"] == "auto"
    with pytest.raises(ConfigError, match="LLM: dtype: expected a text"):
        read("m", {"dtype": {"a": 1}}, {})


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("num_speculative_tokens", 4, ["--num-speculative-tokens", "4"]),
        ("dtype", "float8", ["--dtype", "float8"]),
        ("block_size", -5, ["--block-size=-5"]),
        ("speculative_model", "x", ["--speculative-model", "x"]),
    ],
)
def test_errors_are_those_of_the_command_line(name: str, value: object, flag: list[str]) -> None:
    with pytest.raises(ConfigError) as ours:
        read("m", {name: value}, {})
    with pytest.raises(ConfigError) as theirs:
        parsed_flags.Values(parsed_flags.from_command_line(flag)[0])
    words = str(theirs.value).removeprefix(flag[0].partition("=")[0])
    assert str(ours.value) == f"LLM: {name}{words}"


def test_an_unknown_keyword_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LLM: max_num_seq: no such flag; did you mean max_num_seqs\?"):
        read("m", {"max_num_seq": 4}, {})


def test_arguments_then_environment_then_file(tmp_path: Path) -> None:
    file = tmp_path / "ring.yaml"
    file.write_text("max-num-seqs: 1\nblock-size: 32\ndetokenizers: 3\nport: 9000\n")
    environ = {"BLOCKYARD_MAX_NUM_SEQS": "2", "BLOCKYARD_BLOCK_SIZE": "16", "BLOCKYARD_API_KEY": "k"}
    values, _ = read("m", {"config": str(file), "max_num_seqs": 3}, environ)
    assert [values[n] for n in ("max-num-seqs", "block-size", "detokenizers")] == [3, 16, 3]
    assert not values.is_given("port") and not values.is_given("api-key"), "said to serve, not to us"


def test_a_mock_needs_no_model() -> None:
    assert read(None, {"worker_cls": "mock"}, {})[0]["model"] == "demo"
    assert read("other", {"worker_cls": "mock"}, {})[0]["model"] == "other"
    assert read(None, {}, {})[0]["model"] == FLAGS["model"].default


def test_notes_of_the_command_line_are_printed_here() -> None:
    _, notes = read("m", {"num_scheduler_steps": 4, "swap_space": 0.5, "preemption_mode": "recompute"}, {})
    assert [note.partition(":")[0] for note in notes] == ["LLM", "LLM"]
    assert "N above 1 is --run-ahead N-1" in notes[0] and "no host memory is taken" in notes[1]
