"""Matrices of QQQ, written code by code as QQQ/gptq/qlinear/qlinear_marlin.py (`_get_perms`, `pack`) documents it."""

from pathlib import Path

import pytest
import torch
from packed_words import pack_words
from quantized_checkpoint import EVEN, Checkpoints, Sample, Stored, write_projections

from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.quantization.dense import UnquantizedLinear
from blockyard.shared.errors import ConfigError


def orders(has_groups: bool) -> tuple[list[int], list[int], list[int]]:
    codes = []
    for i in range(32):
        lane = [16 * row + i // 4 + 8 * block for block in (0, 1) for row in range(4 * (i % 4), 4 * (i % 4) + 4)]
        codes += [one + 256 * tile for tile in range(4) for one in lane]
    turn = (0, 2, 4, 6, 1, 3, 5, 7) if has_groups else (4, 0, 5, 1, 6, 2, 7, 3)
    codes = [codes[start + i] for start in range(0, 1024, 8) for i in turn]
    grouped = [i + 8 * j for i in range(8) for j in range(8)]
    return codes, grouped, [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]


def draw(outputs: int, inputs: int, has_groups: bool) -> Stored:
    of_codes, grouped, single = orders(has_groups)
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


def write_qqq(folder: Path) -> Checkpoints:
    said = {"quant_method": "qqq", "wbits": 4, "group_size": -1}
    return write_projections(folder, EVEN, said, lambda *shape: draw(*shape, False))


SAMPLES = {"qqq": Sample(write_qqq)}


@pytest.mark.parametrize("group", [128, -1])
def test_qqq(group: int) -> None:
    stored, numbers = draw(128, 256, group > 0)
    table = WeightTable(torch.float32, torch.device("cpu"))
    said = {"quant_method": "qqq", "wbits": 4, "group_size": group}
    linear = LinearLayers(table, {"quantization_config": said}).make([part("h.0.a", 128)], 256)
    for key, value in stored.items():
        table.put(f"h.0.a.{key}", value.contiguous())
    table.check_complete()
    table.finish()
    assert isinstance(linear.method, UnquantizedLinear)
    torch.testing.assert_close(linear.method.weight, numbers)
    assert any(line.startswith("dequantized at load: h.0.a") for line in table.describe_unused())


def test_wrong_settings_are_refused() -> None:
    table = WeightTable(torch.float32, torch.device("meta"))
    with pytest.raises(ConfigError, match="group_size 64: 4, and -1 or 128"):
        LinearLayers(table, {"quantization_config": {"quant_method": "qqq", "group_size": 64}})
