"""GGUF files, written and judged by the package gguf."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from model_logits import all_logits
from quantized_checkpoint import IDS, Checkpoints, Sample
from safetensors.torch import load_file, save_file
from tiny_models import BY_NAME, start
from torch import Tensor

from blockyard.services.gpu_worker.loading.tensor_headers import TensorHeader, TensorHeaders
from blockyard.services.gpu_worker.quantization.formats.gguf import GgufScheme
from blockyard.services.gpu_worker.quantization.formats.layouts.ggml_blocks import TYPES
from blockyard.services.gpu_worker.quantization.kept.w4a16 import W4A16
from blockyard.services.gpu_worker.quantization.kept.w8a16 import W8A16
from blockyard.services.gpu_worker.quantization.scheme import Matrix
from blockyard.shared.errors import ConfigError, LoadError
from blockyard.shared.quantization.files import read_quantization

FLOATS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,)}  # bytes of float16
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def draw(kind: Kind, outputs: int, inputs: int) -> np.ndarray[Any, Any]:
    """Random bytes whose numbers are finite, uint8 [outputs, bytes of a row]."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(3)
    blocks = generator.integers(0, 256, (outputs, inputs // numbers, size), dtype=np.uint8)
    scales = (generator.random((outputs, inputs // numbers)) * 1e-3 + 1e-4).astype(np.float16)
    scales[0, 0] = 0
    offsets = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,)}
    for start_of in (offsets | FLOATS).get(kind.name, ()):
        blocks[..., start_of : start_of + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(outputs, -1)


def write_gguf(
    folder: Path, model: str, kind: Kind, architecture: str, *, has_heads: bool = True, **more: Any
) -> tuple[Path, Path]:
    """Writes a model as a .gguf file beside config.json, and with the numbers that the file stands for."""
    plain, packed = folder / "plain", folder / "packed"
    BY_NAME[model].save(plain)
    files = list(plain.glob("*.safetensors"))
    tensors = {name: value for file in files for name, value in load_file(file).items()}
    for file in [*files, *plain.glob("*.index.json")]:
        file.unlink()
    packed.mkdir()
    config = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config))
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(packed / "model.gguf", architecture)
    if has_heads:
        writer.add_head_count(heads[0])
        writer.add_head_count_kv(heads[1])
    for name, value in tensors.items():
        base, _, last = name.rpartition(".")
        own = gguf_name(base)
        numbers = value.float()
        if value.dim() == 2 and value.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 and last == "weight":
            data = draw(kind, *value.shape)
            if kind in (Kind.Q4_0, Kind.Q8_0, Kind.Q5_1):
                data = gguf.quants.quantize(numbers.numpy(), kind)
            tensors[name] = torch.from_numpy(gguf.quants.dequantize(data, kind)).to(value.dtype)
        else:
            data = numbers.numpy()
        if architecture == "llama" and own.endswith(("attn_q", "attn_k")):  # convert_hf_to_gguf.py, `permute`
            count = heads[0] if own.endswith("q") else heads[1]
            shape = data.shape
            data = data.reshape(count, 2, shape[0] // count // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
        is_blocks = data.dtype == np.uint8
        writer.add_tensor(f"{own}.{last}", np.ascontiguousarray(data), raw_dtype=kind if is_blocks else None)
    if architecture == "llama":
        writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))
    for key, value in more.items():
        writer.add_tensor(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file({name: value.contiguous() for name, value in tensors.items()}, plain / "model.safetensors")
    return plain, packed


def gguf_name(base: str) -> str:
    if base in NAMES:
        return NAMES[base]
    _, _, layer, rest = base.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}"


SAID = json.dumps({"quantization_config": {"quant_method": "gguf"}})


def scheme_of(kind: str, stored: Tensor, inputs: int, dtype: torch.dtype) -> Any:
    headers = TensorHeaders([("h.0.a.weight", TensorHeader(tuple(stored.shape), torch.uint8, kind))])
    return GgufScheme(dtype).stored(Matrix(name="h.0.a", outputs=len(stored), inputs=inputs, headers=headers))


SAMPLES = {"gguf": Sample(lambda folder: Checkpoints(*write_gguf(folder, "qwen3", Kind.Q8_0, "qwen3")))}


@pytest.mark.parametrize("name", TYPES)
def test_blocks_with_a_kept_form(name: str) -> None:
    stored = draw(Kind[name], 6, 512)
    want = torch.from_numpy(gguf.quants.dequantize(stored, Kind[name]))
    for dtype, most in ((torch.float32, 2e-6), (torch.bfloat16, 2e-3)):
        made = scheme_of(name, torch.from_numpy(stored), 512, dtype)
        kept = {
            key: value.to(made.form.tensors()[key].dtype)
            for key, value in made.to_kept({"weight": torch.from_numpy(stored)}).items()
        }
        assert isinstance(made.form, W4A16 if "4" in name else W8A16)
        assert {key: value.shape for key, value in kept.items()} == {
            key: one.shape(6, 512) for key, one in made.form.tensors().items()
        }
        got = made.form.dequantize(kept, 512, torch.float32)
        assert float((got - want).abs().max() / want.abs().max()) < most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0, 6e-8])
def test_zeros_that_cannot_be_kept(scale: float, dtype: torch.dtype) -> None:
    """Where the scale is 0, as of equal numbers, or tiny beside the offset, the offset alone counts."""
    stored = draw(Kind.Q4_1, 2, 64)
    blocks = stored.reshape(2, 2, 20)
    blocks[..., :2] = np.full((2, 2, 1), scale, np.float16).view(np.uint8)
    blocks[..., 2:4] = np.full((2, 2, 1), 0.5, np.float16).view(np.uint8)
    want = torch.from_numpy(gguf.quants.dequantize(stored, Kind.Q4_1))
    made = scheme_of("Q4_1", torch.from_numpy(stored), 64, dtype)
    kept = {
        key: value.to(made.form.tensors()[key].dtype)
        for key, value in made.to_kept({"weight": torch.from_numpy(stored)}).items()
    }
    torch.testing.assert_close(made.form.dequantize(kept, 64, torch.float32), want, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("model", "architecture", "kind"),
    [
        *(("llama", "llama", kind) for kind in (Kind.Q4_0, Kind.Q5_1, Kind.Q8_0, Kind.IQ4_NL)),
        *(("qwen2", "qwen2", kind) for kind in (Kind.Q4_0, Kind.Q5_0)),
        ("qwen3", "qwen3", Kind.Q4_1),
    ],
)
def test_logits(tmp_path: Path, model: str, architecture: str, kind: Kind) -> None:
    plain, packed = write_gguf(tmp_path, model, kind, architecture)
    assert read_quantization(packed, {}).said == {"quant_method": "gguf"}
    assert read_quantization(plain, {}).said == {}
    for load_format in ("auto", "gguf"):
        runner = start(packed, max_model_len=64, config_overrides=SAID, load_format=load_format)
        like = start(plain, max_model_len=64)
        torch.testing.assert_close(all_logits(runner, IDS, [12]), all_logits(like, IDS, [12]), atol=1e-4, rtol=1e-4)
    [line] = [one for one in runner.model.table.describe_unused() if "that are dequantized at load take" in one]
    embedding = runner.model.table.places["model.embed_tokens.weight"].target.numel()
    numbers, size_bytes = gguf.GGML_QUANT_SIZES[kind]
    if kind != Kind.IQ4_NL:  # all other types have a form
        in_file = embedding / numbers * size_bytes
        assert f"take {embedding * 4 / 1e9:.3f} GB, {in_file / 1e9:.3f} GB in the files: model.embed_tokens" in line
    start(packed, max_model_len=64, config_overrides=SAID, load_format="dummy")


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    _, packed = write_gguf(tmp_path / "a", "llama", Kind.Q8_0, "llama", **{"blk.0.ffn_gate_exps.weight": np.ones(2)})
    with pytest.raises(LoadError, match=r"model.gguf: a tensor blk\.0\.ffn_gate_exps\.weight is not known"):
        start(packed, config_overrides=SAID)
    _, packed = write_gguf(tmp_path / "b", "llama", Kind.Q8_0, "phi3")
    with pytest.raises(LoadError, match=r"general.architecture is 'phi3'; llama, qwen2, qwen3 are read"):
        start(packed, config_overrides=SAID)
    _, headless = write_gguf(tmp_path / "c", "llama", Kind.Q8_0, "llama", has_heads=False)
    with pytest.raises(
        LoadError, match=r"model\.gguf: llama\.attention\.head_count is missing, by which blk\.\d\.attn_"
    ):
        start(headless, config_overrides=SAID)
    file = packed / "model.gguf"
    (packed / "other.gguf").write_bytes(file.read_bytes())
    with pytest.raises(LoadError, match=r"several \.gguf files: model\.gguf, other\.gguf"):
        start(packed, config_overrides=SAID)
    (packed / "other.gguf").unlink()
    for content in (b"none", b"", file.read_bytes()[:5000]):
        file.write_bytes(content)
        with pytest.raises(LoadError, match=r"model\.gguf is not a usable GGUF file"):
            start(packed, config_overrides=SAID)
    with pytest.raises(ConfigError, match="32 inputs are no whole blocks of Q4_K"):
        scheme_of("Q4_K", torch.zeros(2, 144, dtype=torch.uint8), 32, torch.float32)
    wrong = torch.from_numpy(draw(Kind.Q8_0, 2, 64))
    wrong.view(2, 2, 34)[0, 0, :2] = 255
    with pytest.raises(LoadError, match=r"h\.0\.a\.weight: the checkpoint has a scale of nan"):
        scheme_of("Q8_0", wrong, 64, torch.float32).to_kept({"weight": wrong})
