"""What is behind the pooling of a classifier: the model's output layer, and the function of its logits, once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.pooling.vector_head import FUNCTIONS
from blockyard.shared.config.pooling.activations import Activation


class ClassHead:
    """Makes scores or classes of pooled rows."""

    def __init__(self, model: Model, activation: Activation, returned_ids: Sequence[int] | None = None) -> None:
        """returned_ids: the outputs that are kept, before the function; None: all."""
        self._model, self._function = model, FUNCTIONS[activation.value]
        device = model.table.device
        self._returned = None if returned_ids is None else torch.tensor(list(returned_ids), device=device)

    def tensors(self) -> list[Tensor]:
        return []

    def __call__(self, rows: Tensor, *, use_activation: bool = True) -> Tensor:
        """rows [n, hidden] float32 -> [n, labels] float32. use_activation: False returns logits."""
        logits = self._model.logits(rows.to(self._model.table.dtype)).float()
        if self._returned is not None:
            logits = logits.index_select(1, self._returned)
        return self._function(logits) if use_activation else logits
