"""Codes and scales of a kept weight as kernels of a GPU read them."""

import torch
from torch import Tensor

from blockyard.kernels.quantized.packed_weights import E8M0, Codes, PackedWeights


def packed_codes(
    kind: Codes,
    codes: Tensor,
    inputs: int,
    group: int | None,
    scales: Tensor,
    zeros: Tensor | None = None,
    row_scales: Tensor | None = None,
    table: Tensor | None = None,
) -> PackedWeights:
    """Views of the tensors of a weight, of experts with a leading dimension of them.

    group: inputs of a scale; None: each row has a scale. row_scales: of a weight that has groups, too.
    """
    is_e8m0 = scales.dtype == E8M0 and group is not None
    return PackedWeights(
        codes=codes,
        kind=kind,
        inputs=inputs,
        group=group or 0,
        scales=None if group is None else scales.view(torch.uint8) if is_e8m0 else scales,
        zeros=zeros,
        row_scales=scales if group is None else row_scales,
        table=table,
        is_e8m0=is_e8m0,
    )
