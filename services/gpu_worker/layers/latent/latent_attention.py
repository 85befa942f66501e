"""Multi-head latent attention (MLA, https://arxiv.org/abs/2405.04434): the KV cache has one row a token for all heads.

A row is the normalised latent, from which each head's K and V follow by two matrices, and one rotated part of K that
all heads share. The attention backend decides where these matrices are applied: to rows, or to the query and the
result.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.layers.apply_rope import interleave_pairs
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.layers.attention import AttentionShape
from blockyard.services.gpu_worker.layers.fused_ops import ops_of
from blockyard.services.gpu_worker.layers.latent.up_projection import UpProjection
from blockyard.services.gpu_worker.layers.linear import Linear, LinearLayers
from blockyard.services.gpu_worker.layers.norm import Norm, make_rms_norm
from blockyard.services.gpu_worker.layers.rope_parameters import RopeParameters
from blockyard.services.gpu_worker.layers.rotary import Rotation
from blockyard.services.gpu_worker.loading.linear_spec import Rows, Split, part
from blockyard.services.gpu_worker.quantization.method import Fusion
from blockyard.services.gpu_worker.step import Attend, LatentRows

NORM_EPS = 1e-6  # of the norms of latents, whatever config.json says of the others


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """The sizes of latent attention. A head of q and K is a part that is not rotated, and then one that is."""

    num_heads: int
    plain_dim: int  # of q and K: numbers that are not rotated
    rotated_dim: int
    value_dim: int  # of a head of V
    latent_dim: int
    query_latent_dim: int | None  # q also comes from a latent of so many numbers; None: from the hidden state

    @property
    def query_dim(self) -> int:
        return self.plain_dim + self.rotated_dim

    @property
    def row_dim(self) -> int:
        """Numbers that the KV cache has of a token."""
        return self.latent_dim + self.rotated_dim


def latent_shape(sizes: LatentSizes, rope: RopeParameters) -> AttentionShape:
    """What the attention backend computes. YaRN's `mscale_all_dim` is a factor of q and of K, so it enters twice."""
    scale = sizes.query_dim**-0.5
    if rope.rope_type != "default" and rope.mscale_all_dim and (rope.factor or 1.0) > 1:
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor or 1.0) + 1) ** 2
    return AttentionShape(
        num_heads=sizes.num_heads,
        kv_heads=1,
        head_dim=sizes.row_dim,
        rules=ScoreRules(scale=scale),
        latent_dim=sizes.latent_dim,
        plain_dim=sizes.plain_dim,
        value_dim=sizes.value_dim,
    )


class LatentAttention:
    """Implements `AttentionSublayer`."""

    def __init__(
        self,
        layers: LinearLayers,
        prefix: str,
        layer: int,
        hidden: int,
        sizes: LatentSizes,
        *,
        bias: bool = False,
        halves: bool = False,
    ) -> None:
        """prefix: of the layer's names in checkpoints. bias: of the products from and to the hidden state, but for q
        without a latent. halves: pairs that are rotated are two halves; otherwise they are side by side."""
        table, heads, latent = layers.table, sizes.num_heads, sizes.latent_dim
        self.ops, self._layer, self._sizes = ops_of(table), layer, sizes

        def arrange_query(stored: Tensor) -> Tensor:
            return _interleave_last(stored, sizes.query_dim, sizes.rotated_dim) if halves else stored

        def arrange_rows(stored: Tensor) -> Tensor:
            return _interleave_last(stored, sizes.row_dim, sizes.rotated_dim) if halves else stored

        self._query_norm: RMSNorm | None = None
        self._query: Linear | None = None  # from the latent of q
        query = Rows(heads * sizes.query_dim, heads)
        first = part(f"{prefix}.q_proj", query, arrange=arrange_query)
        rows = part(f"{prefix}.kv_a_proj_with_mqa", sizes.row_dim, 1, arrange_rows)  # all heads read them
        if sizes.query_latent_dim is not None:
            size = sizes.query_latent_dim
            first = part(f"{prefix}.q_a_proj", size, 1)
            self._query_norm = make_rms_norm(table, f"{prefix}.q_a_layernorm", size, NORM_EPS)
            self._query = layers.make(
                [part(f"{prefix}.q_b_proj", query, arrange=arrange_query)], size, split=Split.OUTPUTS
            )
        self._rows: Linear | None = None  # None: the first product makes them, too
        if self._query is not None or not bias:
            self._first = layers.make([first, rows], hidden, split=Split.OUTPUTS, bias=bias, fusion=Fusion.NORM)
        else:  # of these two, q alone has no bias
            self._first = layers.make([first], hidden, split=Split.OUTPUTS, fusion=Fusion.NORM)
            self._rows = layers.make([rows], hidden, bias=bias)
        self._linears = [one for one in (self._first, self._rows, self._query) if one is not None]
        self._row_norm = make_rms_norm(table, f"{prefix}.kv_a_layernorm", latent, NORM_EPS)
        self.up = UpProjection(layers, f"{prefix}.kv_b_proj", heads, sizes.plain_dim, sizes.value_dim, latent)
        values, out = Rows(heads * sizes.value_dim, heads), [part(f"{prefix}.o_proj", hidden)]
        self.out = layers.make(out, values, split=Split.INPUTS, bias=bias, fusion=Fusion.ADD)
        self._linears.append(self.out)

    def linears(self) -> list[Linear]:
        return self._linears

    def prepare(self) -> None:
        self._row_norm.prepare()
        if self._query_norm is not None:
            self._query_norm.prepare()

    def attend(self, residual: Tensor, delta: Tensor | None, norm: Norm, rotation: Rotation, backend: Attend) -> Tensor:
        """Implements `AttentionSublayer`: -> [rows, heads * value_dim]."""
        sizes = self._sizes
        if self._rows is None:
            first = self.ops.norm_then_linear(self._first, residual, delta, norm)
            first, rows = first[:, : -sizes.row_dim], first[:, -sizes.row_dim :]
        else:
            x = self.ops.add_norm(residual, delta, norm)
            first, rows = self._first(x), self._rows(x)
        if self._query is not None and self._query_norm is not None:
            first = self._query(self._query_norm(first.contiguous()))
        query = first.view(len(first), -1, sizes.query_dim)
        latent = LatentRows(rows, self._row_norm, self.up.weight, sizes.plain_dim, self.up.adapted)
        return backend.latent(self._layer, query, rotation.angles, latent)


def _interleave_last(rows: Tensor, head_dim: int, rotated_dim: int) -> Tensor:
    """Interleaves the pairs of the last `rotated_dim` rows of each head: see `interleave_pairs`."""
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    plain, rotated = heads[:, :-rotated_dim], heads[:, -rotated_dim:]
    turned = interleave_pairs(rotated.flatten(0, 1), rotated_dim).view(rotated.shape)
    return torch.cat((plain, turned), 1).reshape(rows.shape)
