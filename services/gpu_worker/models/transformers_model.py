"""Runs a decoder class of the installed `transformers` over our own layers (--model-impl transformers).

The class is built on torch's meta device, without memory. Then its `nn.Linear`s become our linear layers, its other
parameters get places in the `WeightTable`, and its attention, which is registered with transformers, calls the step's.
Modules that our kernels can compute are replaced (`transformers_layers`). So a flat batch without padding runs through
it, in CUDA graphs and ahead of the host as with other models. Before that, each class has to pass a trial: many keep
states of a sequence, or look at other tokens of a batch, which would mix requests.

Code from model folders is never run. Imported only when such a model is wanted: `transformers` takes seconds to load.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.services.gpu_worker.layers.adapter_rows import AdapterRows
from blockyard.services.gpu_worker.layers.attention import AttentionShape
from blockyard.services.gpu_worker.layers.embedding import OutputLayer
from blockyard.services.gpu_worker.layers.fused_ops import find_ops
from blockyard.services.gpu_worker.layers.linear import Linear, LinearLayers
from blockyard.services.gpu_worker.layers.long_rotations import FLAG as LONG_FLAG
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertProducts
from blockyard.services.gpu_worker.layers.rope_parameters import CHUNKED
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.interface import AdaptableParts, ModelShape
from blockyard.services.gpu_worker.models.transformers_layers.attention_input import join_qkv
from blockyard.services.gpu_worker.models.transformers_layers.connection import NAME, Connection, register
from blockyard.services.gpu_worker.models.transformers_layers.experts import ExpertsKind, are_experts, find_kind
from blockyard.services.gpu_worker.models.transformers_layers.fusions import Fusions, find_fusions
from blockyard.services.gpu_worker.models.transformers_layers.head import HeadAlone, make_own_output
from blockyard.services.gpu_worker.models.transformers_layers.module_calls import recorded_calls
from blockyard.services.gpu_worker.models.transformers_layers.placement import Placed, place_modules
from blockyard.services.gpu_worker.models.transformers_layers.probes import PROBLEMS
from blockyard.services.gpu_worker.models.transformers_layers.rotations import LaterReads
from blockyard.services.gpu_worker.models.transformers_layers.stored_names import use_stored_names
from blockyard.services.gpu_worker.models.transformers_layers.tensor_parallel import (
    ONE_RANK,
    TensorParallelPlan,
    own_shape,
    read_plan,
)
from blockyard.services.gpu_worker.models.transformers_layers.trial import WINDOW, try_rank, try_rows
from blockyard.services.gpu_worker.parallel.shares import WHOLE, Shard
from blockyard.services.gpu_worker.step import InputVectors, Step
from blockyard.shared.architectures import describe_unsupported, find_architecture
from blockyard.shared.errors import ConfigError

log = logging.getLogger(__name__)

FLAG = "--model-impl transformers"
PROBE_TOKENS = 3
LIMITS = ("sliding_window", "index_topk", "keep_window_size")  # of keys to attend to: short in a trial
ATTENTION_KINDS = {"full_attention", "sliding_attention"}  # of layers, in a config's layer_types
# of models that also see or hear: their text part runs
OTHER_PARTS = (
    "vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
    "audio_tower.",
    "visual.",
    "vision_embed_tokens.",
)
LONGROPE = "longrope"
# why a class is refused that runs otherwise
REPLACED, DIVIDED = "it does not run with our layers: ", "it does not run with a rank's share of its layers: "
OWN_ATTENTION = "it computes its attention itself, and looks up no other one (AttentionInterface of transformers)"


def build(config: dict[str, Any], table: WeightTable) -> "TransformersModel":
    """Raises ConfigError for a model that transformers does not have, or with layers that we cannot run."""
    layers = trace_layers(config, table.dtype, table.shard)
    causal, hf_config = make_on_meta(config, table.dtype)
    name, positions = type(causal).__name__, getattr(hf_config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        raise ConfigError(f"{FLAG}: the config of {name} has no max_position_embeddings, which bounds a sequence")
    linears = LinearLayers(table, config)
    own = make_own_output(config, causal, layers.hidden_size, linears)
    shape = ModelShape(
        vocab_size=hf_config.vocab_size,
        max_positions=positions,
        attention=layers.attention,
        num_outputs=None if own is None else own[1],
    )
    connection = Connection(causal)
    if table.has_memory:
        place_buffers(causal, table.device)
    table.leave_out(*OTHER_PARTS)
    ops = find_ops(table.device)
    placed = place_modules(causal, linears, layers.fusions, layers.calls, ops, experts=layers.experts, plan=layers.plan)
    with _refusals(name):
        use_stored_names(causal, table)
    model = TransformersModel(causal, connection, shape, table, placed, None if own is None else own[0])
    if not table.has_memory:
        with _refusals(name, "its head does not run without its layers: "), torch.inference_mode():
            model.logits(torch.zeros(PROBE_TOKENS, layers.hidden_size, dtype=table.dtype, device="meta"))
    return model


class TransformersModel:
    """Implements `Model`."""

    def __init__(
        self,
        causal: Any,
        connection: Connection,
        shape: ModelShape,
        table: WeightTable,
        placed: Placed,
        output: OutputLayer | None = None,
    ) -> None:
        """output: in the place of the class's head; None: that one."""
        self.shape, self.table, self._placed, self._connection = shape, table, placed, connection
        self.adapter_rows, self.adaptable = AdapterRows(), AdaptableParts()
        self._base, self._output = getattr(causal, causal.base_model_prefix), output or HeadAlone(causal)
        self._linears = [*placed.linears, *(() if output is None else output.linears())]
        self.own_products = sorted(placed.own_products)  # see `Placed`
        self._no_mask: Tensor | None = None  # of four dimensions: transformers then makes none itself

    def prepare(self, max_model_len: int) -> list[str]:
        if self.adapter_rows.long_rotations is not None:
            raise ConfigError(f"{LONG_FLAG} is not built yet with --model-impl transformers")
        for linear in self._linears:
            linear.prepare()
        for norm in self._placed.norms:
            norm.prepare()
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.table.device)
        return []

    def linears(self) -> list[Linear]:
        return self._linears

    def experts(self) -> list[ExpertProducts]:
        return [module.products for module in self._placed.experts]

    def embeddings(self) -> list[Tensor]:
        return self._placed.embeddings

    def computed(self) -> list[Tensor]:
        return [] if self._no_mask is None else [self._no_mask]

    def forward(self, step: Step) -> Tensor:
        self._connection.computes = _StepAttention(self.shape, step)
        assert self._no_mask is not None
        hidden = _run(self._base, step.token_ids, step.positions, self._no_mask, step.vectors)
        for owner in self._placed.transient:
            owner.forget()
        self._connection.computes = None  # it holds the tensors of the step
        if step.logits_indices is None:
            return hidden
        self.adapter_rows.select(step.logits_indices.rows)
        return hidden.index_select(0, step.logits_indices.rows)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._output(hidden)


@dataclass(frozen=True, slots=True)
class _StepAttention:
    """The attention of one step, as attention modules of transformers call it."""

    shape: ModelShape
    step: Step

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, **_: Any) -> Tensor:
        """See `Computes.attend`."""
        tokens, size = query.shape[2], value.shape[3]
        if size < key.shape[3]:  # the KV cache has room for the keys' size
            value = F.pad(value, (0, key.shape[3] - size))
        needed = self.step.logits_indices if layer == self.shape.num_layers - 1 else None
        backend = self.step.attend if needed is None else self.step.attend.of_rows(needed)
        out = backend(layer, join_qkv(query, key, value)).view(-1, query.shape[1], query.shape[3])[..., :size]
        if needed is not None:
            out = at_their_rows(out, needed.rows, tokens)
        return out[None]

    def route(self, experts: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        raise AssertionError(f"{type(experts).__name__} was not replaced")  # all experts are, or a model is refused


def at_their_rows(out: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """out [n, ...] at `rows` [n] of [num_rows, ...], zeros elsewhere. Of a row that is there twice, the first counts:
    a captured step is padded with rows that others have."""
    places = torch.arange(len(rows), device=rows.device, dtype=rows.dtype)
    first = rows.new_full((num_rows,), len(rows)).scatter_reduce(0, rows, places, "amin")
    return torch.cat((out, out.new_zeros((1, *out.shape[1:]))))[first]


class _Trace:
    """Notes attention and experts of each layer, in a forward pass on the meta device."""

    def __init__(self) -> None:
        self.layers: dict[int, AttentionShape] = {}
        self.modules: dict[nn.Module, AttentionShape] = {}  # that call attention
        self.top_k: dict[int, int] = {}  # by the identity of a module of experts
        self.hidden_size = 0  # of the head's input

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, **options: Any
    ) -> Tensor:
        value.clone()  # for `LaterReads`: attention reads it
        wrong = _unsupported(key, value, options) or ("two calls in one pass" if layer in self.layers else "")
        if wrong:
            raise ConfigError(f"its attention of layer {layer} has {wrong}, which no attention kernel here computes")
        head_dim = query.shape[3]
        self.layers[layer] = self.modules[options["owner"]] = AttentionShape(
            num_heads=query.shape[1],
            kv_heads=key.shape[1],
            head_dim=head_dim,
            rules=ScoreRules(
                scale=head_dim**-0.5 if scaling is None else scaling, window=options.get("sliding_window") or None
            ),
        )
        return query[..., : value.shape[3]].transpose(1, 2)

    def route(self, experts: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if x.dim() != 2 or chosen.shape != weights.shape or chosen.shape[:1] != x.shape[:1]:
            raise ConfigError(f"its {type(experts).__name__} are called with other tensors than rows and their experts")
        self.top_k[id(experts)] = chosen.shape[1]
        return torch.empty_like(x)


def _unsupported(key: Tensor, value: Tensor, options: dict[str, Any]) -> str:
    """Returns a feature that our attention lacks; empty if it has all."""
    if value.shape[3] > key.shape[3] or key.shape[:3] != value.shape[:3]:
        return f"values of {value.shape[3]} numbers for keys of {key.shape[3]}"
    names = {"softcap": "a soft cap", "s_aux": "sinks", "position_bias": "a position bias", "head_mask": "a head mask"}
    found = [words for name, words in names.items() if options.get(name) is not None]
    return found[0] if found else "" if options.get("is_causal", True) is not False else "no causal order"


def _run(base: Any, token_ids: Tensor, positions: Tensor, mask: Tensor, vectors: InputVectors | None = None) -> Tensor:
    """The hidden states [tokens, hidden] of a flat batch."""
    inputs = {"input_ids": token_ids[None]}
    if vectors is not None:
        embedded = base.get_input_embeddings()(token_ids)
        vectors.put(embedded)
        inputs = {"inputs_embeds": embedded[None]}
    out = base(**inputs, position_ids=positions[None], attention_mask=mask, use_cache=False)
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


@contextmanager
def _refusals(name: str, what: str = "") -> Iterator[None]:
    """Makes an error a ConfigError that names the class. what: words before the text of errors that are not ours."""
    try:
        yield
    except ConfigError as e:
        raise ConfigError(f"{FLAG}: {name} is refused: {e}") from e
    except PROBLEMS as e:
        raise ConfigError(f"{FLAG}: {name} is refused: {what}{_line(e)}") from e


def make_on_meta(config: dict[str, Any], dtype: torch.dtype, **changed: Any) -> tuple[Any, Any]:
    """The model class without memory, and its configuration. Raises ConfigError.

    changed: settings of the configuration to replace.
    """
    register()
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError("config.json: model_type is missing, by which transformers finds the class")
    name = kind
    try:
        fields = PreTrainedConfig._decode_special_floats({k: v for k, v in config.items() if k != "model_type"})
        hf_config = AutoConfig.for_model(kind, **fields)
        for key, value in changed.items():
            if getattr(hf_config, key, None) is not None:
                setattr(hf_config, key, value)
        make: Any = AutoModelForCausalLM  # its methods have no types
        if type(hf_config) in make._model_mapping:
            name = make._model_mapping[type(hf_config)].__name__
        with torch.device("meta"):
            causal = make.from_config(hf_config, attn_implementation=NAME, experts_implementation=NAME, dtype=dtype)
    except PROBLEMS as e:
        cause = f"transformers cannot build it from model_type {kind}: {_line(e)}"
        if isinstance(e, KeyError) and e.args == (NAME,):  # a table of attention classes, by implementation
            raise ConfigError(f"{FLAG}: {name} is refused: {OWN_ATTENTION}") from e
        names = config["architectures"]
        known = find_architecture(names) is not None
        raise ConfigError(f"{FLAG}: {cause}" if known else f"{describe_unsupported(names)}; {cause}") from e
    if LONGROPE in _rope_types(causal.config):  # chosen by the longest sequence of a batch, for all of them
        raise ConfigError(f"{FLAG}: {name} is refused: rotations of rope_type {LONGROPE} are not supported")
    if CHUNKED in (getattr(causal.config, "layer_types", None) or ()):
        raise ConfigError(f"{FLAG}: {name} is refused: layers with {CHUNKED} are not supported")
    if not hasattr(causal, causal.base_model_prefix):
        raise ConfigError(f"{FLAG}: {name} is refused: it has no decoder apart from its head")
    return causal.eval(), hf_config


@dataclass(frozen=True, slots=True)
class TracedLayers:
    """The facts about a model's layers that forward passes on the meta device show."""

    attention: tuple[AttentionShape, ...]  # of a rank
    calls: list[str]  # names of the linear layers, in the order in which a step calls them
    fusions: Fusions
    experts: Mapping[str, ExpertsKind]  # of mixtures, by name
    hidden_size: int  # of the head's input
    plan: TensorParallelPlan  # of ranks


def _rope_types(config: Any) -> set[str]:
    """Returns the rope types of all layers, which may differ."""
    found = getattr(config, "rope_parameters", None) or {}
    return {one["rope_type"] for one in (found, *found.values()) if isinstance(one, dict) and "rope_type" in one}


def trace_layers(config: dict[str, Any], dtype: torch.dtype, shard: Shard = WHOLE) -> TracedLayers:
    """Runs the layers on the meta device, and again with what can be replaced and a rank's share of the weights; then
    on the CPU, with rows of two sequences. Raises ConfigError."""
    causal, _ = make_on_meta(config, dtype)
    name = type(causal).__name__
    with recorded_calls(causal) as recorded:
        trace = _trace(causal)
    with _refusals(name):
        experts = _find_experts(causal, trace)
    prove_rows(json.dumps(config, sort_keys=True))
    calls, fusions, plan = [call.name for call in recorded.linears], find_fusions(causal, recorded), ONE_RANK
    if shard.size > 1:
        shapes = {called: trace.modules[one] for called, one in causal.named_modules() if one in trace.modules}
        with _refusals(name):
            plan = read_plan(causal, dtype, shapes, experts, shard)
        prove_rank(json.dumps(config, sort_keys=True), tuple(shapes.items()), tuple(experts), shard)
        fusions = plan.fit(fusions)
    for found in (fusions, Fusions()):
        reads, table = LaterReads(), WeightTable(dtype, torch.device("meta"), shard=shard)
        placed = (LinearLayers(table, config), found, calls, find_ops(table.device), reads.rotate_of)
        place_modules(causal, *placed, plan=plan)
        try:
            with reads:
                again = _trace(causal, REPLACED if shard.size == 1 else DIVIDED)
        except ConfigError as e:  # for example a class that reads the weight of a norm, or views q as one row
            if found == Fusions():
                raise
            log.warning("%s runs with its own modules: it does not run with ours (%s)", name, e)
            causal, _ = make_on_meta(config, dtype)
            continue
        attention = _own_attention(trace, again, shard)
        if attention is not None:
            break
    else:
        raise ConfigError(f"{FLAG}: {name} is refused: its layers do not run with the heads of one rank")
    in_place = {name: name in reads.rotated - reads.found for name in found.rotations}
    return TracedLayers(attention, calls, replace(found, rotations=in_place), experts, trace.hidden_size, plan)


def _own_attention(whole: "_Trace", traced: "_Trace", shard: Shard) -> tuple[AttentionShape, ...] | None:
    """Returns the attention of each layer on a rank; None if a layer runs with other heads. whole: of one rank."""
    if whole.layers.keys() != traced.layers.keys():
        return None
    found = [own_shape(shape, traced.layers[layer], shard) for layer, shape in sorted(whole.layers.items())]
    own = tuple(shape for shape in found if shape is not None)
    return own if len(own) == len(found) else None


def _find_experts(causal: Any, trace: _Trace) -> dict[str, ExpertsKind]:
    """The modules of experts by name. Raises ConfigError for modules that ours cannot replace."""
    return {
        name: find_kind(module, trace.top_k.get(id(module), 1))
        for name, module in causal.named_modules()
        if are_experts(module)
    }


def _trace(causal: Any, what: str = "it does not run as one flat batch: ") -> _Trace:
    """Runs the layers on the meta device. Raises ConfigError. what: words before the text of errors."""
    connection, trace = Connection(causal), _Trace()
    connection.computes = trace
    ids = torch.zeros(PROBE_TOKENS, dtype=torch.int64, device="meta")
    with _refusals(type(causal).__name__, what):
        try:
            with torch.inference_mode(False), torch.no_grad():  # inference tensors do not count their versions
                mask = torch.zeros(1, 1, 1, 1, device="meta")
                trace.hidden_size = _run(getattr(causal, causal.base_model_prefix), ids, ids, mask).shape[-1]
        except PROBLEMS as e:
            if not causal._can_set_attn_implementation():
                raise ConfigError(OWN_ATTENTION) from e
            if "meta" in str(e):  # there are no numbers to read
                raise ConfigError("it reads numbers of a step's tensors on the host, for which no step waits") from e
            raise
        if not trace.layers:
            found = causal._can_set_attn_implementation()
            raise ConfigError("none of its layers has attention" if found else OWN_ATTENTION)
        if sorted(trace.layers) != list(range(len(trace.layers))):
            raise ConfigError(f"only its layers {sorted(trace.layers)} have attention, from which tokens have their KV")
    return trace


@lru_cache(maxsize=4)  # a start builds a model several times
def prove_rows(config: str) -> None:
    """Runs a class with made-up weights on the CPU: see `trial`. config: config.json. Raises ConfigError."""
    causal, hf_config = make_on_meta(json.loads(config), torch.float32, **dict.fromkeys(LIMITS, WINDOW))
    connection = Connection(causal)
    with _refusals(type(causal).__name__, "it does not run with made-up weights on the CPU: "):
        place_buffers(causal, torch.device("cpu"))
        try_rows(causal, connection, _run, hf_config.vocab_size)
        kinds = set(getattr(hf_config, "layer_types", None) or (["states"] if causal._is_stateful else []))
        if unknown := sorted(kinds - ATTENTION_KINDS):
            raise ConfigError(f"it has layers of {', '.join(unknown)}, of which our KV cache keeps nothing")


@lru_cache(maxsize=4)
def prove_rank(
    config: str, attention: tuple[tuple[str, AttentionShape], ...], experts: tuple[str, ...], shard: Shard
) -> None:
    """Runs a rank's part of a class with made-up weights on the CPU: see `trial`. Raises ConfigError.

    config: config.json. attention, experts: see `read_plan`.
    """
    causal, hf_config = make_on_meta(json.loads(config), torch.float32)
    with _refusals(type(causal).__name__, DIVIDED):
        connection, plan = Connection(causal), read_plan(causal, torch.float32, dict(attention), experts, shard)
        place_buffers(causal, torch.device("cpu"))
        try_rank(causal, connection, _run, hf_config.vocab_size, plan, shard)


def _line(error: Exception) -> str:
    words = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {words}" if isinstance(error, KeyError) else words or type(error).__name__


def place_buffers(causal: Any, device: torch.device) -> None:
    """Makes buffers that are no weights, such as the frequencies of rotations."""
    for module in causal.modules():
        for name, one in module._buffers.items():
            if one is not None and one.is_meta:
                module._buffers[name] = torch.zeros_like(one, device=device)
    with torch.no_grad():  # parameters are on the meta device still: nothing is done to them
        _fill_buffers(causal, causal)


def _fill_buffers(model: Any, module: Any) -> None:
    """model: the innermost one around `module` that has initial values. A module may fill buffers inside of it."""
    inner = module if isinstance(module, PreTrainedModel) else model
    for child in module.children():
        _fill_buffers(inner, child)
    inner._init_weights(module)
