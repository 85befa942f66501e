"""A mixture of experts against plain torch, on the CPU and with the kernels of a GPU."""

from dataclasses import replace

import pytest
import quick_interpreter  # noqa: F401, before kernels are imported
import torch
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.moe.gates import Gate, gated
from blockyard.kernels.moe.routing import Routing, choose_experts
from blockyard.services.gpu_worker.layers.fused_ops import OPS
from blockyard.services.gpu_worker.layers.linear import dense_linear
from blockyard.services.gpu_worker.layers.moe import routed_experts as experts_file
from blockyard.services.gpu_worker.layers.moe.expert_configs import candidates
from blockyard.services.gpu_worker.layers.moe.expert_places import ExpertPlaces
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertWeights
from blockyard.services.gpu_worker.layers.moe.routed_experts import HostExperts, RoutedExperts
from blockyard.services.gpu_worker.loading.expert_loads import LayerLoad
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.quantization.dense import Float32Linear, UnquantizedExperts

HIDDEN, INNER, NUM_EXPERTS = 32, 24, 6
ROUTING = Routing(num_experts=NUM_EXPERTS, top_k=3)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_weights(bias: bool = False) -> ExpertWeights:
    torch.manual_seed(2)
    sizes = ((NUM_EXPERTS, 2 * INNER), (NUM_EXPERTS, HIDDEN))
    biases = [torch.randn(*size, device=DEVICE) if bias else None for size in sizes]
    return ExpertWeights(
        gate_up=UnquantizedExperts(torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN, device=DEVICE) / 5, biases[0]),
        down=UnquantizedExperts(torch.randn(NUM_EXPERTS, HIDDEN, INNER, device=DEVICE) / 5, biases[1]),
        device=torch.device(DEVICE),
    )


def plain(x: Tensor, experts: Tensor, factors: Tensor, of: ExpertWeights, gate: Gate, scales_input: bool) -> Tensor:
    """Row by row and expert by expert."""
    out, gate_up, down = torch.zeros_like(x), of.gate_up, of.down
    for row in range(len(x)):
        for expert, factor in zip(experts[row].tolist(), factors[row], strict=True):
            given = x[row] * factor if scales_input else x[row]
            first = gate_up.weight[expert] @ given + (0 if gate_up.bias is None else gate_up.bias[expert])
            last = down.weight[expert] @ gated(first, gate) + (0 if down.bias is None else down.bias[expert])
            out[row] += last if scales_input else last * factor
    return out


def summed(delta: Tensor) -> Tensor:
    return delta if delta.dim() == 2 else delta.sum(1)


@pytest.mark.parametrize("rows", [0, 1, 5, 20])  # 0: a step in which no sequence samples
@pytest.mark.parametrize("scales_input", [False, True])
@pytest.mark.parametrize(("gate", "bias"), [(Gate.SILU, False), (Gate.CLAMPED_SWIGLU, True)])
@pytest.mark.parametrize("kind", ["host", "grouped"])
def test_sums_of_experts(kind: str, gate: Gate, bias: bool, scales_input: bool, rows: int) -> None:
    weights = make_weights(bias)
    if kind == "grouped":
        from blockyard.services.gpu_worker.layers.moe.grouped_experts import GroupedExperts

        made: HostExperts | GroupedExperts = GroupedExperts(weights, ROUTING, gate, scales_input)
    else:
        made = HostExperts(weights, ROUTING, gate, scales_input)
    x, shared = torch.randn(rows, HIDDEN, device=DEVICE), torch.randn(rows, HIDDEN, device=DEVICE)
    logits = torch.randn(rows, NUM_EXPERTS, device=DEVICE)
    logits[:, 2] = -100  # an expert that no row chooses
    experts, factors = made.choose(logits, None)
    assert experts.tolist() == choose_experts(logits, ROUTING)[0].tolist()
    expected = plain(x, experts, factors, weights, gate, scales_input)
    got = made.forward(x, experts, factors, shared)
    assert got is not None and torch.allclose(got, expected + shared, rtol=1e-4, atol=1e-4)
    residual = torch.randn(rows, HIDDEN, device=DEVICE)
    before, got = residual.clone(), made.forward(x, experts, factors, None, residual=residual)
    added = residual if got is None else residual + summed(got)
    assert torch.allclose(added, before + expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 5, 20])
@pytest.mark.parametrize("kind", ["host", "grouped"])
def test_parts_of_ranks_with_some_experts_whole(kind: str, rows: int) -> None:
    """Pairs of other ranks' experts are not computed."""
    whole, x = make_weights(bias=True), torch.randn(rows, HIDDEN, device=DEVICE)
    total, logits = torch.zeros_like(x), torch.randn(rows, NUM_EXPERTS, device=DEVICE)
    logits[:, [0, 3]] = -100  # first places: no row chooses them
    whole.gate_up.weight[[0, 3]] = torch.nan
    for rank, own in enumerate((range(3), range(3, 6))):
        gate_up, down = (
            UnquantizedExperts(one.weight[own.start : own.stop], one.bias[own.start : own.stop])
            for one in (whole.gate_up, whole.down)
        )
        places = ExpertPlaces(NUM_EXPERTS, Shard(rank, 2), torch.device(DEVICE), counts=False)
        weights = replace(whole, gate_up=gate_up, down=down, places=places)
        if kind == "grouped":
            from blockyard.services.gpu_worker.layers.moe.grouped_experts import GroupedExperts

            made: HostExperts | GroupedExperts = GroupedExperts(weights, ROUTING, Gate.SILU, False)
        else:
            made = HostExperts(weights, ROUTING, Gate.SILU, False)
        experts, factors = made.choose(logits, None)
        part = made.forward(x, experts.clone(), factors, None)
        assert part is not None
        total += part
    expected = plain(x, *choose_experts(logits, ROUTING), whole, Gate.SILU, False)
    assert torch.allclose(total, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(8, 8), (40, 16), (300, 16), (1500, 1100)])  # all layouts of the CPU
def test_a_dense_expert_takes_over_the_weights_of_another(shape: tuple[int, int]) -> None:
    method = UnquantizedExperts(torch.randn(2, *shape, device=DEVICE), torch.randn(2, shape[0], device=DEVICE))
    for is_prepared in (False, True):
        taken, given = method.linear(0), method.linear(1)
        if is_prepared:
            taken.prepare()
            given.prepare()
        taken.write([one.clone() for one in given.contents()])
        for rows in (1, 2, 20):
            x = torch.randn(rows, shape[1], device=DEVICE)
            assert torch.equal(taken.apply(x), given.apply(x))
        method.weight.normal_()
    assert method.numbers() == []


@pytest.mark.parametrize("rows", [1, 7, 20])
@pytest.mark.parametrize("kind", ["host", "grouped"])
def test_products_count_how_often_experts_are_chosen(kind: str, rows: int) -> None:
    load = LayerLoad(torch.full((NUM_EXPERTS,), 9, dtype=torch.int32, device=DEVICE))
    weights = replace(make_weights(), load=load)
    if kind == "grouped":
        from blockyard.services.gpu_worker.layers.moe.grouped_experts import GroupedExperts

        made: HostExperts | GroupedExperts = GroupedExperts(weights, ROUTING, Gate.SILU, False)
    else:
        made = HostExperts(weights, ROUTING, Gate.SILU, False)
    assert load.top_k == ROUTING.top_k
    experts, factors = made.choose(torch.randn(rows, NUM_EXPERTS, device=DEVICE), None)
    made.forward(torch.randn(rows, HIDDEN, device=DEVICE), experts, factors, None)
    assert load.pairs.tolist() == experts.flatten().cpu().bincount(minlength=NUM_EXPERTS).tolist()


def test_the_host_computes_only_chosen_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = HostExperts(make_weights(), ROUTING, Gate.SILU, False)
    called = set()
    for i, linear in enumerate(made.linears()):
        linear.wrap(lambda product, i=i: lambda x: (called.add(i), product(x))[1])
    experts = torch.tensor([[0, 4, 5], [5, 4, 0]], dtype=torch.int32, device=DEVICE)
    made.forward(torch.randn(2, HIDDEN, device=DEVICE), experts, torch.ones(2, 3, device=DEVICE), None)
    assert called == {0, 4, 5, 6, 10, 11}


def test_the_bias_decides_the_choice_and_not_the_weights() -> None:
    routing = Routing(num_experts=NUM_EXPERTS, top_k=2, sigmoid=True, scale=2.5)
    weights = make_weights()
    router = dense_linear(torch.randn(NUM_EXPERTS, HIDDEN, device=DEVICE))
    bias = torch.tensor([0.0, 9.0, 0.0, 0.0, 8.0, 0.0], device=DEVICE)
    layer = RoutedExperts(router, weights, routing, choice_bias=bias)
    residual, norm = torch.randn(3, HIDDEN, device=DEVICE), RMSNorm(torch.ones(HIDDEN, device=DEVICE), 1e-6)
    before, x = residual.clone(), norm(residual)
    got = layer.forward(residual, None, norm)
    scores = router(x).sigmoid()[:, [1, 4]]
    factors = scores / scores.sum(-1, keepdim=True) * 2.5
    expected = plain(x, torch.tensor([[1, 4]] * 3), factors, weights, Gate.SILU, False)
    added = residual if got is None else residual + summed(got)
    assert torch.allclose(added, before + expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_one_row_is_normalised_by_the_router_and_the_experts_and_added_to_the_residual(
    batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from blockyard.services.gpu_worker.layers.moe.grouped_experts import GroupedExperts
    from blockyard.services.gpu_worker.layers.triton_ops import TritonOps

    monkeypatch.setattr(experts_file, "find_experts", GroupedExperts)
    monkeypatch.setitem(OPS, DEVICE, TritonOps)
    weight = torch.randn(NUM_EXPERTS, HIDDEN, device=DEVICE)
    router = dense_linear(weight)
    layer = RoutedExperts(router, make_weights(), ROUTING)
    called = []

    def fused(x: Tensor, norm: RMSNorm | None = None, gated: bool = False, add_to: Tensor | None = None) -> Tensor:
        assert norm is not None and not gated and add_to is None
        called.append(len(x))
        return norm(x) @ weight.T

    router.use({}, fused={1: fused, 5: fused})
    if batch_invariant:
        router.make_batch_invariant()
    norm = RMSNorm(torch.rand(HIDDEN, device=DEVICE), 1e-6)
    for rows in (1, 5):
        residual = torch.randn(rows, HIDDEN, device=DEVICE)
        before = residual.clone()
        want = before + layer.apply(norm(residual))
        delta = layer.forward(residual, None, norm)
        assert (delta is None) == (rows == 1 and not batch_invariant)
        added = residual if delta is None else residual + summed(delta)
        assert torch.allclose(added, want, rtol=1e-4, atol=1e-4)
    assert called == ([] if batch_invariant else [1])


@pytest.mark.parametrize("kind", ["host", "grouped"])
def test_a_row_alone_and_among_100_has_the_same_bits_in_a_batch_invariant_model(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "grouped":
        from blockyard.services.gpu_worker.layers.moe.grouped_experts import GroupedExperts

        monkeypatch.setattr(experts_file, "find_experts", GroupedExperts)
    router = dense_linear(torch.randn(NUM_EXPERTS, HIDDEN, device=DEVICE))
    layer = RoutedExperts(router, make_weights(bias=True), ROUTING)
    for linear in layer.linears():
        linear.make_batch_invariant()
    x = torch.randn(100, HIDDEN, device=DEVICE)
    together = layer.apply(x)
    assert len(together.unique(dim=0)) == 100
    for row in (0, 41, 99):
        assert torch.equal(layer.apply(x[row : row + 1])[0], together[row])
    assert torch.equal(layer.apply(x[30:50]), together[30:50])


def test_a_batch_invariant_model_has_one_tiling_for_all_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from blockyard.services.gpu_worker.layers.moe import expert_products, grouped_experts

    used = []
    product = expert_products.grouped_linear
    monkeypatch.setattr(
        expert_products,
        "grouped_linear",
        lambda x, weight, mapped, pairs, tiling, **more: (
            used.append((mapped.tile, tiling)),
            product(x, weight, mapped, pairs, tiling, **more),
        )[1],
    )
    made = grouped_experts.GroupedExperts(make_weights(), ROUTING, Gate.SILU, False)
    for rows in (1, 5, 40):
        x, logits = torch.randn(rows, HIDDEN, device=DEVICE), torch.randn(rows, NUM_EXPERTS, device=DEVICE)
        experts, weights = made.choose(logits, None)
        assert made.forward(x, experts, weights, None, True, x) is not None, "it is not added to the residual"
    assert len(used) == 6 and used[:2] == used[2:4] == used[4:], "gate and up, and down"


def test_a_router_in_float32_has_its_own_kernel_for_rows_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from blockyard.services.gpu_worker.layers.moe import exact_product

    weight, given = torch.randn(NUM_EXPERTS, HIDDEN, device=DEVICE), []
    monkeypatch.setattr(
        exact_product, "router_linear", lambda x, weight, arrived, pdl: given.append(x) or x.float() @ weight.T
    )
    product = exact_product.ExactProduct(Float32Linear(weight), torch.device(DEVICE))
    x = torch.randn(5, HIDDEN, device=DEVICE)
    for rows in (x, x.half(), x.bfloat16()):
        got = product(rows)
        assert got.dtype == torch.float32 and torch.allclose(got, rows.float() @ weight.T, rtol=1e-4, atol=1e-4)
    assert [rows.dtype for rows in given] == [torch.bfloat16]


@pytest.mark.filterwarnings("ignore:.*encountered in")  # the interpreter's, for places without a pair
@pytest.mark.parametrize("scales_input", [False, True])
@pytest.mark.parametrize(("gate", "bias"), [(Gate.SILU, False), (Gate.CLAMPED_SWIGLU, True)])
def test_many_pairs_of_16_bits_have_a_kernel_of_their_own(
    gate: Gate, bias: bool, scales_input: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from blockyard.services.gpu_worker.layers.moe.grouped_experts import GroupedExperts

    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    whole = make_weights(bias)
    weights = replace(whole, gate_up=_as_dtype(whole.gate_up, dtype), down=_as_dtype(whole.down, dtype))
    layer = GroupedExperts(weights, ROUTING, gate, scales_input)
    x = torch.randn(150, HIDDEN, device=DEVICE).to(dtype)
    experts, factors = layer.choose(torch.randn(150, NUM_EXPERTS, device=DEVICE), None)
    some = candidates(layer.shape, 150)
    assert [config.kernel for config in some] == ["prefill"] * 3 + ["grouped"] * (len(some) - 3)
    got = layer.forward(x, experts, factors, None)
    few = layer.forward_with(some[-1], x, experts, factors)
    assert got is not None and few is not None
    assert float((got.double() - few.double()).norm() / few.double().norm()) < (1e-2 if DEVICE == "cuda" else 2e-3)
    in_float32 = GroupedExperts(whole, ROUTING, gate, scales_input)
    assert {config.kernel for config in candidates(in_float32.shape, 150)} == {"grouped"}


def _as_dtype(method: UnquantizedExperts, dtype: torch.dtype) -> UnquantizedExperts:
    return UnquantizedExperts(method.weight.to(dtype), None if method.bias is None else method.bias.to(dtype))
