"""The layers of a decoder: how norms, attention and feed-forward are put together around the residual.

All have the methods of `DecoderLayer`. The output of a sublayer is passed on as `delta`, and the next norm adds it to
the residual, so that one kernel does both.
"""

from typing import Protocol

from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.layers.attention import Attention, AttentionSublayer
from blockyard.services.gpu_worker.layers.fused_ops import FusedOps
from blockyard.services.gpu_worker.layers.linear import Linear
from blockyard.services.gpu_worker.layers.mlp import FeedForward, PlainFeedForward
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertProducts
from blockyard.services.gpu_worker.layers.norm import NoNorm, Norm
from blockyard.services.gpu_worker.layers.rotary import Rotation
from blockyard.services.gpu_worker.step import Step


class DecoderLayer(Protocol):
    """One layer of a decoder."""

    def prepare(self) -> None:
        """Prepares norms, once the weights are loaded. The model prepares the linear layers."""

    def linears(self) -> list[Linear]:
        """Returns all linear layers, in the order in which a step uses them."""

    def experts(self) -> list[ExpertProducts]:
        """Returns the experts of the layer, if it has some."""

    def forward(
        self,
        ops: FusedOps,
        residual: Tensor,
        delta: Tensor | None,
        rotation: Rotation,
        step: Step,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the layer. Adds delta, the output of the previous layer, to residual in place.

        Returns residual and the delta of this layer, which the caller adds to residual; a delta of None is already
        added. Both have the rows in `rows`; None: all rows.
        """


class PreNormLayer:
    """Norm, attention, norm, feed-forward; each sublayer is added to the residual."""

    def __init__(self, norm1: Norm, attention: AttentionSublayer, norm2: Norm, mlp: FeedForward) -> None:
        self._norm1, self._attention, self._norm2, self._mlp = norm1, attention, norm2, mlp
        for norm, sublayer in ((norm1, attention), (norm2, mlp)):
            if not isinstance(norm, RMSNorm):  # no fused kernel computes another norm
                sublayer.linears()[0].disable_fusion()

    def prepare(self) -> None:
        for part in (self._norm1, self._attention, self._norm2):
            part.prepare()

    def linears(self) -> list[Linear]:
        return [*self._attention.linears(), *self._mlp.linears()]

    def experts(self) -> list[ExpertProducts]:
        return self._mlp.experts()

    def forward(
        self,
        ops: FusedOps,
        residual: Tensor,
        delta: Tensor | None,
        rotation: Rotation,
        step: Step,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Implements `DecoderLayer`."""
        residual, delta = self._attention.forward(ops, residual, delta, self._norm1, rotation, step, rows)
        return residual, self._mlp.forward(ops, residual, delta, self._norm2)


class PostNormLayer:
    """The output of each sublayer has a norm before it is added to the residual; its input may have one, too."""

    def __init__(
        self,
        attention: Attention,
        after_attention: Norm,
        mlp: PlainFeedForward,
        after_mlp: Norm,
        *,
        before_attention: Norm | None = None,
        before_mlp: Norm | None = None,
    ) -> None:
        self._attention, self._mlp = attention, mlp
        self._before = (before_attention or NoNorm(), before_mlp or NoNorm())
        self._after = (after_attention, after_mlp)
        _disable_fusion([attention.out, *mlp.linears()])
        if not isinstance(before_attention, RMSNorm):
            attention.qkv.disable_fusion()

    def prepare(self) -> None:
        for part in (*self._before, *self._after, self._attention):
            part.prepare()

    def linears(self) -> list[Linear]:
        return [*self._attention.linears(), *self._mlp.linears()]

    def experts(self) -> list[ExpertProducts]:
        return self._mlp.experts()

    def forward(
        self,
        ops: FusedOps,
        residual: Tensor,
        delta: Tensor | None,
        rotation: Rotation,
        step: Step,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Implements `DecoderLayer`."""
        attended = self._attention.apply_normed(ops, residual, delta, self._before[0], rotation, step)
        if rows is not None:
            residual = residual.index_select(0, rows)
        [x] = ops.add_normed(residual, attended, self._after[0], self._before[1:])
        ops.add_normed(residual, self._mlp.apply(ops, x), self._after[1])
        return residual, None


class ParallelLayer:
    """Attention and feed-forward both read the same residual, and their sum is added to it."""

    def __init__(self, norm: Norm, attention: Attention, mlp: PlainFeedForward, mlp_norm: Norm | None = None) -> None:
        """mlp_norm: of the input of the feed-forward; None: it has the output of `norm`."""
        self._norm, self._attention, self._mlp, self._mlp_norm = norm, attention, mlp, mlp_norm
        _disable_fusion(self.linears())

    def prepare(self) -> None:
        self._norm.prepare()
        self._attention.prepare()
        if self._mlp_norm is not None:
            self._mlp_norm.prepare()

    def linears(self) -> list[Linear]:
        return [*self._attention.linears(), *self._mlp.linears()]

    def experts(self) -> list[ExpertProducts]:
        return self._mlp.experts()

    def forward(
        self,
        ops: FusedOps,
        residual: Tensor,
        delta: Tensor | None,
        rotation: Rotation,
        step: Step,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Implements `DecoderLayer`."""
        x = ops.add_norm(residual, delta, self._norm)
        attended = self._attention.apply(x, rotation, step)
        if rows is not None:
            residual, x = residual.index_select(0, rows), x.index_select(0, rows)
        if self._mlp_norm is not None:
            x = ops.add_norm(residual, None, self._mlp_norm)
        return residual, attended.add_(self._mlp.apply(ops, x))


def _disable_fusion(linears: list[Linear]) -> None:
    """Of layers that want each product's own output."""
    for linear in linears:
        linear.disable_fusion()
