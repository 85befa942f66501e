"""adapter_config.json: what is read, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from blockyard.shared.errors import AdapterError
from blockyard.shared.lora.adapter_config import CONFIG_FILE, AdapterConfig, parse_config
from blockyard.shared.lora.adapter_folder import read_config, read_header
from blockyard.shared.lora.prompt_config import is_prompt_adapter, read_prompt_config

DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def parse(**fields: Any) -> AdapterConfig:
    given = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]} | fields
    return parse_config(json.dumps(given).encode()).config


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "peft_type"),
        ({"use_dora": True}, "use_dora"),
        ({"use_qalora": True}, "use_qalora"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"init_lora_weights": "corda"}, "init_lora_weights"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights"),
        ({"bias": "some"}, "bias"),
        ({"r": 0}, "r"),
        ({"r": "8"}, "r"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": "(q_proj"}, "(q_proj"),
        ({"rank_pattern": {"[": 2}}, "["),
        ({"target_modules": "q{99999999999}"}, "q{99999999999}"),
        ({"context_length": 0}, "context_length"),
        ({"context_length": 10**30}, "context_length"),
        ({"layers_to_transform": [10**19]}, "layers_to_transform"),
        ({"trainable_token_indices": [-1]}, "trainable_token_indices"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(AdapterError) as e:
        parse(**fields)
    assert name in str(e.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", DEEP], ids=lambda one: str(one[:9]))
def test_what_is_no_json_object(content: bytes, tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_bytes(content)
    assert not is_prompt_adapter(tmp_path)
    for read in (read_config, read_prompt_config):
        with pytest.raises(AdapterError, match="not a JSON object"):
            read(tmp_path)


def test_a_header_that_is_no_json_object(tmp_path: Path) -> None:
    (file := tmp_path / "adapter_model.safetensors").write_bytes(len(DEEP).to_bytes(8, "little") + DEEP)
    with pytest.raises(AdapterError, match="not a safetensors file"):
        read_header(file)


def test_fields_of_training_are_ignored_and_unknown_ones_are_told() -> None:
    fields = {"target_modules": ["q"], "lora_dropout": 0.1, "use_dora": False, "megatron_config": None, "new": 1}
    assert parse_config(json.dumps(fields).encode()).notes == ["adapter_config.json: new: not known, and not read"]


def test_ranks_and_scales() -> None:
    config = parse(rank_pattern={"k_proj": 2}, alpha_pattern={r"layers\.1\.self_attn\.q_proj": 4})
    assert (config.rank_of("model.layers.0.self_attn.k_proj"), config.rank_of("a.v_proj")) == (2, 8)
    assert config.scale_of("model.layers.0.self_attn.q_proj") == 2.0
    assert config.scale_of("model.layers.1.self_attn.q_proj") == 0.5
    assert config.scale_of("model.layers.0.self_attn.k_proj") == 8.0
    assert parse(r=16, use_rslora=True).scale_of("q_proj") == 4.0


@pytest.mark.parametrize(
    ("fields", "hits", "misses"),
    [
        ({"target_modules": ["q_proj"]}, ["q_proj", "a.q_proj"], ["aq_proj", "q_proj.a"]),
        ({"target_modules": r"a\.\d"}, ["a.1"], ["a.1.b", "b.a.1"]),
        ({"target_modules": "all-linear"}, ["a.q_proj", "a.router"], ["lm_head"]),
        ({"target_modules": ["p"], "exclude_modules": ["b.p"]}, ["a.p"], ["b.p", "c.b.p"]),
        ({"target_modules": ["p"], "exclude_modules": r"b.*"}, ["a.p"], ["b.p"]),
        (
            {"target_modules": ["p"], "layers_to_transform": [1]},
            ["m.h.1.p", "m.h.1.e.0.p"],
            ["m.h.0.p", "m.h.0.e.1.p"],
        ),
        ({"target_modules": ["p"], "layers_to_transform": 1, "layers_pattern": "h"}, ["m.h.1.p"], ["m.l.1.p"]),
        ({"target_modules": ["m.h.0.p"], "layers_to_transform": 1}, ["m.h.0.p"], ["m.h.1.p"]),
    ],
)
def test_targets(fields: dict[str, Any], hits: list[str], misses: list[str]) -> None:
    config = parse(**fields)
    assert all(config.targets(name) for name in hits)
    assert not any(config.targets(name) for name in misses)
