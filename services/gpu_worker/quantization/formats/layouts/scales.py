"""Checks numbers of checkpoints."""

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.weights import FLOATS
from blockyard.shared.errors import LoadError

NO_EXPONENT = 255  # of e8m0: NaN
SCALES = FLOATS | {torch.float8_e8m0fnu}  # dtypes that checkpoints have of scales


def exponents(name: str, stored: Tensor) -> Tensor:
    """Returns exponents, uint8 or e8m0, in e8m0. Raises LoadError for an exponent that stands for no number."""
    if bool((stored.view(torch.uint8) == NO_EXPONENT).any()):
        raise LoadError(f"{name}: the checkpoint has a scale of nan")
    return stored.view(torch.float8_e8m0fnu)


def check_scales(name: str, scales: Tensor, *, signed: bool = False) -> Tensor:
    """Returns scales in float32. Raises LoadError if one is not finite, or is negative and not `signed`."""
    scales = scales.float()
    wrong = ~(scales.isfinite() & (scales >= 0)) if not signed else ~scales.isfinite()
    if bool(wrong.any()):
        raise LoadError(f"{name}: the checkpoint has a scale of {float(scales[wrong].flatten()[0])}")
    return scales
