"""How a mixture of experts chooses the experts of a row, in torch.

The variants are those of Mixtral and Qwen (softmax), DeepSeek V2 (softmax in groups, https://arxiv.org/abs/2405.04434)
and DeepSeek V3 (sigmoid with a bias for the choice, https://arxiv.org/abs/2412.19437).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_EXPERTS = 1024
NEVER = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a model's router chooses. Of experts with equal scores the one with the lowest number is chosen first."""

    num_experts: int
    top_k: int  # experts of each row
    sigmoid: bool = False  # scores are sigmoid(logit); otherwise the softmax over all experts
    renormalize: bool = True  # the weights of a row's experts sum to 1, before `scale`
    scale: float = 1.0  # of all weights
    groups: int = 1  # experts are in so many groups of equal size
    top_groups: int = 1  # experts are chosen from so many of the groups
    sum_of_two: bool = False  # a group is as good as its best two experts together; otherwise as its best one

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts <= MAX_EXPERTS:
            raise ValueError(f"{self.top_k} of {self.num_experts} experts, at most {MAX_EXPERTS}")
        if not 1 <= self.top_groups <= self.groups or self.num_experts % self.groups:
            raise ValueError(f"{self.top_groups} of {self.groups} groups of {self.num_experts} experts")
        if self.top_k > self.top_groups * (self.num_experts // self.groups):
            raise ValueError(f"{self.top_groups} groups have fewer than {self.top_k} experts")


def choose_experts(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits [rows, experts], bias [experts] added for the choice alone -> experts int32, weights fp32 [rows, top_k].

    factors [experts] multiply the weights at last. The best come first.
    """
    logits = logits.float()
    scores = _sigmoid(logits) if routing.sigmoid else logits.softmax(-1)
    choice = scores if bias is None else scores + bias.float()
    if routing.sigmoid and bias is None and routing.top_groups == routing.groups:
        choice = logits.nan_to_num()  # the same order, but sigmoids of large logits are all 1
    if routing.top_groups < routing.groups:
        grouped = choice.unflatten(-1, (routing.groups, routing.num_experts // routing.groups))
        best = grouped.topk(2, -1).values.sum(-1) if routing.sum_of_two else grouped.amax(-1)
        chosen = best.argsort(dim=-1, descending=True, stable=True)[:, : routing.top_groups]
        open_groups = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, True)
        choice = grouped.masked_fill(~open_groups[..., None], NEVER).reshape(choice.shape)
    experts = choice.argsort(dim=-1, descending=True, stable=True)[:, : routing.top_k]
    weights = scores.gather(1, experts)
    if routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
    weights = weights * routing.scale
    return experts.int(), weights if factors is None else weights * factors.float()[experts]


def _sigmoid(logits: Tensor) -> Tensor:
    """torch's `sigmoid` rounds by an element's place in the tensor on the CPU, a softmax over pairs does not."""
    return torch.stack((logits, torch.zeros_like(logits)), -1).softmax(-1)[..., 0]
