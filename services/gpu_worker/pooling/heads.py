"""The steps behind the pooling: of vectors dense layers, fewer dimensions, normalization; of classifiers the output
layer of the model and the function of its logits, once."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from blockyard.services.gpu_worker.models.interface import Model
from blockyard.shared.config.pooling.activations import Activation
from blockyard.shared.config.pooling.pooling_choice import PoolingChoice
from blockyard.shared.config.pooling.sentence_modules import WEIGHTS, DenseModule
from blockyard.shared.errors import LoadError

FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {  # by class of torch.nn
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "ReLU": torch.relu,
    "GELU": F.gelu,
    "SiLU": F.silu,
    "Softmax": lambda x: x.softmax(-1),
}


class DenseLayer:
    """A Dense module of sentence-transformers, in float32."""

    def __init__(self, module: DenseModule, folder: Path, device: torch.device) -> None:
        """folder: of the model. Raises LoadError for weights that are missing or of another shape."""
        self._function = FUNCTIONS[module.activation]
        stored = _read_weights(folder / module.folder)
        where = folder / module.folder
        shape = (module.out_features, module.in_features)
        self.weight = _take(stored, "linear.weight", shape, where, device)
        self.bias = _take(stored, "linear.bias", shape[:1], where, device) if module.bias else None
        self._residual: Tensor | None = None
        self._adds_input = module.use_residual
        if module.use_residual and module.in_features != module.out_features:
            self._residual = _take(stored, "residual.weight", shape, where, device)
        known = {"linear.weight": self.weight, "linear.bias": self.bias, "residual.weight": self._residual}
        if unread := sorted(name for name in stored if known.get(name) is None):
            raise LoadError(f"{where}: config.json means no {unread[0]}, which the weights of this Dense module have")

    def tensors(self) -> list[Tensor]:
        return [one for one in (self.weight, self.bias, self._residual) if one is not None]

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] float32 -> [rows, out]."""
        out = self._function(F.linear(x, self.weight, self.bias))
        if self._adds_input:
            out = out + (x if self._residual is None else F.linear(x, self._residual))
        return out


class VectorHead:
    """Makes vectors of pooled rows."""

    def __init__(self, choice: PoolingChoice, folder: Path, device: torch.device) -> None:
        """folder: of the model, which has the weights of dense layers. Raises LoadError."""
        self._choice = choice
        self._dense = [DenseLayer(module, folder, device) for module in choice.dense]

    def tensors(self) -> list[Tensor]:
        """The weights, which sleep moves to host memory."""
        return [tensor for layer in self._dense for tensor in layer.tensors()]

    def __call__(self, rows: Tensor, dimensions: int | None = None, normalize: bool | None = None) -> Tensor:
        """rows [n, width] float32 -> [n, dimensions or the width of the choice] float32.

        dimensions: the first so many numbers, cut before they are normalized; None: the choice's `truncate_dim`, cut
        behind all as sentence-transformers does. normalize: of the request; None: as the model does.
        """
        fits = bool(self._dense) and rows.shape[1] == self._dense[0].weight.shape[1]  # else a request pools otherwise
        for place, layer in enumerate(self._dense if fits else ()):
            if place in self._choice.normalize_before:
                rows = F.normalize(rows, dim=-1)
            rows = layer(rows)
        if dimensions is not None:
            rows = rows[:, :dimensions]
        wants = self._choice.normalize if normalize is None else normalize
        if wants:
            rows = F.normalize(rows, dim=-1)
        return rows if dimensions is not None else rows[:, : self._choice.truncate_dim]


class ClassHead:
    """Makes scores or classes of pooled rows."""

    def __init__(self, model: Model, activation: Activation, returned_ids: Sequence[int] | None = None) -> None:
        """returned_ids: the outputs that are kept, before the function; None: all."""
        self._model, self._function = model, FUNCTIONS[activation.value]
        device = model.table.device
        self._returned = None if returned_ids is None else torch.tensor(list(returned_ids), device=device)

    def tensors(self) -> list[Tensor]:
        return []

    def __call__(
        self,
        rows: Tensor,
        *,
        use_activation: bool = True,
        softmax: bool | None = None,
        returned_ids: Sequence[int] | None = None,
    ) -> Tensor:
        """rows [n, hidden] float32 -> [n, labels] float32. use_activation: False returns logits.

        softmax, returned_ids: of the request, in place of the model's; None: as the model has it.
        """
        logits = self._model.logits(rows.to(self._model.table.dtype)).float()
        if returned_ids is not None:
            logits = logits.index_select(1, torch.tensor(list(returned_ids), device=logits.device))
        elif self._returned is not None:
            logits = logits.index_select(1, self._returned)
        if not use_activation or softmax is False:
            return logits
        return logits.softmax(-1) if softmax else self._function(logits)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    safe = folder / WEIGHTS[0]
    try:
        if safe.is_file():
            return load_file(safe)
        loaded: dict[str, Tensor] = torch.load(folder / WEIGHTS[1], map_location="cpu", weights_only=True)
    except Exception as e:
        raise LoadError(f"{folder}: cannot read the weights of this Dense module: {str(e).splitlines()[0]}") from e
    return loaded


def _take(stored: Mapping[str, Tensor], name: str, shape: Sequence[int], folder: Path, device: torch.device) -> Tensor:
    if name not in stored:
        raise LoadError(f"{folder}: the weights of this Dense module lack {name}")
    if tuple(stored[name].shape) != tuple(shape):
        raise LoadError(f"{folder}: {name} is {list(stored[name].shape)}, config.json means {list(shape)}")
    return stored[name].to(device, torch.float32)
