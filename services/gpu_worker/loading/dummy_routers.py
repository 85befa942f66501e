"""Dummy weights of the routers of mixtures of experts: how many experts a step reads must be known to time it.

Router rows are random, hence nearly orthogonal, and of equal norm: each expert is chosen equally often by inputs that
differ. A longer row has larger scores and smaller ones, and is among the best more often; this makes skewed routing.

In a long prompt random attention adds nearly the same vector to all rows, the mean of its values. An embedding as small
as other weights would be lost in it: of 600 tokens of Qwen3-30B-A3B the sixth layer then chose 35 of 128 experts.
"""

import re
from collections.abc import Collection
from statistics import NormalDist

import torch
from torch import Tensor

EMBEDDING_SCALE = 10.0  # standard deviation of embeddings, if `wants_large_embedding`
HOT_SHARE = 0.1  # of the experts, with skewed routing; they get half of the tokens
_TOP_SHARE = 1 / 16  # of the experts that a row chooses: between the shares of Qwen 3 and gpt-oss
_ROUTER = re.compile(r"\.(gate|router|router\.layer|router\.proj)\.weight$")
_CHOICE_BIAS = re.compile(r"\.(e_score_correction_bias|(gate|router)\.bias)$")


def is_router(name: str) -> bool:
    """Whether a weight of this name has a row for each expert."""
    return _ROUTER.search(name) is not None


def is_choice_bias(name: str) -> bool:
    """Whether a weight of this name is added to the scores of experts."""
    return _CHOICE_BIAS.search(name) is not None


def is_embedding(name: str) -> bool:
    """Whether a weight of this name has a row for each token."""
    return name.endswith("embed_tokens.weight")


def wants_large_embedding(names: Collection[str]) -> bool:
    """Whether a model with weights of these names routes evenly only with embeddings of EMBEDDING_SCALE.

    With a head of its own: one that is the embedding would choose the last token again.
    """
    return any(map(is_router, names)) and any(name.endswith("lm_head.weight") for name in names)


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
