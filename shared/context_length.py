"""How many tokens config.json lets a sequence have: what the launcher holds --max-model-len against.

A family has its length from its own fields. The launcher may not import families, so it reads these few here.
"""

from collections.abc import Mapping
from typing import Any

from blockyard.shared.architectures import find_architecture
from blockyard.shared.json_objects import merge_patch

LENGTH, TRAINED, CONDENSED = "max_position_embeddings", "original_max_position_embeddings", "rope_condense_ratio"
GPT2, ROBERTA = "layer_norm.gpt2", "encoders.roberta"
UNSAID_LENGTHS = {  # by module of the family, for a config.json without a length
    "encoders.bert": 512,
    "encoders.modernbert": 8192,
    ROBERTA: 512,
    "gemma.gemma": 8192,
    "gemma.gemma2": 8192,
    "gemma.gemma3": 131072,
    "gemma.gemma4": 131072,
    "layer_norm.cohere": 8192,
    "layer_norm.cohere2": 8192,
    GPT2: 1024,
    "layer_norm.starcoder2": 4096,
    "llama_style.arcee": 4096,
    "llama_style.glm": 131072,
    "llama_style.glm4": 131072,
    "llama_style.ministral3": 262144,
    "llama_style.mistral": 131072,
    "llama_style.phi3": 4096,
    "llama_style.qwen2": 32768,
    "llama_style.qwen3": 32768,
    "llama_style.seed_oss": 524288,
    "llama_style.smollm3": 32768,
    "moe.deepseek_v3": 4096,
    "moe.glm4_moe": 131072,
    "moe.glm4_moe_lite": 202752,
    "moe.gpt_oss": 131072,
    "moe.llama4": 131072,
    "moe.minimax_m2": 196608,
    "moe.mixtral": 131072,
    "moe.olmoe": 4096,
    "moe.qwen2_moe": 32768,
    "moe.qwen3_moe": 32768,
}
USUAL_LENGTH = 2048
# whose positions are no rotations, or whose length counts their scaling already
NOT_EXTENDED = ("encoders.", "gemma.gemma3", "gemma.gemma4", GPT2, "layer_norm.opt")
EXTENDED_UNSAID = ("llama_style.ministral3", "moe.gpt_oss")  # whose unsaid rotations are scaled to the unsaid length
ROPE = ("rope_scaling", "rope_parameters")  # the first overrides the other


def longest_sequence(config: Mapping[str, Any], overrides: Mapping[str, Any], model_impl: str = "auto") -> int | None:
    """Returns the most tokens of a sequence, at least what the family allows. None: its class in transformers says it.

    config: of the text part. overrides: merged over it. A field of a wrong type counts as unsaid: the worker names it.
    """
    # overrides replace these: types of rotations have different keys
    kept = {key: value for key, value in config.items() if key not in ROPE or not isinstance(overrides.get(key), dict)}
    merged = merge_patch(kept, overrides)
    family = _family(merged)
    if family is None or model_impl == "transformers":
        return _number(merged, LENGTH)
    unsaid = UNSAID_LENGTHS.get(family, USUAL_LENGTH)
    length = _number(merged, LENGTH) or (_number(merged, "n_positions") if family == GPT2 else None) or unsaid
    if family == ROBERTA:  # positions begin behind that of padding
        padding = _number(merged, "pad_token_id")
        return length - 1 - (1 if padding is None else padding)
    if family.startswith(NOT_EXTENDED):
        return length
    rope = next((merged[key] for key in ROPE if merged.get(key)), None)
    if rope is None and family in EXTENDED_UNSAID:
        return max(length, unsaid)
    if isinstance(rope, dict) and any(isinstance(value, dict) for value in rope.values()):  # by kinds of layers
        rope = rope.get("full_attention")
    rope = rope if isinstance(rope, dict) else {}
    kind, factor = rope.get("rope_type") or rope.get("type") or "default", rope.get("factor")
    if kind == "default" and merged.get(CONDENSED) is not None:
        kind, factor = "linear", merged[CONDENSED]
    trained = _number(merged, TRAINED) or _number(rope, TRAINED) or length
    return extended_length(kind, factor if isinstance(factor, int | float) else None, trained, length)


def too_long(flag: str, asked: int, most: int) -> str:
    """Returns the refusal of a --max-model-len."""
    return (
        f"{flag} {asked} is more than the {most} tokens config.json allows; --hf-overrides or --rope-scaling can "
        "extend that"
    )


def extended_length(kind: str, factor: float | None, trained: int | None, length: int) -> int:
    """Returns the length that scaled rotations support.

    kind: `rope_type`. trained: `original_max_position_embeddings`. length: that of config.json.
    """
    if factor is None or kind not in ("linear", "dynamic", "yarn"):
        return length
    if kind == "yarn" and trained is not None:
        return max(length, int(trained * factor))
    return int(length * factor)


def _family(config: Mapping[str, Any]) -> str | None:
    """Returns the module of the family that runs the model."""
    names = config.get("architectures")
    found = find_architecture(names) if isinstance(names, list) else None
    if found is None or found.module != "llama_style.mistral3":
        return None if found is None else found.module
    return "llama_style.ministral3" if config.get("model_type") == "ministral3" else "llama_style.mistral"


def _number(fields: Mapping[str, Any], key: str) -> int | None:
    value = fields.get(key)
    return value if isinstance(value, int) else None
