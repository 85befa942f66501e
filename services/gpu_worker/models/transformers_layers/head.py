"""The head of a transformers class alone: the hidden states of chosen rows go in, without the layers.

A class that does not generate text has an output layer of ours in its place.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from blockyard.services.gpu_worker.layers.embedding import OutputLayer
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.models.output_layers import make_decoder_output
from blockyard.shared.config.pooling.output_kinds import OutputKind, first_kind
from blockyard.shared.errors import ConfigError

DECODER = "decoder"  # of classes whose base model holds its layers in a module of this name


class HeadAlone:
    """The head of a model, with the scale or cap that its family has behind it."""

    def __init__(self, causal: Any) -> None:
        """Takes the layers out of `causal`."""
        self._causal, self._layers = causal, _GivenHidden(getattr(causal, causal.base_model_prefix))
        setattr(causal, causal.base_model_prefix, self._layers)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> logits [rows, vocab_size]."""
        self._layers.hidden = hidden[None]
        out: Tensor = self._causal(input_ids=None, use_cache=False).logits[0]
        self._layers.hidden = None
        return out


class _GivenHidden(nn.Module):
    """Takes the place of a model's layers."""

    hidden: Tensor | None = None

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(base).items() if not name.startswith("_")}
        self.__dict__ |= plain | self.__dict__  # heads read factors there
        if DECODER in base._modules:
            self.__dict__[DECODER] = self  # no submodule: that would be a cycle

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _LayersOutput(last_hidden_state=self.hidden)


class _LayersOutput(BaseModelOutputWithPast):
    """The output of the layers. Fields that a class adds, such as `router_logits`, are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class ClassEmbedding:
    """The embedding table of a class. Implements `output_layers.EmbeddingRows`."""

    def __init__(self, causal: Any) -> None:
        self._module: nn.Embedding = causal.get_input_embeddings()
        self.vocab_size = self._module.num_embeddings

    def row(self, token_id: int) -> Tensor:
        """Raises ConfigError for an embedding that is more than a table."""
        if type(self._module) is not nn.Embedding:
            raise ConfigError(f"its {type(self._module).__name__} scales embeddings: tokens cannot be compared by them")
        found: Tensor = self._module(torch.tensor([token_id], device=self._module.weight.device))
        return found


def make_own_output(
    config: dict[str, Any], causal: Any, hidden_size: int, layers: LinearLayers
) -> tuple[OutputLayer, int] | None:
    """Takes the head out of `causal`, before its weights get places. Returns ours, and its number of outputs.

    None: the model generates, and keeps its head. hidden_size: of the head's input. Raises ConfigError.
    """
    kind = first_kind(config)
    if kind is OutputKind.TOKENS:
        return None
    causal.set_output_embeddings(nn.Identity())
    tied = bool(getattr(causal.config, "tie_word_embeddings", False))
    return make_decoder_output(kind, config, layers, ClassEmbedding(causal), hidden_size, tied=tied)
