"""A mixture whose experts are in a kept form: kernels of a GPU against weights that the form dequantizes."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import quick_interpreter  # noqa: F401, before kernels are imported
import torch
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.moe.gates import Gate, gated
from blockyard.kernels.moe.routing import Routing
from blockyard.services.gpu_worker.execution.ranks.expert_moves import agree_on_numbers
from blockyard.services.gpu_worker.layers.moe.expert_configs import (
    QUANTIZED_SKINNY,
    ROUNDING_SKINNY,
    batch_invariant,
    candidates,
)
from blockyard.services.gpu_worker.layers.moe.expert_places import ExpertPlaces
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertWeights
from blockyard.services.gpu_worker.layers.moe.routed_experts import HostExperts
from blockyard.services.gpu_worker.loading.expert_loads import LayerLoad
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.quantization.kept.form import KeptExperts, KeptForm, kinds
from blockyard.services.gpu_worker.quantization.kept.fp8_w8a8 import Fp8W8A8
from blockyard.services.gpu_worker.quantization.kept.int8_w8a8 import Int8W8A8
from blockyard.services.gpu_worker.quantization.kept.table4_a16 import E2M1, FP4, NF4, Table4A16
from blockyard.services.gpu_worker.quantization.kept.w4a16 import W4A16
from blockyard.services.gpu_worker.quantization.kept.w8a16 import W8A16
from blockyard.services.gpu_worker.quantization.method import ExpertMethod
from blockyard.shared.errors import ConfigError

HIDDEN, INNER, NUM_EXPERTS = 96, 40, 6
ROUTING = Routing(num_experts=NUM_EXPERTS, top_k=2)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
ERROR = 2e-2 if DEVICE == "cuda" else 1e-3  # of a row
E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
FORMS: tuple[KeptForm, ...] = (
    W4A16(32),
    W4A16(128, zeros=torch.uint8),
    W4A16(32, zeros=torch.float16, scales=torch.bfloat16),
    W4A16(),
    Table4A16(NF4, 64),
    Table4A16(FP4, 64, scales=torch.float16),
    Table4A16(E2M1, 32, scales=E8M0),
    Table4A16(E2M1, 16, scales=E4M3, row_scales=True),
    W8A16(torch.int8),
    W8A16(torch.uint8, 16, zeros=True, scales=torch.float16),
    W8A16(E4M3, 32, scales=E8M0),
    Fp8W8A8(),
    Fp8W8A8(32),
    Fp8W8A8(8),
    Fp8W8A8(32, static=True),
    Fp8W8A8(most_input=1.0),
    Int8W8A8(),
    Int8W8A8(static=True),
    Int8W8A8(symmetric=False),
    Int8W8A8(static=True, symmetric=False),
)
KEYS = [f"{form.name}-{i}" for i, form in enumerate(FORMS)]


def make(form: KeptForm, outs: int, size: int) -> KeptExperts:
    """Dummy weights with codes and scales that differ, ten times as large as those of a start."""
    kept: dict[str, Tensor] = {
        name: torch.empty(shape, dtype=dtype, device=DEVICE)
        for name, (shape, dtype) in kinds(form, outs, size, (NUM_EXPERTS,)).items()
    }
    form.fill(kept, torch.Generator(DEVICE).manual_seed(outs))
    for name, one in kept.items():
        if one.dtype == E8M0:
            one.view(torch.uint8).add_(torch.randint(2, 5, one.shape, device=DEVICE).byte())
        elif "scales" in name:
            one.copy_((one.float() * (5 + 10 * torch.rand(one.shape, device=DEVICE))).clamp(max=400).to(one.dtype))
        elif name == "zeros":
            one.copy_((one.float() + torch.randint(-3, 4, one.shape, device=DEVICE)).to(one.dtype))
    return KeptExperts(form, kept, (size, outs), DTYPE, torch.randn(NUM_EXPERTS, outs, device=DEVICE).to(DTYPE) / 4)


def make_layer(form: KeptForm, load: LayerLoad | None = None) -> ExpertWeights:
    torch.manual_seed(4)
    gate_up, down = make(form, 2 * INNER, HIDDEN), make(form, HIDDEN, INNER)
    return ExpertWeights(gate_up=gate_up, down=down, device=torch.device(DEVICE), load=load)


def plain(weights: ExpertWeights, x: Tensor, experts: Tensor, factors: Tensor) -> Tensor:
    """Row by row and expert by expert, as `HostExperts` computes."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for row in range(len(x)):
        for expert, factor in zip(experts[row].tolist(), factors[row], strict=True):
            first = gated(product(weights.gate_up, expert, x[row : row + 1]), Gate.SILU).to(DTYPE)
            out[row] += (product(weights.down, expert, first) * factor)[0]
    return out


def product(method: ExpertMethod, expert: int, x: Tensor) -> Tensor:
    assert isinstance(method, KeptExperts) and method.bias is not None
    kept: Mapping[str, Tensor] = method.tensors()
    own = {name: one if one.dim() == 0 else one[expert] for name, one in kept.items() if name != "bias"}
    weight = method.kept_form.dequantize(own, method.shape[0], torch.float32)
    return method.round_inputs(x).double() @ weight.double().T + method.bias[expert].double()


@pytest.mark.filterwarnings("ignore:.*encountered in")  # the interpreter's, for places without a pair
@pytest.mark.parametrize("form", FORMS, ids=KEYS)
def test_sums_of_experts(form: KeptForm) -> None:
    from blockyard.services.gpu_worker.layers.moe.grouped_experts import GroupedExperts

    weights = make_layer(form)
    layer = GroupedExperts(weights, ROUTING, Gate.SILU, False)
    assert {id(one) for one in layer.tensors()} == {
        id(one) for method in (weights.gate_up, weights.down) for one in method.tensors().values()
    }
    assert layer.size_bytes == sum(
        one.nbytes
        for method in (weights.gate_up, weights.down)
        for name, one in method.tensors().items()
        if name != "bias"
    )
    x = torch.randn(20, HIDDEN, device=DEVICE).to(DTYPE)
    experts, factors = layer.choose(torch.randn(20, NUM_EXPERTS, device=DEVICE), None)
    want = plain(weights, x, experts, factors)
    for rows in (1, 20):
        got = layer.forward(x[:rows], experts[:rows], factors[:rows], None)
        assert got is not None and error(got, want[:rows]) < ERROR
    same = [layer.forward(x[:rows], experts[:rows], factors[:rows], None, batch_invariant=True) for rows in (1, 20)]
    assert same[1] is not None and error(same[1], want) < ERROR
    for few in same[:1]:
        assert few is not None and torch.equal(few, same[1][: len(few)])


@pytest.mark.parametrize("form", FORMS, ids=KEYS)
@pytest.mark.parametrize("is_prepared", [False, True])
def test_an_expert_takes_over_the_weights_of_another(form: KeptForm, is_prepared: bool) -> None:
    """As they are loaded, which kernels of a GPU read, and as the CPU has prepared them."""
    method = make(form, 2 * INNER, HIDDEN)
    taken, given = method.linear(1), method.linear(4)
    x = torch.randn(3, HIDDEN, device=DEVICE).to(DTYPE)
    if is_prepared:
        taken.prepare()
        given.prepare()
    want, before = given.apply(x), taken.apply(x)
    assert not torch.equal(want, before)
    taken.write([one.clone() for one in given.contents()])
    assert torch.equal(taken.apply(x), want) and torch.equal(given.apply(x), want)
    if not is_prepared:
        assert torch.equal(method.linear(1).apply(x), want), "in the memory of all experts"
    assert all(one.dim() == 0 for one in method.numbers())


class OtherRanks:
    """Ranks of which the others have the scale 7."""

    device = torch.device(DEVICE)

    def largest(self, values: Tensor) -> Tensor:
        return values.clamp(min=7)


def test_ranks_with_some_experts_whole_agree_on_what_holds_for_all() -> None:
    """The scale by which inputs are divided: experts that move find the one that they had."""
    weights = make_layer(Int8W8A8(static=True))
    numbers = [number for method in (weights.gate_up, weights.down) for number in method.numbers()]
    for places, scale in ((None, 2.0), (ExpertPlaces(NUM_EXPERTS, Shard(), torch.device(DEVICE), counts=False), 7.0)):
        for number in numbers:
            number.fill_(2.0)
        layer = HostExperts(replace(weights, places=places), ROUTING, Gate.SILU, False)
        agree_on_numbers([layer], OtherRanks())
        assert [float(number) for number in numbers] == [scale] * 2
        agree_on_numbers([layer], None)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("form", [W4A16(32), Fp8W8A8(), Fp8W8A8(32), Fp8W8A8(48)], ids=["w4", "fp8", "g32", "g48"])
def test_norms_are_fused_where_kernels_round_inputs(form: KeptForm) -> None:
    from blockyard.services.gpu_worker.layers.moe.grouped_experts import GroupedExperts

    weights = make_layer(form)
    layer = GroupedExperts(weights, ROUTING, Gate.SILU, False)
    assert layer.fuses_norm(1) == (form != Fp8W8A8(48)) and not layer.fuses_norm(64)
    if not layer.fuses_norm(1):
        return
    norm = RMSNorm(torch.rand(HIDDEN, device=DEVICE).to(DTYPE), 0.1)
    residual = torch.randn(1, HIDDEN, device=DEVICE).to(DTYPE)
    experts, factors = layer.choose(torch.randn(1, NUM_EXPERTS, device=DEVICE), None)
    x = residual.float() * torch.rsqrt(residual.float().square().mean(-1, keepdim=True) + 0.1) * norm.weight.float()
    want = plain(weights, x.to(DTYPE), experts, factors) + residual.double()
    assert layer.forward(residual, experts, factors, None, residual=residual, norm=norm) is None
    assert error(residual, want) < ERROR


def test_forms_have_configs_of_their_own() -> None:
    from blockyard.services.gpu_worker.layers.moe.grouped_experts import GroupedExperts

    shapes = [GroupedExperts(make_layer(form), ROUTING, Gate.SILU, False).shape for form in FORMS]
    assert len({shape.form for shape in shapes}) == len(FORMS) - 4  # static scales and bounds change no kernel's time
    for shape in shapes:
        few = ROUNDING_SKINNY if "inputs" in shape.form else QUANTIZED_SKINNY
        assert candidates(shape, 1)[: len(few)] == few
        for rows in (1, 8, 64, 2048):
            assert {config.kernel for config in candidates(shape, rows)} <= {"skinny", "grouped"}
        assert batch_invariant(shape).kernel == "grouped"


def test_groups_that_no_kernel_reads_are_refused() -> None:
    from blockyard.services.gpu_worker.layers.moe.grouped_experts import GroupedExperts

    with pytest.raises(ConfigError, match="experts have groups of 5 inputs"):
        GroupedExperts(make_layer(W4A16(5)), ROUTING, Gate.SILU, False)
