"""Runs a decoder class of the installed `transformers` over our own layers (--model-impl transformers).

The class is built on torch's meta device, without memory. Then its `nn.Linear`s become our linear layers, its other
parameters get places in the `WeightTable`, and its attention, which is registered with transformers, calls the step's.
So a flat batch without padding runs through it, in CUDA graphs and ahead of the host as with other models.

Code from model folders is never run. Imported only when such a model is wanted: `transformers` takes seconds to load.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import BaseModelOutputWithPast

from blockyard.services.gpu_worker.layers.attention import AttentionShape
from blockyard.services.gpu_worker.layers.linear import Linear, LinearLayers, dense_linear
from blockyard.services.gpu_worker.layers.rope_parameters import CHUNKED
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.interface import ModelShape
from blockyard.services.gpu_worker.step import Step
from blockyard.shared.architectures import describe_unsupported, find_architecture
from blockyard.shared.errors import ConfigError

NAME = "blockyard"  # of our attention among those of transformers
PROBE_TOKENS = 3
# what a module may raise that our way of running does not fit
PROBLEMS = (
    *(RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError, ImportError),
    StrictDataclassError,  # a config that contradicts itself
)


def build(config: dict[str, Any], table: WeightTable) -> "TransformersModel":
    """Raises ConfigError for a model that transformers does not have, or whose attention is not ours to compute."""
    causal, hf_config = make_on_meta(config, table.dtype)
    attention = trace_attention(causal)
    positions = getattr(hf_config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        raise ConfigError("config.json: max_position_embeddings is missing")
    shape = ModelShape(vocab_size=hf_config.vocab_size, max_positions=positions, attention=attention)
    place_buffers(causal, table.device)
    model = TransformersModel(causal, shape, table, place_weights(causal, LinearLayers(table, config)))
    if table.device.type == "meta":
        trace_head(model, hf_config.hidden_size)
    return model


class TransformersModel:
    """Implements `Model`."""

    def __init__(self, causal: Any, shape: ModelShape, table: WeightTable, linears: list[Linear]) -> None:
        self.shape, self.table, self._linears = shape, table, linears
        self._base, self._head = getattr(causal, causal.base_model_prefix), _Head(causal)
        self._no_mask: Tensor | None = None  # of four dimensions: transformers then makes none itself

    def prepare(self, max_model_len: int) -> list[str]:
        for linear in self._linears:
            linear.prepare()
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.table.device)
        return []

    def linears(self) -> list[Linear]:
        return self._linears

    def forward(self, step: Step) -> Tensor:
        hidden = _run(self._base, step.token_ids, step.positions, self._no_mask, _StepAttention(self.shape, step))
        return hidden if step.logits_indices is None else hidden.index_select(0, step.logits_indices)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


class _Head:
    """The head of a model alone, with the scale or cap that its family has behind it."""

    def __init__(self, causal: Any) -> None:
        self._causal, self._layers = causal, _GivenHidden()
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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return BaseModelOutputWithPast(last_hidden_state=self.hidden)


@dataclass(frozen=True, slots=True)
class _StepAttention:
    """The attention of one step, as attention modules of transformers call it."""

    shape: ModelShape
    step: Step

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, **_: Any) -> Tensor:
        """query [1, heads, tokens, head_dim], rotated -> [1, tokens, heads, head_dim]."""
        tokens = query.shape[2]
        qkv = torch.cat((query[0], key[0], value[0])).transpose(0, 1).contiguous()
        out = self.step.attend(layer, qkv).view(-1, query.shape[1], query.shape[3])
        rows = self.step.logits_indices
        if rows is not None and layer == self.shape.num_layers - 1 and len(out) == len(rows):
            out = _at_their_rows(out, rows, tokens)  # the last layer computes only these rows
        return out[None]


def _at_their_rows(out: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """out [n, ...] at `rows` [n] of [num_rows, ...], zeros elsewhere. Of a row that is there twice, the first counts:
    a captured step is padded with rows that others have."""
    places = torch.arange(len(rows), device=rows.device, dtype=rows.dtype)
    first = rows.new_full((num_rows,), len(rows)).scatter_reduce(0, rows, places, "amin")
    return torch.cat((out, out.new_zeros((1, *out.shape[1:]))))[first]


class _AttentionTrace:
    """Notes the attention of each layer, in a forward pass on the meta device."""

    def __init__(self) -> None:
        self.layers: dict[int, AttentionShape] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, **options: Any
    ) -> Tensor:
        wrong = _unsupported(key, value, options)
        if wrong:
            raise ConfigError(f"--model-impl transformers: the attention of layer {layer} has {wrong}")
        head_dim = query.shape[3]
        self.layers[layer] = AttentionShape(
            num_heads=query.shape[1],
            kv_heads=key.shape[1],
            head_dim=head_dim,
            scale=head_dim**-0.5 if scaling is None else scaling,
            window=options.get("sliding_window") or None,
        )
        return query.transpose(1, 2)


def _unsupported(key: Tensor, value: Tensor, options: dict[str, Any]) -> str:
    """What our attention lacks; empty if it lacks nothing."""
    if key.shape != value.shape:
        return f"values of {value.shape[3]} numbers for keys of {key.shape[3]}"
    names = {"softcap": "a soft cap", "s_aux": "sinks", "position_bias": "a position bias", "head_mask": "a head mask"}
    found = [words for name, words in names.items() if options.get(name) is not None]
    return found[0] if found else "" if options.get("is_causal", True) is not False else "no causal order"


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
    """The attention that transformers calls. `step_attention` comes through all modules from `_run`."""
    attention = options.pop("step_attention", None)
    if attention is None:
        raise ConfigError(f"--model-impl transformers: {type(module).__name__} passes no arguments to its attention")
    return attention.attend(module.layer_idx, query, key, value, scaling, **options), None


def _run(base: Any, token_ids: Tensor, positions: Tensor, mask: Tensor | None, attention: Any) -> Tensor:
    """The hidden states [tokens, hidden] of a flat batch."""
    out = base(
        input_ids=token_ids[None],
        position_ids=positions[None],
        attention_mask=mask,
        use_cache=False,
        step_attention=attention,
    )
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


def make_on_meta(config: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Any]:
    """The model class without memory, and its configuration. Raises ConfigError."""
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError("config.json: model_type is missing, by which transformers finds the class")
    try:
        hf_config = AutoConfig.for_model(kind, **{k: v for k, v in config.items() if k != "model_type"})
        with torch.device("meta"):
            make: Any = AutoModelForCausalLM  # its methods have no types
            causal = make.from_config(hf_config, attn_implementation=NAME, dtype=dtype)
    except PROBLEMS as e:
        cause = f"transformers cannot build it from model_type {kind}: {_line(e)}"
        names = config["architectures"]
        known = find_architecture(names) is not None
        raise ConfigError(cause if known else f"{describe_unsupported(names)}; {cause}") from e
    if CHUNKED in (getattr(causal.config, "layer_types", None) or ()):
        raise ConfigError(f"--model-impl transformers: layers with {CHUNKED} are not supported")
    if not hasattr(causal, causal.base_model_prefix):
        raise ConfigError(f"--model-impl transformers: {type(causal).__name__} has no decoder apart from its head")
    return causal.eval(), hf_config


def trace_attention(causal: Any) -> tuple[AttentionShape, ...]:
    """The attention of each layer, found by running the layers on the meta device. Raises ConfigError."""
    trace = _AttentionTrace()
    ids = torch.zeros(PROBE_TOKENS, dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode():
            mask = torch.zeros(1, 1, 1, 1, device="meta")
            _run(getattr(causal, causal.base_model_prefix), ids, ids, mask, trace)
    except PROBLEMS as e:
        raise ConfigError(
            f"--model-impl transformers: {type(causal).__name__} does not run as one flat batch: {_line(e)}"
        ) from e
    if sorted(trace.layers) != list(range(len(trace.layers))) or not trace.layers:
        raise ConfigError(
            f"--model-impl transformers: not all layers of {type(causal).__name__} have attention that can be replaced"
        )
    return tuple(trace.layers[layer] for layer in range(len(trace.layers)))


def trace_head(model: TransformersModel, hidden_size: int) -> None:
    """Runs the head on the meta device. Raises ConfigError."""
    try:
        with torch.inference_mode():
            model.logits(torch.zeros(PROBE_TOKENS, hidden_size, dtype=model.table.dtype, device="meta"))
    except PROBLEMS as e:
        raise ConfigError(f"--model-impl transformers: the head does not run without the layers: {_line(e)}") from e


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def place_buffers(causal: Any, device: torch.device) -> None:
    """Makes what is no weight, such as the frequencies of rotations. On the meta device it stays there."""
    if device.type == "meta":
        return
    with torch.no_grad():
        for module in causal.modules():
            buffers = {name: one for name, one in module._buffers.items() if one is not None and one.is_meta}
            if buffers:
                for name, one in buffers.items():
                    module._buffers[name] = torch.zeros_like(one, device=device)
                causal._init_weights(module)  # parameters are on the meta device still: nothing is done to them


def place_weights(causal: Any, layers: LinearLayers) -> list[Linear]:
    """Gives all parameters places in the table, under transformers' names. Returns the linear layers, in order."""
    table, linears, tied = layers.table, list[Linear](), dict[int, Tensor]()
    for module_name, module, name, parameter in _parameters(causal):
        path = f"{module_name}.{name}" if module_name else name
        if isinstance(module, nn.Linear):
            continue
        if id(parameter) not in tied:
            target = table.empty(*parameter.shape)
            table.place(path, target, tuple(parameter.shape))
            tied[id(parameter)] = target
        setattr(module, name, nn.Parameter(tied[id(parameter)], requires_grad=False))
    for module_name, module in list(causal.named_modules()):
        if isinstance(module, nn.Linear):
            linear = _linear(module_name, module, layers, tied)
            linears.append(linear)
            parent, _, own = module_name.rpartition(".")
            setattr(causal.get_submodule(parent), own, _LinearModule(linear, module))
    table.ignore_suffix(".rotary_emb.inv_freq")
    return linears


def _parameters(causal: Any) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    for module_name, module in causal.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                yield module_name, module, name, parameter


def _linear(name: str, module: nn.Linear, layers: LinearLayers, tied: dict[int, Tensor]) -> Linear:
    embedding = tied.get(id(module.weight))
    if embedding is not None:  # the head has the table of the embedding
        layers.table.ignore(f"{name}.weight")
        return dense_linear(embedding)
    return layers.make({name: module.out_features}, module.in_features, bias=module.bias is not None)


class _LinearModule(nn.Module):
    """A linear layer of ours in the place of transformers'."""

    def __init__(self, linear: Linear, replaced: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = replaced.in_features, replaced.out_features
        self._product: Callable[[Tensor], Tensor] = linear

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)
