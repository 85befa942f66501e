"""Fields that config.json leaves out have the defaults of the family's class in the installed transformers.

Each field of the class is added, with the value that the class gives it, to a config.json of sizes alone: the model
that a family builds may not change. So computed defaults are compared, too.
"""

import enum
import functools
import json
from typing import Any

import msgspec
import pytest
import torch
import transformers
from tiny_models import VOCAB

from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.registry import find_family
from blockyard.shared.architectures import ARCHITECTURES
from blockyard.shared.config.text_part import text_part
from blockyard.shared.errors import ConfigError

# number of heads: all families' default numbers of K/V heads divide it
SIZES = {"vocab_size": VOCAB, "hidden_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 64}
SIZES |= {"intermediate_size": 96}
OTHER_CLASSES = {"AquilaForCausalLM": "LlamaForCausalLM", "LLaMAForCausalLM": "LlamaForCausalLM"}
OTHER_SIZES: dict[str, dict[str, Any]] = {
    "FalconForCausalLM": {"new_decoder_architecture": False},
    "Gemma4ForCausalLM": {"hidden_size_per_layer_input": 0},  # the default is refused
    "Gemma4ForConditionalGeneration": {"hidden_size_per_layer_input": 0},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},  # has no default
    "GPT2LMHeadModel": {"vocab_size": VOCAB, "n_embd": 1024, "n_layer": 5, "n_head": 64},
    "Mistral3ForConditionalGeneration": {"tie_word_embeddings": True},  # of the whole model
    "MiniMaxM2ForCausalLM": {"num_hidden_layers": 2},  # for speed: has many experts, and equal layers
    "GptOssForCausalLM": {"num_hidden_layers": 2},  # layers in turn
    "DeepseekV3ForCausalLM": {"num_hidden_layers": 4},  # three of them dense
    "Glm4MoeForCausalLM": {"num_hidden_layers": 2},  # one of them dense
    "OPTForCausalLM": {"ffn_dim": 96},
    "Qwen3MoeForCausalLM": {"num_hidden_layers": 2},
}
# with these the computed defaults of other fields differ
SWITCHES: list[tuple[str, dict[str, Any]]] = [
    ("Cohere2ForCausalLM", {"sliding_window_pattern": 2}),
    ("DeepseekV3ForCausalLM", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    ("Gemma3ForCausalLM", {"sliding_window_pattern": 2}),
    ("Gemma3ForCausalLM", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 500.0}),
    ("GptOssForCausalLM", {"rope_theta": 500.0}),
    ("Llama4ForCausalLM", {"interleave_moe_layer_step": 2, "no_rope_layer_interval": 2}),
    ("MiniMaxM2ForCausalLM", {"rotary_dim": 64}),
    ("Olmo3ForCausalLM", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}, "rope_theta": 500.0}),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 3}),
    ("Qwen2MoeForCausalLM", {"use_sliding_window": True, "max_window_layers": 3}),
    ("Qwen3ForCausalLM", {"use_sliding_window": True, "max_window_layers": 3}),
    ("Qwen3MoeForCausalLM", {"use_sliding_window": True, "max_window_layers": 3}),
    ("SmolLM3ForCausalLM", {"use_sliding_window": True, "sliding_window": 9}),
]
OF_ALL_CLASSES = set(json.loads(transformers.PretrainedConfig().to_json_string(use_diff=False))) | {
    "attention_dropout", "bos_token_id", "eos_token_id", "initializer_range", "pad_token_id", "use_cache",
}  # fmt: skip
REQUIRED = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
REQUIRED |= {"n_embd", "n_layer", "n_head", "ffn_dim"}

MANY = 32  # of a longer list, that of experts, which are built alike, the first and the last are compared
ATOMS = {type(None), str, bool, int, float, complex, torch.dtype, torch.device}
IN_TRANSFORMERS = [name for name in ARCHITECTURES if not name.endswith("RewardModel")]  # those are remote code


@functools.cache
def hf_class(name: str) -> Any:
    """The class of the configuration, of a model with several parts that of its text part."""
    whole = getattr(transformers, OTHER_CLASSES.get(name, name)).config_class
    return type(whole().get_text_config()) if hasattr(whole(), "text_config") else whole


def sizes(name: str) -> dict[str, Any]:
    own = OTHER_SIZES.get(name, {})
    return own if "n_embd" in own else SIZES | own


def spelled_out(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a class as transformers writes them, without those that all classes have."""
    found = json.loads(hf_class(name)(**fields).to_json_string(use_diff=False))
    return {key: value for key, value in found.items() if key not in OF_ALL_CLASSES}


def build(name: str, fields: dict[str, Any]) -> Any:
    config = fields | {"architectures": [name], "model_type": hf_class(name).model_type}
    return find_family(config)(config, WeightTable(torch.float32, torch.device("meta")))


def contents(thing: object) -> list[object]:
    """All values that an object of a model holds, without its weights' places."""
    found: list[object] = []
    collect(thing, found, ())
    return found


def collect(thing: object, found: list[object], above: tuple[int, ...]) -> None:
    if type(thing) in ATOMS or isinstance(thing, enum.Enum):
        found.append(thing)
        return
    if isinstance(thing, torch.Tensor):
        found.append((tuple(thing.shape), thing.dtype))
        return
    if isinstance(thing, WeightTable):
        found += [(place, at.shape) for place, at in sorted(thing.places.items())]
        return
    found.append(type(thing).__name__)
    if id(thing) in above or isinstance(thing, LinearLayers):
        return
    parts: Any = ()
    if isinstance(thing, dict):
        parts = [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple):
        parts = thing if len(thing) <= MANY else [*thing[:2], *thing[-2:], len(thing)]
    elif isinstance(thing, msgspec.Struct):
        parts = [getattr(thing, field) for field in thing.__struct_fields__]
    elif type(thing).__module__.startswith("blockyard."):
        parts = [*getattr(thing, "__dict__", {}).values(), *(getattr(thing, slot, None) for slot in slots(type(thing)))]
    above = (*above, id(thing))
    for part in parts:
        if type(part) in ATOMS:
            found.append(part)
        else:
            collect(part, found, above)


@functools.cache
def slots(kind: type) -> list[str]:
    return [slot for base in kind.__mro__ for slot in getattr(base, "__slots__", ())]


def changing(name: str, fields: dict[str, Any]) -> list[str]:
    """Fields that change the model if they are spelled out."""
    expected = contents(build(name, fields))
    return [
        f"{field}: {value}"
        for field, value in spelled_out(name, fields).items()
        if field not in fields and contents(build(name, fields | {field: value})) != expected
    ]


def test_a_field_that_differs_is_found() -> None:
    fields = sizes("LlamaForCausalLM")
    models = [build("LlamaForCausalLM", fields | more) for more in ({}, {"rms_norm_eps": 1e-3}, {"rope_theta": 7.0})]
    assert len({tuple(map(str, contents(model))) for model in models}) == 3


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_defaults_are_those_of_transformers(name: str) -> None:
    assert changing(name, sizes(name)) == []


@pytest.mark.parametrize(("name", "fields"), SWITCHES)
def test_computed_defaults_are_those_of_transformers(name: str, fields: dict[str, Any]) -> None:
    assert changing(name, sizes(name) | fields) == []


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_sizes_are_required_or_those_of_transformers(name: str) -> None:
    """Without any field: one line names a missing size, or all sizes are those of the class."""
    given = {"hidden_size_per_layer_input": 0, "num_experts_per_tok": 6}
    given = {key: value for key, value in given.items() if key in OTHER_SIZES.get(name, {})}
    try:
        expected = contents(build(name, given))
    except ConfigError as e:
        assert any(f"missing required field `{field}`" in str(e) for field in REQUIRED)
        return
    defaults = spelled_out(name, given)
    changed = [
        field
        for field in REQUIRED & defaults.keys()
        if contents(build(name, given | {field: defaults[field]})) != expected
    ]
    assert changed == []


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_null_is_what_transformers_makes_of_it(name: str) -> None:
    """Where the class takes null for a field, the model is that of the fields that it then spells out, or refused."""
    given, wrong = sizes(name), []
    for field in spelled_out(name, given).keys() - given.keys():
        try:
            expected = spelled_out(name, given | {field: None})
        except Exception:  # noqa: BLE001, classes raise errors of many kinds
            continue
        try:
            found = contents(build(name, given | {field: None}))
        except ConfigError:
            continue
        try:
            same = found == contents(build(name, given | expected))
        except ConfigError:
            same = False
        if not same:
            wrong.append(field)
    assert wrong == []


def test_a_text_part_that_leaves_out_its_kind() -> None:
    config = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"]}
    text = text_part(config | {"text_config": SIZES | {"head_dim": 16}})
    model = find_family(text)(text, WeightTable(torch.float32, torch.device("meta")))
    assert "lm_head.weight" not in model.table.places  # tied, the default of the whole model
    assert model.shape.attention[0].kv_heads == 8
