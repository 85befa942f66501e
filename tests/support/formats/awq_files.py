"""Writes checkpoints of AWQ, code by code, in three packings.

They are as in AutoAWQ: awq/modules/linear, gemm.py, gemv.py, and `pack_intweight` in gemv_fast.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from packed_words import pack_words
from quantized_checkpoint import is_projection, write
from torch import Tensor

GROUP = 16
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # of the outputs in a word of gemm, from its lowest bits on
Packing = Callable[[Tensor, Tensor, Tensor, int], dict[str, Tensor]]


def gemm(codes: Tensor, zeros: Tensor, scales: Tensor, group: int) -> dict[str, Tensor]:
    """codes [outputs, inputs], zeros and scales [outputs, groups]."""

    def packed(numbers: Tensor) -> Tensor:
        return pack_words(numbers.unflatten(1, (-1, 8))[..., ORDER].flatten(1), 4)

    return {"qweight": packed(codes.t()), "qzeros": packed(zeros.t()), "scales": scales.t()}


def zeros_width(inputs: int, group: int) -> int:
    """Words of zeros in a row of gemv."""
    multiplier = 1 if group >= 128 else {64: 2, 32: 4, 16: 8}[group]
    width = -(-(inputs // group) // 8)
    return -(-width // multiplier) * multiplier


def gemv(codes: Tensor, zeros: Tensor, scales: Tensor, group: int) -> dict[str, Tensor]:
    width = zeros_width(codes.shape[1], group)
    wide_zeros, wide_scales = torch.zeros(len(codes), width * 8).long(), torch.zeros(len(codes), width * 8).half()
    wide_zeros[:, : zeros.shape[1]], wide_scales[:, : zeros.shape[1]] = zeros, scales
    return {"qweight": pack_words(codes, 4), "qzeros": pack_words(wide_zeros, 4), "scales": wide_scales}


def gemv_fast(codes: Tensor, zeros: Tensor, scales: Tensor, group: int) -> dict[str, Tensor]:
    """Four rows of 64 inputs are packed together; in each run of 32 inputs, input i stands at `places[i]`."""
    outputs, inputs = codes.shape
    of_run = [i for b in range(4) for a in range(4) for i in (8 * a + 2 * b, 8 * a + 2 * b + 1)]
    of_eight = [8 * run + i for run in range(4) for i in (0, 2, 4, 6, 1, 3, 5, 7)]
    ordered = codes.reshape(outputs, -1, 32)[..., of_run][..., of_eight].reshape(outputs, inputs)
    blocks = ordered.reshape(outputs // 4, 4, inputs // 64, 64).transpose(1, 2).reshape(outputs // 4, -1)
    wide = torch.zeros(zeros_width(inputs, group) * 8, outputs).half()
    wide_scales, wide_zeros = wide.clone(), wide.clone()
    wide_scales[: scales.shape[1]] = scales.t()
    wide_zeros[: scales.shape[1]] = -(scales.float() * zeros).half().t()
    return {"qweight": pack_words(blocks, 4, 16), "scales": wide_scales, "scaled_zeros": wide_zeros}


PACKINGS: dict[str, Packing] = {"gemm": gemm, "gemv": gemv, "gemv_fast": gemv_fast}


def draw(
    pack: Packing, outputs: int, inputs: int, group: int, zero: int | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a matrix and its numbers. zero: of all; None: random ones."""
    groups = inputs // group
    codes = torch.randint(0, 16, (outputs, inputs))
    zeros = torch.randint(0, 16, (outputs, groups)) if zero is None else torch.full((outputs, groups), zero)
    scales = (torch.rand(outputs, groups) * 0.03 + 0.005).half()
    whole = (numbers.repeat_interleave(group, 1) for numbers in (zeros, scales.float()))
    return pack(codes, zeros, scales, group), (codes - next(whole)) * next(whole)


def write_awq(folder: Path, model: str, version: str = "gemm", group: int = GROUP, **more: Any) -> Any:
    """Matrices that do not fit the packing are left out, and named."""
    unit = 64 if version == "gemv_fast" else max(group, 8)

    def fits(weight: Tensor) -> bool:
        return weight.shape[1] % unit == 0 and weight.shape[0] % 8 == 0

    left_out: dict[str, None] = {}

    def store(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not is_projection(name):
            return None
        if not fits(weight):
            left_out[name] = None
            return None
        size = weight.shape[1] if group < 0 else group
        zero = None if more.get("zero_point", True) else 8
        stored, numbers = draw(PACKINGS[version], *weight.shape, size, zero)
        return {f"{name}.{key}": value for key, value in stored.items()}, numbers

    said: dict[str, Any] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": version,
    }
    made = write(folder, model, store, {"config.json": {}})
    change_config(made.packed, said | {"modules_to_not_convert": [*left_out, "gate"], **more})
    return made


def change_config(folder: Path, said: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
