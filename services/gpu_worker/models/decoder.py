"""A pre-norm transformer decoder. The model family passes its layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.layers.attention import Attention, AttentionShape
from blockyard.services.gpu_worker.layers.embedding import TokenEmbedding
from blockyard.services.gpu_worker.layers.fused_ops import FusedOps, find_ops
from blockyard.services.gpu_worker.layers.linear import Linear, LinearLayers
from blockyard.services.gpu_worker.layers.norm import make_rms_norm
from blockyard.services.gpu_worker.layers.rotary import RotaryEmbedding
from blockyard.services.gpu_worker.models.interface import ModelShape
from blockyard.services.gpu_worker.step import Step


class FeedForward(Protocol):
    """A feed-forward sublayer, such as `GatedMLP`."""

    def linears(self) -> list[Linear]: ...
    def forward(self, ops: FusedOps, residual: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor | None: ...


class DecoderLayer:
    """One pre-norm layer: norm, attention, norm, feed-forward.

    The output of a sublayer is passed on as `delta`, and the next norm adds it to the residual: one kernel does both.
    """

    def __init__(self, norm1: RMSNorm, attention: Attention, norm2: RMSNorm, mlp: FeedForward) -> None:
        self._norm1, self._attention, self._norm2, self._mlp = norm1, attention, norm2, mlp

    def prepare(self) -> None:
        for part in (self._norm1, self._attention, self._norm2):
            part.prepare()

    def linears(self) -> list[Linear]:
        return [*self._attention.linears(), *self._mlp.linears()]

    def forward(
        self,
        ops: FusedOps,
        residual: Tensor,
        delta: Tensor | None,
        rotation: Tensor,
        step: Step,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the layer. Adds delta, the output of the previous layer, to residual in place.

        Returns residual and the delta of this layer, which the caller adds to residual; a delta of None is already
        added. Both have the rows in `rows`; None: all rows.
        """
        residual, delta = self._attention.forward(ops, residual, delta, self._norm1, rotation, step, rows)
        return residual, self._mlp.forward(ops, residual, delta, self._norm2)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What a decoder is built with outside of its layers."""

    vocab_size: int
    hidden: int  # size of the hidden state
    norm_eps: float  # of the final norm
    tie_embeddings: bool  # the output matrix is the embedding table


class Decoder:
    """A decoder with token embeddings, layers, a final norm and an output matrix. Implements `Model`."""

    def __init__(
        self,
        layers: LinearLayers,
        config: DecoderConfig,
        shape: tuple[AttentionShape, ...],
        rotary: RotaryEmbedding,
        make_layer: Callable[[int], DecoderLayer],
    ) -> None:
        """shape: the attention shape of each layer. make_layer(i) builds layer i and declares its weights."""
        self.shape = ModelShape(vocab_size=config.vocab_size, max_positions=rotary.max_positions, attention=shape)
        self.table = table = layers.table
        self._rotary = rotary
        self._embedding = TokenEmbedding(layers, "model.embed_tokens", config.vocab_size, config.hidden)
        self._ops = find_ops(table.device)
        self._layers = [make_layer(layer) for layer in range(len(shape))]
        self._norm = make_rms_norm(table, "model.norm", config.hidden, config.norm_eps)
        self._head = self._embedding.make_head(layers, config.tie_embeddings)
        table.ignore_suffix(".rotary_emb.inv_freq")

    def prepare(self, max_model_len: int) -> None:
        for layer in self._layers:
            layer.prepare()
        self._norm.prepare()
        for linear in self.linears():
            linear.prepare()
        self._rotary.prepare(max_model_len, self.table.device)

    def linears(self) -> list[Linear]:
        return [*(linear for layer in self._layers for linear in layer.linears()), self._head]

    def forward(self, step: Step) -> Tensor:
        residual = self._embedding(step.token_ids)
        delta: Tensor | None = None
        rotation = self._rotary(step.positions)
        last = self._layers[-1]
        for layer in self._layers:
            rows = step.logits_indices if layer is last else None
            residual, delta = layer.forward(self._ops, residual, delta, rotation, step, rows)
        return self._ops.add_norm(residual, delta, self._norm)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)
