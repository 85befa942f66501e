"""The launcher refuses a --max-model-len by the length that the family itself has."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import MODELS, Tiny
from tiny_poolers import DECODERS, ENCODERS

from blockyard.services.gpu_worker.loading.hf_config import read_config
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.registry import find_family
from blockyard.shared.config.text_part import text_part
from blockyard.shared.context_length import LENGTH, UNSAID_LENGTHS, longest_sequence
from blockyard.shared.errors import ConfigError

TINY = list({tiny.architecture: tiny for tiny in (*MODELS, *ENCODERS, *DECODERS)}.values())
LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
OVERRIDES: list[dict[str, Any]] = [
    {},
    {LENGTH: 500},
    LINEAR,
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.5}},
    {"rope_scaling": YARN},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
]


def of_family(folder: Path, config: dict[str, Any], overrides: dict[str, Any]) -> int | None:
    """The length that the worker has; None: it refuses the fields."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        settings = read_config(folder, json.dumps(overrides))
        return find_family(settings)(settings, WeightTable(torch.float32, torch.device("meta"))).shape.max_positions
    except ConfigError:
        return None


@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.architecture)
def test_the_launcher_reads_what_the_family_reads(tiny: Tiny, tmp_path: Path) -> None:
    written = tiny.config_json()
    text = written.get("text_config", written)
    unsaid = {key: value for key, value in text.items() if key not in (LENGTH, "n_positions", "rope_parameters")}
    unsaid = written | {"text_config": unsaid} if text is not written else unsaid
    tested = 0
    for config in (written, unsaid):
        for overrides in OVERRIDES:
            length = of_family(tmp_path, config, overrides)
            if length is not None:
                assert longest_sequence(text_part(config), overrides) == length, overrides
                tested += 1
    assert tested >= 2


def test_overrides_replace_rotations() -> None:
    config = {"architectures": ["LlamaForCausalLM"], LENGTH: 512, "rope_scaling": YARN}
    assert longest_sequence(config, {"rope_scaling": {"type": "yarn", "factor": 3.0}}) == 1536
    assert longest_sequence(config, {"rope_scaling": None}) == 512


def test_of_a_class_of_transformers_the_length_is_not_extended() -> None:
    assert longest_sequence({"architectures": ["Unknown"], LENGTH: 256, **LINEAR}, {}) == 256
    assert longest_sequence({"architectures": ["LlamaForCausalLM"], LENGTH: 256, **LINEAR}, {}, "transformers") == 256
    assert longest_sequence({"architectures": ["Unknown"], "n_ctx": 256}, {}) is None


@pytest.mark.parametrize("wrong", [{LENGTH: "long"}, {"rope_scaling": 7}, {"rope_scaling": {"rope_type": ["yarn"]}}])
def test_a_field_of_a_wrong_type_is_left_to_the_worker(wrong: dict[str, Any]) -> None:
    assert longest_sequence({"architectures": ["Qwen3ForCausalLM"]} | wrong, {}) == UNSAID_LENGTHS["llama_style.qwen3"]
