"""Feed-forward sublayers, with and without a gate."""

from typing import Protocol

from torch import Tensor

from blockyard.services.gpu_worker.layers.activations import ACTIVATIONS
from blockyard.services.gpu_worker.layers.fused_ops import ops_of
from blockyard.services.gpu_worker.layers.linear import Linear, LinearLayers
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertProducts
from blockyard.services.gpu_worker.layers.norm import Norm
from blockyard.services.gpu_worker.loading.linear_spec import MatrixPart, Rows, Split, part
from blockyard.services.gpu_worker.quantization.method import Fusion


class FeedForward(Protocol):
    """A feed-forward sublayer with a norm before it. Its output is added to the residual."""

    def linears(self) -> list[Linear]: ...

    def experts(self) -> list[ExpertProducts]: ...

    def forward(self, residual: Tensor, delta: Tensor | None, norm: Norm) -> Tensor | None:
        """Adds delta to residual in place. Returns the new delta, which the caller adds; None: it is already added."""


class PlainFeedForward(Protocol):
    """A feed-forward sublayer of which other layers want the output itself."""

    def linears(self) -> list[Linear]: ...

    def experts(self) -> list[ExpertProducts]: ...

    def apply(self, x: Tensor) -> Tensor:
        """x [rows, hidden] -> [rows, hidden]."""


class GatedMLP:
    """Computes down(activation(gate(x)) * up(x)), with gate and up in one matrix product."""

    def __init__(
        self,
        layers: LinearLayers,
        prefix: str,
        hidden: int,
        inner: int,
        activation: str = "silu",
        bias: bool = False,
        *,
        joined: str | None = None,
        down: str = "down_proj",
        weighted: bool = False,
    ) -> None:
        """activation: a key of `ACTIVATIONS`. joined: the checkpoint has gate and up as one tensor of this name. down:
        the name of the last matrix there. weighted: what it reads is multiplied by a weight of each row."""
        self._ops, self._activation = ops_of(layers.table), activation
        parts = [part(f"{prefix}.gate_proj", inner), part(f"{prefix}.up_proj", inner)]
        if joined is not None:
            parts = [MatrixPart(name=f"{prefix}.{joined}", rows=(Rows(inner, inner), Rows(inner, inner)))]
        self.gate_up = layers.make(parts, hidden, split=Split.OUTPUTS, bias=bias, fusion=Fusion.NORM)
        fusion = Fusion.GATED_ADD if activation == "silu" else Fusion.ADD  # fused kernels support only silu
        last = [part(f"{prefix}.{down}", hidden)]
        self.down = layers.make(last, inner, split=Split.INPUTS, bias=bias, fusion=fusion, weighted=weighted)

    def linears(self) -> list[Linear]:
        return [self.gate_up, self.down]

    def experts(self) -> list[ExpertProducts]:
        return []

    def forward(self, residual: Tensor, delta: Tensor | None, norm: Norm) -> Tensor | None:
        """Implements `FeedForward`."""
        return self.finish(self._ops.norm_then_linear(self.gate_up, residual, delta, norm), residual)

    def finish(self, gate_up: Tensor, residual: Tensor) -> Tensor | None:
        """The rest behind `gate_up`. Returns as `forward`."""
        return self._ops.linear_then_add(self.down, gate_up, residual, self._activation)

    def apply(self, x: Tensor) -> Tensor:
        """Implements `PlainFeedForward`."""
        return self.finish_alone(self.gate_up(x))

    def finish_alone(self, gate_up: Tensor) -> Tensor:
        """The rest behind `gate_up`, without the residual."""
        return self.down(self._ops.act_mul(gate_up, self._activation))


class MLP:
    """Computes down(activation(up(x)))."""

    def __init__(
        self, layers: LinearLayers, up: str, down: str, hidden: int, inner: int, activation: str, *, bias: bool,
        transposed: bool = False,
    ) -> None:  # fmt: skip
        """up, down: names of the matrices in checkpoints. activation: a key of `ACTIVATIONS`. transposed: stored as
        [in, out]."""
        self._ops, self._activate = ops_of(layers.table), ACTIVATIONS[activation]
        first, last, both = [part(up, inner)], [part(down, hidden)], {"bias": bias, "transposed": transposed}
        self.up = layers.make(first, hidden, split=Split.OUTPUTS, fusion=Fusion.NORM, **both)
        self.down = layers.make(last, inner, split=Split.INPUTS, fusion=Fusion.ADD, **both)

    def linears(self) -> list[Linear]:
        return [self.up, self.down]

    def experts(self) -> list[ExpertProducts]:
        return []

    def forward(self, residual: Tensor, delta: Tensor | None, norm: Norm) -> Tensor | None:
        """Implements `FeedForward`."""
        inner = self._activate(self._ops.norm_then_linear(self.up, residual, delta, norm))
        return self._ops.linear_then_add(self.down, inner, residual)

    def apply(self, x: Tensor) -> Tensor:
        """Implements `PlainFeedForward`."""
        return self.down(self._activate(self.up(x)))
