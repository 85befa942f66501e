"""The layers of a model under the names of their modules, and what an adapter's matrices become there."""

import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.services.gpu_worker.layers.embedding import HEAD
from blockyard.services.gpu_worker.layers.latent.up_projection import UpProjection
from blockyard.services.gpu_worker.layers.linear import Linear, Product
from blockyard.services.gpu_worker.layers.long_rotations import FLAG
from blockyard.services.gpu_worker.layers.moe.expert_matrices import AdaptableExpert
from blockyard.services.gpu_worker.loading.checkpoint_names import bare
from blockyard.services.gpu_worker.loading.linear_spec import MatrixPart, Split
from blockyard.services.gpu_worker.lora.module_tensors import STACK_SUFFIX, STACKED, ModuleTensors, is_finite, listed
from blockyard.services.gpu_worker.lora.ranks.layer_share import LayerShare
from blockyard.services.gpu_worker.lora.token_rows import HeadTarget, TokenTargets
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.shared.errors import AdapterError
from blockyard.shared.lora.adapter_config import MAX_RANK, AdapterConfig

EXPERT = re.compile(r"(?P<stack>.*\.experts)\.(?P<number>\d+)\.\w+$")  # names of modules of one expert
# one of the experts of Granite, whose checkpoints have their stacks without the name of a module
GRANITE_EXPERT = re.compile(r"(?<=mlp)\.(\d+\.(?:in|out)put_linear)$")
COMPARED = 16  # columns of a weight, about
OTHER_NAMES = {"embed_out": "lm_head"}  # of modules that checkpoints of some families call otherwise


@dataclass(frozen=True, slots=True)
class Target:
    """One module: a part of a layer's product."""

    name: str
    layer: int  # index in the layers that adapters may change
    part: MatrixPart
    index: int  # of the part in its layer
    in_features: int  # of all ranks


@dataclass(frozen=True, slots=True)
class RowOrder:
    """How a B came into the order of its product."""

    stored: Tensor  # [stored out, rank]
    rows: Tensor  # [out] int64, of these


@dataclass(frozen=True, slots=True)
class Delta:
    """What an adapter adds to one part of a layer's product: (x @ a.T) @ b.T + bias. Matrices are a rank's shares."""

    start: int  # first output
    a: Tensor | None  # [own rank, in]; None: a bias alone
    b: Tensor | None  # [out, rank], rows in the order of the product, times the scale
    bias: Tensor | None = None  # [out]
    own_start: int = 0  # first of the own rank, which is the whole but with --fully-sharded-loras
    order: RowOrder | None = None  # of B, if nothing else was done to it

    @property
    def rank(self) -> int:
        return 0 if self.b is None else self.b.shape[1]

    @property
    def size(self) -> int:
        """Outputs."""
        some = self.bias if self.b is None else self.b
        assert some is not None
        return some.shape[0]

    def tensors(self) -> Iterator[Tensor]:
        yield from (one for one in (self.a, self.b, self.bias) if one is not None)


AdaptedLayer = Linear | UpProjection | AdaptableExpert


def adapted_layers(model: Model) -> list[AdaptedLayer]:
    """The layers that adapters may change. Deltas name them by their index."""
    layers: list[AdaptedLayer] = [*adapted_linears(model), *model.adaptable.up_projections]
    if model.table.adapts_experts:
        layers += [one for experts in model.experts() for matrix in experts.matrices() for one in matrix.experts()]
    return layers


def adapted_linears(model: Model) -> list[Linear]:
    """The first of `adapted_layers`."""
    has_experts = model.table.adapts_experts
    return [one for one in model.linears() if has_experts or not EXPERT.match(_key(one.spec.parts[0].name))]


def layer_shares(model: Model, *, fully_sharded: bool = False) -> list[LayerShare]:
    """The shares of this rank, of each of `adapted_layers`."""
    return [
        # of latent attention each rank multiplies A by heads of its own, so that A has to be whole
        LayerShare(one.spec, model.table.shard, fully_sharded=fully_sharded and isinstance(one, Linear))
        for one in adapted_layers(model)
    ]


class ModelTargets:
    """Finds the modules of adapters in one model, or in what a rank has of it."""

    def __init__(self, model: Model, whole: Model | None = None, *, fully_sharded: bool = False) -> None:
        """whole: the declared model with all layers and experts; None: `model` has them all. fully_sharded: see
        `LayerShare`."""
        self._layers, self._table = adapted_layers(model), model.table
        self.long_rotations, self._trained_len = model.adapter_rows.long_rotations, model.shape.max_positions
        self.vocab_size = model.shape.vocab_size
        self._shares = layer_shares(model, fully_sharded=fully_sharded)
        self._targets: dict[str, Target] = {}
        self._orders: dict[str, Tensor] = {}  # of rows of B, by the target's name
        # by the name of their mixture: the layers of experts, with their numbers, and how many experts all ranks have
        self._experts: dict[str, list[tuple[int, int]]] = {}
        for layer, adapted in enumerate(self._layers):
            for index, one in enumerate(adapted.spec.parts):
                if one.name:
                    self._targets[_key(one.name)] = Target(one.name, layer, one, index, adapted.spec.in_features)
            if (found := EXPERT.match(_key(adapted.spec.parts[0].name))) is not None:
                self._experts.setdefault(found["stack"], []).append((int(found["number"]), layer))
        self._all = set(self._targets) if whole is None else _names_of(whole)
        self._num_experts: dict[str, int] = {}
        for found in filter(None, map(EXPERT.match, self._all)):
            number = int(found["number"]) + 1
            self._num_experts[found["stack"]] = max(number, self._num_experts.get(found["stack"], 0))
        head = self.find(HEAD)
        of_head = None if head is None else HeadTarget(head.name, head.layer, adapted_linears(model)[head.layer])
        self.tokens = TokenTargets(model, of_head, self._has_name)

    def long_context(self, context_length: int | None) -> tuple[int, int]:
        """The factor of an adapter for so many tokens, and the length of its longest sequence; 1 and 0: the model's.

        Raises AdapterError for one that is not served.
        """
        if self.long_rotations is not None:
            factor = self.long_rotations.factor_of(context_length, self._trained_len)
            return factor, self.long_rotations.max_len(factor, context_length)
        if context_length is not None and context_length > self._trained_len:
            raise AdapterError(f"context_length {context_length} is more than the model's {self._trained_len}: {FLAG}")
        return 1, 0

    def find(self, module: str) -> Target | None:
        name = _key(module)
        return self._targets.get(name) or self._targets.get(OTHER_NAMES.get(name, ""))

    def names(self) -> list[str]:
        """Of all ranks."""
        return [*self._all, *self._num_experts, *self.tokens.names()]

    def arrange(
        self, modules: list[ModuleTensors], dtype: torch.dtype, config: AdapterConfig, max_rank: int = MAX_RANK
    ) -> Generator[bool, None, dict[int, list[Delta]]]:
        """Returns the deltas of each layer by its index, in `dtype`, one matrix at a time. Raises AdapterError.

        modules: are taken out of the list. max_rank: of one expert of a stack. Modules of layers that other ranks have
        are left to them.
        """
        missing, named = list[str](), dict[str, str]()
        for module in modules:
            if (other := named.setdefault(_key(module.name), module.name)) != module.name:
                raise AdapterError(f"{other} and {module.name} of the adapter are the same module")
            if not self._table.adapts_experts and _is_of_experts(module):
                raise AdapterError(
                    f"the adapter changes experts, such as {module.name}: with --enable-eplb, or with both "
                    "--enable-expert-parallel and --data-parallel-size, workers serve adapters of other layers"
                )
            if not self._has(module):
                missing.append(module.name)
            yield True
        if missing:
            raise AdapterError(f"this model has no layer for {listed(missing)}")
        found: dict[int, list[Delta]] = {}
        modules.reverse()
        while modules:
            module = modules.pop()
            if module.is_stack:
                for layer, delta in self._stack_deltas(module, dtype, config, max_rank):
                    found.setdefault(layer, []).append(delta)
                    yield True
                continue
            target = self.find(module.name)
            if target is not None and (own := self._delta(target, module, dtype)) is not None:
                found.setdefault(target.layer, []).append(own)
            yield True
        return found

    def _has(self, module: ModuleTensors) -> bool:
        """Whether this rank or another one has the module."""
        return _stack(module) in self._num_experts if module.is_stack else self._has_name(module.name)

    def _has_name(self, module: str) -> bool:
        name = _key(module)
        return name in self._all or OTHER_NAMES.get(name, "") in self._all

    def _stack_deltas(
        self, module: ModuleTensors, dtype: torch.dtype, config: AdapterConfig, max_rank: int
    ) -> Iterator[tuple[int, Delta]]:
        """The deltas of each expert. Which of their two products a stack belongs to, its shape tells."""
        a, b = module.a, module.b
        assert a is not None and b is not None
        own, number = self._experts.get(_stack(module), []), self._num_experts[_stack(module)]
        if not own:
            return  # it is of another stage
        inputs, outputs = a.shape[1], b.shape[0]
        layers = self._of_shape(own, inputs, outputs)
        if inputs == outputs:
            is_exchanged = bool(layers) and config.exchanges_stacks and not self._layers[layers[0][1]].spec.transposed
        else:
            is_exchanged = not layers
        if is_exchanged and a.shape[0] == b.shape[1] and not a.shape[0] % number:
            layers, (a, b) = self._of_shape(own, outputs, inputs), _exchanged(a, b, number)
        if not layers or a.shape[0] % number or a.shape[0] != b.shape[1]:
            shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
            raise AdapterError(
                f"lora_A and lora_B of {module.name} have the shapes {shapes}: no experts here have such"
            )
        rank, parts = a.shape[0] // number, self._layers[layers[0][1]].spec.parts
        is_gate_up = len(parts) > 1 or len(parts[0].rows) > 1
        name = f"{module.name.removesuffix(STACK_SUFFIX)}.{STACKED[0 if is_gate_up else 1]}"
        if rank > max_rank or rank != config.rank_of(name):
            limits = f"its config says {config.rank_of(name)}, the limit is {max_rank}"
            raise AdapterError(f"{name} has rank {rank}; {limits}")
        of_experts = torch.unflatten(b.float(), 1, (rank, number)) * config.scale_of(name)  # the expert is fastest
        for expert, layer in layers:
            rows, one, share = of_experts[:, :, expert], self._layers[layer].spec.parts, self._shares[layer]
            rows = share.cut_rows(one[0].in_order(rows) if len(one) == 1 else rows, 0, len(one))
            of_expert = share.cut_a(a[expert * rank : (expert + 1) * rank])
            pair = of_expert.to(dtype).contiguous(), rows.to(dtype).contiguous()
            _check_finite(module, dtype, *pair)
            yield layer, Delta(share.starts[0], *pair, own_start=share.own_rank(rank).start)

    def _of_shape(self, own: list[tuple[int, int]], inputs: int, outputs: int) -> list[tuple[int, int]]:
        return [(expert, one) for expert, one in own if _shape(self._layers[one]) == (inputs, outputs)]

    def _delta(self, target: Target, module: ModuleTensors, dtype: torch.dtype) -> Delta | None:
        """None: a bias that another rank adds."""
        one = target.part
        stored = one.stored_rows or one.size
        if module.base is not None:
            self._check_base(target, module.base)
        _check_shape(module, "lora_A", module.a, 1, target.in_features)
        for name, tensor in (("lora_B", module.b), ("lora_B.bias", module.b_bias), ("bias", module.bias)):
            _check_shape(module, name, tensor, 0, stored)
        share, index = self._shares[target.layer], target.index
        if module.b_bias is not None and self._layers[target.layer].spec.weighted:
            raise AdapterError(
                f"the adapter has a bias for {target.name}, which is not served there, because its output is "
                "multiplied by a gate: merge it into its base"
            )

        def own_rows(values: Tensor) -> Tensor:
            return share.cut_rows(one.in_order(values.float()), index)

        b = None if module.b is None else share.cut_rows(one.in_order(module.b), index)
        if b is not None and (module.scale != 1.0 or b.dtype != dtype):
            b = b.float() * module.scale
        b = None if b is None else b.to(dtype).contiguous()
        bias = None
        if module.b_bias is not None and share.has_bias:
            bias = own_rows(module.b_bias) * module.scale
        if module.bias is not None and (own := self._bias_of(target)) is not None:
            other = own_rows(module.bias) - own
            bias = other if bias is None else bias + other
        a = None if module.a is None else share.cut_a(module.a).to(dtype).contiguous()
        if any(one is not None and one.dtype != dtype for one in (module.a, module.b)):  # else it has been checked
            _check_finite(module, dtype, a, b)
        if b is None and bias is None:
            return None
        bias = None if bias is None else bias.to(dtype).contiguous()
        own_start = 0 if module.a is None else share.own_rank(module.a.shape[0]).start
        order = None
        if module.b is not None and b is not None and module.scale == 1.0 and module.b.dtype == dtype:
            order = None if b.data_ptr() == module.b.data_ptr() else RowOrder(module.b, self._order_of(target))
        return Delta(share.starts[index], a, b, bias, own_start, order)

    def _order_of(self, target: Target) -> Tensor:
        if (found := self._orders.get(target.name)) is None:
            rows = torch.arange(target.part.stored_rows or target.part.size)
            found = self._shares[target.layer].cut_rows(target.part.in_order(rows), target.index)
            self._orders[target.name] = found
        return found

    def _check_base(self, target: Target, stored: Tensor) -> None:
        """Raises AdapterError if a weight that came with the adapter is not the model's, by some of its columns."""
        layer, share = self._layers[target.layer], self._shares[target.layer]
        differs = AdapterError(
            f"the adapter has a weight of its own for {target.name}, which is not the model's: merge it into its base"
        )
        if stored.shape != (target.part.stored_rows or target.part.size, target.in_features):
            raise differs
        size = len(share.inputs)
        columns = torch.arange(0, size, max(1, size // COMPARED))
        units = torch.eye(size, dtype=self._table.dtype)[columns].to(self._table.device)
        product = _product(layer)
        with torch.inference_mode():
            bias = product(torch.zeros_like(units[:1]))
            own = (product(units) - bias)[:, self._own_outputs(target)].float().cpu().T
        given = share.cut_rows(target.part.in_order(stored[:, columns + share.inputs.start].float()), target.index)
        if not torch.allclose(own, given, rtol=0.05, atol=0.05 * float(given.abs().mean())):
            raise differs

    def _bias_of(self, target: Target) -> Tensor | None:
        """The rank's part of the model's own bias, which any format gives as the product of zeros. None: it has none
        of it."""
        layer, share = self._layers[target.layer], self._shares[target.layer]
        if not layer.spec.bias:
            raise AdapterError(f"the adapter has a bias for {target.name}, which has none in this model")
        if share.sums_between and layer.spec.split is Split.INPUTS:
            raise AdapterError(f"the adapter has a bias for {target.name}: --fully-sharded-loras serves none there")
        if not share.has_bias:
            return None
        zeros = torch.zeros(1, len(share.inputs), dtype=self._table.dtype, device=self._table.device)
        with torch.inference_mode():
            return _product(layer)(zeros)[0, self._own_outputs(target)].float().cpu()

    def _own_outputs(self, target: Target) -> slice:
        share = self._shares[target.layer]
        return slice(share.starts[target.index], share.starts[target.index] + share.sizes[target.index])


def _names_of(whole: Model) -> set[str]:
    """The modules of all ranks."""
    return {_key(one.name) for layer in adapted_layers(whole) for one in layer.spec.parts if one.name}


def _product(layer: AdaptedLayer) -> Product:
    """The product of the model itself, without adapters."""
    return layer.method.apply if isinstance(layer, Linear) else layer.product


def _shape(layer: AdaptedLayer) -> tuple[int, int]:
    return layer.spec.in_features, sum(one.size for one in layer.spec.parts)


def _exchanged(a: Tensor, b: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The A and B of a stack of which PEFT takes inputs for outputs: its A has outputs, transposed, its B inputs.

    It does with weights [experts, in, out] whose class does not call them transposed, as Llama 4's, and before release
    0.19.1 with all [experts, out, in].
    """
    rank = a.shape[0] // number
    inputs = torch.unflatten(b, 1, (rank, number)).permute(2, 1, 0).flatten(0, 1)
    return inputs, torch.unflatten(a, 0, (number, rank)).permute(2, 1, 0).flatten(1, 2)


def _key(name: str) -> str:
    """The name by which a module is found: transformers calls the mixtures of some checkpoints otherwise."""
    return GRANITE_EXPERT.sub(r".experts.\1", bare(name).replace("block_sparse_moe.", "mlp."))


def _is_of_experts(module: ModuleTensors) -> bool:
    return module.is_stack or EXPERT.match(_key(module.name)) is not None


def _stack(module: ModuleTensors) -> str:
    return _key(module.name.removesuffix(STACK_SUFFIX))


def _check_shape(module: ModuleTensors, name: str, tensor: Tensor | None, dim: int, size: int) -> None:
    if tensor is not None and tensor.shape[dim] != size:
        raise AdapterError(f"{name} of {module.name} has the shape {tuple(tensor.shape)}; this model has {size} there")


def _check_finite(module: ModuleTensors, dtype: torch.dtype, *tensors: Tensor | None) -> None:
    if not all(is_finite(one) for one in tensors if one is not None):
        raise AdapterError(f"the matrices of {module.name} are too large for {str(dtype).removeprefix('torch.')}")
