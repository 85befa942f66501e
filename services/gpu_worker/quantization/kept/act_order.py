"""Columns in another order than inputs, so that the columns of a group are side by side (GPTQ's act order)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from blockyard.services.gpu_worker.quantization.kept.form import KeptTensor

ORDER = "order"  # the name of the tensor, int32 [inputs]: which input each column is
TENSOR = KeptTensor(torch.int32, rows=False, inputs=1)


def of_inputs(values: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
    """Columns of [..., outputs, inputs] in the order of inputs."""
    columns = kept[ORDER].argsort(-1)  # of each input
    return values.gather(-1, columns[..., None, :].expand_as(values))


def fill(order: Tensor) -> None:
    """Writes the order of inputs."""
    order.copy_(torch.arange(order.shape[-1], device=order.device).expand_as(order))
