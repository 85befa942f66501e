"""Divides a transformers class among ranks, by its own plan for tensor parallelism (`base_model_tp_plan`).

The plan names modules, each with a style of `transformers.distributed.tensor_parallel`. There parts are equal and
follow one another. Here outputs and inputs of attention are divided by heads, as those of our own layers, so that ranks
may have different numbers of heads. A layer with all outputs on all ranks, between two divided ones, is as in the plan.
MLPs with a gate and experts are divided by their inner width, whatever their weights' layout.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.tensor_parallel import replace_layer_number_by_wildcard

from blockyard.services.gpu_worker.layers.attention import AttentionShape
from blockyard.services.gpu_worker.layers.embedding import JoinedColumns
from blockyard.services.gpu_worker.layers.linear import Linear, LinearLayers
from blockyard.services.gpu_worker.loading.linear_spec import LinearSpec, Rows, Split, part
from blockyard.services.gpu_worker.models.transformers_layers.fusions import Fusions
from blockyard.services.gpu_worker.models.transformers_layers.gates import DOWN, GATE, JOINED, UP
from blockyard.services.gpu_worker.models.transformers_layers.joint_products import is_linear
from blockyard.services.gpu_worker.parallel.rank_group import RankGroup
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.shared.errors import ConfigError

EMBEDDING = "embedding_rowwise"


class Division(Enum):
    """What a rank has of a linear layer."""

    OUTPUTS = "outputs"  # some, which the layer behind takes
    JOINED_OUTPUTS = "joined outputs"  # some; all ranks get those of all
    INPUTS = "inputs"  # those that the layer before gives it; products of all ranks are added
    CUT_INPUTS = "cut inputs"  # some of the inputs that all ranks get; products of all ranks are added


SPLITS = {
    Division.OUTPUTS: Split.OUTPUTS,
    Division.JOINED_OUTPUTS: Split.OUTPUTS,
    Division.INPUTS: Split.INPUTS,
    Division.CUT_INPUTS: Split.INPUTS,
}
STYLES: dict[str, Division | None] = {  # None: all ranks compute the same
    "colwise": Division.OUTPUTS,
    "colwise_gather_output": Division.JOINED_OUTPUTS,
    "colwise_rep": Division.JOINED_OUTPUTS,
    "rowwise": Division.INPUTS,
    "rowwise_split_input": Division.CUT_INPUTS,
    "rowwise_rep": Division.CUT_INPUTS,
    "embedding_colwise": None,
    "local_params": None,
    "mla_kv_a_proj": None,
    "replicate": None,
    "replicated_with_grad_allreduce": None,
}


@dataclass(frozen=True, slots=True)
class TensorParallelPlan:
    """What ranks divide of a class, all by name. One rank has an empty plan."""

    linears: Mapping[str, Division] = field(default_factory=dict)
    embeddings: frozenset[str] = frozenset()  # divided by the vocabulary
    attention: Mapping[str, AttentionShape] = field(default_factory=dict)  # of attention modules, with all heads
    head: str | None = None  # the output layer, whose outputs only the leader needs

    def fit(self, fusions: Fusions) -> Fusions:
        """Returns the fusions of modules that are divided alike."""
        joint = list[tuple[str, ...]]()
        for group in fusions.joint:
            alike = defaultdict[Division | None, list[str]](list)
            for name in group:
                alike[self.linears.get(name)].append(name)
            joint += [tuple(names) for division, names in alike.items() if _can_join(division) and len(names) > 1]
        gates = {name: activation for name, activation in fusions.gates.items() if self._divides_gated(name)}
        return replace(fusions, joint=tuple(joint), gates=gates)

    def _divides_gated(self, name: str) -> bool:
        first = [(f"{name}.{JOINED}",), (f"{name}.{GATE}", f"{name}.{UP}")]
        return f"{name}.{DOWN}" in self.linears and any(all(one in self.linears for one in names) for names in first)

    def make_linear(self, layers: LinearLayers, names: Sequence[str], modules: Sequence[nn.Linear]) -> Linear:
        """Makes one product of linear layers with the same input, which are divided alike."""
        division, shard = self.linears.get(names[0]), layers.table.shard
        inputs, bias = modules[0].in_features, modules[0].bias is not None
        if division is None:
            matrices = [part(name, module.out_features) for name, module in zip(names, modules, strict=True)]
            return layers.make(matrices, inputs, bias=bias)
        matrices = [
            part(name, self.outputs(name, module.out_features, shard))
            for name, module in zip(names, modules, strict=True)
        ]
        linear = layers.make(matrices, self.inputs(names[0], inputs), split=SPLITS[division], bias=bias)
        if division is Division.JOINED_OUTPUTS:
            self.join(linear, names[0], layers)
        elif division is not Division.OUTPUTS:
            add_ranks(linear, layers)
        return linear

    def join(self, linear: Linear, name: str, layers: LinearLayers) -> None:
        """Makes the product have the outputs of all ranks: on the leader if it is the head, otherwise on all ranks."""
        shard, ranks = layers.table.shard, layers.table.ranks
        if name != self.head:
            linear.join(_JoinedOutputs(linear.spec, shard, ranks))
        elif ranks is not None:
            linear.join(JoinedColumns(ranks, linear.spec.parts[0].size))

    def own_inputs(self, linear: Linear, name: str, shard: Shard) -> range | None:
        """Returns which inputs a rank takes of those that it gets. None: all."""
        is_cut = self.linears.get(name) is Division.CUT_INPUTS
        return linear.spec.inputs.share(shard) if is_cut else None

    def outputs(self, name: str, size: int, shard: Shard) -> Rows:
        """Returns how the outputs of a layer are divided. Raises ConfigError for some that are not heads."""
        shape = self._attention_of(name) if self.linears[name] is Division.OUTPUTS else None
        if shape is None:
            return Rows(size, size)
        heads, kv_heads = shape.num_heads, shape.kv_heads
        if size == kv_heads * shape.head_dim:
            return Rows(size, kv_heads)
        is_either = heads == kv_heads or heads % shard.size == kv_heads % shard.size == 0  # then both have equal shares
        if size % heads or not (is_either or size == heads or size % (heads * shape.head_dim) == 0):
            raise ConfigError(f"its plan for ranks divides {name}, whose {size} outputs are not whole heads")
        return Rows(size, heads, kv_heads)

    def inputs(self, name: str, size: int) -> Rows:
        """Returns how the inputs of a layer are divided."""
        shape = self._attention_of(name) if self.linears[name] is Division.INPUTS else None
        if shape is None or size % shape.num_heads:
            return Rows(size, size)
        return Rows(size, shape.num_heads, shape.kv_heads)

    def _attention_of(self, name: str) -> AttentionShape | None:
        while name:
            name = name.rpartition(".")[0]
            if name in self.attention:
                return self.attention[name]
        return None


ONE_RANK = TensorParallelPlan()


def read_plan(
    causal: Any, dtype: torch.dtype, attention: Mapping[str, AttentionShape], experts: Collection[str], shard: Shard
) -> TensorParallelPlan:
    """Reads the plan of a class. Raises ConfigError for a class without one, and for what is not built of it.

    dtype: of the model. attention: the modules that call attention, by name, with all heads. experts: names of
    mixtures, which are divided without a plan.
    """
    if not getattr(causal, causal.base_model_prefix).tp_plan:
        raise ConfigError("it has no plan that divides its layers among ranks (base_model_tp_plan)")
    linears, embeddings, head = dict[str, Division](), set[str](), causal.get_output_embeddings()
    own = [f"{name}." for name in experts]
    for name, one in chain(causal.named_modules(), causal.named_parameters()):
        style = causal.tp_plan.get(replace_layer_number_by_wildcard(name))
        if style is None or name in experts or name.startswith(tuple(own)):
            continue
        if isinstance(one, nn.Embedding) and style == EMBEDDING:
            embeddings.add(name)
            continue
        division = STYLES.get(style)
        is_ours = isinstance(one, nn.Module) and is_linear(one) and one.weight.dtype == dtype
        if style not in STYLES or (division in (Division.OUTPUTS, Division.INPUTS) and not is_ours):
            raise ConfigError(f"its plan for ranks has {name} as {style}, which is not built for {type(one).__name__}")
        if division is not None and is_ours:
            linears[name] = division
    head_name = next((name for name, module in causal.named_modules() if module is head), None)
    plan = TensorParallelPlan(linears, frozenset(embeddings), attention, head_name)
    for name in linears:
        plan.outputs(name, causal.get_submodule(name).out_features, shard)
    return plan


def own_shape(shape: AttentionShape, traced: AttentionShape, shard: Shard) -> AttentionShape | None:
    """Returns a rank's part of an attention, or all of it, as its divided layers call it. None: they do otherwise.

    Raises ConfigError for more ranks than query heads.
    """
    for one in (shape.share(shard), shape if shard.size == 1 else replace(shape, model_kv_heads=shape.kv_heads)):
        if (one.num_heads, one.kept, one.rules) == (traced.num_heads, traced.kept, traced.rules):
            return one
    return None


def add_ranks(linear: Linear, layers: LinearLayers) -> None:
    """Makes the product the sum of all ranks' products, which are partial."""
    if layers.table.ranks is not None:
        linear.join(layers.table.ranks.sum)


def divide_lookup(embedding: nn.Embedding, own: range, ranks: RankGroup | None) -> None:
    """Makes an embedding that has the rows of `own` tokens look up all tokens, with the other ranks."""
    embedding.padding_idx = None  # it may be another rank's
    embedding.__dict__["forward"] = _DividedLookup(embedding.forward, own, ranks)


class _DividedLookup:
    """The lookup of an embedding on one rank: the sum over ranks has all tokens."""

    def __init__(self, look_up: Callable[[Tensor], Tensor], own: range, ranks: RankGroup | None) -> None:
        self._look_up, self._own, self._ranks = look_up, own, ranks

    def __call__(self, input: Tensor) -> Tensor:
        own = input - self._own.start
        is_elsewhere = (own < 0) | (own >= len(self._own))
        found = self._look_up(own.masked_fill_(is_elsewhere, 0)).masked_fill_(is_elsewhere[..., None], 0)
        if self._ranks is None:
            return found
        return self._ranks.sum(found.view(-1, found.shape[-1])).view(found.shape)


class _JoinedOutputs:
    """Puts the outputs of all ranks together on all ranks. Each rank adds its own to zeros, in a sum over ranks."""

    def __init__(self, spec: LinearSpec, shard: Shard, ranks: RankGroup | None) -> None:
        """ranks: None if the model is only declared."""
        self._ranks, self._size = ranks, sum(one.size for one in spec.parts)
        self._own, start = list[range](), 0  # among all outputs
        for one in spec.parts:
            self._own += [range(start + rows.start, start + rows.stop) for rows in spec.rows(one, shard)]
            start += one.size

    def __call__(self, own: Tensor) -> Tensor:
        whole = own.new_zeros(len(own), self._size)
        start = 0
        for rows in self._own:
            whole[:, rows.start : rows.stop] = own[:, start : start + len(rows)]
            start += len(rows)
        return whole if self._ranks is None else self._ranks.sum(whole)


def _can_join(division: Division | None) -> bool:
    """Whether layers with the same input, which are divided so, are one product."""
    return division is not Division.CUT_INPUTS
