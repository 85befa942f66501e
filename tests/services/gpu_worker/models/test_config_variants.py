"""Spellings of config.json and of checkpoints: logits as transformers reads the same folder, or one line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_logits import all_logits
from safetensors.torch import load_file, save_file
from tiny_models import BY_NAME, VOCAB, Tiny, settings, start

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.errors import ConfigError, LoadError

LEFT_OUT = object()
PLAIN = {"rope_type": "default", "rope_theta": 5000.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS = {"full_attention": PLAIN, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}
NO_FACTOR = {"rope_type": "yarn", "original_max_position_embeddings": 64}


def write(folder: Path, name: str, fields: dict[str, Any]) -> Tiny:
    """Writes a checkpoint with the shapes of a config.json, and the config.json as it is here."""
    tiny = BY_NAME[name]
    given = ({"rope_parameters": PLAIN} if tiny.rope else {}) | tiny.fields | fields
    given = {key: value for key, value in given.items() if value is not LEFT_OUT}
    replace(tiny, fields=given, rope=None, rewrite={}).save(folder)
    said = given | {"architectures": [tiny.model.__name__], "model_type": tiny.config.model_type}
    (folder / "config.json").write_text(json.dumps(said))
    return tiny


def assert_same(tiny: Tiny, folder: Path, **options: Any) -> Runner:
    """Asserts that logits are those of transformers, which reads the folder, too."""
    eager: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = tiny.model.from_pretrained(folder, dtype=torch.float32, **eager).eval()
    ids = np.random.default_rng(4).integers(2, VOCAB, 60).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    runner = start(folder, max_model_len=128, **options)
    assert float((all_logits(runner, ids, [60]) - expected).abs().max()) <= 1e-3 * float(expected.std())
    return runner


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_scaling": LINEAR}),  # beside rope_parameters, whose theta it does not take
    ("llama", {"rope_scaling": YARN, "rope_theta": 300.0}),
    ("llama", {"rope_scaling": YARN | {"rope_theta": 700.0}}),
    ("llama", {"rope_scaling": {}}),
    ("llama", {"rope_scaling": None, "rope_theta": 300.0}),
    ("llama", {"rope_parameters": {"rope_type": "default"}, "rope_theta": 300.0}),
    ("llama", {"rope_parameters": None, "rope_theta": 300, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("llama", {"rope_parameters": {"type": "linear", "factor": 4.0} | PLAIN}),
    ("llama", {"rope_parameters": YARN | {"rope_theta": 300.0}, "original_max_position_embeddings": 32}),
    ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 300.0}, "original_max_position_embeddings": 32}),
    ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 300.0}}),
    ("llama", {"rope_parameters": NO_FACTOR | {"rope_theta": 300.0, "factor": None}}),
    ("llama", {"rope_parameters": YARN | {"rope_theta": 300.0, "truncate": None, "beta_fast": None}}),
    ("llama", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}),  # which it ignores
    ("llama", {"partial_rotary_factor": 0.5, "rotary_pct": 0.5, "rotary_emb_base": 7}),
    ("llama", {"head_dim": None, "num_key_value_heads": None, "hidden_act": LEFT_OUT}),
    ("mixtral", {"rope_parameters": LEFT_OUT, "rms_norm_eps": LEFT_OUT}),
    ("mixtral", {"rope_parameters": None, "rope_scaling": LINEAR}),
    ("mixtral", {"num_local_experts": 4, "num_experts": 6}),
    ("gpt-oss", {"rope_parameters": LEFT_OUT}),
    ("gpt-oss", {"rope_parameters": LEFT_OUT, "rope_theta": 300.0}),
    ("gpt-oss", {"rope_parameters": {}}),
    ("gpt-oss", {"rope_parameters": LEFT_OUT, "rope_scaling": LINEAR}),
    ("deepseek-v3", {"routed_scaling_factor": LEFT_OUT, "rope_interleave": None}),
    ("deepseek-v3", {"norm_topk_prob": None, "n_shared_experts": LEFT_OUT, "q_lora_rank": LEFT_OUT}),
    ("deepseek-v3", {"n_routed_experts": 16, "num_local_experts": 8}),
    ("deepseek-v2", {"norm_topk_prob": None, "n_shared_experts": LEFT_OUT, "q_lora_rank": LEFT_OUT}),
    ("glm4-moe", {"n_routed_experts": 16, "num_local_experts": 8, "rope_parameters": LEFT_OUT}),
    ("glm", {"rope_parameters": {"rope_theta": 300.0}}),
    ("glm", {"partial_rotary_factor": 0.25}),
    ("minimax-m2", {"rotary_dim": 8, "rope_parameters": LEFT_OUT}),
    ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 2}),
    ("qwen3-moe", {"num_experts": 4, "num_local_experts": 8, "mlp_only_layers": None, "head_dim": LEFT_OUT}),
    ("qwen2-moe", {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 3}),
    ("qwen2-moe", {"use_sliding_window": True, "sliding_window": 17, "layer_types": ["sliding_attention"] * 4}),
    ("qwen2-moe", {"mlp_only_layers": None}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 2, "head_dim": LEFT_OUT}),
    ("smollm3", {"sliding_window": 17, "layer_types": ["sliding_attention"] * 3}),
    ("smollm3", {"sliding_window": 17, "use_sliding_window": True}),
    ("smollm3", {"sliding_window": 17}),
    ("phi3-long", {"original_max_position_embeddings": LEFT_OUT}),
    ("gpt-neox", {"rope_parameters": None, "rotary_emb_base": 300, "rotary_pct": 0.5}),
    ("gpt-neox", {"rope_parameters": None, "rope_theta": 300.0, "partial_rotary_factor": 0.5}),  # which it ignores
    ("gpt2", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}),
    ("gemma", {"hidden_act": "gelu", "hidden_activation": "relu"}),
    ("gemma", {"hidden_act": "relu"}),
    ("gemma3", {"rope_parameters": LEFT_OUT, "layer_types": None}),
    ("gemma3", {"rope_parameters": KINDS, "rope_scaling": LINEAR}),
    ("gemma3", {"rope_parameters": {"full_attention": None, "sliding_attention": PLAIN}, "rope_theta": 300.0}),
    ("olmo3", {"rope_parameters": LEFT_OUT, "rope_scaling": YARN, "rope_theta": 300.0}),
    ("falcon-7b-like", {"alibi": None, "bias": None, "multi_query": None, "num_kv_heads": None}),
    ("cohere", {"use_qk_norm": None, "rope_parameters": LEFT_OUT}),
]


LLAMA4_YARN = YARN | {"factor": 8.0, "rope_theta": 5000.0}
VARIANTS += [
    # a norm of q and k behind the rotation
    ("llama4", {"use_qk_norm": True, "rms_norm_eps": 0.01}),
    ("llama4", {"use_qk_norm": True, "rms_norm_eps": 1e-5, "rope_parameters": LLAMA4_YARN}),
    ("llama4", {"use_qk_norm": True, "rms_norm_eps": 0.01, "rope_parameters": LLAMA4_YARN}),
    ("llama4", {"use_qk_norm": True, "rms_norm_eps": 0.1, "rope_parameters": LLAMA4_YARN | {"attention_factor": 0.3}}),
    ("llama4", {"use_qk_norm": False, "rms_norm_eps": 0.01, "rope_parameters": LLAMA4_YARN}),
]


@pytest.mark.parametrize(("name", "fields"), VARIANTS)
def test_spellings(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    assert_same(write(tmp_path, name, fields), tmp_path)


@pytest.mark.parametrize("name", ["llama4-sees", "mistral3", "gemma3-sees", "gemma4-sees"])
def test_sizes_beside_a_text_part_are_not_its_own(name: str, tmp_path: Path) -> None:
    beside = {"rope_scaling": LINEAR, "rope_theta": 300.0, "sliding_window": 5, "rope_condense_ratio": 2}
    assert_same(write(tmp_path, name, beside | {"rms_norm_eps": 0.5, "final_logit_softcapping": 2.0}), tmp_path)


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("llama", {"rope_parameters": NO_FACTOR}, "rope type 'yarn' needs `factor`"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope type 'linear' needs `factor`"),
        ("llama", {"rope_parameters": KINDS}, "objects of kinds of layers, which this family lacks"),
        ("gemma3", {"rope_parameters": PLAIN}, "rope_parameters needs an object for each kind of layer"),
        (
            "olmo3",
            {"rope_parameters": LEFT_OUT, "rope_scaling": {"type": "linear", "factor": 4.0}},
            "rope_scaling needs `rope_type`",
        ),
        ("gemma4", {"head_dim": None}, "head_dim is null"),
    ],
)
def test_spellings_that_are_refused(name: str, fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    """transformers ends with a traceback, or computes something else without a word."""
    write(tmp_path, name, {})
    config = json.loads((tmp_path / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not LEFT_OUT}))
    with pytest.raises(ConfigError, match=said) as error:
        start(tmp_path)
    assert "\n" not in str(error.value)


def test_flags_override_both_spellings(tmp_path: Path) -> None:
    tiny = write(tmp_path, "llama", {"rope_scaling": LINEAR})
    flags = json.dumps({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 700.0})
    runner = start(tmp_path, config_overrides=flags)
    write(tmp_path, "llama", {"rope_parameters": LEFT_OUT, "rope_scaling": LINEAR | {"factor": 2.0}, "rope_theta": 700})
    ids = list(range(2, 40))
    expected = all_logits(assert_same(tiny, tmp_path), ids, [38])
    torch.testing.assert_close(all_logits(runner, ids, [38]), expected)


def rewrite(folder: Path, **changed: torch.Tensor | None) -> None:
    """Changes tensors of the checkpoint; None: removes. Names have two underscores for a dot."""
    tensors = {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        file.unlink()
    tensors |= {name.replace("__", "."): value for name, value in changed.items()}
    tensors = {name: value.contiguous() for name, value in tensors.items() if value is not None}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


EMBEDDINGS = {
    "qwen2": "model__embed_tokens__weight",
    "llama": "model__embed_tokens__weight",
    "gemma2": "model__embed_tokens__weight",
    "cohere": "model__embed_tokens__weight",
    "starcoder2": "model__embed_tokens__weight",
    "falcon-7b-like": "transformer__word_embeddings__weight",
    "gpt2": "transformer__wte__weight",
    "opt": "model__decoder__embed_tokens__weight",
}


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_tied_embeddings_beside_an_own_head(name: str, tmp_path: Path) -> None:
    """Another head than the embedding is used, an equal one is not, and a head alone is the embedding."""
    tiny = write(tmp_path, name, {"tie_word_embeddings": True})
    notes: list[str] = []
    for head in ("own", "equal", "alone"):
        embedding = start(tmp_path).model.table.places[EMBEDDINGS[name].replace("__", ".")].target.clone()
        own = torch.randn_like(embedding) if head == "own" else embedding
        rewrite(tmp_path, **{"lm_head__weight": own} | ({EMBEDDINGS[name]: None} if head == "alone" else {}))
        assert_same(tiny, tmp_path)
        engine.start(settings(tmp_path), lambda phase, progress, lines: notes.extend(lines))
        is_own = "lm_head.weight: the checkpoint's own, although tie_word_embeddings is true" in notes
        assert is_own == (head == "own")
        assert ("not used: 1 tensor of lm_head.weight" in notes) == (head == "equal")
        notes.clear()


@pytest.mark.parametrize("name", ["llama4-sees", "mistral3", "gemma3-sees", "gemma4-sees"])
@pytest.mark.parametrize(("whole", "text"), [(True, False), (False, True)])
def test_a_missing_head_where_two_flags_disagree(name: str, whole: bool, text: bool, tmp_path: Path) -> None:
    """Llama 4 has its head within the text part, where that part's flag holds; the others have it beside the part."""
    fields = BY_NAME[name].fields["text_config"] | {"tie_word_embeddings": text}
    tiny = write(tmp_path, name, {"tie_word_embeddings": whole, "text_config": fields})
    heads = {"lm_head__weight": None, "language_model__lm_head__weight": None}
    rewrite(tmp_path, **heads)
    if text if name == "llama4-sees" else whole:
        assert_same(tiny, tmp_path)
    else:
        with pytest.raises(LoadError, match=r"^the checkpoint lacks lm_head\.weight$"):
            start(tmp_path)


@pytest.mark.parametrize("flag", [False, LEFT_OUT])
def test_a_missing_head_of_an_untied_model_is_named(flag: Any, tmp_path: Path) -> None:
    write(tmp_path, "llama", {"tie_word_embeddings": flag})
    rewrite(tmp_path, lm_head__weight=None)
    with pytest.raises(LoadError, match=r"^the checkpoint lacks lm_head\.weight$"):
        start(tmp_path)


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("llama", ["model.layers.0.self_attn.rotary_emb." + n for n in ("inv_freq", "cos_cached", "sin_cached")]),
        ("qwen2", ["model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"]),
        ("gemma3", ["model.rotary_emb_local.inv_freq", "model.rotary_emb.full_attention_inv_freq"]),
        ("phi3-long", ["model.layers.0.self_attn.rotary_emb.long_inv_freq"]),
        ("mistral", ["model.position_ids", "model.causal_mask"]),
        ("falcon-7b-like", ["transformer.h.0.self_attention.maybe_rotary.inv_freq"]),
        ("gpt2", ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"]),
        ("gpt-neox", ["gpt_neox.layers.0.attention." + n for n in ("bias", "masked_bias", "rotary_emb.inv_freq")]),
        ("deepseek-v3", ["model.layers.1.self_attn.rotary_emb.cos_cached"]),
    ],
)
def test_stored_tables_are_not_used(name: str, tables: list[str], tmp_path: Path) -> None:
    tiny = write(tmp_path, name, {})
    rewrite(tmp_path, **{table.replace(".", "__"): torch.ones(4) for table in tables})
    assert_same(tiny, tmp_path)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('"time_step_limit": [0.0, Infinity]', [0.0, float("inf")]),
        ('"time_step_limit": [-Infinity, 1]', [float("-inf"), 1]),
        ('"time_step_limit": {"__float__": "Infinity"}', float("inf")),
    ],
)
def test_numbers_that_json_lacks(written: str, read: object, tmp_path: Path) -> None:
    tiny = write(tmp_path, "llama", {})
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("{", "{" + written + ", ", 1))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1, "x": NaN}')
    assert_same(tiny, tmp_path)
    assert engine.read_config(tmp_path)["time_step_limit"] == read
