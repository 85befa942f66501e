"""The functions that attention and experts of a transformers class call in place of its own.

transformers looks both up by a name in the config and passes the module. Each module holds the `Connection` of its
model, which has what computes the step. So no class has to hand arguments on to its attention.
"""

from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import AttentionMaskInterface

from blockyard.shared.errors import ConfigError

NAME = "blockyard"  # of our functions among transformers' own
_FIELD = "blockyard_connection"


class Computes(Protocol):
    """Computes attention and experts for a transformers class."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, **options: Any
    ) -> Tensor:
        """query [1, heads, tokens, head_dim], rotated -> [1, tokens, heads, head_dim of values].

        options: as the class calls its attention; `owner` is the module that does.
        """

    def route(self, experts: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [rows, hidden], chosen and weights [rows, top_k] -> [rows, hidden]."""


class Connection:
    """Connects the modules of one model with what computes its steps."""

    def __init__(self, causal: nn.Module) -> None:
        self.computes: Computes | None = None
        for module in causal.modules():
            module.__dict__[_FIELD] = self

    def of(self) -> Computes:
        assert self.computes is not None
        return self.computes


def register() -> None:
    """Tells transformers our functions. May be called again."""
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    ExpertsInterface.register(NAME, _route)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ConfigError(f"its {type(module).__name__} does not know the number of its layer")
    if attention_mask is not None and attention_mask.numel() > 1:  # a step's mask has one number
        raise ConfigError(f"its {type(module).__name__} makes a mask of its own")
    options.setdefault("is_causal", getattr(module, "is_causal", None))
    return _connection(module).of().attend(layer, query, key, value, scaling, owner=module, **options), None


def _route(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return _connection(module).of().route(module, hidden_states, top_k_index, top_k_weights)


def _connection(module: nn.Module) -> Connection:
    found: Connection = module.__dict__[_FIELD]
    return found
