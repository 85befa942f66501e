"""Weights that a file has quantized and that are kept as numbers of the model's dtype: a form without a kernel."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.services.gpu_worker.quantization.dense import FORM
from blockyard.services.gpu_worker.quantization.kept.form import DUMMY_SCALE, KeptForm, KeptTensor

WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class Dequantized(KeptForm):
    """Implements `KeptForm`; the kernels of unquantized weights multiply it."""

    dtype: torch.dtype  # of the model
    name = FORM
    multiplies_on_host = True

    def tensors(self) -> Mapping[str, KeptTensor]:
        return {WEIGHT: KeptTensor(self.dtype, inputs=1)}

    def dequantize(self, kept: Mapping[str, Tensor], inputs: int, dtype: torch.dtype) -> Tensor:
        return kept[WEIGHT].to(dtype)

    def fill(self, kept: Mapping[str, Tensor], generator: torch.Generator) -> None:
        weight = kept[WEIGHT]
        weight.copy_(torch.empty_like(weight, device=generator.device).normal_(0.0, DUMMY_SCALE, generator=generator))
