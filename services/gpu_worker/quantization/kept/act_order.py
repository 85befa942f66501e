"""Columns in another order than inputs, so that the columns of a group are side by side (GPTQ's act order)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from blockyard.services.gpu_worker.quantization.kept.form import KeptTensor
from blockyard.shared.errors import LoadError

ORDER = "order"  # the name of the tensor, int32 [inputs]: which input each column is
TENSOR = KeptTensor(torch.int32, rows=False, inputs=1)


def sorting(name: str, group: int | None, groups: Tensor) -> Tensor | None:
    """Returns the order that sorts inputs by group, from the group of each input [inputs]. None: all are in one.

    name: of the tensor of groups. group: inputs of a group. Raises LoadError for groups that config.json does not mean.
    """
    inputs = len(groups)
    last = 0 if group is None else -(-inputs // group) - 1
    low, high = (int(one) for one in groups.aminmax())
    if low < 0 or high > last:
        raise LoadError(f"{name}: the checkpoint has group {low if low < 0 else high}, expected 0 to {last}")
    if group is None:
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], torch.arange(inputs, device=groups.device) // group):
        raise LoadError(f"{name}: the checkpoint has groups of other sizes than {group} inputs")
    return order


def of_inputs(values: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
    """Columns of [..., outputs, inputs] in the order of inputs."""
    columns = kept[ORDER].argsort(-1)  # of each input
    return values.gather(-1, columns[..., None, :].expand_as(values))


def fill(order: Tensor) -> None:
    """Writes the order of inputs."""
    order.copy_(torch.arange(order.shape[-1], device=order.device).expand_as(order))
