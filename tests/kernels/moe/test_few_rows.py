"""Products on tensor cores without a map: each program finds the pairs of its expert."""

import pytest
import torch

from blockyard.kernels.moe.few_rows import MAX_ROWS
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.grouped_linear import GroupedTiling, grouped_linear, grouped_linear_reference
from blockyard.kernels.moe.map_experts import map_experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = GroupedTiling(out_tile=16, in_tile=32, stages=2, warps=4)


@pytest.mark.parametrize(("num_experts", "top_k"), [(6, 3), (40, 5), (3, 3), (4, 1)])
@pytest.mark.parametrize("rows", [1, 5, MAX_ROWS])
def test_a_product_without_a_map(rows: int, num_experts: int, top_k: int) -> None:
    """The same bits as with one, and the loads."""
    x, weight = torch.randn(rows, 40, device=DEVICE), torch.randn(num_experts, 20, 40, device=DEVICE) / 6
    experts = torch.rand(rows, num_experts, device=DEVICE).topk(top_k).indices.int()
    loads = torch.full((num_experts,), -1, dtype=torch.int32, device=DEVICE)
    got = grouped_linear(x, weight, experts, rows * top_k, SMALL, gate=Gate.SILU, loads=loads)
    want = grouped_linear_reference(x, weight, experts, gate=Gate.SILU)
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)
    assert loads.tolist() == experts.flatten().cpu().bincount(minlength=num_experts).tolist()
    mapped = map_experts(experts, num_experts, 16)
    assert torch.allclose(got, grouped_linear(x, weight, mapped, rows * top_k, SMALL, gate=Gate.SILU), rtol=1e-6)


def test_all_rows_have_the_same_experts() -> None:
    x, weight = torch.randn(7, 40, device=DEVICE), torch.randn(5, 20, 40, device=DEVICE) / 6
    experts = torch.tensor([[4, 2]], dtype=torch.int32, device=DEVICE).repeat(7, 1)
    got = grouped_linear(x, weight, experts, 14, SMALL)
    assert torch.allclose(got, grouped_linear_reference(x, weight, experts), rtol=1e-4, atol=1e-5)


def test_too_many_rows() -> None:
    x, weight = torch.randn(MAX_ROWS + 1, 40, device=DEVICE), torch.randn(5, 20, 40, device=DEVICE)
    experts = torch.zeros(MAX_ROWS + 1, 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="do not fit 17 pairs"):
        grouped_linear(x, weight, experts, MAX_ROWS + 1, SMALL)
    with pytest.raises(ValueError, match="do not fit 2 pairs"):
        grouped_linear(x[:1], weight, experts[:1], 2, SMALL)
