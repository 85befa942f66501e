"""Norms of the hidden state, and of q and k: RMSNorm with and without unit offset, L2 norm, LayerNorm, none."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.loading.linear_spec import Arrange, Cut, Rows
from blockyard.services.gpu_worker.loading.weights import WeightTable


class Norm(Protocol):
    """A norm over the last dimension. There are fused kernels for `RMSNorm`, and for `LayerNorm` behind an addition."""

    def prepare(self) -> None:
        """Precomputes constants. Called once, after the weights are loaded."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape. Does not write to x."""


def make_rms_norm(table: WeightTable, name: str, size: int, eps: float, unit_offset: bool = False) -> RMSNorm:
    """Makes an RMSNorm with the weight `name`.weight of the checkpoint.

    unit_offset: the checkpoint stores weight - 1, as for Gemma. Loading adds 1, in float32.
    """
    if not unit_offset:
        return RMSNorm(table.vector(f"{name}.weight", size), eps)
    weight = table.empty(size, dtype=torch.float32)
    table.place(f"{name}.weight", weight, (size,), _plus_one)
    return RMSNorm(weight, eps)


def _plus_one(stored: Tensor) -> Tensor:
    return stored.float() + 1.0


class LayerNorm:
    """Computes (x - mean) / std, and if `affine` multiplies by a weight and, if `bias`, adds a bias.

    The kernel behind `TritonOps` reads its weight, bias and eps.
    """

    def __init__(
        self, table: WeightTable, name: str, size: int, affine: bool = True, *, eps: float = 1e-5, bias: bool = True
    ) -> None:
        self._size, self.eps = (size,), eps
        self.weight = table.vector(f"{name}.weight", size) if affine else None
        self.bias = table.vector(f"{name}.bias", size) if affine and bias else None

    def prepare(self) -> None:
        pass

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._size, self.weight, self.bias, self.eps)


class NoNorm:
    """Returns its input itself, where a layer has no norm."""

    def prepare(self) -> None:
        pass

    def __call__(self, x: Tensor) -> Tensor:
        return x


class SeparateQKNorm:
    """Norms of q and of k that the attention kernels do not compute: kernels of their own."""

    def __init__(self, num_heads: int, kv_heads: int, q_norm: Norm, k_norm: Norm, whole: bool) -> None:
        """whole: a norm is over all heads of a token, otherwise over each head."""
        self._heads, self._rotated = num_heads, num_heads + kv_heads
        self._q_norm, self._k_norm, self._whole = q_norm, k_norm, whole

    def prepare(self) -> None:
        self._q_norm.prepare()
        self._k_norm.prepare()

    def apply(self, qkv: Tensor) -> None:
        """Normalises q and k in place: qkv [tokens, heads + 2 * kv_heads, head_dim]."""
        q, k = qkv[:, : self._heads], qkv[:, self._heads : self._rotated]
        if self._whole:
            q.copy_(self._q_norm(q.flatten(1)).view_as(q))
            k.copy_(self._k_norm(k.flatten(1)).view_as(k))
        else:
            q.copy_(self._q_norm(q))
            k.copy_(self._k_norm(k))


class DividedQKNorm:
    """RMSNorms over all q heads and over all k heads, of a rank that has a share of both."""

    def __init__(self, table: WeightTable, rows: tuple[Rows, Rows], q_norm: RMSNorm, k_norm: RMSNorm) -> None:
        """rows: outputs of q, and of k."""
        self._ranks, shard, of_k = table.ranks, table.shard, rows[1]
        self._heads, k_heads = (len(one.own_units(shard)) for one in rows)
        self._rotated = self._heads + k_heads
        self._norms = (q_norm, k_norm)
        self._sizes = torch.tensor([one.size for one in rows], dtype=torch.float32, device=table.device)
        # of ranks with the same head of k, the first one counts it
        self._counts_k = not shard.rank or of_k.share(shard) != of_k.share(shard._replace(rank=shard.rank - 1))

    def prepare(self) -> None:
        """There are no constants."""

    def apply(self, qkv: Tensor) -> None:
        """As `SeparateQKNorm.apply`."""
        assert self._ranks is not None
        both = qkv[:, : self._heads].flatten(1), qkv[:, self._heads : self._rotated].flatten(1)
        squares = torch.stack([x.float().square().sum(-1) for x in both], -1)
        if not self._counts_k:
            squares[:, 1] = 0
        means = self._ranks.sum(squares) / self._sizes
        first = 0
        for i, (x, norm) in enumerate(zip(both, self._norms, strict=True)):
            scaled = x.float() * torch.rsqrt(means[:, i : i + 1] + norm.eps) * norm.weight.float()
            heads = x.shape[1] // qkv.shape[2]
            qkv[:, first : first + heads].copy_(scaled.view(len(x), heads, -1))
            first += heads


class _HeadLayerNorm:
    """LayerNorm over each head, each with its own weight [heads, head_dim] and without a bias."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps = weight, eps

    def prepare(self) -> None:
        pass

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], None, None, self._eps).mul_(self._weight)


QKNorm = (
    RMSNorm | SeparateQKNorm | DividedQKNorm
)  # the attention kernels compute an RMSNorm over each head, see `step.Attend`
# arguments: weights, prefix of names in checkpoints, outputs of q, outputs of k, order of a head's numbers
MakeQKNorm = Callable[[WeightTable, str, Rows, Rows, Arrange], QKNorm]


def _own_heads(table: WeightTable, of_q: Rows, of_k: Rows) -> tuple[int, int]:
    return len(of_q.own_units(table.shard)), len(of_k.own_units(table.shard))


def head_rms_norm(eps: float, unit_offset: bool = False, *, with_values: bool = False) -> MakeQKNorm:
    """RMSNorm over each head: all q heads share one weight, all k heads another. unit_offset: see `make_rms_norm`.

    with_values: the heads of v are normalised, too, without a weight.
    """

    def make(table: WeightTable, prefix: str, of_q: Rows, of_k: Rows, arrange: Arrange) -> QKNorm:
        def add_one(rows: Tensor) -> Tensor:
            return arrange(_plus_one(rows))

        (heads, kv_heads), head_dim = _own_heads(table, of_q, of_k), of_q.unit
        k_end = heads + kv_heads
        rows = k_end + kv_heads if with_values else k_end
        weight = table.empty(rows, head_dim, dtype=torch.float32 if unit_offset else None)
        weight[k_end:].fill_(1.0)
        how = add_one if unit_offset else arrange
        table.place(f"{prefix}.q_norm.weight", weight[:heads], (head_dim,), how)
        table.place(f"{prefix}.k_norm.weight", weight[heads:k_end], (head_dim,), how)
        return RMSNorm(weight, eps)

    return make


def head_l2_norm(eps: float) -> MakeQKNorm:
    """x / sqrt(mean(x^2) + eps) over each head of q and k: RMSNorm without a weight.

    It may also stand for a norm behind the rotation, which does not change the length of a head.
    """

    def make(table: WeightTable, prefix: str, of_q: Rows, of_k: Rows, arrange: Arrange) -> QKNorm:
        weight = table.empty(sum(_own_heads(table, of_q, of_k)), of_q.unit)
        return RMSNorm(weight.fill_(1.0), eps)

    return make


def whole_rms_norm(eps: float) -> MakeQKNorm:
    """RMSNorm over all q heads together, and over all k heads together."""

    def make(table: WeightTable, prefix: str, of_q: Rows, of_k: Rows, arrange: Arrange) -> QKNorm:
        def make_norm(name: str, rows: Rows) -> RMSNorm:
            own = rows.share(table.shard)
            weight = table.empty(len(own))
            table.place(f"{prefix}.{name}.weight", weight, (rows.size,), arrange, cut=Cut(-1, (own,)))
            return RMSNorm(weight, eps)

        q_norm, k_norm = make_norm("q_norm", of_q), make_norm("k_norm", of_k)
        if table.shard.size > 1:
            return DividedQKNorm(table, (of_q, of_k), q_norm, k_norm)
        return SeparateQKNorm(of_q.units, of_k.units, q_norm, k_norm, whole=True)

    return make


def head_layer_norm(eps: float) -> MakeQKNorm:
    """LayerNorm over each head, without a bias; each head has its own weight."""

    def make(table: WeightTable, prefix: str, of_q: Rows, of_k: Rows, arrange: Arrange) -> QKNorm:
        def arrange_heads(rows: Tensor) -> Tensor:
            return arrange(rows.reshape(-1)).view(rows.shape)

        def make_norm(name: str, rows: Rows) -> _HeadLayerNorm:
            own = rows.own_units(table.shard)
            weight, cut = table.empty(len(own), rows.unit), Cut(-2, (own,))
            table.place(f"{prefix}.{name}.weight", weight, (rows.units, rows.unit), arrange_heads, cut=cut)
            return _HeadLayerNorm(weight, eps)

        heads, kv_heads = _own_heads(table, of_q, of_k)
        return SeparateQKNorm(heads, kv_heads, make_norm("q_norm", of_q), make_norm("k_norm", of_k), whole=False)

    return make
