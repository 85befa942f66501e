"""The layers of one pipeline stage as a model: input comes from the stage before, and output goes to the next."""

import math
from dataclasses import replace

from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.layers.linear import Linear
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertProducts
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.parallel.stage_link import StageLink
from blockyard.services.gpu_worker.parallel.stages import Stage
from blockyard.services.gpu_worker.step import Attend, LatentRows, LogitsIndices, Step


class StageModel:
    """Implements `Model` for a rank of a stage. Ranks of all stages call `forward` for the same steps in one order."""

    def __init__(self, decoder: Decoder, stage: Stage, link: StageLink) -> None:
        self._decoder, self._link, self._first_layer = decoder, link, stage.layers.start
        self.shape, self.table, self.adapter_rows = decoder.shape, decoder.table, decoder.adapter_rows
        self.adaptable, self.is_last = decoder.adaptable, stage.is_last

    def prepare(self, max_model_len: int) -> list[str]:
        return self._decoder.prepare(max_model_len)

    def linears(self) -> list[Linear]:
        return self._decoder.linears()

    def experts(self) -> list[ExpertProducts]:
        return self._decoder.experts()

    def embeddings(self) -> list[Tensor]:
        return self._decoder.embeddings()

    def computed(self) -> list[Tensor]:
        return self._decoder.computed()

    def balanced_context(self) -> int:
        """See `Geometry`. 0 for mixtures: a token uses few of their experts."""
        attended = sum(layer.num_heads * layer.head_dim for layer in self.shape.attention if layer.rules.window is None)
        if not attended or self.experts():
            return 0
        heads = {id(linear) for linear in self._decoder.head_linears()}
        weights = sum(math.prod(linear.shape) for linear in self.linears() if id(linear) not in heads)
        return weights // (2 * attended)  # a weight is two operations, a number of a head four: of K, and of V

    def forward(self, step: Step) -> Tensor:
        """Returns hidden states of the last stage; of others the residual, which is sent, of as many rows."""
        link = self._link
        if not link.is_first:
            hidden = link.receive(len(step.token_ids), self._decoder.hidden_size, self.table.dtype)
            step = replace(step, hidden=hidden, attend=StageAttend(step.attend, self._first_layer))
        found = self._decoder.forward(step)
        if not link.is_last:
            link.send(found)
            if step.logits_indices is not None:  # perhaps more than tokens, with padding; nothing reads them
                found = found.new_empty(len(step.logits_indices.rows), self._decoder.hidden_size)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """Of stages that are not the last, zeros: trial steps want some."""
        if not self.is_last:
            return hidden.new_zeros(len(hidden), self.shape.num_outputs or self.shape.vocab_size)
        return self._decoder.logits(hidden)


class StageAttend:
    """Implements `Attend` for layers that have their numbers in the whole model, over the KV of a stage."""

    def __init__(self, attend: Attend, first_layer: int) -> None:
        """first_layer: of the stage."""
        self._attend, self._first_layer = attend, first_layer

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        return self._attend(layer - self._first_layer, qkv, rotation, norm)

    def latent(self, layer: int, query: Tensor, rotation: Tensor | None, latent: LatentRows) -> Tensor:
        return self._attend.latent(layer - self._first_layer, query, rotation, latent)

    def of_rows(self, indices: LogitsIndices) -> "StageAttend":
        return StageAttend(self._attend.of_rows(indices), self._first_layer)
