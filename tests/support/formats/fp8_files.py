"""Writes checkpoints in fp8, and rounds inputs by a definition of its own."""

from functools import partial
from pathlib import Path

import torch
from quantized_checkpoint import Checkpoints, is_projection, write
from torch import Tensor

E4M3 = torch.float8_e4m3fn
BLOCK = (24, 40)  # divides neither 64 nor 96
INPUT_SCALE = 0.03


def codes_like(weight: Tensor) -> Tensor:
    """Random bytes without the two that are no numbers."""
    made = torch.randint(0, 256, weight.shape, dtype=torch.uint8)
    return torch.where(made & 127 == 127, made - 1, made).view(E4M3)


def store(scales: str, static: bool, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
    """As documented in transformers for `fp8` and `fbgemm_fp8`, and in DeepSeek-V3's README_WEIGHTS.md for blocks."""
    if not is_projection(name):
        return None
    codes = codes_like(weight)
    rows, columns = weight.shape
    size = {"tensor": (), "row": (rows, 1), "block": (-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))}[scales]
    scale = torch.rand(size) * 0.002 + 0.0005
    whole = scale
    if scales == "block":
        whole = scale.repeat_interleave(BLOCK[0], 0)[:rows].repeat_interleave(BLOCK[1], 1)[:, :columns]
    tensors = {f"{name}.weight": codes, f"{name}.weight_scale{'_inv' * (scales == 'block')}": scale}
    if static:
        tensors[f"{name}.input_scale"] = torch.tensor(INPUT_SCALE)
    return tensors, codes.float() * whole


def write_fp8(folder: Path, model: str, scales: str, static: bool = False, method: str = "fp8") -> Checkpoints:
    said = {"quant_method": method, "activation_scheme": "static" if static else "dynamic"}
    block = {"weight_block_size": BLOCK} if scales == "block" else {}
    return write(folder, model, partial(store, scales, static), {"config.json": {"quantization_config": said | block}})


def write_deepspeed(folder: Path, model: str = "llama") -> Checkpoints:
    """16 bits, with the fields of vLLM's `DeepSpeedFPConfig`."""

    def store_numbers(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        return ({f"{name}.weight": weight}, round_rows(weight)) if is_projection(name) else None

    said = {"quant_method": "deepspeedfp", "bits": 8, "group_size": 512}
    return write(folder, model, store_numbers, {"config.json": {"quantization_config": said}})


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    return torch.clamp(x / scale, -448, 448).to(E4M3).float() * scale


def round_rows(x: Tensor) -> Tensor:
    return rounded(x, x.abs().amax(1, keepdim=True).clamp(min=1e-9) / 448)


def round_groups(x: Tensor) -> Tensor:
    groups = [x[:, i : i + BLOCK[1]] for i in range(0, x.shape[1], BLOCK[1])]
    return torch.cat([round_rows(group) for group in groups], 1)


def round_statically(x: Tensor) -> Tensor:
    return rounded(x, torch.tensor(INPUT_SCALE))
