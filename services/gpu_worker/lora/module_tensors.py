"""The tensors of an adapter, module by module: every tensor of the file is one of them, or named in an error."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.shared.errors import AdapterError
from blockyard.shared.lora.adapter_config import AdapterConfig
from blockyard.shared.lora.adapter_folder import PREFIX

ADDED = "added_rows"  # what names of rows of added tokens end with, which a file of their own has
# what a name ends with -> field of `ModuleTensors`; adapters saved by old releases have the adapter's name in it
ENDINGS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_A.default.weight": "a",
    "lora_B.default.weight": "b",
    "lora_B.bias": "b_bias",
    "lora_B.default.bias": "b_bias",
    "base_layer.bias": "bias",
    "token_adapter.base_layer.weight": "base",
    "original_module.weight": "base",
    "base_layer.weight": "base",
    "bias": "bias",
    "lora_embedding_A": "token_a",
    "lora_embedding_B": "token_b",
    "lora_embedding_A.default": "token_a",
    "lora_embedding_B.default": "token_b",
    "token_adapter.trainable_tokens_delta": "token_rows",
    "modules_to_save.weight": "weight",
    "weight": "weight",
    ADDED: "added",
}
OF_TOKENS = ("token_a", "token_b", "token_rows", "weight", "added")
EXPERTS = "experts"  # last part of the name of a stack
STACK_SUFFIX = ".base_layer"  # of a module of which PEFT adapts two parameters
STACKED = ("gate_up_proj", "down_proj")  # names of parameters that are stacks of experts
MAX_NAMED = 5  # tensors in one message
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(slots=True)
class ModuleTensors:
    """What an adapter has for one module: y += scale * (B(A(x)) + b_bias), and `bias` in place of the module's own."""

    name: str
    scale: float
    a: Tensor | None = None  # [rank, in]
    b: Tensor | None = None  # [out, rank]
    b_bias: Tensor | None = None  # [out]
    bias: Tensor | None = None  # [out]
    base: Tensor | None = None  # the module's own weight, which PEFT saves of a head or an embedding
    token_a: Tensor | None = None  # [rank, vocab_size], of an embedding: y += scale * A[:, token] @ B.T
    token_b: Tensor | None = None  # [width, rank]
    token_rows: Tensor | None = None  # [tokens, width], in the place of the rows of some tokens
    weight: Tensor | None = None  # [vocab_size, width], in the place of the module's own
    added: Tensor | None = None  # [added tokens, width], rows behind the module's own
    # largest absolute values as read, by field; empty in a worker
    largest: dict[str, float] = dataclasses.field(default_factory=dict)
    is_scaled: bool = False  # B has the scale already
    is_stack: bool = False  # of all experts: A [experts * rank, in], expert after expert, B [out, rank * experts]

    def tensors(self) -> list[tuple[str, Tensor]]:
        found = ((name, getattr(self, name)) for name in dict.fromkeys(ENDINGS.values()))
        return [(name, value) for name, value in found if value is not None]

    def parameters(self) -> list[str]:
        """What `target_parameters` may name it by. Which one of two a stack is, the shapes tell: see `targets`."""
        if self.is_stack:
            return [f"{self.name.removesuffix(STACK_SUFFIX)}.{one}" for one in STACKED]
        return [f"{self.name}.weight"]

    def convert(self, dtype: torch.dtype) -> None:
        """Brings matrices into the dtype of products, with the scale in B. Raises AdapterError for numbers that are too
        large for it. A stack keeps its B: which scale it has depends on the model."""
        for down, up in (("a", "b"), ("token_a", "token_b")):
            a, b = getattr(self, down), getattr(self, up)
            if a is not None and a.dtype != dtype:
                setattr(self, down, _converted(self.name, a, dtype))
            if b is not None and not self.is_stack and not (self.is_scaled and up == "b"):
                scaled = b.mul_(self.scale) if b.dtype == dtype else b.float() * self.scale  # both round once
                setattr(self, up, _converted(self.name, scaled, dtype))
            most = self.largest.get(down, 0.0) * self.largest.get(up, 0.0) * abs(1.0 if self.is_stack else self.scale)
            if most > torch.finfo(dtype).max:  # a layer's output would not be finite, nor would any behind it
                raise AdapterError(f"the products of lora_A and lora_B of {self.name} are too large for {_text(dtype)}")
        if not self.is_stack:
            self.b_bias = None if self.b_bias is None else self.b_bias.float() * self.scale
            self.scale = 1.0

    @property
    def is_of_tokens(self) -> bool:
        """Whether the adapter changes rows of tokens, of an embedding or a head."""
        return any(getattr(self, name) is not None for name in OF_TOKENS)


class EarlyChecks:
    """What may be done to tensors while they are read, by the threads that read them."""

    def __init__(self, config: AdapterConfig, dtype: torch.dtype) -> None:
        """dtype: of products."""
        self._config, self._dtype = config, dtype
        self.largest: dict[str, float] = {}  # absolute values of finite tensors, by name
        self.scaled = set[str]()  # those that have the scale of their module

    def take(self, name: str, values: Tensor) -> None:
        """Others are left to `group_tensors` and `ModuleTensors.convert`, which refuse them."""
        if not math.isfinite(most := largest_value(values)):
            return
        self.largest[name] = most
        module, field = _split(name)
        if field != "b" or values.dtype != self._dtype:
            return
        own = _make(self._config, module)
        if not own.is_stack and is_finite(scaled := values * own.scale):
            values.copy_(scaled)
            self.scaled.add(name)


def group_tensors(
    config: AdapterConfig, tensors: Mapping[str, Tensor], early: EarlyChecks, *, with_bias: bool
) -> list[ModuleTensors]:
    """Assigns tensors to modules. early: was told of some. with_bias: adapters may have biases. Raises AdapterError."""
    modules: dict[str, ModuleTensors] = {}
    unknown: list[str] = []
    for name, value in sorted(tensors.items()):  # a file's reader gives any order, on which sums would depend
        module, field = _split(name)
        if field is None:
            unknown.append(name)
            continue
        if field in ("bias", "b_bias") and not with_bias:
            raise AdapterError(f"the adapter has biases, such as {name}: --enable-lora-bias serves such adapters")
        if value.dtype not in DTYPES:
            raise AdapterError(f"{name} has the dtype {value.dtype}")
        most = early.largest.get(name)
        if not math.isfinite(most := largest_value(value) if most is None else most):
            raise AdapterError(f"{name} has values that are not finite")
        own = modules.setdefault(module, _make(config, module))
        before: Tensor | None = getattr(own, field)  # PEFT saves the matrix of a resized embedding twice
        if before is not None and not torch.equal(before, value.to(before.dtype)):
            raise AdapterError(f"the adapter has two tensors for {field} of {module}; one is {name}")
        setattr(own, field, value)
        own.largest[field] = most
        own.is_scaled = own.is_scaled or name in early.scaled
    if unknown:
        raise AdapterError(f"these tensors of the adapter are not known: {listed(unknown)}")
    if not modules:
        raise AdapterError("the adapter has no tensors")
    for own in modules.values():
        _check(config, own)
    _check_idle(config, list(modules.values()))
    return list(modules.values())


def _check_idle(config: AdapterConfig, modules: list[ModuleTensors]) -> None:
    """Raises AdapterError for what the config names and the file has no tensors for."""
    names = [own.name for own in modules]
    saved = [own.name for own in modules if own.weight is not None]
    trained = [own.name for own in modules if own.token_rows is not None]
    tokens = config.trainable_token_indices
    idle = {
        "target_modules": config.idle_targets(names),
        "target_parameters": config.idle_parameters([one for own in modules for one in own.parameters()]),
        "modules_to_save": [one for one in config.modules_to_save or [] if not any(_ends(name, one) for name in saved)],
        "trainable_token_indices": ["of all modules"] if tokens and not trained else [],
    }
    if isinstance(tokens, dict):
        of_none = [one for one, ids in tokens.items() if ids and not any(_ends(name, one) for name in trained)]
        idle["trainable_token_indices"] = of_none
    for field, found in idle.items():
        if found:
            raise AdapterError(f"{field} {listed(found)}: the adapter has no tensors for them")


def pattern_names(tensors: Iterable[str]) -> set[str]:
    """The names of modules and parameters that patterns of the config are matched with, of tensors by their names."""
    names = set[str]()
    for module in {_split(name)[0] for name in tensors}:
        stack = module.removesuffix(STACK_SUFFIX)
        parameters = [f"{stack}.{name}" for name in STACKED] if last_name(stack) == EXPERTS else []
        names.update((module, f"{module}.weight", *parameters))
    return names


def is_finite(value: Tensor) -> bool:
    """Whether all of a tensor's values are."""
    return math.isfinite(largest_value(value))


def largest_value(value: Tensor) -> float:
    """Of the absolute values; NaN if there is one. The extremes take a fortieth of `isfinite`'s time."""
    return max(abs(float(one)) for one in value.aminmax()) if value.numel() else 0.0


def listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _split(name: str) -> tuple[str, str | None]:
    """The module of a tensor, and the field; None: it is not known."""
    for ending, field in ENDINGS.items():
        if name.endswith(f".{ending}"):
            return name.removeprefix(PREFIX).removesuffix(f".{ending}"), field
    return name, None


def _make(config: AdapterConfig, module: str) -> ModuleTensors:
    """The scale of a stack depends on its parameter, which the shapes tell: see `targets`."""
    if not config.targets(module) and config.targets_parameter(f"{module}.weight"):
        return ModuleTensors(module, config.scale_of(f"{module}.weight"))
    stack = module.removesuffix(STACK_SUFFIX)
    is_stack = last_name(stack) == EXPERTS and any(config.targets_parameter(f"{stack}.{name}") for name in STACKED)
    return ModuleTensors(module, config.scale_of(module), is_stack=is_stack)


def _check(config: AdapterConfig, own: ModuleTensors) -> None:
    if own.is_of_tokens:
        _check_tokens(config, own)
        return
    if own.a is None and own.b is None and own.b_bias is None and config.bias == "all":
        return  # a bias of a module that is no target
    if own.is_stack:
        if own.a is None or own.b is None or own.a.dim() != 2 or own.b.dim() != 2:
            raise AdapterError(f"the adapter has no pair of matrices for {own.name}")
        return
    if not config.targets(own.name) and not config.targets_parameter(f"{own.name}.weight"):
        raise AdapterError(f"the adapter has tensors for {own.name}, which its target_modules leave out")
    if own.a is None or own.b is None:
        raise AdapterError(f"the adapter has only one of lora_A and lora_B for {own.name}")
    key = own.name if config.targets(own.name) else f"{own.name}.weight"
    rank = config.rank_of(key)
    if own.a.dim() != 2 or own.b.dim() != 2 or own.a.shape[0] != rank or own.b.shape[1] != rank:
        shapes = f"{tuple(own.a.shape)} and {tuple(own.b.shape)}"
        raise AdapterError(f"lora_A and lora_B of {own.name} have the shapes {shapes}; its rank is {rank}")


def _converted(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    found = values.to(dtype).contiguous()
    if not is_finite(found):
        raise AdapterError(f"the matrices of {name} are too large for {_text(dtype)}")
    return found


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_tokens(config: AdapterConfig, own: ModuleTensors) -> None:
    if (own.token_a is None) != (own.token_b is None):
        raise AdapterError(f"the adapter has only one of lora_embedding_A and lora_embedding_B for {own.name}")
    if own.token_a is not None and own.token_b is not None:
        rank = config.rank_of(own.name)
        if not config.targets(own.name):
            raise AdapterError(f"the adapter has tensors for {own.name}, which its target_modules leave out")
        if own.token_a.dim() != 2 or own.token_a.shape[0] != rank or own.token_b.shape[1:] != (rank,):
            shapes = f"{tuple(own.token_a.shape)} and {tuple(own.token_b.shape)}"
            raise AdapterError(f"lora_embedding_A and B of {own.name} have the shapes {shapes}; its rank is {rank}")
    if own.token_rows is not None and len(own.token_rows) != (number := len(config.tokens_of(own.name))):
        raise AdapterError(f"{own.name} has {len(own.token_rows)} trained rows; trainable_token_indices names {number}")


def target_name(module: ModuleTensors) -> str:
    """The last part of the name, of a stack that of its experts."""
    return last_name(module.name.removesuffix(STACK_SUFFIX) if module.is_stack else module.name)


def _ends(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def last_name(module: str) -> str:
    """The last part of a module's name: q_proj of model.layers.0.self_attn.q_proj."""
    return module.rpartition(".")[2]
