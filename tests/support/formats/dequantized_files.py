"""Writes matrices of formats that are dequantized at load, code by code, as their projects document them.

AQLM: inference_lib/src/aqlm/utils.py (`_dequantize_weight`). SqueezeLLM: squeezellm/quant.py (`pack2`). QQQ:
QQQ/gptq/qlinear/qlinear_marlin.py (`_get_perms`, `pack`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from packed_words import pack_words
from quantized_checkpoint import Checkpoints, is_projection, write
from tiny_models import Tiny
from torch import Tensor

Stored = tuple[dict[str, Tensor], Tensor]


def aqlm(outputs: int, inputs: int, out_group: int, in_group: int, books: int, bits: int) -> Stored:
    rows, columns, dtype = outputs // out_group, inputs // in_group, torch.int8 if bits <= 8 else torch.int16
    codes = torch.randint(0, 1 << bits, (rows, columns, books))
    codebooks = (torch.randn(books, 1 << bits, out_group, in_group) * 0.02).half()
    scales = (torch.rand(rows, 1, 1, 1) + 0.5).half()
    groups = sum(codebooks[i].float()[codes[..., i]] for i in range(books))  # [rows, columns, out_group, in_group]
    numbers = (groups * scales.float()).transpose(1, 2).reshape(outputs, inputs)
    return {"codes": codes.to(dtype), "codebooks": codebooks, "scales": scales}, numbers


def squeezellm(outputs: int, inputs: int, bits: int = 4, sparse: bool = False) -> Stored:
    table, codes = (torch.randn(outputs, 1 << bits) * 0.05).half(), torch.randint(0, 1 << bits, (outputs, inputs))
    numbers = torch.stack([row[own] for row, own in zip(table.float(), codes, strict=True)])
    stored = {"qweight": pack_words(codes, bits).t(), "lookup_table": table}
    if sparse:
        outliers = torch.where(torch.rand(outputs, inputs) < 0.02, torch.randn(outputs, inputs) * 0.2, 0.0)
        rows = outliers.to_sparse_csr()
        stored |= {"rows": rows.crow_indices().int(), "cols": rows.col_indices().int(), "vals": rows.values()}
        whole, places = torch.randn(inputs, 2) * 0.05, torch.tensor([outputs - 1, 3])
        stored |= {"full_rows": whole, "full_row_indices": places.int(), "startrows": torch.zeros(4 * outputs).int()}
        numbers = numbers + outliers
        numbers[places] += whole.t()
    return stored, numbers


def qqq_orders(has_groups: bool) -> tuple[list[int], list[int], list[int]]:
    codes = []
    for i in range(32):
        lane = [16 * row + i // 4 + 8 * block for block in (0, 1) for row in range(4 * (i % 4), 4 * (i % 4) + 4)]
        codes += [one + 256 * tile for tile in range(4) for one in lane]
    turn = (0, 2, 4, 6, 1, 3, 5, 7) if has_groups else (4, 0, 5, 1, 6, 2, 7, 3)
    codes = [codes[start + i] for start in range(0, 1024, 8) for i in turn]
    grouped = [i + 8 * j for i in range(8) for j in range(8)]
    return codes, grouped, [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]


def qqq(outputs: int, inputs: int, has_groups: bool) -> Stored:
    of_codes, grouped, single = qqq_orders(has_groups)
    rows = torch.rand(1, outputs) * 0.001 + 0.0002
    signed = torch.randint(-8, 8, (inputs, outputs))
    groups = (torch.rand(inputs // 128, outputs) * 12 + 2).half() if has_groups else torch.empty(0).half()
    if has_groups:
        numbers = torch.round(signed * groups.float().repeat_interleave(128, 0)) * rows
        stored_groups = groups.reshape(-1, 64)[:, grouped].reshape(groups.shape)
    else:
        numbers, stored_groups = signed * 16 * rows, groups
    codes = signed + 8 if has_groups else signed % 16
    tiles = codes.reshape(inputs // 16, 16, outputs // 16, 16).permute(0, 2, 1, 3)
    ordered = tiles.reshape(-1, 1024)[:, of_codes].reshape(inputs // 16, outputs * 16)
    stored = {"B": pack_words(ordered, 4), "s_channel": rows.reshape(-1, 32)[:, single].reshape(rows.shape)}
    return stored | {"s_group": stored_groups}, numbers.t()


def write_all(folder: Path, model: str | Tiny, said: dict[str, Any], make: Callable[..., Stored]) -> Checkpoints:
    def store(name: str, weight: Tensor) -> Stored | None:
        if not is_projection(name) or f"{name}.weight" in said.get("linear_weights_not_to_quantize", ()):
            return None
        stored, numbers = make(*weight.shape)
        return {f"{name}.{key}": value for key, value in stored.items()}, numbers

    return write(folder, model, store, {"config.json": {"quantization_config": said}})
