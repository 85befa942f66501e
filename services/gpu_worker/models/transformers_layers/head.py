"""The head of a transformers class alone: the hidden states of chosen rows go in, without the layers."""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

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
