"""Runs a decoder class of the installed `transformers` over our own layers (--model-impl transformers).

The class is built on torch's meta device, without memory. Then its `nn.Linear`s become our linear layers, its other
parameters get places in the `WeightTable`, and its attention, which is registered with transformers, calls the step's.
Modules that our kernels can compute are replaced (`transformers_layers`). So a flat batch without padding runs through
it, in CUDA graphs and ahead of the host as with other models.

Code from model folders is never run. Imported only when such a model is wanted: `transformers` takes seconds to load.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import BaseModelOutputWithPast

from blockyard.services.gpu_worker.layers.attention import AttentionShape
from blockyard.services.gpu_worker.layers.fused_ops import find_ops
from blockyard.services.gpu_worker.layers.linear import Linear, LinearLayers
from blockyard.services.gpu_worker.layers.rope_parameters import CHUNKED
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.interface import ModelShape
from blockyard.services.gpu_worker.models.transformers_layers.attention_input import join_qkv
from blockyard.services.gpu_worker.models.transformers_layers.fusions import Fusions, find_fusions
from blockyard.services.gpu_worker.models.transformers_layers.later_reads import LaterReads
from blockyard.services.gpu_worker.models.transformers_layers.module_calls import recorded_calls
from blockyard.services.gpu_worker.models.transformers_layers.placement import Placed, place_modules
from blockyard.services.gpu_worker.models.transformers_layers.probes import PROBLEMS
from blockyard.services.gpu_worker.step import Step
from blockyard.shared.architectures import describe_unsupported, find_architecture
from blockyard.shared.errors import ConfigError

log = logging.getLogger(__name__)

NAME = "blockyard"  # of our attention among those of transformers
PROBE_TOKENS = 3
LONGROPE = "longrope"


def build(config: dict[str, Any], table: WeightTable) -> "TransformersModel":
    """Raises ConfigError for a model that transformers does not have, or whose attention is not ours to compute."""
    layers = trace_layers(config, table.dtype)
    causal, hf_config = make_on_meta(config, table.dtype)
    positions = getattr(hf_config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        raise ConfigError("config.json: max_position_embeddings is missing")
    shape = ModelShape(vocab_size=hf_config.vocab_size, max_positions=positions, attention=layers.attention)
    place_buffers(causal, table.device)
    ops = find_ops(table.device)
    placed = place_modules(causal, LinearLayers(table, config), layers.fusions, layers.calls, ops)
    model = TransformersModel(causal, shape, table, placed)
    if table.device.type == "meta":
        trace_head(model, hf_config.hidden_size)
    return model


class TransformersModel:
    """Implements `Model`."""

    def __init__(self, causal: Any, shape: ModelShape, table: WeightTable, placed: Placed) -> None:
        self.shape, self.table, self._placed = shape, table, placed
        self._base, self._head = getattr(causal, causal.base_model_prefix), _Head(causal)
        self._no_mask: Tensor | None = None  # of four dimensions: transformers then makes none itself

    def prepare(self, max_model_len: int) -> list[str]:
        for linear in self._placed.linears:
            linear.prepare()
        for norm in self._placed.norms:
            norm.prepare()
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.table.device)
        return []

    def linears(self) -> list[Linear]:
        return self._placed.linears

    def forward(self, step: Step) -> Tensor:
        hidden = _run(self._base, step.token_ids, step.positions, self._no_mask, _StepAttention(self.shape, step))
        for owner in self._placed.transient:
            owner.forget()
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
        out = self.step.attend(layer, join_qkv(query, key, value)).view(-1, query.shape[1], query.shape[3])
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
        value.clone()  # for `LaterReads`: attention reads it
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
    if LONGROPE in _rope_types(causal.config):  # chosen by the longest sequence of a batch, for all of them
        raise ConfigError(f"--model-impl transformers: rotations of rope_type {LONGROPE} are not supported")
    if CHUNKED in (getattr(causal.config, "layer_types", None) or ()):
        raise ConfigError(f"--model-impl transformers: layers with {CHUNKED} are not supported")
    if not hasattr(causal, causal.base_model_prefix):
        raise ConfigError(f"--model-impl transformers: {type(causal).__name__} has no decoder apart from its head")
    return causal.eval(), hf_config


@dataclass(frozen=True, slots=True)
class TracedLayers:
    """What forward passes on the meta device show of a model's layers."""

    attention: tuple[AttentionShape, ...]
    calls: list[str]  # names of the linear layers, in the order in which a step calls them
    fusions: Fusions


def _rope_types(config: Any) -> set[str]:
    """Of all layers, which may differ."""
    found = getattr(config, "rope_parameters", None) or {}
    return {one["rope_type"] for one in (found, *found.values()) if isinstance(one, dict) and "rope_type" in one}


def trace_layers(config: dict[str, Any], dtype: torch.dtype) -> TracedLayers:
    """Runs the layers on the meta device, and once more with what can be replaced. Raises ConfigError."""
    causal, _ = make_on_meta(config, dtype)
    with recorded_calls(causal) as recorded:
        attention = trace_attention(causal)
    calls, fusions = [call.name for call in recorded.linears], find_fusions(causal, recorded)
    reads, table = LaterReads(), WeightTable(dtype, torch.device("meta"))
    ops = find_ops(table.device)
    try:
        place_modules(causal, LinearLayers(table, config), fusions, calls, ops, reads.rotate_of)
        with reads:
            runs = trace_attention(causal) == attention
    except ConfigError:  # for example a class that reads the weight of a norm, or views q as one row
        runs = False
    if not runs:
        log.warning("%s runs with its own modules: it does not run with ours", type(causal).__name__)
        return TracedLayers(attention, calls, Fusions())
    in_place = {name: name in reads.rotated - reads.found for name in fusions.rotations}
    return TracedLayers(attention, calls, replace(fusions, rotations=in_place))


def trace_attention(causal: Any) -> tuple[AttentionShape, ...]:
    """The attention of each layer, found by running the layers on the meta device. Raises ConfigError."""
    trace = _AttentionTrace()
    ids = torch.zeros(PROBE_TOKENS, dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode(False), torch.no_grad():  # inference tensors do not count their versions
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
