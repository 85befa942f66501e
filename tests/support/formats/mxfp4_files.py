"""Writes checkpoints of gpt-oss with experts in mxfp4, with the numbers that transformers decodes."""

import json
from pathlib import Path

import torch
from quantized_checkpoint import Checkpoints
from safetensors.torch import load_file, save_file
from tiny_models import BY_NAME
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

QUANTIZATION = {"quantization_config": {"quant_method": "mxfp4"}}


def write_mxfp4(folder: Path) -> Checkpoints:
    """A tiny checkpoint in bfloat16, and the same model with its experts in mxfp4."""
    made = Checkpoints(folder / "plain", folder / "packed")
    BY_NAME["gpt-oss"].save(made.plain)
    config = json.loads((made.plain / "config.json").read_text())
    files = list(made.plain.glob("*.safetensors"))
    tensors = {key: value for file in files for key, value in load_file(file).items()}
    for file in [*files, *made.plain.glob("*.index.json")]:
        file.unlink()
    torch.manual_seed(4)
    packed = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, size, out = packed.pop(name).shape
        blocks = torch.randint(256, (experts, out, size // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 126, (experts, out, size // 32), dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    made.packed.mkdir()
    save_file(tensors, made.plain / "model.safetensors")
    save_file(packed, made.packed / "model.safetensors")
    (made.packed / "config.json").write_text(json.dumps(config | QUANTIZATION))
    return made
