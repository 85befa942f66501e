"""Products that the tuner makes of 4- and 8-bit weights with inputs as they are: each candidate and each fusion, in
Triton's interpreter, and on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blockyard.kernels.layers.linear_stream_k import Workspace
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.quantized.block_weights import BLOCK
from blockyard.services.gpu_worker.layers.linear import Linear, make_spec
from blockyard.services.gpu_worker.linear_tuning import block_products as tuned_products
from blockyard.services.gpu_worker.linear_tuning.block_products import SKINNY_BESIDE_MMA, SKINNY_TILES, BlockProducts
from blockyard.services.gpu_worker.linear_tuning.kernel_configs import LinearShape
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.quantization.kept import block_products
from blockyard.services.gpu_worker.quantization.kept.form import KeptForm, KeptLinear, PackedForm, kinds
from blockyard.services.gpu_worker.quantization.kept.table4_a16 import E2M1, NF4, Table4A16
from blockyard.services.gpu_worker.quantization.kept.w4a16 import W4A16
from blockyard.services.gpu_worker.quantization.kept.w8a16 import W8A16
from blockyard.services.gpu_worker.quantization.method import Fusion

HAS_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if HAS_GPU else ("cpu", torch.float16)
FORMS: list[KeptForm] = [
    W4A16(128),
    W4A16(64, torch.uint8),
    W4A16(None, torch.float16),
    Table4A16(NF4, 64),
    Table4A16(E2M1, 32, torch.float8_e8m0fnu),
    W8A16(torch.int8),
]
ERROR = 1e-2


@pytest.fixture(autouse=True)
def workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, methods of weights import no kernels."""
    monkeypatch.setattr(block_products, "Workspace", Workspace, raising=False)


def layer(form: KeptForm, outputs: int, inputs: int, fusion: Fusion = Fusion.NONE) -> Linear:
    kept = {
        name: torch.zeros(shape, dtype=dtype, device=DEVICE)
        for name, (shape, dtype) in kinds(form, outputs, inputs).items()
    }
    form.fill(kept, torch.Generator(DEVICE).manual_seed(1))
    method = KeptLinear(form, kept, (inputs, outputs), DTYPE)
    made = Linear(method, make_spec([part("", outputs)], inputs), fusion)
    made.prepare()
    if method.blocks is None:  # there is no GPU: kernels run in the interpreter
        assert isinstance(form, PackedForm)
        packed = form.packed({name: one[None] for name, one in kept.items()}, inputs)
        method.blocks = block_products.block_product(packed, None, DTYPE)
    return made


def weight_of(linear: Linear, form: KeptForm) -> Tensor:
    inputs, outputs = linear.shape
    kept = {
        name: torch.zeros(shape, dtype=dtype, device=DEVICE)
        for name, (shape, dtype) in kinds(form, outputs, inputs).items()
    }
    form.fill(kept, torch.Generator(DEVICE).manual_seed(1))
    return form.dequantize(kept, inputs, torch.float32).double()


def rows_of(rows: int, size: int) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator(DEVICE).manual_seed(rows), device=DEVICE).to(DTYPE)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def test_each_candidate_of_few_rows() -> None:
    """Of inputs that some tiles do not divide, and of the small layer that a kernel is compiled for."""
    made = BlockProducts(torch.device(DEVICE), DTYPE, 132)
    wanted = ((Table4A16(NF4, 64), 4096, SKINNY_BESIDE_MMA), (W8A16(torch.int8), 1536, SKINNY_TILES))
    for form, inputs, tiles in wanted:
        linear = layer(form, 24, inputs)
        shape, weight = LinearShape(inputs, 24, 1, linear.method.form or ""), weight_of(linear, form)
        found = [one for one in made.candidates(shape, 1, [linear]) if one.kernel == "skinny"]
        fitting = [one for one in tiles[1] if inputs % (one[1] * one[2]) == 0]
        assert len(found) == len(fitting) and (inputs == 4096) == (len(found) == len(tiles[1]))
        x = rows_of(1, inputs)
        for config in found:
            assert error(made.of(config, linear.method)(x), x.double() @ weight.T) < ERROR, config
        small = made.example(found[0], True, Fusion.NONE, linear.method)
        assert small.method.form == linear.method.form
        assert not made.of(found[0], small.method)(rows_of(1, small.shape[0])).any()


@pytest.mark.parametrize("hopper", [False, True])
def test_kernels_by_number_of_rows(hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned_products, "runs_hopper_kernels", lambda device: hopper)
    made = BlockProducts(torch.device(DEVICE), DTYPE, 132)
    few, more = ({"wgmma"}, {"wgmma", "blocks"}) if hopper else ({"blocks"}, {"blocks"})
    for form, outputs, kernels in (
        (W4A16(128), 32, {1: {"skinny", "mma"}, 8: {"mma"}, 16: {"mma", *few}, 17: few}),
        (W4A16(128), 32, {65: {*more, "unpacked"}}),
        (W4A16(128), 24, {8: {"mma"}, 17: {"blocks"}}),
        (W8A16(torch.int8), 32, {1: {"skinny", "blocks"}, 8: {"blocks"}, 16: {"blocks"}}),
    ):
        linear = layer(form, outputs, 1024)
        for rows, names in kernels.items():
            assert {one.kernel for one in made.candidates(LinearShape(1024, outputs, 1), rows, [linear])} == names


def test_candidates_are_compiled_as_the_layer_needs_them() -> None:
    """A kernel in registers is another one for more rows, and for inputs that do not fill all its warps."""
    made, linear = BlockProducts(torch.device(DEVICE), DTYPE, 132), layer(W4A16(128), 32, 4096)
    for rows, row_tile in ((8, 8), (9, 16)):
        for config in made.candidates(LinearShape(4096, 32, 1), rows, [linear]):
            if config.kernel == "mma":
                assert config.row_tile == row_tile
                example = made.example(config, False, Fusion.NONE, linear.method)
                step = BLOCK * config.warps * config.stages
                assert (example.shape[0] % step == 0) == (4096 % step == 0)


def test_products_of_warp_groups_fill_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned_products, "runs_hopper_kernels", lambda device: True)
    made, linear = BlockProducts(torch.device(DEVICE), DTYPE, 132), layer(W4A16(128), 32, 1024)

    def splits(outputs: int, inputs: int, rows: int) -> list[tuple[int, int]]:
        found = made.candidates(LinearShape(inputs, outputs, 1), rows, [linear])
        return [(one.warps, one.split) for one in found if one.kernel == "wgmma"]

    assert splits(4096, 4096, 64) == [(8, 8), (16, 8)] and splits(28672, 4096, 32) == [(16, 1), (16, 0)]
    assert splits(28672, 4096, 256) == [(8, 1), (8, 0)] and splits(256, 512, 10) == [(16, 1), (16, 0)]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_is_fused(form: KeptForm) -> None:
    made, inputs, outputs = BlockProducts(torch.device(DEVICE), DTYPE, 132), 1024, 24
    linear = layer(form, outputs, inputs, Fusion.NORM)
    assert linear.fusion is Fusion.NORM
    weight = weight_of(linear, form)
    config = next(
        one for one in made.candidates(LinearShape(inputs, outputs, 1), 1, [linear]) if one.kernel == "skinny"
    )
    fused = made.fused(config, linear.method)
    x, total, norm = rows_of(2, inputs), rows_of(2, outputs), RMSNorm(rows_of(1, inputs)[0].float(), 1e-6)
    normed = torch.nn.functional.rms_norm(x.double(), (inputs,), norm.weight.double(), norm.eps)
    assert error(fused(x, norm), normed @ weight.T) < ERROR
    gate, up = rows_of(2, 2 * inputs).chunk(2, -1)
    want = (torch.nn.functional.silu(gate.double()) * up.double()) @ weight.T + total.double()
    assert error(fused(torch.cat((gate, up), -1), gated=True, add_to=total), want) < ERROR


def test_columns_in_another_order_are_not_fused() -> None:
    form = W4A16(128, order="model.layers.0.mlp.down_proj")
    method = KeptLinear(form, {}, (1024, 24), DTYPE)
    assert not method.fusions and KeptLinear(W4A16(128), {}, (1024, 24), DTYPE).fusions == frozenset(Fusion)


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_tuned_and_batch_invariant_products(form: KeptForm, tmp_path: Path) -> None:
    linears = [layer(form, 384, 1024, Fusion.ADD), layer(form, 256, 2560, Fusion.NORM)]
    sizes = (1, 2, 4, 17, 64, 200)
    tuner = _tuner(linears)
    tuner.tune(list(sizes), lambda share: None, tmp_path)
    with torch.inference_mode():
        for linear in linears:
            weight = weight_of(linear, form)
            for rows in (*sizes, 300):
                x = rows_of(rows, linear.shape[0])
                assert error(linear(x), x.double() @ weight.T) < ERROR
                for layer_shape, group in zip(tuner.layers, tuner.groups, strict=True):
                    for config in tuner.candidates(layer_shape, rows) if linear is group[0] else []:
                        assert error(tuner.products.of(config, linear)(x), x.double() @ weight.T) < ERROR, config
        _tuner(linears).make_batch_invariant()
        for linear in linears:
            x = rows_of(100, linear.shape[0])
            together = linear(x)
            for rows in (1, 2, 16, 63):
                assert torch.equal(linear(x[37 : 37 + rows]), together[37 : 37 + rows])


def _tuner(linears: list[Linear]) -> Any:
    from blockyard.services.gpu_worker.linear_tuning.tuner import Tuner

    return Tuner(linears, device=torch.device("cuda"), dtype=DTYPE)
