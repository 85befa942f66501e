"""Routers in float32 on 16-bit rows, against torch: odd sizes, sums in parts, counts that are 0 again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compile_for_hopper import SHARED, shared_bytes

from blockyard.kernels.moe.router_linear import (
    FEW_ROWS,
    MOST_TILES,
    RouterTiling,
    router_linear,
    router_linear_reference,
    takes,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter multiplies no bfloat16
SMALL = RouterTiling(16, 16, 32, 2, 2)


def counts() -> torch.Tensor:
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("options", [{"few": True}, {"few": False}, {"few": False, "tiling": SMALL}, {}], ids=str)
@pytest.mark.parametrize(("experts", "size"), [(6, 40), (20, 300), (16, 64)])
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 9, 40])
def test_logits(rows: int, experts: int, size: int, options: dict[str, Any]) -> None:
    if options.get("few") and rows > FEW_ROWS:
        pytest.skip("many rows")
    x, weight = torch.randn(rows, size).to(DEVICE, DTYPE), torch.randn(experts, size).to(DEVICE)
    arrived = counts()
    exact = x.double() @ weight.double().T
    for _ in range(2):
        got = router_linear(x, weight, arrived, pdl=False, **options)
        assert got.shape == (rows, experts) and got.dtype == torch.float32
        assert not rows or float((got - exact).norm() / exact.norm()) < 1e-6
    assert torch.allclose(got, router_linear_reference(x, weight), rtol=1e-4, atol=1e-4)
    assert not arrived.any()


def test_small_parts_of_weights_are_not_lost() -> None:
    """1 + 2^-9 + 2^-18 has three parts in bfloat16."""
    weight = torch.full((16, 64), 1 + 2**-9 + 2**-18, device=DEVICE)
    x = torch.ones(20, 64, dtype=DTYPE, device=DEVICE)
    x[:, ::2] = -1
    x[:, 0] = 1
    got = router_linear(x, weight, counts(), pdl=False, few=False)
    assert torch.equal(got, torch.full_like(got, float(weight[0, 0]) * 2))


def test_operands_that_do_not_fit() -> None:
    x, weight = torch.zeros(2, 32, dtype=DTYPE, device=DEVICE), torch.zeros(4, 32, device=DEVICE)
    with pytest.raises(ValueError, match="rows"):
        router_linear(x.float(), weight, counts(), pdl=False)
    with pytest.raises(ValueError, match="weight"):
        router_linear(x, weight.half(), counts(), pdl=False)
    with pytest.raises(ValueError, match="arrived"):
        router_linear(x, weight, counts()[:1], pdl=False)
    assert takes(x.bfloat16()) and not takes(x.half()) and not takes(x.bfloat16().T)


LAUNCHES = """
from blockyard.kernels.moe.router_linear import MOST_TILES, router_linear

arrived = torch.zeros(MOST_TILES, dtype=torch.int32)
for experts, size, numbers in ((64, 2048, (8, 64)), (256, 7168, (1, 16, 2048))):
    for rows in numbers:
        router_linear(torch.zeros(rows, size).bfloat16(), torch.zeros(experts, size), arrived, pdl=True)
"""


def test_the_sizes_of_deepseek_compile_for_an_h200(tmp_path: Path) -> None:
    shared = shared_bytes(LAUNCHES, tmp_path)
    assert {name for name, _ in shared} == {"router_few_kernel", "router_many_kernel"}
    assert max(size for _, size in shared) <= SHARED // 2
