"""A transformer decoder: embeddings, layers, a final norm and an output layer. The model family passes the parts.

This is the one place where the layers of a model are made, and a pipeline stage makes its own alone.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from blockyard.services.gpu_worker.layers.adapter_rows import AdapterRows
from blockyard.services.gpu_worker.layers.decoder_layers import DecoderLayer
from blockyard.services.gpu_worker.layers.embedding import LearnedPositions, OutputLayer, TokenEmbedding
from blockyard.services.gpu_worker.layers.fused_ops import ops_of
from blockyard.services.gpu_worker.layers.latent.up_projection import UpProjection
from blockyard.services.gpu_worker.layers.linear import Linear
from blockyard.services.gpu_worker.layers.long_rotations import FLAG
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertProducts
from blockyard.services.gpu_worker.layers.norm import NoNorm, Norm
from blockyard.services.gpu_worker.layers.rotary import LayerRotations
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.interface import AdaptableParts, ModelShape
from blockyard.services.gpu_worker.step import Step
from blockyard.shared.errors import ConfigError


class Decoder:
    """Runs the parts of a decoder. Implements `Model`.

    Of a stage it has the layers of `table.stage`: `forward` of a later one begins with `Step.hidden`, and that of one
    that is not the last returns the residual, to which all is added.
    """

    def __init__(
        self,
        table: WeightTable,
        shape: ModelShape,
        *,
        embedding: TokenEmbedding,
        make_layer: Callable[[int], DecoderLayer],
        norm: Norm,
        head: OutputLayer,
        rotations: LayerRotations,
        positions: LearnedPositions | None = None,
        up_projections: Sequence[UpProjection] = (),
    ) -> None:
        """make_layer: given the number of a layer. positions: learned ones that are added to the embeddings of tokens;
        None: positions are in `rotations`. up_projections: of the layers' latent attention."""
        self.table, self.adapter_rows, self._stage = table, AdapterRows(), table.stage
        shape, numbers = shape.share(table.shard), range(shape.num_layers)
        if self._stage is not None:
            numbers = self._stage.layers
            shape, rotations = shape.of_layers(numbers), rotations.of_layers(numbers)
        self.shape = shape
        self.layer_bytes: list[int] = []  # weights of each layer
        self._layers: list[DecoderLayer] = []
        for number in numbers:
            before = table.size_bytes
            self._layers.append(make_layer(number))
            self.layer_bytes.append(table.size_bytes - before)
        self._ops, self.adaptable = ops_of(table), AdaptableParts(up_projections, embedding)
        self._embedding, self._positions, self._rotations = embedding, positions, rotations
        self._norm, self._head = norm, head
        self._has_embedding = self._stage is None or self._stage.is_first
        self._has_head = self._stage is None or self._stage.is_last

    def prepare(self, max_model_len: int) -> list[str]:
        for layer in self._layers:
            layer.prepare()
        self._norm.prepare()
        for linear in self.linears():
            linear.prepare()
        if self._positions is not None and self._has_embedding:
            self._positions.prepare(max_model_len)
        long = self.adapter_rows.long_rotations
        factors = () if long is None else long.factors
        if factors and not self._rotations.takes_factors:
            raise ConfigError(f"{FLAG}: this model's positions are not rotated by plain or linear RoPE")
        return self._rotations.prepare(max_model_len, self.table.device, self.table.dtype, factors)

    def linears(self) -> list[Linear]:
        layers = (linear for layer in self._layers for linear in layer.linears())
        first = self._embedding.linears() if self._has_embedding else []
        return [*first, *layers, *(self._head.linears() if self._has_head else [])]

    def experts(self) -> list[ExpertProducts]:
        return [experts for layer in self._layers for experts in layer.experts()]

    def embeddings(self) -> list[Tensor]:
        if not self._has_embedding:
            return []
        return [self._embedding.weight, *([] if self._positions is None else [self._positions.weight])]

    @property
    def hidden_size(self) -> int:
        """Numbers of a row of the residual."""
        return self._layers[0].linears()[0].spec.inputs.size

    def head_linears(self) -> list[Linear]:
        """Returns the linear layers of the output layer."""
        return self._head.linears()

    def computed(self) -> list[Tensor]:
        return self._rotations.tensors()

    def forward(self, step: Step) -> Tensor:
        residual = self._embed(step) if step.hidden is None else step.hidden
        delta: Tensor | None = None
        rotations = self._rotations(self.adapter_rows.rotated(step.positions))
        backend, last, needed = step.attend, self._layers[-1], step.logits_indices
        for layer, rotation in zip(self._layers, rotations, strict=True):
            if layer is last and needed is not None and self._has_head:  # behind its attention no other row is read
                heads, normed = layer.attend(residual, delta, rotation, backend.of_rows(needed))
                self.adapter_rows.select(needed.rows)  # products read it early: other kernels have to run before them
                residual = residual.index_select(0, needed.rows)
                normed = None if normed is None else normed.index_select(0, needed.rows)
                residual, delta = layer.finish(residual, (heads, normed))
            else:
                residual, delta = layer.finish(residual, layer.attend(residual, delta, rotation, backend))
        return self._ops.add_norm(residual, delta, self._norm if self._has_head else NoNorm())

    def _embed(self, step: Step) -> Tensor:
        hidden = self._embedding(step.token_ids, step.vectors)
        if self._positions is not None:
            hidden.add_(self._positions(step.positions))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)
