"""Writes checkpoints of AutoRound in the packings of GPTQ and AWQ."""

from collections.abc import Mapping
from pathlib import Path

import torch
from packed_words import pack_words
from quantized_checkpoint import Checkpoints, is_projection, write
from torch import Tensor


def write_auto_round(folder: Path, packing: Mapping[str, str]) -> Checkpoints:
    """packing: fields of quantization_config."""
    packing_format = packing.get("packing_format", "auto_round:auto_gptq")
    less = int(packing_format == "auto_round:auto_gptq")

    def store(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not is_projection(name) or name.endswith("k_proj"):
            return None
        outputs, inputs = weight.shape
        codes, zeros = torch.randint(0, 16, (outputs, inputs)), torch.randint(1, 16, (outputs, inputs // 32))
        scales = (torch.rand(zeros.shape) * 0.03).half()
        numbers = (codes - zeros.repeat_interleave(32, 1)) * scales.float().repeat_interleave(32, 1)
        if "awq" in packing_format:
            turn = [0, 2, 4, 6, 1, 3, 5, 7]
            words = [pack_words(one.t().unflatten(1, (-1, 8))[..., turn].flatten(1), 4) for one in (codes, zeros)]
        else:
            words = [pack_words(codes, 4).t(), pack_words(zeros.t() - less, 4)]
        own = {"qweight": words[0], "qzeros": words[1], "scales": scales.t()}
        return {f"{name}.{key}": value for key, value in own.items()}, numbers

    rules = {f"model.layers.{i}.self_attn.k_proj": {"bits": 16, "data_type": "fp"} for i in range(3)}
    said = {"quant_method": "intel/auto-round", "bits": 4, "group_size": 32, "sym": False, "extra_config": rules}
    return write(folder, "llama", store, {"config.json": {"quantization_config": said | packing}})
