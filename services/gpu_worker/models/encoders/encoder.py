"""An encoder of BERT's form: a sum of embeddings with a norm, and layers that normalise behind each sublayer."""

from collections.abc import Sequence

from torch import Tensor

from blockyard.services.gpu_worker.layers.adapter_rows import AdapterRows
from blockyard.services.gpu_worker.layers.attention import Attention
from blockyard.services.gpu_worker.layers.embedding import LearnedPositions, OutputLayer, TokenEmbedding
from blockyard.services.gpu_worker.layers.linear import Linear
from blockyard.services.gpu_worker.layers.mlp import MLP
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertProducts
from blockyard.services.gpu_worker.layers.norm import LayerNorm
from blockyard.services.gpu_worker.layers.rotary import NO_ROTATION
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.interface import AdaptableParts, ModelShape
from blockyard.services.gpu_worker.step import Attend, Step


class EncoderEmbedding:
    """The sum of the embeddings of a token, its position and its token type, with a norm."""

    def __init__(
        self, words: TokenEmbedding, positions: LearnedPositions, token_types: Tensor | None, norm: LayerNorm
    ) -> None:
        """token_types: [types, hidden]; None: the model has none."""
        self.words, self.positions, self._token_types, self._norm = words, positions, token_types, norm

    def tables(self) -> list[Tensor]:
        found = [self.words.weight, self.positions.weight]
        return found if self._token_types is None else [*found, self._token_types]

    def __call__(self, step: Step) -> Tensor:
        """Returns [tokens, hidden]."""
        hidden = self.words(step.token_ids)
        if step.vectors is not None:
            step.vectors.put(hidden)
        hidden.add_(self.positions(step.positions))
        if self._token_types is not None:
            types = step.token_types
            hidden.add_(self._token_types[0] if types is None else self._token_types.index_select(0, types))
        return self._norm(hidden)


class EncoderLayer:
    """Attention and feed-forward; the sum of each with its input is normalised."""

    def __init__(self, attention: Attention, norm1: LayerNorm, mlp: MLP, norm2: LayerNorm) -> None:
        self._attention, self._norm1, self._mlp, self._norm2 = attention, norm1, mlp, norm2
        for linear in self.linears():
            linear.disable_fusion()

    def linears(self) -> list[Linear]:
        return [*self._attention.linears(), *self._mlp.linears()]

    def __call__(self, hidden: Tensor, backend: Attend) -> Tensor:
        """hidden [tokens, hidden] -> the same shape."""
        ops = self._attention.ops
        attended = self._attention.out(self._attention.attend_normed(hidden, NO_ROTATION, backend))
        hidden = ops.norm_of_sum(hidden, attended, self._norm1)
        return ops.norm_of_sum(hidden, self._mlp.apply(hidden), self._norm2)


class Encoder:
    """Runs the parts of an encoder. Implements `Model`."""

    def __init__(
        self,
        table: WeightTable,
        shape: ModelShape,
        *,
        embedding: EncoderEmbedding,
        layers: Sequence[EncoderLayer],
        output: OutputLayer,
    ) -> None:
        self.table, self.shape = table, shape.share(table.shard)
        self.adapter_rows, self.adaptable = AdapterRows(), AdaptableParts()
        self._embedding, self._layers, self._output = embedding, layers, output

    def prepare(self, max_model_len: int) -> list[str]:
        for linear in self.linears():
            linear.prepare()
        self._embedding.positions.prepare(max_model_len)
        return []

    def linears(self) -> list[Linear]:
        return [*(linear for layer in self._layers for linear in layer.linears()), *self._output.linears()]

    def experts(self) -> list[ExpertProducts]:
        return []

    def embeddings(self) -> list[Tensor]:
        return self._embedding.tables()

    def computed(self) -> list[Tensor]:
        return []

    def forward(self, step: Step) -> Tensor:
        hidden = self._embedding(step)
        for layer in self._layers:
            hidden = layer(hidden, step.attend)
        return hidden if step.logits_indices is None else hidden.index_select(0, step.logits_indices.rows)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._output(hidden)
