"""Products of many pairs against their reference: partly filled tiles, both orders, experts without rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compile_for_hopper import SHARED, shared_bytes
from torch import Tensor

from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.grouped_linear import grouped_linear_reference
from blockyard.kernels.moe.grouped_linear_prefill import (
    TILE,
    PrefillTiling,
    fits,
    grouped_linear_prefill,
    grouped_linear_prefill_reference,
    has_pair,
)
from blockyard.kernels.moe.map_experts import map_experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
ERROR = 6e-3 if DEVICE == "cuda" else 1e-3
TILINGS = [PrefillTiling(16, 32, 2, 4), PrefillTiling(32, 64, 2, 4, group=3)]
# pairs of each expert: tiles of all sizes, of which the last holds one pair or all
PAIRS = {"few": (1, 32, 0, 33), "some": (64, 65, 128), "many": (129, 0, 160, 161), "two tiles": (192, 193, 0, 385)}


@pytest.mark.filterwarnings("ignore:.*encountered in matmul")  # the interpreter's, for places without a pair
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("counts", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize(("gate", "form"), [
    (Gate.SILU, "plain"), (Gate.CLAMPED_SWIGLU, "bias"), (Gate.GELU_TANH, "scaled first"), (Gate.NONE, "scaled"),
])  # fmt: skip
def test_products(counts: tuple[int, ...], gate: Gate, form: str, tiling: PrefillTiling) -> None:
    num_experts, num_pairs, size, outs = len(counts), sum(counts), 40, 44
    top_k = 2 if num_pairs % 2 == 0 else 1
    x = torch.randn(num_pairs // top_k, size).to(DEVICE, DTYPE)
    weight = (torch.randn(num_experts, outs, size) / 6).to(DEVICE, DTYPE)
    owners = torch.arange(num_experts).repeat_interleave(torch.tensor(counts))[torch.randperm(num_pairs)]
    experts = owners.int().view(-1, top_k).to(DEVICE)
    options: dict[str, Any] = {
        "bias": torch.randn(num_experts, outs).to(DEVICE, DTYPE) if form != "plain" else None,
        "gate": gate,
        "scale": torch.rand(num_pairs, device=DEVICE) if form.startswith("scaled") else None,
        "scale_first": form == "scaled first",
    }
    mapped = map_experts(experts, num_experts, TILE)
    want = grouped_linear_reference(x, weight, experts, **options)
    got = grouped_linear_prefill(x, weight, mapped, num_pairs, tiling, **options)
    assert got.shape == want.shape and close(got, want)
    in_order = grouped_linear_prefill(x, weight, mapped, num_pairs, tiling, sorted_out=True, **options)
    known = has_pair(mapped, num_pairs)
    assert close(in_order[known], grouped_linear_prefill_reference(x, weight, mapped, experts, **options)[known])
    pairs = torch.full((len(mapped.pairs), size), float("nan")).to(DEVICE, DTYPE)
    pairs[known] = x[(mapped.pairs[known] // top_k).long()]
    assert torch.equal(grouped_linear_prefill(pairs, weight, mapped, num_pairs, tiling, sorted_in=True, **options), got)


def close(got: Tensor, want: Tensor) -> bool:
    return float((got.double() - want.double()).norm() / want.double().norm()) <= ERROR


def test_operands_that_do_not_fit() -> None:
    x, weight = torch.zeros(3, 32, dtype=DTYPE, device=DEVICE), torch.zeros(2, 16, 32, dtype=DTYPE, device=DEVICE)
    mapped = map_experts(torch.zeros(3, 1, dtype=torch.int32, device=DEVICE), 2, TILE)
    tiling = PrefillTiling(16, 32, 2, 4)
    assert fits(weight) and not fits(weight.float()) and not fits(weight[..., :30].contiguous())
    with pytest.raises(ValueError, match="do not fit"):
        grouped_linear_prefill(x, weight, mapped, 4, tiling)
    with pytest.raises(ValueError, match="do not fit"):
        grouped_linear_prefill(x, weight, mapped, 3, tiling, sorted_in=True)
    with pytest.raises(ValueError, match="aligned"):
        grouped_linear_prefill(x[:, :30].contiguous(), weight[..., :30].contiguous(), mapped, 3, tiling)
    with pytest.raises(ValueError, match="tiles must be of 192"):
        zeros = torch.zeros(3, 1, dtype=torch.int32, device=DEVICE)
        grouped_linear_prefill(x, weight, map_experts(zeros, 2, 64), 3, tiling)
    with pytest.raises(ValueError, match="scale"):
        grouped_linear_prefill(x, weight, mapped, 3, tiling, scale=torch.zeros(4, device=DEVICE))


LAUNCHES = """
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.grouped_linear_prefill import TILE, PrefillTiling, grouped_linear_prefill
from blockyard.kernels.moe.map_experts import ExpertMap
from blockyard.services.gpu_worker.layers.moe.expert_configs import PREFILL

mapped = ExpertMap(torch.zeros(8 * TILE, dtype=torch.int32), torch.zeros(8, dtype=torch.int32), TILE)
x, gate_up, down = torch.zeros(8, 2880), torch.zeros(4, 1408, 2880), torch.zeros(4, 2880, 704)
inner = grouped_linear_prefill(
    x.bfloat16(), gate_up.bfloat16(), mapped, 32, PrefillTiling(*PREFILL[0].gate_up), gate=Gate.SILU, sorted_out=True
)
tiling, scale = PrefillTiling(*PREFILL[0].down), torch.zeros(32)
grouped_linear_prefill(inner, down.bfloat16(), mapped, 32, tiling, scale=scale, sorted_in=True)
"""


def test_the_measured_tilings_compile_for_an_h200(tmp_path: Path) -> None:
    shared = shared_bytes(LAUNCHES, tmp_path)
    assert len(shared) == 2 and max(size for _, size in shared) <= SHARED
