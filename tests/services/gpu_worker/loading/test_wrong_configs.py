"""A config.json that is invalid or does not match its checkpoint: one line, before memory is allocated."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import BY_NAME, settings

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.host_link import HostLink, SameMemory
from blockyard.services.gpu_worker.loading import checkpoint
from blockyard.services.gpu_worker.loading.checkpoint_check import check_memory
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.startup.cuda_link import CudaLink
from blockyard.shared.errors import ConfigError, LoadError

NOWHERE = "/nowhere/model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    BY_NAME["llama"].save(tmp_path)
    return tmp_path


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refusal(folder: Path, **fields: Any) -> str:
    """The error of a worker that starts on the folder, before it loads weights."""
    began = time.monotonic()
    with pytest.raises((ConfigError, LoadError)) as error:
        engine.start(settings(folder, **fields), lambda phase, progress, notes: loaded(phase))
    assert "\n" not in str(error.value)
    assert time.monotonic() - began < 10
    return str(error.value)


def loaded(phase: str) -> None:
    assert phase == "reading the configuration", "memory was taken"


LIES: list[tuple[str, Any, str]] = [
    ("vocab_size", 10**9, "vocab_size is 1000000000"),
    ("vocab_size", 0, "vocab_size is 0"),
    ("hidden_size", -1, "hidden_size is -1"),
    ("hidden_size", 2**40, "hidden_size is"),
    ("intermediate_size", 0, "intermediate_size is 0"),
    ("num_hidden_layers", 10**7, "num_hidden_layers is 10000000"),
    ("num_hidden_layers", -3, "num_hidden_layers is -3"),
    ("num_attention_heads", 0, "num_attention_heads is 0"),
    ("num_attention_heads", 65, "heads"),
    ("num_key_value_heads", -2, "num_key_value_heads is -2"),
    ("head_dim", -8, "head_dim is -8"),
    ("max_position_embeddings", 0, "max_position_embeddings is 0"),
    ("max_position_embeddings", 10**12, "max_position_embeddings is 1000000000000"),
    ("max_position_embeddings", 2**30, "--max-model-len"),
    ("rms_norm_eps", -1, "rms_norm_eps is -1"),
    ("rope_parameters", {"rope_type": "yarn", "factor": 0.0}, "$.factor"),
    ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}, "$.original_max"),
    ("rope_parameters", {"rope_type": "yarn", "factor": 1e-300}, "not finite"),
    ("rope_parameters", {"rope_type": "linear", "factor": 1e-300}, "not finite"),
    ("rope_parameters", {"rope_type": "linear", "factor": -1.0}, "$.factor"),
    ("rope_parameters", {"rope_type": "default", "rope_theta": -5.0}, "$.rope_theta"),
    (
        "rope_parameters",
        {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": -10 / 1.3862943611198906},
        "rope parameters",
    ),
]


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(("name", "value", "said"), LIES, ids=[f"{n} {str(v)[:12]}" for n, v, _ in LIES])
def test_invalid_values_are_one_line(folder: Path, load_format: str, name: str, value: Any, said: str) -> None:
    if value == 2**30 and torch.cuda.is_available():
        pytest.skip("a GPU may have room for the rotations")
    change(folder, **{name: value})
    assert said in refusal(folder, load_format=load_format)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("vocab_size", 2**22, "the checkpoint has [211, 64], config.json means [4194304, 64]"),
        ("hidden_size", 128, "the checkpoint has"),
        ("intermediate_size", 97, "the checkpoint has"),
        ("num_hidden_layers", 2000, "the checkpoint lacks model.layers.10.input_layernorm.weight and"),
        ("num_hidden_layers", 2, "a weight that the model does not: model.layers.2."),
        ("num_key_value_heads", 4, "the checkpoint has"),
    ],
)
def test_values_of_another_model_are_compared_with_the_checkpoint(
    folder: Path, name: str, value: Any, said: str
) -> None:
    change(folder, **{name: value})
    assert said in refusal(folder)


def test_torch_files_bound_the_number_of_weights(folder: Path) -> None:
    weights = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    for file in folder.glob("model*"):
        file.unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    change(folder, vocab_size=2**22)
    assert "can hold" in refusal(folder)


def test_dummy_weights_must_fit_into_memory(folder: Path) -> None:
    change(folder, hidden_size=2**17, intermediate_size=2**19, num_hidden_layers=100)
    said = refusal(folder, load_format="dummy")
    assert "GiB in float32" in said and "GiB more than the " in said and "billion weights in bfloat16 would fit" in said


@pytest.mark.parametrize("free", [0.45, 0.8])
def test_what_would_fit_is_said(free: float) -> None:
    """Of 1 GiB in float32."""
    table = WeightTable(torch.float32, torch.device("meta"))
    table.layer_memory("model.layers.0.a", ((1 << 14, 1 << 14), torch.float32))
    said = {0.45: "a model of at most 0.2 billion weights in bfloat16 would fit", 0.8: "--dtype bfloat16 would fit"}

    def said_on(link: HostLink, free: float) -> str:
        with pytest.raises(LoadError, match=r"take 1\.00 GiB in float32, 0\.") as error:
            check_memory(table, 0.0, 64, 16, link, int(free * 2**30))
        return str(error.value)

    assert said[free] in said_on(SameMemory(), free)
    assert "--cpu-offload-gb 1 or more would keep enough of them in host memory" in said_on(
        CudaLink(torch.device("cuda")), free
    )


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.4.w2.weight"),
        ("qwen3-moe", "model.layers.2.mlp.experts.5.gate_proj.weight"),
        ("glm4-moe", "model.layers.1.mlp.experts.7.up_proj.weight"),
        ("deepseek-v3", "model.layers.2.mlp.experts.0.down_proj.weight"),
        ("llama4", "model.layers.1.feed_forward.experts.gate_up_proj"),
    ],
)
def test_a_missing_expert_is_named(tmp_path: Path, name: str, lost: str) -> None:
    BY_NAME[name].save(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        weights = load_file(file)
        if weights.pop(lost, None) is not None:
            save_file(weights, file, {"format": "pt"})
            break
    else:
        raise AssertionError(f"the checkpoint has no {lost}")
    assert refusal(tmp_path) == f"the checkpoint lacks {lost}"


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"weight_map": {"a": NOWHERE}}, "outside of its folder: '/nowhere"),
        ({"weight_map": {"a": "../secret.safetensors"}}, "outside of its folder"),
        ({"weight_map": {"a": "x/../../secret.safetensors"}}, "outside of its folder"),
        ({"weight_map": {"a": "circle.safetensors"}}, "lacks circle.safetensors"),
        ({"weight_map": {"a": 5}}, "outside of its folder: 5"),
        ({"weight_map": {"a": ["b"]}}, "not an index"),
        ({"weight_map": {}}, "names no shard"),
        ({"weight_map": 7}, "not an index"),
    ],
)
def test_an_index_names_files_of_its_folder(folder: Path, index: Any, said: str) -> None:
    (folder / "circle.safetensors").symlink_to("other.safetensors")
    (folder / "other.safetensors").symlink_to("circle.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert said in refusal(folder)


def test_symlink_cycles_and_nested_files(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")
    assert "not a readable file" in refusal(folder)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.symlink_to(index)
    assert "not an index" in refusal(folder)
    index.unlink()
    index.write_text("[" * 100_000)
    assert "not an index" in refusal(folder)
    (folder / "config.json").write_text("[" * 100_000)
    assert "config.json" in refusal(folder)


def test_shards_may_be_symlinks_out_of_the_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As in the hub's cache, where each file is a link to a blob."""
    blobs = tmp_path_factory.mktemp("blobs")
    for file in folder.glob("*.safetensors"):
        file.rename(blobs / file.name)
        file.symlink_to(blobs / file.name)
    assert len(checkpoint.find_files(folder, "auto", [])) > 1
    engine.start(settings(folder), lambda phase, progress, notes: None)


def test_ids_outside_the_vocabulary_end_no_sequence(folder: Path) -> None:
    change(folder, eos_token_id=[1, -1, 10**12])
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert engine.start(settings(folder), lambda phase, progress, notes: None).geometry.eos_token_ids == [1]


def test_logits_that_are_not_finite_are_found_at_the_start(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[-1]
    weights = load_file(file)
    save_file({k: torch.full_like(v, torch.nan) for k, v in weights.items()}, file, {"format": "pt"})
    with pytest.raises(LoadError, match="the model's logits are not finite in a first step") as error:
        engine.start(settings(folder), lambda phase, progress, notes: None)
    assert "\n" not in str(error.value)
