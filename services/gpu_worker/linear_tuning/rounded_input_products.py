"""Kernels of weights and inputs of 8 bits (`Fp8W8A8`, `Int8W8A8`). Imports Triton: for GPUs only.

Beside the method's own product: the skinny GEMM for few rows, and the stream-K GEMM. Their inputs are rounded by the
kernel that makes them, or here. For one or two rows there is a skinny GEMM that normalises and rounds them itself: a
kernel less, but instructions in each program, so that both are measured. A gate is always computed by another kernel:
by their instructions, programs of 8 to 16 of 4,096 outputs would take 4 to 9 us for the silu of 14,336 inputs.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blockyard.kernels.layers.act_mul import act_mul_rounded
from blockyard.kernels.layers.add_rms_norm import add_rms_norm_rounded
from blockyard.kernels.layers.linear_stream_k import Tiling, Workspace
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.layers.rounding import InputRounding, RoundedRows
from blockyard.kernels.programmatic_launch import supports_pdl
from blockyard.kernels.quantized.linear_w8a8_rounding import linear_w8a8_rounding, tile_of
from blockyard.kernels.quantized.linear_w8a8_skinny import linear_w8a8_skinny
from blockyard.kernels.quantized.linear_w8a8_stream_k import linear_w8a8_stream_k
from blockyard.kernels.quantized.quantize_rows import quantize_rows
from blockyard.services.gpu_worker.layers.linear import FusedProduct, Linear, Product, RoundedProduct, make_spec
from blockyard.services.gpu_worker.linear_tuning import kernel_configs
from blockyard.services.gpu_worker.linear_tuning.kernel_configs import CUBLAS, KernelConfig, LinearShape, of_rows
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.quantization.kept.form import KeptLinear, kinds
from blockyard.services.gpu_worker.quantization.kept.fp8_w8a8 import SCALES, Fp8W8A8
from blockyard.services.gpu_worker.quantization.method import Fusion, LinearMethod

WORKSPACE_ELEMENTS = 6 << 20  # one tile of 128 x 256 for each of 192 programs
WORKSPACE_PROGRAMS = 1 << 14
CODE_BYTES = 1
EXAMPLE_FEATURES = 256  # of `example`, at least

# rows -> candidates: out_tile, in_tile, tiles loaded before the PDL wait, warps
SKINNY_TILES = {
    1: ((4, 1024, 2, 2), (4, 2048, 2, 4), (8, 1024, 2, 4), (8, 2048, 1, 4), (8, 2048, 2, 8), (4, 2048, 1, 4),
        (4, 4096, 1, 4), (2, 4096, 1, 4), (1, 4096, 1, 2), (1, 4096, 1, 1), (2, 2048, 2, 2), (4, 1024, 4, 4),
        (16, 1024, 2, 8)),
    2: ((4, 1024, 1, 2), (4, 2048, 1, 4), (2, 4096, 1, 4), (4, 1024, 2, 2), (8, 1024, 2, 4), (4, 2048, 2, 4)),
    4: ((2, 2048, 1, 4), (4, 2048, 1, 4), (4, 1024, 2, 4), (4, 1024, 1, 2), (2, 1024, 2, 2)),
    8: ((2, 2048, 1, 4), (4, 1024, 1, 4)),
}  # fmt: skip
# rows -> candidates that round: out_tile, warps
ROUNDING_TILES = {1: ((8, 4), (16, 8), (8, 8), (16, 4), (4, 4)), 2: ((8, 8), (8, 4), (4, 4), (4, 8))}
THREADS = 32  # of a warp
THREAD_PRODUCTS = 256  # of weights in a thread's registers and rows, at most
ROUNDING_FUSIONS = (Fusion.NORM, Fusion.ADD)
# most rows -> candidates: out_tile, row_tile, in_tile, stages, warps
STREAM_K_TILES = {
    16: ((64, 16, 128, 5, 4), (64, 16, 256, 5, 4), (64, 16, 128, 8, 4), (128, 16, 128, 4, 4), (128, 16, 256, 3, 4)),
    32: ((64, 32, 128, 5, 4), (64, 32, 256, 4, 4), (64, 32, 128, 8, 4), (128, 32, 128, 4, 4), (128, 32, 128, 6, 4)),
    64: ((64, 64, 128, 6, 4), (64, 64, 128, 4, 4), (128, 64, 128, 4, 4), (64, 64, 256, 3, 4), (128, 64, 128, 6, 8),
         (128, 64, 128, 6, 4)),
    128: ((64, 128, 128, 5, 4), (128, 128, 128, 4, 8), (128, 128, 128, 6, 8), (128, 64, 128, 6, 4),
          (64, 64, 128, 6, 4), (128, 128, 64, 6, 8)),
    256: ((128, 128, 128, 4, 8), (128, 128, 128, 6, 8), (128, 256, 128, 3, 8), (128, 256, 64, 5, 8),
          (64, 128, 128, 6, 4), (64, 256, 128, 4, 4)),
}  # fmt: skip
BATCH_INVARIANT = (128, 64, 128, 4, 4)  # as in STREAM_K_TILES, for any number of rows


class RoundedInputProducts:
    """Implements `RoundedFormProducts`. Its kernels share the workspace of the stream-K kernel."""

    def __init__(self, device: torch.device, dtype: torch.dtype, processors: int) -> None:
        self._device, self._dtype, self._processors = device, dtype, processors
        self._pdl = supports_pdl(device)
        self._space: Workspace | None = None

    def candidates(self, layer: LinearShape, rows: int, group: Sequence[Linear]) -> list[KernelConfig]:
        methods = [_kept(linear.method) for linear in group]
        if rows > kernel_configs.MAX_ROWS or any(one.input_rounding is None for one in methods):
            return []
        scaled, block = methods[0].weight8().group, methods[0].weight8().block
        if any((one.weight8().group, one.weight8().block) != (scaled, block) for one in methods):
            return []
        configs = self._rounding(layer, rows, scaled) if group[0].fusion in ROUNDING_FUSIONS else []
        configs += [
            KernelConfig("skinny", out, 0, size, early, warps)
            for out, size, early, warps in SKINNY_TILES.get(rows, ())
            if size * early <= 2 * layer.in_features
        ]
        if rows > 1:
            for tiles in of_rows(rows, STREAM_K_TILES):
                if scaled is None or scaled % tiles[2] == 0:
                    splits = kernel_configs.splits(layer, rows, tiles, CODE_BYTES, self._processors)
                    configs += [kernel_configs.stream_k(layer, tiles, split) for split in splits]
        return configs

    def _rounding(self, layer: LinearShape, rows: int, group: int | None) -> list[KernelConfig]:
        tile = tile_of(layer.in_features, group)
        return [
            KernelConfig("skinny", out, 0, tile, 1, warps, rounds=True)
            for out, warps in ROUNDING_TILES.get(rows, ())
            if rows * out * tile <= THREAD_PRODUCTS * THREADS * warps
        ]

    def batch_invariant(self, layer: LinearShape) -> KernelConfig:
        if layer.in_features % 16:
            return CUBLAS
        out_tile, _, in_tile, _, _ = BATCH_INVARIANT
        together = round(self._processors / -(-layer.out_features // out_tile))
        split = max(min(together, layer.in_features // in_tile // kernel_configs.FEWEST_STEPS), 1)
        return kernel_configs.stream_k(layer, BATCH_INVARIANT, split)

    def of(self, config: KernelConfig, method: LinearMethod) -> Product:
        rounding, multiply = _rounding(method), self.rounded(config, method)
        return lambda x: multiply(quantize_rows(x, rounding))

    def rounded(self, config: KernelConfig, method: LinearMethod) -> RoundedProduct:
        if config == CUBLAS:
            return _kept(method).apply_rounded
        if config.kernel == "skinny":
            return self._skinny(config, method)
        weight, bias = _kept(method).weight8(), _kept(method).bias
        workspace, split, pdl = self._workspace(), config.split, self._pdl
        tiling = Tiling(
            config.out_tile, config.row_tile, config.in_tile, config.stages, config.warps, pdl, config.fetch
        )
        return lambda rows: linear_w8a8_stream_k(rows, weight, bias, tiling, workspace, split)

    def fused(self, config: KernelConfig, method: LinearMethod) -> FusedProduct:
        """The skinny GEMM of rows that it, the norm or the gate rounds, which adds to the residual. config: of it."""
        rounding, multiply = _rounding(method), self._skinny(config, method)
        weight, bias, pdl = _kept(method).weight8(), _kept(method).bias, self._pdl
        out_tile, warps, rounds = config.out_tile, config.warps, config.rounds

        def product(
            x: Tensor, norm: RMSNorm | None = None, gated: bool = False, add_to: Tensor | None = None
        ) -> Tensor:
            if rounds and not gated:
                return linear_w8a8_rounding(
                    x, rounding, weight, bias, out_tile=out_tile, warps=warps, pdl=pdl, norm=norm, add_to=add_to
                )
            if norm is not None:
                return multiply(add_rms_norm_rounded(x, None, norm.weight, norm.eps, rounding), add_to)
            return multiply(act_mul_rounded(x, "silu", rounding) if gated else quantize_rows(x, rounding), add_to)

        return product

    def example(self, config: KernelConfig, bias: bool, fusion: Fusion, like: LinearMethod) -> Linear:
        outputs = inputs = EXAMPLE_FEATURES
        if config.kernel == "skinny":
            inputs = max(config.in_tile * config.stages, EXAMPLE_FEATURES)
        form = _kept(like).kept_form
        kept = {
            name: torch.zeros(shape, dtype=dtype, device=self._device)
            for name, (shape, dtype) in kinds(form, outputs, inputs).items()
        }
        if _kept(like).weight8().block == 1 and isinstance(form, Fp8W8A8):
            kept[SCALES][0] = 1.0  # no blocks of equal scales
        vector = torch.zeros(outputs, dtype=self._dtype, device=self._device) if bias else None
        spec = make_spec([part("", outputs)], inputs, bias=bias)
        made = Linear(KeptLinear(form, kept, (inputs, outputs), self._dtype, vector), spec, fusion)
        made.prepare()
        return made

    def _skinny(self, config: KernelConfig, method: LinearMethod) -> Callable[..., Tensor]:
        weight, bias, pdl = _kept(method).weight8(), _kept(method).bias, self._pdl
        tiles = {"out_tile": config.out_tile, "tile": config.in_tile, "warps": config.warps, "early": config.stages}

        def multiply(rows: RoundedRows, add_to: Tensor | None = None) -> Tensor:
            return linear_w8a8_skinny(rows, weight, bias, pdl=pdl, add_to=add_to, **tiles)

        return multiply

    def _workspace(self) -> Workspace:
        """It is made for the first model of such a form: others need no memory for it."""
        if self._space is None:
            self._space = Workspace(WORKSPACE_ELEMENTS, WORKSPACE_PROGRAMS, self._device)
        return self._space


def _kept(method: LinearMethod) -> KeptLinear:
    assert isinstance(method, KeptLinear)
    return method


def _rounding(method: LinearMethod) -> InputRounding:
    rounding = _kept(method).input_rounding
    assert rounding is not None, "this layer's inputs are not rounded by kernels"
    return rounding
