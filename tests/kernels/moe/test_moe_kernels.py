"""Kernels of mixtures of experts against their references: odd sizes, experts without rows, poisoned outputs."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blockyard.kernels.moe import combine_experts as combine_file
from blockyard.kernels.moe import grouped_linear as grouped_file
from blockyard.kernels.moe import map_experts as map_file
from blockyard.kernels.moe import route_experts as route_file
from blockyard.kernels.moe.combine_experts import combine_experts, combine_experts_reference
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.grouped_linear import GroupedTiling, grouped_linear, grouped_linear_reference
from blockyard.kernels.moe.map_experts import ExpertMap, map_experts, map_experts_reference, most_tiles
from blockyard.kernels.moe.route_experts import route_experts, route_experts_reference
from blockyard.kernels.moe.routing import Routing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
SMALL = GroupedTiling(out_tile=16, in_tile=32, stages=2, warps=4)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills new tensors with NaN or a large number, so that unwritten elements are found."""

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        size = args[0] if isinstance(args[0], tuple) else args
        return torch.full(size, float("nan") if kwargs["dtype"].is_floating_point else 1 << 30, **kwargs)

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return empty if name == "empty" else getattr(torch, name)

    for file in (combine_file, grouped_file, route_file):
        monkeypatch.setattr(file, "torch", Torch())


ROUTINGS = {
    "mixtral": Routing(num_experts=8, top_k=2),
    "qwen": Routing(num_experts=60, top_k=4, renormalize=False),
    "one": Routing(num_experts=16, top_k=1, sigmoid=True, renormalize=False),
    "deepseek-v2": Routing(num_experts=20, top_k=6, renormalize=False, scale=16.0, groups=5, top_groups=3),
    "deepseek-v3": Routing(num_experts=32, top_k=8, sigmoid=True, scale=2.5, groups=8, top_groups=4, sum_of_two=True),
    "all": Routing(num_experts=5, top_k=5),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias and factors"])
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_experts_and_weights(rows: int, routing: Routing, with_bias: bool, dtype: torch.dtype) -> None:
    wide = torch.randn(rows, routing.num_experts + 3, device=DEVICE).to(dtype)
    logits = wide[:, : routing.num_experts]
    bias = torch.randn(routing.num_experts, device=DEVICE) if with_bias else None
    factors = torch.rand(routing.num_experts, device=DEVICE).to(dtype) if with_bias else None
    experts, weights = route_experts(logits, routing, bias, factors)
    expected, expected_weights = route_experts_reference(logits, routing, bias, factors)
    if with_bias:
        assert torch.equal(expected_weights, route_experts_reference(logits, routing, bias)[1] * factors[expected])
    assert experts.tolist() == expected.tolist()
    assert torch.allclose(weights, expected_weights, rtol=1e-5, atol=1e-7)
    places = torch.randperm(routing.num_experts + 1, device=DEVICE).int()
    placed, same = route_experts(logits, routing, bias, factors, places)
    assert torch.equal(placed, places[expected.long()]) and torch.equal(same, weights)


def test_equal_scores_choose_the_first() -> None:
    for routing in ROUTINGS.values():
        logits = torch.zeros(2, routing.num_experts, device=DEVICE)
        experts, _ = route_experts(logits, routing)
        assert experts.tolist() == route_experts_reference(logits, routing)[0].tolist()
        assert experts[0].tolist() == list(range(routing.top_k))


@pytest.mark.parametrize("top_k", [1, 3])
def test_large_logits_are_told_apart(top_k: int) -> None:
    """In float32 the sigmoids of the three largest are all 1."""
    logits = torch.tensor([[30.0, -9.0, 50.0, float("-inf"), 40.0, 1.0]], device=DEVICE)
    routing = Routing(num_experts=6, top_k=top_k, sigmoid=True, renormalize=False)
    for route in (route_experts, route_experts_reference):
        experts, weights = route(logits, routing)
        assert experts.tolist() == [[2, 4, 0][:top_k]]
        assert weights.tolist() == [[1.0] * top_k]


def test_logits_that_are_no_numbers_give_experts_that_exist() -> None:
    for routing in ROUTINGS.values():
        logits = torch.full((1, routing.num_experts), float("nan"), device=DEVICE)
        experts, _ = route_experts(logits, routing)
        assert 0 <= int(experts.min()) <= int(experts.max()) < routing.num_experts


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_experts": 4, "top_k": 5},
        {"num_experts": 0, "top_k": 0},
        {"num_experts": 8, "top_k": 2, "groups": 3},
        {"num_experts": 8, "top_k": 2, "groups": 2, "top_groups": 3},
        {"num_experts": 8, "top_k": 3, "groups": 4, "top_groups": 1},
    ],
)
def test_routings_that_contradict_themselves(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="experts"):
        Routing(**wrong)


def as_lists(mapped: ExpertMap) -> tuple[list[int], list[int]]:
    """The map, without what stands in tiles that have no expert."""
    used = int((mapped.experts >= 0).sum())
    return mapped.experts.tolist(), mapped.pairs[: used * mapped.tile].tolist()


@pytest.mark.parametrize("kernels", [1, 2])
@settings(max_examples=20, deadline=None)
@given(data=st.data(), num_experts=st.integers(1, 40), top_k=st.integers(1, 4), tile=st.sampled_from([1, 4, 12, 16]))
def test_maps(data: st.DataObject, kernels: int, num_experts: int, top_k: int, tile: int) -> None:
    """By one kernel, and by the two that take many pairs; here a few, in chunks of 16. Pairs of `num_experts` are left
    out."""
    rows = data.draw(st.integers(0, 24))
    some = st.sampled_from(sorted(data.draw(st.sets(st.integers(0, num_experts), min_size=1))))
    chosen = [[data.draw(some) for _ in range(top_k)] for _ in range(rows)]
    experts = torch.tensor(chosen, dtype=torch.int32, device=DEVICE).view(rows, top_k)
    with pytest.MonkeyPatch.context() as patch:
        if kernels == 2:
            patch.setattr(map_file, "FEW_PAIRS", 0)
            patch.setattr(map_file, "_SORTED", 16)
        loads = torch.full((num_experts,), -1, dtype=torch.int32, device=DEVICE)
        mapped = map_experts(experts, num_experts, tile, loads)
    assert len(mapped.experts) == most_tiles(rows * top_k, num_experts, tile)
    if rows:
        assert as_lists(mapped) == as_lists(map_experts_reference(experts, num_experts, tile))
        assert loads.tolist() == experts.flatten().cpu().bincount(minlength=num_experts).tolist()[:num_experts]


@pytest.mark.skipif(DEVICE == "cpu", reason="17 s in the interpreter")
def test_a_map_of_many_pairs() -> None:
    experts = torch.randint(0, 6, (1100, 8), dtype=torch.int32, device=DEVICE)
    assert as_lists(map_experts(experts, 7, 256)) == as_lists(map_experts_reference(experts, 7, 256))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", list(Gate))
@pytest.mark.parametrize(("rows", "top_k", "tile"), [(1, 2, 16), (9, 3, 16), (40, 2, 32)])
@pytest.mark.parametrize("form", ["plain", "bias", "scaled", "scaled first"])
def test_products(form: str, rows: int, top_k: int, tile: int, gate: Gate, dtype: torch.dtype) -> None:
    num_experts, size, outs = 6, 40, 22
    x = torch.randn(rows, size, device=DEVICE).to(dtype)
    weight = (torch.randn(num_experts, outs, size, device=DEVICE) / 6).to(dtype)
    bias = torch.randn(num_experts, outs, device=DEVICE).to(dtype) if form != "plain" else None
    experts = torch.randint(0, num_experts - 1, (rows, top_k), dtype=torch.int32, device=DEVICE)  # one has no rows
    scale = torch.rand(rows * top_k, device=DEVICE) if form.startswith("scaled") else None
    options = {"bias": bias, "gate": gate, "scale": scale, "scale_first": form == "scaled first"}
    mapped = map_experts(experts, num_experts, tile)
    got = grouped_linear(x, weight, mapped, rows * top_k, SMALL, **options)
    want = grouped_linear_reference(x, weight, experts, **options)
    assert got.shape == want.shape and got.dtype == dtype and not got.isnan().any()
    assert float((got.double() - want.double()).norm() / want.double().norm()) <= ERROR[dtype]


def test_the_second_product_reads_pairs() -> None:
    x, weight = torch.randn(6, 40, device=DEVICE), torch.randn(4, 18, 40, device=DEVICE)
    experts = torch.tensor([[0, 3], [3, 1], [1, 0]], dtype=torch.int32, device=DEVICE)
    got = grouped_linear(x, weight, map_experts(experts, 4, 16), 6, SMALL)
    assert torch.allclose(got, grouped_linear_reference(x, weight, experts), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("with_shared", [False, True])
def test_sums(with_shared: bool) -> None:
    pairs = torch.randn(15, 1030, device=DEVICE)
    shared = torch.randn(5, 1030, device=DEVICE) if with_shared else None
    assert torch.equal(combine_experts(pairs, 3, shared), combine_experts_reference(pairs, 3, shared))
    experts = torch.tensor([[0, 4, 1], [4, 4, 4], [3, 2, 1], [4, 0, 4], [4, 4, 2]], dtype=torch.int32, device=DEVICE)
    pairs[(experts == 4).view(-1)] = torch.nan
    got = combine_experts(pairs, 3, shared, experts, 4)
    assert torch.equal(got, combine_experts_reference(pairs, 3, shared, experts, 4)) and not got.isnan().any()


def test_shapes_that_do_not_fit() -> None:
    x, weight = torch.randn(3, 32, device=DEVICE), torch.randn(2, 16, 32, device=DEVICE)
    mapped = map_experts(torch.zeros(3, 1, dtype=torch.int32, device=DEVICE), 2, 16)
    for wrong in ({"bias": torch.zeros(16, device=DEVICE)}, {"scale": torch.zeros(4, device=DEVICE)}):
        with pytest.raises(ValueError, match=r"bias|scale"):
            grouped_linear(x, weight, mapped, 3, SMALL, **wrong)
    with pytest.raises(ValueError, match="do not fit"):
        grouped_linear(x, weight, mapped, 4, SMALL)
    with pytest.raises(ValueError, match="int32"):
        map_experts(torch.zeros(3, 1, device=DEVICE), 2, 16)
    with pytest.raises(ValueError, match=r"loads must be \[2\] contiguous int32, got \[3\] torch.int32"):
        map_experts(torch.zeros(3, 1, dtype=torch.int32, device=DEVICE), 2, 16, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="do not fit"):
        combine_experts(torch.zeros(5, 8, device=DEVICE), 2)
    with pytest.raises(ValueError, match=r"experts \[2, 3\] torch.float32 are not int32 \[2, 3\]"):
        combine_experts(torch.zeros(6, 8, device=DEVICE), 3, None, torch.zeros(2, 3, device=DEVICE), 4)
