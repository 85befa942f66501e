"""Writes GGUF files by the package gguf."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from tiny_models import BY_NAME

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


def write_gguf(folder: Path, model: str, kind: Kind, architecture: str, **more: Any) -> tuple[Path, Path]:
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
