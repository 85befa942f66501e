"""Dummy weights of the routers of mixtures of experts: how many experts a step reads must be known to time it.

Router rows are random, hence nearly orthogonal, and of equal norm: each expert is chosen equally often by inputs that
differ. A longer row has larger scores and smaller ones, and is among the best more often; this makes skewed routing.
"""

import re
from statistics import NormalDist

import torch
from torch import Tensor

HOT_SHARE = 0.1  # of the experts, with skewed routing; they get half of the tokens
_TOP_SHARE = 1 / 16  # of the experts that a row chooses: between those of Qwen 3 and gpt-oss
_ROUTER = re.compile(r"\.(gate|router|router\.layer|router\.proj)\.weight$")
_CHOICE_BIAS = re.compile(r"\.(e_score_correction_bias|(gate|router)\.bias)$")


def is_router(name: str) -> bool:
    """Whether a weight of this name has a row for each expert."""
    return _ROUTER.search(name) is not None


def is_choice_bias(name: str) -> bool:
    """Whether a weight of this name is added to the scores of experts."""
    return _CHOICE_BIAS.search(name) is not None


def settle(router: Tensor, scale: float, skewed: bool) -> None:
    """Gives the rows of router [experts, hidden] the norm of random ones with standard deviation `scale`, in place.

    skewed: the first rows, a tenth, are so much longer that these experts get half of the tokens. They are as many as
    HOT_SHARE says if a row chooses about one expert of 16; with another number the skew is somewhat another.
    """
    num_experts, hidden = router.shape
    rows = torch.nn.functional.normalize(router.float(), dim=-1) * (scale * hidden**0.5)
    if skewed:
        hot = max(round(HOT_SHARE * num_experts), 1)
        half = _TOP_SHARE * num_experts / 2  # of the choices of a row
        rows[:hot] *= _quantile(half / (num_experts - hot)) / _quantile(min(half / hot, 0.45))
    router.copy_(rows)


def _quantile(share: float) -> float:
    """The score that this share of normally distributed scores exceeds."""
    return NormalDist().inv_cdf(1 - share)
