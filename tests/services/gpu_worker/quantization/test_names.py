"""What names of a quantization_config mean."""

from typing import Any

import pytest

from blockyard.services.gpu_worker.quantization.names import NamePatterns, SettingsByPattern, is_left_out, layer_of
from blockyard.shared.errors import ConfigError

Q, GATE = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.gate"


@pytest.mark.parametrize(
    ("pattern", "name", "is_meant"),
    [
        (Q, Q, True),
        ("layers.1.self_attn.q_proj", Q, True),
        ("language_model.model.layers.1.self_attn.q_proj", Q, True),
        ("model.language_model.layers.1.self_attn.q_proj", Q, True),
        (Q, f"language_model.{Q}", True),
        ("model.layers.1", Q, True),
        ("model.layers.1", "model.layers.10.self_attn.q_proj", False),
        ("model.layers.1.", Q, True),
        ("model.layers.1.", "model.layers.10.self_attn.q_proj", False),
        ("model.layers.*.self_attn", Q, True),
        ("model.layers.*.self", Q, False),
        ("self_attn", Q, True),
        ("mlp.gate", GATE, True),
        ("mlp.gate", "model.layers.1.mlp.gate_proj", False),
        ("lm_head", "lm_head", True),
        ("model.layers.*.mlp.gate", GATE, True),
        ("*.mlp.gate", "model.layers.1.mlp.gate_proj", False),
        ("language_model.model.layers.*.mlp.gate", GATE, True),
        ("re:.*mlp[.]gate$", GATE, True),
        ("re:model[.]layers[.]1[.]", Q, True),
        ("re:layers[.]1[.]self", Q, True),
        ("re:.*self_attn$", Q, False),
        ("model.layers.1.self_attn.qkv_proj", Q, True),
        ("re:.*qkv_proj", Q, True),
        ("model.layers.1.self_attn.gate_up_proj", Q, False),
        ("vision_tower", Q, False),
    ],
)
def test_one_pattern(pattern: str, name: str, is_meant: bool) -> None:
    patterns = NamePatterns([pattern])
    assert patterns.unused() == [pattern]
    assert patterns.match(name) == is_meant
    assert patterns.unused() == ([] if is_meant else [pattern])


def test_a_fused_matrix_is_meant_if_all_of_its_parts_are() -> None:
    fused, parts = "model.layers.0.mlp.gate_up_proj", ["layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"]
    assert NamePatterns(parts).match(fused)
    assert not NamePatterns(parts[:1]).match(fused)


def test_a_wrong_expression() -> None:
    with pytest.raises(ConfigError, match=r"'re:\(' is not a regular expression"):
        NamePatterns(["re:("])


@pytest.mark.parametrize(
    ("name", "is_out"),
    [
        *(("lm_head", True), (GATE, True), ("model.embed_tokens", True), ("transformer.wte", True)),
        *((Q, False), ("model.layers.1.mlp.gate_proj", False), ("model.layers.1.mlp.shared_expert_gate", True)),
        *(("model.layers.1.block_sparse_moe.router.layer", True), ("model.layers.1.router.proj", True)),
    ],
)
def test_what_is_left_out_unsaid(name: str, is_out: bool) -> None:
    assert is_left_out(name) == is_out


def test_dynamic_rules() -> None:
    rules: dict[str, dict[str, Any]] = {
        r"-:.*\.gate$": {},
        r"+:.*layers\.1\..*q_proj.*": {"bits": 8},
        r".*down.*": {"group_size": 32},
        r".*": {"desc_act": True},
    }
    found = SettingsByPattern(rules, marks=("-:", "+:"))
    assert found.find(GATE) == (r"-:.*\.gate$", {})
    assert found.find(Q) == (r"+:.*layers\.1\..*q_proj.*", {"bits": 8})
    assert found.unused() == [r".*down.*", r".*"]
    assert found.find("model.layers.1.mlp.down_proj") == (".*down.*", {"group_size": 32})
    assert found.unused() == [".*"]
    assert SettingsByPattern({}).find(Q) is None


def test_expressions_that_match_a_part_of_a_name() -> None:
    rules = {r"layers\.1\.self": 8}
    assert SettingsByPattern(rules).find(Q) is not None  # names without their first part are names, too
    assert SettingsByPattern({r"self_attn\.q": 8}).find(Q) is None
    assert SettingsByPattern({r"self_attn\.q": 8}, anywhere=True).find(Q) == (r"self_attn\.q", 8)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        (Q, "model.layers.1"),
        ("h.10.attn.c_attn", "h.10"),
        ("bert.encoder.layer.0.output.dense", "bert.encoder.layer.0"),
        ("transformer.blocks.3.ffn.layers.0.w1", "transformer.blocks.3"),
        *((name, "") for name in ("lm_head", "layers.1", "model.layers.norm.weight", "path.0.weight")),
    ],
)
def test_the_layer_of_a_matrix(name: str, layer: str) -> None:
    assert layer_of(name) == layer
