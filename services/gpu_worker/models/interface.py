"""The interface between a model and the rest of the worker."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from blockyard.services.gpu_worker.layers.adapter_rows import AdapterRows
from blockyard.services.gpu_worker.layers.attention import AttentionShape
from blockyard.services.gpu_worker.layers.embedding import TokenEmbedding
from blockyard.services.gpu_worker.layers.latent.up_projection import UpProjection
from blockyard.services.gpu_worker.layers.linear import Linear
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertProducts
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a model that the runner, the memory plan, the KV cache and the scheduler need."""

    vocab_size: int
    max_positions: int  # longest sequence that the model supports
    attention: tuple[AttentionShape, ...]  # one for each layer
    has_kv: bool = True  # False: each token attends to all others, so that nothing is kept of earlier steps
    num_outputs: int | None = None  # of `logits`; None: `vocab_size`
    all_attention: tuple[AttentionShape, ...] | None = None  # of a pipeline stage: for each layer of the model
    first_layer: int = 0  # number in the model of the first one here

    def share(self, shard: Shard) -> "ModelShape":
        """Returns the sizes of a rank. Raises ConfigError for more ranks than query heads."""
        if shard.size == 1:
            return self
        return replace(self, attention=tuple(layer.share(shard) for layer in self.attention))

    def of_layers(self, layers: range) -> "ModelShape":
        """Returns the sizes of a pipeline stage with these layers."""
        own = self.attention[layers.start : layers.stop]
        return replace(self, attention=own, all_attention=self.attention, first_layer=layers.start)

    @property
    def of_model(self) -> "ModelShape":
        """The sizes of all layers, with a rank's share of each."""
        if self.all_attention is None:
            return self
        return replace(self, attention=self.all_attention, all_attention=None, first_layer=0)

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @property
    def num_heads(self) -> int:
        """The largest number of query heads of any layer."""
        return max(layer.num_heads for layer in self.attention)

    @property
    def head_dim(self) -> int:
        """The largest size of a head of any layer."""
        return max(layer.head_dim for layer in self.attention)

    @property
    def runs(self) -> tuple[tuple[range, tuple[int, int, int]], ...]:
        """Successive layers that keep the same of a token, with what they keep: see `AttentionShape.kept`.

        Layers that differ in what all ranks keep are not of one run, so that all ranks have the same runs.
        """
        found: list[tuple[range, tuple[int, int, int]]] = []
        for layer, shape in enumerate(self.attention):
            before = self.attention[layer - 1]
            if found and (before.kept, before.model_kv_heads) == (shape.kept, shape.model_kv_heads):
                found[-1] = (range(found[-1][0].start, layer + 1), shape.kept)
            else:
                found.append((range(layer, layer + 1), shape.kept))
        return tuple(found)

    @property
    def has_latent(self) -> bool:
        return any(layer.latent_dim is not None for layer in self.attention)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer of the model: the number of last keys that a token attends to; None: all."""
        return tuple(layer.rules.window for layer in self.of_model.attention)


@dataclass(frozen=True, slots=True)
class AdaptableParts:
    """What adapters may change of a model beside its linear layers."""

    up_projections: Sequence[UpProjection] = ()  # of latent attention
    embedding: TokenEmbedding | None = None


class Model(Protocol):
    """A model. Use: build it, load the weights of `table`, call `prepare`, then run steps."""

    shape: ModelShape
    table: WeightTable
    adapter_rows: AdapterRows  # which its layers read
    adaptable: AdaptableParts

    def prepare(self, max_model_len: int) -> list[str]:
        """Repacks weights and builds the rotation tables. Called once, after the weights are loaded.

        Returns lines for the start's report: the choices that follow from `max_model_len`.
        """

    def linears(self) -> list[Linear]:
        """Returns all linear layers, in the order in which a step uses them."""

    def experts(self) -> list[ExpertProducts]:
        """Returns the experts of all mixtures, layer by layer."""

    def embeddings(self) -> list[Tensor]:
        """Returns the tables that are looked up by token or position, [rows, width]."""

    def computed(self) -> list[Tensor]:
        """Returns what `prepare` has made that is no weight, such as the rotations of all positions."""

    def forward(self, step: Step) -> Tensor:
        """Runs the layers. Returns hidden states [tokens, hidden], the input of `logits`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the output layer: [rows, hidden] -> [rows, vocab_size], in the dtype of the model.

        Of a classifier [rows, labels], and the rows are pooled hidden states.
        """


def tensors_of(model: Model) -> Iterator[Tensor]:
    """All tensors that live as long as a prepared model. Several may share their memory."""
    yield from model.table.tensors()
    yield from model.embeddings()
    yield from model.computed()
    for linear in model.linears():
        yield from linear.method.tensors().values()
    for experts in model.experts():
        yield from experts.tensors()
