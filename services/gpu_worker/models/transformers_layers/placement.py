"""Gives the modules of a transformers class their replacements, and all weights places in the `WeightTable`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers.core_model_loading import build_glob_alternation

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.layers.fused_ops import FusedOps
from blockyard.services.gpu_worker.layers.linear import Linear, LinearLayers, dense_linear
from blockyard.services.gpu_worker.layers.mlp import GatedMLP
from blockyard.services.gpu_worker.layers.norm import make_rms_norm
from blockyard.services.gpu_worker.loading.linear_spec import Rows, Split, part
from blockyard.services.gpu_worker.loading.weights import FLOATS
from blockyard.services.gpu_worker.models.transformers_layers.experts import ExpertsKind, ExpertsModule
from blockyard.services.gpu_worker.models.transformers_layers.fusions import Fusions
from blockyard.services.gpu_worker.models.transformers_layers.gates import DOWN, GATE, JOINED, GatedModule
from blockyard.services.gpu_worker.models.transformers_layers.joint_products import (
    JointModule,
    JointProduct,
    LinearModule,
    is_linear,
)
from blockyard.services.gpu_worker.models.transformers_layers.norms import NormModule
from blockyard.services.gpu_worker.models.transformers_layers.residual_sums import SumNorm
from blockyard.services.gpu_worker.models.transformers_layers.rotations import Rotate, install
from blockyard.services.gpu_worker.models.transformers_layers.tensor_parallel import (
    ONE_RANK,
    Division,
    TensorParallelPlan,
    add_ranks,
    divide_lookup,
)
from blockyard.services.gpu_worker.quantization.dense import place_rows


@dataclass(slots=True)
class Placed:
    """The replacements of modules that other code has to know."""

    linears: list[Linear] = field(default_factory=list)  # in the order in which a step uses them
    norms: list[RMSNorm] = field(default_factory=list)
    experts: list[ExpertsModule] = field(default_factory=list)
    embeddings: list[Tensor] = field(default_factory=list)
    own_products: set[str] = field(default_factory=set)  # classes of modules that multiply matrices themselves
    transient: list[JointProduct | SumNorm] = field(default_factory=list)  # forget their tensors behind a step


class _Placement:
    """The replacement of a model's modules, one after the other. Weights keep transformers' names."""

    def __init__(
        self,
        causal: Any,
        layers: LinearLayers,
        fusions: Fusions,
        experts: Mapping[str, ExpertsKind],
        ops: FusedOps,
        plan: TensorParallelPlan,
    ) -> None:
        self._causal, self._layers, self._fusions, self._ops = causal, layers, fusions, ops
        self._experts, self._plan = experts, plan
        self.norms, self.sums, self.experts = list[RMSNorm](), list[SumNorm](), list[ExpertsModule]()
        self.embeddings = list[Tensor]()
        self.own_products = set[str]()
        self.products = dict[tuple[str, ...], JointProduct]()  # by the names of their layers
        self.linears = list[tuple[str, Linear]]()  # with the name of the first of its layers that a step calls
        self._tied = dict[int, tuple[str, Tensor]]()  # parameters that no linear layer has, by identity
        self._groups = {name: group for group in fusions.joint for name in group}

    def place_parameters(self) -> None:
        """Places what no linear layer, no norm and no experts have, such as embeddings."""
        dtype_of = dtypes_by_name(self._causal, self._layers.table.dtype)
        for module_name, module, name, parameter in _parameters(self._causal):
            if self._is_ours(module) or module_name in self._fusions.norms or module_name in self._experts:
                continue
            if id(parameter) not in self._tied:
                path = f"{module_name}.{name}" if module_name else name
                target = self._plain(module_name, name, parameter, dtype_of(path) or parameter.dtype)
                self._tied[id(parameter)] = path, target
            setattr(module, name, nn.Parameter(self._tied[id(parameter)][1], requires_grad=False))
            if isinstance(module, nn.Embedding):
                self.embeddings.append(self._tied[id(parameter)][1])
                if module_name in self._plan.embeddings:
                    own = Rows(len(parameter), len(parameter)).share(self._layers.table.shard)
                    divide_lookup(module, own, self._layers.table.ranks)
            elif parameter.dim() > 1:
                self.own_products.add(type(module).__name__)

    def _plain(self, module_name: str, name: str, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """Memory and a place of a parameter. Matrices may be stored in the format of the checkpoint."""
        if parameter.dim() == 2 and name == "weight":
            rows, columns = parameter.shape
            split = Split.OUTPUTS if module_name in self._plan.embeddings else Split.NONE
            return self._layers.plain(part(module_name, rows), columns, split=split, dtype=dtype)
        table = self._layers.table
        target = table.empty(*parameter.shape, dtype=dtype)
        table.place(f"{module_name}.{name}" if module_name else name, target, tuple(parameter.shape))
        return target

    def place_buffers(self) -> None:
        table, dtype_of = self._layers.table, dtypes_by_name(self._causal, self._layers.table.dtype)
        for module_name, module in self._causal.named_modules():
            for name, made in list(module._buffers.items()):
                if made is None or name in module._non_persistent_buffers_set:
                    continue
                path = f"{module_name}.{name}" if module_name else name
                module._buffers[name] = target = made.to(dtype_of(path) or made.dtype)
                table.place(path, target, tuple(target.shape), stored=FLOATS | {target.dtype})

    def _is_ours(self, module: nn.Module) -> TypeGuard[nn.Linear]:
        """Whether a linear layer is replaced: not if it keeps another dtype than the model's."""
        return is_linear(module) and module.weight.dtype == self._layers.table.dtype

    def place_modules(self) -> None:
        for name, module in list(self._causal.named_modules()):
            parent = name.rpartition(".")[0]
            if name in self._fusions.norms:
                self._replace(name, self._norm(name))
            elif name in self._fusions.gates:
                self._replace(name, self._gated(name, module))
            elif name in self._experts:
                experts = ExpertsModule(self._experts[name], self._layers, name)
                self.experts.append(experts)
                self.own_products.add(type(module).__name__)  # nothing tells them that a model is batch-invariant
                self.linears += [(f"{name}.{i}", linear) for i, linear in enumerate(experts.linears())]
                self._replace(name, experts)
            elif self._is_ours(module) and parent not in self._fusions.gates:
                self._replace(name, self._linear_module(name, module))

    def _replace(self, name: str, module: nn.Module) -> None:
        parent, _, own = name.rpartition(".")
        setattr(self._causal.get_submodule(parent), own, module)

    def _norm(self, name: str) -> NormModule:
        kind = self._fusions.norms[name]
        norm = make_rms_norm(self._layers.table, name, kind.size, kind.eps, kind.unit_offset)
        module = NormModule(norm, kind.size, self._ops)
        self.norms.append(norm)
        self.sums.append(module.sums)
        return module

    def _gated(self, name: str, module: nn.Module) -> GatedModule:
        down = module.get_submodule(DOWN)
        assert isinstance(down, nn.Linear)
        sizes, activation = (down.out_features, down.in_features), self._fusions.gates[name]
        joined = JOINED if JOINED in module._modules else None
        mlp = GatedMLP(self._layers, name, *sizes, activation, bias=down.bias is not None, joined=joined)
        for linear in mlp.linears():
            linear.disable_fusion()  # the norm and the sum around are transformers'
        add_ranks(mlp.down, self._layers)
        first = f"{name}.{JOINED}" if joined else self._groups[f"{name}.{GATE}"][0]
        self.linears += [(first, mlp.gate_up), (f"{name}.{DOWN}", mlp.down)]
        return GatedModule(mlp)

    def _linear_module(self, name: str, module: nn.Linear) -> nn.Module:
        group = self._groups.get(name)
        parent, division = name.rpartition(".")[0], self._plan.linears.get(name)
        if group is None and parent in self._fusions.rotations and name not in self._fusions.sums:
            group = None if division is Division.CUT_INPUTS else (name,)  # may have all of q, k and v
        if group is None:
            linear = self._linear(name, module)
            self.linears.append((name, linear))
            own_inputs = self._plan.own_inputs(linear, name, self._layers.table.shard)
            return LinearModule(linear, module, self._layers.table.device, own_inputs)
        if group not in self.products:
            self.products[group] = self._joint(group)
        return JointModule(self.products[group], group.index(name), module, self._layers.table.device)

    def _joint(self, group: tuple[str, ...]) -> JointProduct:
        modules = [self._causal.get_submodule(name) for name in group]
        linear = self._plan.make_linear(self._layers, group, modules)
        self.linears.append((group[0], linear))
        has_own = self._plan.linears.get(group[0]) is Division.OUTPUTS
        own = linear.spec.own_sizes(self._layers.table.shard)
        return JointProduct(linear, own if has_own else [module.out_features for module in modules])

    def _linear(self, name: str, module: nn.Linear) -> Linear:
        table, tied = self._layers.table, self._tied.get(id(module.weight))
        if tied is not None:  # the head has the table of the embedding, unless the checkpoint has its own
            is_divided = tied[0].rpartition(".")[0] in self._plan.embeddings
            split = Split.OUTPUTS if is_divided else Split.NONE
            bias = None if module.bias is None else table.empty(len(tied[1]))
            linear = dense_linear(tied[1], bias, name=name, split=split, outputs=module.out_features)
            if bias is not None:
                place_rows(table, linear.spec, bias)
            table.tie(f"{name}.weight", tied[0], lambda own: linear.method.replace("weight", own))
            if is_divided:
                self._plan.join(linear, name, self._layers)
            return linear
        return self._plan.make_linear(self._layers, (name,), (module,))

    def connect_sums(self) -> None:
        """Lets linear layers, or the MLPs that they are in, know the norm behind the sum with their output."""
        for name, norm in self._fusions.sums.items():
            owner = name.rpartition(".")[0] if name.rpartition(".")[0] in self._fusions.gates else name
            module, behind = self._causal.get_submodule(owner), self._causal.get_submodule(norm)
            if isinstance(module, GatedModule | LinearModule) and isinstance(behind, NormModule):
                module.behind = behind.sums

    def install_rotations(self, rotate_of: Callable[[str], Rotate]) -> None:
        """rotate_of: the rotation for an attention module, by its name."""
        for name, in_place in self._fusions.rotations.items():
            of_module = [product for group, product in self.products.items() if group[0].rpartition(".")[0] == name]
            install(self._causal.get_submodule(name), rotate_of(name), of_module if in_place else [])


def place_modules(
    causal: Any,
    layers: LinearLayers,
    fusions: Fusions,
    calls: Sequence[str],
    ops: FusedOps,
    rotate_of: Callable[[str], Rotate] | None = None,
    experts: Mapping[str, ExpertsKind] | None = None,
    plan: TensorParallelPlan = ONE_RANK,
) -> Placed:
    """Gives all parameters places in the table, under transformers' names, and modules their replacements.

    calls: names of linear layers in the order in which a step calls them. rotate_of: the rotation for an attention
    module, by its name; None: that of `ops` for all. experts: of mixtures, by their names. plan: of ranks.
    """
    placement = _Placement(causal, layers, fusions, experts or {}, ops, plan)
    placement.place_parameters()
    placement.place_buffers()
    placement.place_modules()
    placement.connect_sums()
    placement.install_rotations(rotate_of or (lambda name: ops.rotate_halves))
    place = {name: i for i, name in reversed(list(enumerate(calls)))}
    linears = sorted(placement.linears, key=lambda named: place.get(named[0], len(calls)))  # the head is not in calls
    transient: list[JointProduct | SumNorm] = [*placement.products.values(), *placement.sums]
    in_order = [linear for _, linear in linears]
    return Placed(in_order, placement.norms, placement.experts, placement.embeddings, placement.own_products, transient)


def dtypes_by_name(causal: Any, dtype: torch.dtype) -> Callable[[str], torch.dtype | None]:
    """Returns a function: the dtype in which transformers keeps a weight of this name, where it is not the model's."""
    plan: dict[str, torch.dtype] = causal._get_dtype_plan(dtype)
    if not plan:
        return lambda name: None
    pattern, keys, _ = build_glob_alternation(list(plan))

    def dtype_of(name: str) -> torch.dtype | None:
        match = pattern.search(name)
        return None if match is None or match.lastgroup is None else plan[keys[match.lastgroup]]

    return dtype_of


def _parameters(causal: Any) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    for module_name, module in causal.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                yield module_name, module, name, parameter
