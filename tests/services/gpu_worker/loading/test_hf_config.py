"""config.json: overrides, both forms of RoPE settings, model families, refused values."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import LLAMA, settings

from blockyard.services.gpu_worker import cores as cores_file
from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.layers.rope_parameters import read_rope
from blockyard.services.gpu_worker.layers.rotary import RotaryEmbedding, rotation_table
from blockyard.services.gpu_worker.loading.hf_config import read_config, read_eos_ids, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.registry import find_family
from blockyard.services.gpu_worker.startup.cpu import CpuBackend
from blockyard.services.gpu_worker.startup.cuda import CudaBackend
from blockyard.shared.architectures import find_architecture
from blockyard.shared.config.checkpoint import config_overrides
from blockyard.shared.config.parsed_flags import Values, from_command_line
from blockyard.shared.errors import ConfigError

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def write(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]} | LLAMA | fields))
    return folder


def build(folder: Path, overrides: str = "{}") -> Any:
    config = read_config(folder, overrides)
    return find_family(config)(config, WeightTable(torch.float32, torch.device("meta")))


def refusal(folder: Path, overrides: str = "{}", **fields: Any) -> str:
    with pytest.raises(ConfigError) as error:
        build(write(folder, **fields), overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_overrides_are_merged(tmp_path: Path) -> None:
    write(tmp_path, rope_theta=1.0, nested={"a": 1, "b": 2}, gone=3)
    config = read_config(tmp_path, '{"rope_theta": 5.0, "nested": {"b": null, "c": 4}, "gone": null}')
    assert config["rope_theta"] == 5.0
    assert config["nested"] == {"a": 1, "c": 4}
    assert "gone" not in config


@pytest.mark.parametrize(
    ("fields", "overrides"),
    [
        ({"rope_theta": 9.0, "rope_scaling": LLAMA3}, "{}"),
        ({"rope_theta": 9.0, "rope_scaling": {"type": "llama3"} | LLAMA3}, "{}"),
        ({"rope_parameters": {"rope_theta": 9.0} | LLAMA3}, "{}"),
        ({"rope_theta": 9.0, "rope_scaling": {"type": "yarn", "factor": 2}}, json.dumps({"rope_scaling": LLAMA3})),
        ({"rope_parameters": {"rope_theta": 9.0, "rope_type": "default"}}, json.dumps({"rope_scaling": LLAMA3})),
        ({"rope_parameters": {"rope_theta": 1.0} | LLAMA3}, '{"rope_theta": 9.0}'),
        ({}, json.dumps({"rope_theta": 9.0, "rope_scaling": LLAMA3})),
    ],
)
def test_rope_spellings(tmp_path: Path, fields: dict[str, Any], overrides: str) -> None:
    rope = read_rope(read_config(write(tmp_path, **fields), overrides), 256)
    assert (rope.rope_type, rope.rope_theta, rope.factor) == ("llama3", 9.0, 8.0)
    assert rope.original_max_position_embeddings == 256


@pytest.mark.parametrize(
    ("fields", "theta"),
    [
        ({}, 5e5),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 5e5),
        ({"rope_theta": None}, 5e5),
        ({"rope_theta": 9.0}, 9.0),
        ({"rope_parameters": {"rope_theta": 9.0}}, 9.0),
    ],
)
def test_a_family_has_its_own_default_theta(fields: dict[str, Any], theta: float) -> None:
    assert read_rope(with_defaults(fields, {"rope_theta": 5e5}), 256).rope_theta == theta
    assert read_rope(fields, 256).rope_theta == (theta if theta == 9.0 else 10000.0)


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 256),
        ({"rope_type": "linear", "factor": 4}, 1024),
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
        (LLAMA3, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 4.0}, 1024),
    ],
)
def test_context_length_with_rope_scaling(tmp_path: Path, scaling: dict[str, Any] | None, length: int) -> None:
    rope = read_rope(read_config(write(tmp_path, rope_scaling=scaling)), 256)
    assert RotaryEmbedding(rope, 16, 256).max_positions == length


def test_rope_flags_override_the_layers_with_full_attention(tmp_path: Path) -> None:
    kinds = {"full_attention": {"rope_theta": 9.0} | LLAMA3, "sliding_attention": {"rope_theta": 7.0}}
    notes: list[str] = []
    linear = {"rope_type": "linear", "factor": 2.0}
    patch = json.dumps({"rope_theta": 5.0, "rope_scaling": linear})
    config = read_config(write(tmp_path, rope_parameters=kinds), patch, notes.append)
    assert config["rope_parameters"]["full_attention"] == linear | {"rope_theta": 5.0}
    assert read_rope(config, 256, layer_type="full_attention").rope_theta == 5.0
    assert read_rope(config, 256, layer_type="sliding_attention").rope_theta == 7.0
    assert notes == ["rotation: --rope-theta and --rope-scaling apply to the layers with full attention"]


@pytest.mark.parametrize(
    ("rope", "angles"),
    [
        ({"partial_rotary_factor": 0.5}, [1.0, 100**-0.5, 0.0, 0.0]),
        ({"rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5}}, [1.0, 100**-0.25, 0.0, 0.0]),
        ({"rope_condense_ratio": 4}, [0.25, 100**-0.25 / 4, 100**-0.5 / 4, 100**-0.75 / 4]),
    ],
)
def test_rotations_of_a_part_of_a_head(rope: dict[str, Any], angles: list[float]) -> None:
    """Numbers that are not rotated are multiplied by 1 + 0i."""
    table = rotation_table(read_rope({"rope_theta": 100.0} | rope, 64, rotates_part=True), 8, 64, 4)
    torch.testing.assert_close(table[1], torch.polar(torch.ones(4), torch.tensor(angles)))
    assert torch.equal(table[3, 2:].imag == 0, torch.tensor([angles[2] == 0, angles[3] == 0]))


@pytest.mark.parametrize(("length", "kind"), [(64, "short_factor of longrope, as a context of 64 tokens is up to 64"),
    (65, "long_factor of longrope, as a context of 65 tokens is over 64")])  # fmt: skip
def test_the_context_length_settles_the_factors_of_longrope(length: int, kind: str) -> None:
    given = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [4.0, 8.0]}
    rope = read_rope({"rope_scaling": given, "original_max_position_embeddings": 64}, 256)
    rotary = RotaryEmbedding(rope, 4, 256)
    assert rotary.prepare(length, torch.device("cpu"), torch.float32) == [f"rotation: {kind}"]
    angles = rotary(torch.tensor([1])).angles
    assert angles is not None
    first, grown = (1.0, 2.0) if length == 64 else (4.0, 8.0)
    scale = math.sqrt(1 + math.log(4) / math.log(64))
    expected = torch.polar(torch.full((2,), scale), torch.tensor([1 / first, 0.01 / grown]))
    torch.testing.assert_close(angles[0, 0], expected)


def test_queries_grow_with_their_position() -> None:
    rope = read_rope({"rope_scaling": {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 8}}, 64)
    rotary = RotaryEmbedding(rope, 4, 64)
    rotary.prepare(32, torch.device("cpu"), torch.float32)
    scale = rotary(torch.tensor([7, 8, 31])).query_scale
    assert scale is not None
    assert scale.flatten().tolist() == pytest.approx([1.0, 1 + 0.5 * math.log(2), 1 + 0.5 * math.log(4)])


def test_the_text_part_of_a_model_with_several(tmp_path: Path) -> None:
    text = {"hidden_size": 8, "layer_types": ["full_attention"] * 4, "architectures": ["Other"], "eos_token_id": 1}
    write(tmp_path, architectures=["Whole"], eos_token_id=[1, 6], vision_config={"depth": 3}, text_config=text)
    notes: list[str] = []
    config = read_config(tmp_path, '{"num_hidden_layers": 2, "text_config": {"hidden_size": 16}}', notes.append)
    assert (config["hidden_size"], config["architectures"], config["eos_token_id"]) == (16, ["Whole"], [1, 6])
    assert config["layer_types"] == ["full_attention"] * 2
    assert notes == ["config.json: layer_types is cut to the first 2 layers"]
    assert "text_config" not in config


FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LISTS: list[tuple[str, dict[str, Any], str]] = [
    ("GptOssForCausalLM", {"layer_types": [SLIDING, FULL] * 3}, "layer_types is"),
    ("Gemma3ForCausalLM", {"layer_types": [SLIDING] * 5 + [FULL]}, "layer_types is"),
    ("Cohere2ForCausalLM", {"layer_types": [SLIDING, SLIDING, FULL] * 2}, "layer_types is"),
    (
        "Llama4ForCausalLM",
        {"layer_types": [CHUNKED, FULL] * 3, "no_rope_layers": [1, 0] * 3, "moe_layers": [1, 3, 5]},
        "layer_types, no_rope_layers are",
    ),
    ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0] * 3}, "no_rope_layers is"),
]


@pytest.mark.parametrize(("name", "lists", "cut"), LISTS, ids=[name for name, _, _ in LISTS])
def test_fewer_layers_cut_the_lists_of_layers(tmp_path: Path, name: str, lists: dict[str, Any], cut: str) -> None:
    """And families build what is left."""
    write(tmp_path, architectures=[name], num_hidden_layers=6, **lists)
    notes: list[str] = []
    config = read_config(tmp_path, '{"num_hidden_layers": 3}', notes.append)
    assert notes == [f"config.json: {cut} cut to the first 3 layers"]
    for key in lists.keys() - {"moe_layers"}:
        assert config[key] == lists[key][:3]
    if find_architecture([name]) is not None:
        assert build(tmp_path, '{"num_hidden_layers": 3}').shape.num_layers == 3
        assert build(tmp_path).shape.num_layers == 6
    notes.clear()
    given = {"num_hidden_layers": 2, **{key: value[:2] for key, value in lists.items()}}
    assert read_config(tmp_path, json.dumps(given), notes.append)["num_hidden_layers"] == 2
    assert notes == []  # the user's own lists are as they are


def test_refused_configs(tmp_path: Path) -> None:
    assert "FancyForCausalLM is not supported; the nearest that is: " in refusal(
        tmp_path, architectures=["FancyForCausalLM"]
    )
    assert "names no architecture" in refusal(tmp_path, architectures=None)
    assert "names no architecture" in refusal(tmp_path, architectures=[])
    assert "$.hidden_size" in refusal(tmp_path, hidden_size="64")
    assert "missing required field" in refusal(tmp_path, '{"vocab_size": null}')
    assert "hidden_act 'tanh' is not supported; gelu, " in refusal(tmp_path, hidden_act="tanh")
    assert "heads cannot share" in refusal(tmp_path, num_key_value_heads=3)
    assert "'mrope' is not supported" in refusal(tmp_path, rope_scaling={"type": "mrope", "factor": 2})
    assert "needs `short_factor`" in refusal(tmp_path, rope_scaling={"type": "longrope", "factor": 2})
    longrope = {"type": "su", "short_factor": [1.0], "long_factor": [2.0] * 8}
    assert "must have 8 numbers each" in refusal(tmp_path, rope_scaling=longrope)
    assert "needs `original_max" in refusal(tmp_path, rope_scaling={"llama_4_scaling_beta": 0.1})
    assert "needs `factor`" in refusal(tmp_path, rope_scaling={"type": "linear"})
    assert "low_freq_factor" in refusal(tmp_path, rope_scaling={"rope_type": "llama3", "factor": 2})
    glm = ["GlmForCausalLM"]
    few = refusal(tmp_path, architectures=glm, partial_rotary_factor=0.2)
    assert "partial_rotary_factor 0.2 rotates 25 numbers" in few
    assert "partial_rotary_factor" in refusal(tmp_path, architectures=glm, rope_scaling={"partial_rotary_factor": 1.5})
    assert "overrides" in refusal(tmp_path, "{nonsense")
    assert "layer_types" in refusal(tmp_path, architectures=["Qwen2ForCausalLM"], layer_types=["linear_attention"])
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        read_config(tmp_path / "nowhere")


def test_end_of_sequence_ids(tmp_path: Path) -> None:
    write(tmp_path)
    assert read_eos_ids(tmp_path, {"eos_token_id": 5}) == [5]
    assert read_eos_ids(tmp_path, {"eos_token_id": [5, 6]}) == [5, 6]
    assert read_eos_ids(tmp_path, {}) == []
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert read_eos_ids(tmp_path, {"eos_token_id": 5}) == [7, 8]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ConfigError, match="eos_token_id"):
        read_eos_ids(tmp_path, {})


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, (8, 8, 8)),
        ({"architectures": ["MistralForCausalLM"]}, (4096, 4096, 4096)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 3),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}, (None,) * 3),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            (None, None, 8),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 8}, (None,) * 3),
    ],
)
def test_windows(tmp_path: Path, fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    model = build(write(tmp_path, **fields))
    assert isinstance(model, Decoder)
    assert model.shape.windows == windows
    values = Values(from_command_line(["--disable-sliding-window"])[0])
    disabled = build(tmp_path, json.dumps(config_overrides(values)))
    assert disabled.shape.windows == (None,) * 3


PUBLISHED = {  # shapes of published models, without their weights
    "llama-3.1-8b": (
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192},
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "vocab_size": 128256,
        },
        8_030_261_248,
    ),
    "qwen3-0.6b": (
        {
            "architectures": ["Qwen3ForCausalLM"],
            "head_dim": 128,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rope_scaling": None,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
        596_049_920,
    ),
    "opt-125m": (
        {
            "architectures": ["OPTForCausalLM"],
            "do_layer_norm_before": True,
            "ffn_dim": 3072,
            "hidden_size": 768,
            "max_position_embeddings": 2048,
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "vocab_size": 50272,
            "word_embed_proj_dim": 768,
        },
        125_239_296,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_have_the_published_sizes(tmp_path: Path, name: str) -> None:
    fields, parameters = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    places = build(tmp_path).table.places.values()
    assert sum(math.prod(place.shape) for place in places) == parameters


def test_dtypes() -> None:
    cpu, cuda = CpuBackend(), CudaBackend(torch.device("cuda", 0))
    assert engine.pick_dtype("auto", "bfloat16", cpu) == torch.float32
    assert engine.pick_dtype("auto", "bfloat16", cuda) == torch.bfloat16
    assert engine.pick_dtype("auto", None, cuda) == torch.bfloat16
    assert engine.pick_dtype("half", "bfloat16", cpu) == torch.float16
    assert engine.pick_dtype("float", "bfloat16", cpu) == torch.float32
    with pytest.raises(ConfigError, match="int3"):
        engine.pick_dtype("auto", "int3", cuda)


def test_lengths() -> None:
    assert engine.pick_length(None, 256) == 256
    assert engine.pick_length(100, 256) == 100
    with pytest.raises(ConfigError, match="--max-model-len 300 is more than the 256"):
        engine.pick_length(300, 256)


def test_threads_leave_a_core_to_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores_file, "usable_cores", lambda: 1)
    assert cores_file.default_threads() == 1
    monkeypatch.setattr(cores_file, "usable_cores", lambda: 4)
    assert cores_file.default_threads() == 3
    assert [cores_file.default_threads(replicas) for replicas in (2, 3, 8)] == [2, 1, 1]


def test_a_missing_device(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(ConfigError, match="--device cpu"):
        engine.start(settings(write(tmp_path), device="cuda"), lambda *report: None)
