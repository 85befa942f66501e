"""The layers of a decoder: how norms, attention and feed-forward are put together around the residual.

All have the methods of `DecoderLayer`. The output of a sublayer is passed on as `delta`, and the next norm adds it to
the residual, so that one kernel does both.
"""

from typing import Protocol

from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.layers.attention import Attention, AttentionSublayer
from blockyard.services.gpu_worker.layers.linear import Linear
from blockyard.services.gpu_worker.layers.mlp import FeedForward, PlainFeedForward
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertProducts
from blockyard.services.gpu_worker.layers.norm import NoNorm, Norm
from blockyard.services.gpu_worker.layers.rotary import Rotation
from blockyard.services.gpu_worker.step import Attend

# what the second part of a layer reads of the first, beside the residual: the output of the attention backend [rows,
# heads * head_dim], and the input [rows, hidden] that a feed-forward shares with the attention; None: it has its own
Attended = tuple[Tensor, Tensor | None]


class DecoderLayer(Protocol):
    """One layer of a decoder, in two parts: between them the decoder may drop rows without a use."""

    def prepare(self) -> None:
        """Prepares norms, once the weights are loaded. The model prepares the linear layers."""

    def linears(self) -> list[Linear]:
        """Returns all linear layers, in the order in which a step uses them."""

    def experts(self) -> list[ExpertProducts]:
        """Returns the experts of the layer, if it has some."""

    def attend(self, residual: Tensor, delta: Tensor | None, rotation: Rotation, backend: Attend) -> Attended:
        """Adds delta, the output of the previous layer, to residual in place, and computes the attention of the sum."""

    def finish(self, residual: Tensor, attended: Attended) -> tuple[Tensor, Tensor | None]:
        """Computes the rest, of the rows that residual and `attended` both have. May write to them.

        It drops `attended` before the feed-forward, so that the memory can be used again.

        Returns residual and the delta of this layer, which the caller adds to residual; None: it is already added.
        """


class Sublayers:
    """The parts of a decoder layer, which differ in how they are put together."""

    def __init__(self, attention: AttentionSublayer, mlp: FeedForward | PlainFeedForward, *norms: Norm) -> None:
        self._prepared: tuple[AttentionSublayer | Norm, ...] = (attention, *norms)
        self._sublayers = (attention, mlp)

    def prepare(self) -> None:
        for part in self._prepared:
            part.prepare()

    def linears(self) -> list[Linear]:
        return [linear for sublayer in self._sublayers for linear in sublayer.linears()]

    def experts(self) -> list[ExpertProducts]:
        return self._sublayers[1].experts()


class PreNormLayer(Sublayers):
    """Norm, attention, norm, feed-forward; each sublayer is added to the residual."""

    def __init__(self, norm1: Norm, attention: AttentionSublayer, norm2: Norm, mlp: FeedForward) -> None:
        super().__init__(attention, mlp, norm1, norm2)
        self._norm1, self._attention, self._norm2, self._mlp = norm1, attention, norm2, mlp
        for norm, sublayer in ((norm1, attention), (norm2, mlp)):
            if not isinstance(norm, RMSNorm):  # no fused kernel computes another norm
                sublayer.linears()[0].disable_fusion()

    def attend(self, residual: Tensor, delta: Tensor | None, rotation: Rotation, backend: Attend) -> Attended:
        return self._attention.attend(residual, delta, self._norm1, rotation, backend), None

    def finish(self, residual: Tensor, attended: Attended) -> tuple[Tensor, Tensor | None]:
        delta = self._attention.ops.linear_then_add(self._attention.out, attended[0], residual)
        del attended
        return residual, self._mlp.forward(residual, delta, self._norm2)


class PostNormLayer(Sublayers):
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
        super().__init__(attention, mlp, *self._before, *self._after)
        _disable_fusion([attention.out, *mlp.linears()])
        if not isinstance(before_attention, RMSNorm):
            attention.qkv.disable_fusion()

    def attend(self, residual: Tensor, delta: Tensor | None, rotation: Rotation, backend: Attend) -> Attended:
        return self._attention.attend(residual, delta, self._before[0], rotation, backend), None

    def finish(self, residual: Tensor, attended: Attended) -> tuple[Tensor, Tensor | None]:
        attention, ops = self._attention, self._attention.ops
        [x] = ops.add_normed(residual, attention.out(attended[0]), self._after[0], self._before[1:])
        del attended
        ops.add_normed(residual, self._mlp.apply(x), self._after[1])
        return residual, None


class ParallelLayer(Sublayers):
    """Attention and feed-forward both read the same residual, and their sum is added to it."""

    def __init__(self, norm: Norm, attention: Attention, mlp: PlainFeedForward, mlp_norm: Norm | None = None) -> None:
        """mlp_norm: of the input of the feed-forward; None: it has the output of `norm`."""
        super().__init__(attention, mlp, norm, mlp_norm or NoNorm())
        self._norm, self._attention, self._mlp, self._mlp_norm = norm, attention, mlp, mlp_norm
        _disable_fusion(self.linears())

    def attend(self, residual: Tensor, delta: Tensor | None, rotation: Rotation, backend: Attend) -> Attended:
        x = self._attention.ops.add_norm(residual, delta, self._norm)
        return self._attention.attend_normed(x, rotation, backend), x if self._mlp_norm is None else None

    def finish(self, residual: Tensor, attended: Attended) -> tuple[Tensor, Tensor | None]:
        out, x = self._attention.out(attended[0]), attended[1]
        del attended
        if self._mlp_norm is not None:
            x = self._attention.ops.add_norm(residual, None, self._mlp_norm)
        assert x is not None
        return residual, out.add_(self._mlp.apply(x))


def _disable_fusion(linears: list[Linear]) -> None:
    """Disables fused products in layers that want each product's own output."""
    for linear in linears:
        linear.disable_fusion()
