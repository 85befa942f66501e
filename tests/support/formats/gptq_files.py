"""Writes checkpoints of GPTQ, code by code, as AutoGPTQ's `QuantLinear.pack` does it (nn_modules/qlinear)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from packed_words import pack_words
from quantized_checkpoint import Checkpoints, is_projection, write
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """What a file says, and what it is."""

    bits: int = 4
    group: int = 16
    sym: bool = True
    act_order: bool = False
    version: int = 1
    said_version: int | None = None  # other than `version`

    def config(self, **more: Any) -> dict[str, Any]:
        said = self.said_version or self.version
        fields = {"bits": self.bits, "group_size": self.group, "sym": self.sym, "desc_act": self.act_order}
        format_name = "gptq" if said == 1 else "gptq_v2"
        return {"quant_method": "gptq", "checkpoint_format": format_name, **fields, **more}

    def draw(self, outputs: int, inputs: int) -> tuple[dict[str, Tensor], Tensor]:
        """The tensors of a matrix, and its numbers."""
        group, high = (inputs if self.group < 0 else self.group), 1 << self.bits
        groups = -(-inputs // group)
        codes = torch.randint(0, high, (outputs, inputs))
        zeros = torch.randint(0, high, (outputs, groups)) + (self.version == 1)
        if self.sym:
            zeros = torch.full_like(zeros, high // 2)
        scales = (torch.rand(outputs, groups) * 0.5 + 0.1).div(high).half()
        scales[::3] *= -1  # AutoRound's are signed
        g_idx = torch.arange(inputs) // group
        if self.act_order:
            g_idx = g_idx[torch.randperm(inputs)]
        numbers = (codes - zeros[:, g_idx]) * scales.float()[:, g_idx]
        stored = {
            "qweight": pack_words(codes, self.bits).t(),
            "qzeros": pack_words(zeros.t() - int(self.version == 1), self.bits),
            "scales": scales.t(),
            "g_idx": g_idx.int(),
        }
        return stored, numbers


def named(name: str, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.{key}": value for key, value in stored.items()}


def write_gptq(
    folder: Path, model: str, layout: Layout, rules: Mapping[str, Layout | None] = {}, **more: Any
) -> Checkpoints:
    """rules: other layouts of matrices whose names contain the key. None: not quantized."""
    if model == "deepseek-v3":  # 20 inputs or outputs do not fill words
        rules, more = {**rules, "q_a_proj": None, "q_b_proj": None}, {**more, "dynamic": {r"-:.*q_[ab]_proj": {}}}

    def store(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        own = next((one for key, one in rules.items() if key in name), layout if is_projection(name) else None)
        if own is None:
            return None
        stored, numbers = own.draw(*weight.shape)
        return named(name, stored), numbers

    return write(folder, model, store, {"config.json": {"quantization_config": layout.config(**more)}})
