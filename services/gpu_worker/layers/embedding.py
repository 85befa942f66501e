"""Token embeddings, learned positions, and the output layer that may share the weight of the embeddings."""

from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.services.gpu_worker.layers.linear import Linear, LinearLayers, dense_linear
from blockyard.services.gpu_worker.layers.norm import Norm
from blockyard.services.gpu_worker.loading.linear_spec import Rows, Split, part
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.parallel.rank_group import RankGroup
from blockyard.services.gpu_worker.step import InputVectors

HEAD = "lm_head"


class AdaptedEmbedding(Protocol):
    """Adds what adapters change of the embeddings of tokens."""

    @property
    def is_active(self) -> bool:
        """Whether a row of this step has an adapter."""

    def add_to(self, found: Tensor, token_ids: Tensor) -> None:
        """Changes found [tokens, width], the rows of the table, in place. token_ids: counted from this rank's first."""


class TokenEmbedding:
    """The embedding table, [vocab_size, width]."""

    def __init__(
        self, layers: LinearLayers, name: str, vocab_size: int, width: int, factor: float = 1.0,
        project: Linear | None = None, norm: Norm | None = None, *, scales_vectors: bool = False,
    ) -> None:  # fmt: skip
        """factor: of the embeddings, not of the output matrix that shares their weight. project: from `width` to the
        hidden size; None: both are the same. norm: of the embeddings, before the first layer; None: they have none.
        scales_vectors: the factor is one of vectors in the place of embeddings, too."""
        self.name, self.has_tied_head = name, False
        self._adapted: AdaptedEmbedding | None = None
        self._place = partial(_place_embedding, name, vocab_size, width)
        stage = layers.table.stage
        self.weight = self._place(layers) if stage is None or stage.is_first else _absent(width)
        self.vocab_size, self._factor, self._project, self._norm = vocab_size, factor, project, norm
        self._scales_vectors = scales_vectors or factor == 1.0
        self._ranks = layers.table.ranks
        self.own_tokens = Rows(vocab_size, vocab_size).share(layers.table.shard)  # this rank has their rows

    def linears(self) -> list[Linear]:
        return [] if self._project is None else [self._project]

    def __call__(self, token_ids: Tensor, vectors: InputVectors | None = None) -> Tensor:
        adapted = self._adapted if self._adapted is not None and self._adapted.is_active else None
        found = self._find(token_ids, adapted)
        if vectors is not None and self._scales_vectors:
            vectors.put(found)
        if self._project is not None:
            found = self._project(found)
        if self._norm is not None:
            found = self._norm(found)
        found = found if self._factor == 1.0 else found.mul_(self._factor)
        if vectors is not None and not self._scales_vectors:
            vectors.put(found)
        return found

    def adapt(self, adapted: AdaptedEmbedding) -> None:
        """Lets adapters change embeddings, in steps in which it is active."""
        self._adapted = adapted

    def row(self, token_id: int) -> Tensor:
        """Returns the embedding [1, width] of a token as the checkpoint has it, on all ranks."""
        token_ids = torch.tensor([token_id], device=self.weight.device)
        return self._find(token_ids, None)

    def _find(self, token_ids: Tensor, adapted: AdaptedEmbedding | None) -> Tensor:
        """Looks up the tokens, with several ranks only this one's: the sum over ranks has all."""
        if self._ranks is None:
            if adapted is None:
                return F.embedding(token_ids, self.weight)
            # of tokens that an adapter adds it has the rows
            found = F.embedding(token_ids.clamp(max=self.vocab_size - 1), self.weight)
            adapted.add_to(found, token_ids)
            return found
        own, num = token_ids - self.own_tokens.start, len(self.own_tokens)
        if adapted is None or self.own_tokens.stop < self.vocab_size:
            is_elsewhere = (own < 0) | (own >= num)
            rows = own.masked_fill_(is_elsewhere, 0)
        else:  # the last rank has the rows of tokens that an adapter adds
            is_elsewhere = own < 0
            rows = own.masked_fill_(is_elsewhere, 0).clamp(max=num - 1)
        found = F.embedding(rows, self.weight)
        if adapted is not None:
            adapted.add_to(found, own)
        return self._ranks.sum(found.masked_fill_(is_elsewhere[:, None], 0))

    def make_head(self, layers: LinearLayers, tied: bool) -> Linear:
        """Makes the output layer. tied: it uses this weight, unless the checkpoint has another one for it.

        Of the pipeline stages, the last has an output layer. If tied, it has the embeddings, too.
        """
        stage = layers.table.stage
        if stage is not None and not stage.is_last and not (tied and stage.is_first):
            return dense_linear(_absent(self.weight.shape[1]), name=HEAD)
        if tied:
            if stage is not None and not stage.is_first:
                self.weight = self._place(layers)
            linear = dense_linear(self.weight, name=HEAD, split=Split.OUTPUTS, outputs=self.vocab_size)
            self.has_tied_head = True

            def untie(own: Tensor) -> None:
                self.has_tied_head = False
                linear.method.replace("weight", own)

            layers.table.tie(f"{HEAD}.weight", f"{self.name}.weight", untie)
        else:
            linear = layers.make([part(HEAD, self.vocab_size)], self.weight.shape[1], split=Split.OUTPUTS)
        if layers.table.ranks is not None:
            linear.join(JoinedColumns(layers.table.ranks, self.vocab_size))
        return linear


def _place_embedding(name: str, vocab_size: int, width: int, layers: LinearLayers) -> Tensor:
    return layers.plain(part(name, vocab_size), width, split=Split.OUTPUTS)


def _absent(width: int) -> Tensor:
    """Stands for a table that another pipeline stage has."""
    return torch.empty(1, width, device="meta")


class JoinedColumns:
    """Products with the vocabulary: on the leader with the columns of all ranks, on others with their own."""

    def __init__(self, ranks: RankGroup, vocab_size: int) -> None:
        self._ranks, self._widths = ranks, Rows(vocab_size, vocab_size).widths(ranks.size)

    def __call__(self, own: Tensor) -> Tensor:
        return self._ranks.join_columns(own, self._widths)


class LearnedPositions:
    """An embedding of each position, [positions, width], which is added to that of the token."""

    def __init__(self, table: WeightTable, name: str, positions: int, width: int, offset: int = 0) -> None:
        """offset: rows of the checkpoint before position 0."""
        is_here = table.stage is None or table.stage.is_first
        self.weight = table.matrix(f"{name}.weight", positions + offset, width) if is_here else _absent(width)
        self._offset = offset

    def prepare(self, max_model_len: int) -> None:
        self.weight = self.weight[self._offset : self._offset + max_model_len]

    def __call__(self, positions: Tensor) -> Tensor:
        """positions [tokens] -> [tokens, width]."""
        return self.weight.index_select(0, positions)


class OutputLayer(Protocol):
    """What a model makes of hidden states: logits of the vocabulary, or of labels."""

    def linears(self) -> list[Linear]: ...

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, outputs]."""


class Head:
    """The output layer (LM head): hidden states to logits, scaled and with a soft cap where a family has them."""

    def __init__(
        self, linear: Linear, factor: float = 1.0, soft_cap: float | None = None, project: Linear | None = None
    ) -> None:
        """factor: of the logits. soft_cap: logits become soft_cap * tanh(logits / soft_cap). project: of hidden
        states, before `linear`; None: none."""
        self.linear, self._factor, self._soft_cap, self._project = linear, factor, soft_cap, project

    def linears(self) -> list[Linear]:
        return [self.linear] if self._project is None else [self._project, self.linear]

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, vocab_size], wider where adapters add tokens."""
        if self._project is not None:
            hidden = self._project(hidden)
        if self._factor != 1.0:
            hidden = hidden * self._factor  # much smaller than the logits
        logits = self.linear(hidden)
        return logits if self._soft_cap is None else _capped(logits, self._soft_cap, self.linear.spec.parts[0].size)


def _capped(logits: Tensor, cap: float, vocab_size: int) -> Tensor:
    if logits.shape[1] <= vocab_size:
        return logits.div_(cap).tanh_().mul_(cap)
    is_absent = logits == -torch.inf  # tokens of other rows' adapters
    return logits.div_(cap).tanh_().mul_(cap).masked_fill_(is_absent, -torch.inf)
