"""Makes the callables that compute linear layers by a given kernel config. Imports Triton: for GPUs only."""

import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.layers.linear_skinny import linear_skinny
from blockyard.kernels.layers.linear_stream_k import Tiling, Workspace, linear_stream_k
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.programmatic_launch import supports_pdl
from blockyard.services.gpu_worker.layers.linear import FusedProduct, Linear, Product
from blockyard.services.gpu_worker.layers.linear_method import DenseWeight
from blockyard.services.gpu_worker.linear_tuning.kernel_configs import KernelConfig

WORKSPACE_ELEMENTS = 6 << 20  # one tile of 128 x 256 for each of 192 programs
WORKSPACE_PROGRAMS = 1 << 14


class Products:
    """Makes the products of one GPU and one stream. They share the workspace of the stream-K kernel."""

    def __init__(self, device: torch.device) -> None:
        self._pdl = supports_pdl(device)
        self._workspace = Workspace(WORKSPACE_ELEMENTS, WORKSPACE_PROGRAMS, device)

    def of(self, config: KernelConfig, linear: Linear) -> Product:
        weight, bias = dense_weight(linear)
        if config.kernel == "cublas":
            return lambda x: F.linear(x, weight, bias)
        if config.kernel == "skinny":
            return self.fused(config, linear)
        workspace, split, tiling = self._workspace, config.split, self._tiling(config)
        return lambda x: linear_stream_k(x, weight, bias, tiling, workspace, split)

    def _tiling(self, config: KernelConfig) -> Tiling:
        pdl = self._pdl
        return Tiling(config.out_tile, config.row_tile, config.in_tile, config.stages, config.warps, pdl, config.fetch)

    def fused(self, config: KernelConfig, linear: Linear) -> FusedProduct:
        """The skinny GEMM, which can fuse the norm, the gate and the residual addition. config: of that kernel."""
        (weight, bias), pdl = dense_weight(linear), self._pdl
        tiles = {"out_tile": config.out_tile, "tile": config.in_tile, "warps": config.warps, "early": config.stages}

        def product(
            x: Tensor, norm: RMSNorm | None = None, gated: bool = False, add_to: Tensor | None = None
        ) -> Tensor:
            return linear_skinny(x, weight, bias, pdl=pdl, norm=norm, gated=gated, add_to=add_to, **tiles)

        return product


def dense_weight(linear: Linear) -> DenseWeight:
    found = linear.method.dense_weight()
    assert found is not None
    return found
