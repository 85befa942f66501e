"""Router logits to the experts of each row and their weights, on a GPU. `routing` says how they are chosen."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import next_power_of_2
from blockyard.kernels.moe.routing import Routing, choose_experts
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl

route_experts_reference = choose_experts


@triton.jit
def _keep_best_groups(choice, inside, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TWO: tl.constexpr):
    """Sets the scores outside of the best groups to -inf: choice [groups, experts of a group, padded]."""
    members = tl.arange(0, choice.shape[1])[None, :]
    best = tl.max(choice, 1)
    if TWO:
        first = tl.argmax(choice, 1, tie_break_left=True)
        best += tl.max(tl.where(members == first[:, None], float("-inf"), choice), 1)
    number = tl.arange(0, choice.shape[0])
    best = tl.where(number < GROUPS, best, float("-inf"))
    is_open = number < 0
    for _ in tl.static_range(TOP_GROUPS):
        group = tl.argmax(tl.where(is_open, float("-inf"), best), 0, tie_break_left=True)
        is_open |= number == group
    return tl.where(is_open[:, None] & inside, choice, float("-inf"))


@triton.jit
def _sortable(scores):
    """int32 in the order of float32 scores. A warp finds the largest int32 in one instruction, a float32 in ten."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)  # -0 is as good as 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _route_experts_kernel(
    logits_ptr, bias_ptr, factors_ptr, places_ptr, experts_ptr, weights_ptr, stride, scale,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, K_TILE: tl.constexpr, GROUPS: tl.constexpr, GROUP_TILE: tl.constexpr,
    MEMBER_TILE: tl.constexpr, TOP_GROUPS: tl.constexpr, TWO: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr,
    BY_LOGIT: tl.constexpr, RENORMALIZE: tl.constexpr, FACTORS: tl.constexpr, PLACES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program i: row i, its experts as [groups, experts of a group]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = EXPERTS // GROUPS
    groups = tl.arange(0, GROUP_TILE)[:, None]
    members = tl.arange(0, MEMBER_TILE)[None, :]
    inside = (groups < GROUPS) & (members < SIZE)
    expert = groups * SIZE + members
    logits = tl.load(logits_ptr + row * stride + expert, mask=inside, other=float("-inf")).to(tl.float32)
    logits = tl.where(logits == logits, logits, -80.0)  # NaN would choose no expert  # noqa: PLR0124
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    choice = tl.where(inside, scores, float("-inf"))
    if BY_LOGIT:  # the same order, but sigmoids of large logits are all 1; -inf would never be chosen
        choice = tl.where(inside, tl.maximum(logits, -3e38), float("-inf"))
    if BIAS:
        choice += tl.load(bias_ptr + expert, mask=inside, other=0.0).to(tl.float32)
    if TOP_GROUPS < GROUPS:
        choice = _keep_best_groups(choice, inside, GROUPS, TOP_GROUPS, TWO)
    k = tl.arange(0, K_TILE)
    experts = tl.zeros([K_TILE], tl.int32)
    weights = tl.zeros([K_TILE], tl.float32)
    ALL: tl.constexpr = GROUP_TILE * MEMBER_TILE
    number = tl.reshape(tl.where(inside, expert, EXPERTS), [ALL])
    order = tl.reshape(tl.where(inside, _sortable(choice), -(2**31)), [ALL])  # the least: there is none, or it is taken
    bits = tl.reshape(scores.to(tl.int32, bitcast=True), [ALL])
    for i in tl.static_range(TOP_K):
        best = tl.max(order, 0)
        found = tl.min(tl.where(order == best, number, EXPERTS), 0)
        taken = number == found
        weight = tl.max(tl.where(taken, bits, -(2**31)), 0)  # of one number: the same bits
        experts = tl.where(k == i, found, experts)
        weights = tl.where(k == i, weight.to(tl.float32, bitcast=True), weights)
        order = tl.where(taken, -(2**31), order)
    if RENORMALIZE:
        weights /= tl.maximum(tl.sum(weights, 0), 1e-20)
    weights *= scale
    if FACTORS:
        weights *= tl.load(factors_ptr + experts).to(tl.float32)
    if PLACES:
        experts = tl.load(places_ptr + experts)
    tl.store(experts_ptr + row * TOP_K + k, experts, mask=k < TOP_K)
    tl.store(weights_ptr + row * TOP_K + k, weights, mask=k < TOP_K)


def route_experts(
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """logits [rows, experts], bias [experts] added for the choice alone -> experts int32, weights fp32 [rows, top_k].

    factors [experts] multiply the weights at last. The best come first. Logits that are not numbers give experts that
    exist. places [experts] int32, or more: what is returned in place of each expert. Raises ValueError for other
    shapes.
    """
    rows, num_experts = logits.shape
    of_experts = [one for one in (bias, factors) if one is not None]
    if num_experts != routing.num_experts or any(one.shape != (num_experts,) for one in of_experts):
        raise ValueError(f"logits {list(logits.shape)} do not fit {routing.num_experts} experts")
    if places is not None and (places.dtype != torch.int32 or len(places) < num_experts):
        raise ValueError(f"places {list(places.shape)} {places.dtype} are not int32 of {num_experts} experts")
    if logits.stride(1) != 1:
        raise ValueError(f"the logits of a row must be contiguous, got strides {logits.stride()}")
    experts = torch.empty((rows, routing.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, routing.top_k), dtype=torch.float32, device=logits.device)
    if rows:
        pdl = supports_pdl(logits.device)
        limited = routing.top_groups < routing.groups
        groups = routing.groups if limited else 1
        _route_experts_kernel[(rows,)](
            logits, logits if bias is None else bias, logits if factors is None else factors,
            experts if places is None else places, experts, weights, logits.stride(0), routing.scale,
            EXPERTS=num_experts, TOP_K=routing.top_k, K_TILE=next_power_of_2(routing.top_k), GROUPS=groups,
            GROUP_TILE=next_power_of_2(groups), MEMBER_TILE=next_power_of_2(num_experts // groups),
            TOP_GROUPS=routing.top_groups if limited else 1, TWO=routing.sum_of_two, SIGMOID=routing.sigmoid,
            BIAS=bias is not None, BY_LOGIT=routing.sigmoid and bias is None and not limited,
            RENORMALIZE=routing.renormalize, FACTORS=factors is not None, PLACES=places is not None, PDL=pdl,
            num_warps=1, **pdl_options(pdl),
        )  # fmt: skip
    return experts, weights
