"""Token embeddings, learned positions, and the output layer that may share the weight of the embeddings."""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from blockyard.services.gpu_worker.layers.linear import Linear, LinearLayers, dense_linear
from blockyard.services.gpu_worker.layers.norm import Norm
from blockyard.services.gpu_worker.loading.linear_spec import Split, part
from blockyard.services.gpu_worker.loading.weights import WeightTable

HEAD = "lm_head"


class TokenEmbedding:
    """The embedding table, [vocab_size, width]."""

    def __init__(
        self, layers: LinearLayers, name: str, vocab_size: int, width: int, factor: float = 1.0,
        project: Linear | None = None, norm: Norm | None = None,
    ) -> None:  # fmt: skip
        """factor: of the embeddings, not of the output matrix that shares their weight. project: from `width` to the
        hidden size; None: both are the same. norm: of the embeddings, before the first layer; None: they have none."""
        self._name = f"{name}.weight"
        self.weight = layers.plain(part(name, vocab_size), width, split=Split.OUTPUTS)
        self._vocab_size, self._factor, self._project, self._norm = vocab_size, factor, project, norm

    def linears(self) -> list[Linear]:
        return [] if self._project is None else [self._project]

    def __call__(self, token_ids: Tensor) -> Tensor:
        found = F.embedding(token_ids, self.weight)
        if self._project is not None:
            found = self._project(found)
        if self._norm is not None:
            found = self._norm(found)
        return found if self._factor == 1.0 else found.mul_(self._factor)

    def make_head(self, layers: LinearLayers, tied: bool, name: str = HEAD, *, bias: bool = False) -> Linear:
        """Makes the output layer. tied: it uses this weight, unless the checkpoint has another one for it."""
        if not tied:
            return layers.make([part(name, self._vocab_size)], self.weight.shape[1], split=Split.OUTPUTS, bias=bias)
        linear = dense_linear(self.weight, name=name, split=Split.OUTPUTS)
        layers.table.tie(f"{name}.weight", self._name, lambda own: linear.method.replace("weight", own))
        return linear


class LearnedPositions:
    """An embedding of each position, [positions, width], which is added to that of the token."""

    def __init__(self, table: WeightTable, name: str, positions: int, width: int, offset: int = 0) -> None:
        """offset: rows of the checkpoint before position 0."""
        self.weight, self._offset = table.matrix(f"{name}.weight", positions + offset, width), offset

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
        """hidden [rows, hidden] -> [rows, vocab_size]."""
        if self._project is not None:
            hidden = self._project(hidden)
        if self._factor != 1.0:
            hidden = hidden * self._factor  # much smaller than the logits
        logits = self.linear(hidden)
        return logits if self._soft_cap is None else logits.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
