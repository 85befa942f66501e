"""A transformer decoder: embeddings, layers, a final norm and an output layer. The model family passes the parts."""

from collections.abc import Sequence

from torch import Tensor

from blockyard.services.gpu_worker.layers.adapter_rows import AdapterRows
from blockyard.services.gpu_worker.layers.decoder_layers import DecoderLayer
from blockyard.services.gpu_worker.layers.embedding import LearnedPositions, OutputLayer, TokenEmbedding
from blockyard.services.gpu_worker.layers.fused_ops import ops_of
from blockyard.services.gpu_worker.layers.latent.up_projection import UpProjection
from blockyard.services.gpu_worker.layers.linear import Linear
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertProducts
from blockyard.services.gpu_worker.layers.norm import Norm
from blockyard.services.gpu_worker.layers.rotary import LayerRotations
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.interface import AdaptableParts, ModelShape
from blockyard.services.gpu_worker.step import Step


class Decoder:
    """Runs the parts of a decoder. Implements `Model`."""

    def __init__(
        self,
        table: WeightTable,
        shape: ModelShape,
        *,
        embedding: TokenEmbedding,
        layers: Sequence[DecoderLayer],
        norm: Norm,
        head: OutputLayer,
        rotations: LayerRotations,
        positions: LearnedPositions | None = None,
        up_projections: Sequence[UpProjection] = (),
    ) -> None:
        """positions: learned ones that are added to the embeddings of tokens; None: positions are in `rotations`.
        up_projections: of the layers' latent attention."""
        self.table, self.shape, self.adapter_rows = table, shape.share(table.shard), AdapterRows()
        self._ops, self.adaptable = ops_of(table), AdaptableParts(up_projections, embedding)
        self._embedding, self._positions, self._rotations = embedding, positions, rotations
        self._layers, self._norm, self._head = layers, norm, head

    def prepare(self, max_model_len: int) -> list[str]:
        for layer in self._layers:
            layer.prepare()
        self._norm.prepare()
        for linear in self.linears():
            linear.prepare()
        if self._positions is not None:
            self._positions.prepare(max_model_len)
        return self._rotations.prepare(max_model_len, self.table.device, self.table.dtype)

    def linears(self) -> list[Linear]:
        layers = (linear for layer in self._layers for linear in layer.linears())
        return [*self._embedding.linears(), *layers, *self._head.linears()]

    def experts(self) -> list[ExpertProducts]:
        return [experts for layer in self._layers for experts in layer.experts()]

    def embeddings(self) -> list[Tensor]:
        return [self._embedding.weight, *([] if self._positions is None else [self._positions.weight])]

    def computed(self) -> list[Tensor]:
        return self._rotations.tensors()

    def forward(self, step: Step) -> Tensor:
        residual = self._embedding(step.token_ids)
        if step.vectors is not None:
            step.vectors.put(residual)
        if self._positions is not None:
            residual.add_(self._positions(step.positions))
        delta: Tensor | None = None
        rotations = self._rotations(step.positions)
        backend, last, needed = step.attend, self._layers[-1], step.logits_indices
        for layer, rotation in zip(self._layers, rotations, strict=True):
            if layer is last and needed is not None:  # behind its attention no other row is read
                heads, normed = layer.attend(residual, delta, rotation, backend.of_rows(needed))
                residual = residual.index_select(0, needed.rows)
                self.adapter_rows.select(needed.rows)
                normed = None if normed is None else normed.index_select(0, needed.rows)
                residual, delta = layer.finish(residual, (heads, normed))
            else:
                residual, delta = layer.finish(residual, layer.attend(residual, delta, rotation, backend))
        return self._ops.add_norm(residual, delta, self._norm)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)
