"""The layers of a model under the names of their modules, and what an adapter's matrices become there."""

import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.services.gpu_worker.layers.embedding import HEAD
from blockyard.services.gpu_worker.layers.latent.up_projection import UpProjection
from blockyard.services.gpu_worker.layers.linear import Linear, Product
from blockyard.services.gpu_worker.loading.checkpoint_names import bare
from blockyard.services.gpu_worker.loading.linear_spec import MatrixPart
from blockyard.services.gpu_worker.lora.module_tensors import STACK_SUFFIX, STACKED, ModuleTensors, is_finite, listed
from blockyard.services.gpu_worker.lora.token_rows import TokenTargets
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.shared.errors import AdapterError
from blockyard.shared.lora.adapter_config import MAX_RANK, AdapterConfig

EXPERT = re.compile(r"(?P<stack>.*\.experts)\.\d+\.\w+$")  # names of modules of one expert
COMPARED = 16  # columns of a weight, about
OTHER_NAMES = {"embed_out": "lm_head"}  # of modules that checkpoints of some families call otherwise


@dataclass(frozen=True, slots=True)
class Target:
    """One module: a part of a layer's product."""

    name: str
    layer: int  # index in the layers that adapters may change
    part: MatrixPart
    start: int  # first output of the part
    in_features: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What an adapter adds to one part of a layer's product: (x @ a.T) @ b.T + bias."""

    start: int  # first output
    a: Tensor | None  # [rank, in]; None: a bias alone
    b: Tensor | None  # [out, rank], rows in the order of the product, times the scale
    bias: Tensor | None = None  # [out]

    @property
    def rank(self) -> int:
        return 0 if self.a is None else self.a.shape[0]

    @property
    def size(self) -> int:
        """Outputs."""
        some = self.bias if self.b is None else self.b
        assert some is not None
        return some.shape[0]

    def tensors(self) -> Iterator[Tensor]:
        yield from (one for one in (self.a, self.b, self.bias) if one is not None)


AdaptedLayer = Linear | UpProjection


def adapted_layers(model: Model) -> list[AdaptedLayer]:
    """The layers that adapters may change. Deltas name them by their index."""
    return [*model.linears(), *model.adaptable.up_projections]


class ModelTargets:
    """Finds the modules of adapters in one model."""

    def __init__(self, model: Model) -> None:
        self._layers, self._table = adapted_layers(model), model.table
        self._targets: dict[str, Target] = {}
        self._experts: dict[str, list[int]] = {}  # layers of experts by the name of their mixture
        for layer, adapted in enumerate(self._layers):
            start = 0
            for one in adapted.spec.parts:
                if one.name:
                    target = Target(one.name, layer, one, start, adapted.spec.in_features)
                    self._targets[_key(one.name)] = target
                start += one.size
            if (found := EXPERT.match(_key(adapted.spec.parts[0].name))) is not None:
                self._experts.setdefault(found["stack"], []).append(layer)
        head = self.find(HEAD)
        self.tokens = TokenTargets(model, None if head is None else (head.name, head.layer))

    def find(self, module: str) -> Target | None:
        name = _key(module)
        return self._targets.get(name) or self._targets.get(OTHER_NAMES.get(name, ""))

    def names(self) -> list[str]:
        return [*(target.name for target in self._targets.values()), *self.tokens.names()]

    def arrange(
        self, modules: Sequence[ModuleTensors], dtype: torch.dtype, config: AdapterConfig, max_rank: int = MAX_RANK
    ) -> Generator[None, None, dict[int, list[Delta]]]:
        """Returns the deltas of each layer by its index, in `dtype`, one matrix at a time. Raises AdapterError.

        max_rank: of one expert of a stack.
        """
        if missing := [module.name for module in modules if not self._has(module)]:
            raise AdapterError(f"this model has no layer for {listed(missing)}")
        found: dict[int, list[Delta]] = {}
        for module in modules:
            if module.is_stack:
                for layer, delta in self._stack_deltas(module, dtype, config, max_rank):
                    found.setdefault(layer, []).append(delta)
                    yield
                continue
            target = self.find(module.name)
            assert target is not None
            found.setdefault(target.layer, []).append(self._delta(target, module, dtype))
            yield
        return found

    def _has(self, module: ModuleTensors) -> bool:
        return _stack(module) in self._experts if module.is_stack else self.find(module.name) is not None

    def _stack_deltas(
        self, module: ModuleTensors, dtype: torch.dtype, config: AdapterConfig, max_rank: int
    ) -> Iterator[tuple[int, Delta]]:
        """The deltas of each expert. Which of their two products a stack belongs to, its shape tells."""
        a, b = module.a, module.b
        assert a is not None and b is not None
        inputs, outputs = a.shape[1], b.shape[0]
        layers = [one for one in self._experts[_stack(module)] if _shape(self._layers[one]) == (inputs, outputs)]
        number = len(layers)
        if not number or a.shape[0] % number or a.shape[0] != b.shape[1]:
            shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
            raise AdapterError(
                f"lora_A and lora_B of {module.name} have the shapes {shapes}: no experts here have such"
            )
        rank, parts = a.shape[0] // number, self._layers[layers[0]].spec.parts
        is_gate_up = len(parts) > 1 or len(parts[0].rows) > 1
        name = f"{module.name.removesuffix(STACK_SUFFIX)}.{STACKED[0 if is_gate_up else 1]}"
        if rank > max_rank or rank != config.rank_of(name):
            limits = f"its config says {config.rank_of(name)}, the limit is {max_rank}"
            raise AdapterError(f"{name} has rank {rank}; {limits}")
        of_experts = torch.unflatten(b.float(), 1, (rank, number)) * config.scale_of(name)  # the expert is fastest
        for expert, layer in enumerate(layers):
            own, one = of_experts[:, :, expert], self._layers[layer].spec.parts
            rows = in_order(one[0], own) if len(one) == 1 else own
            pair = a[expert * rank : (expert + 1) * rank].to(dtype).contiguous(), rows.to(dtype).contiguous()
            _check_finite(module, dtype, *pair)
            yield layer, Delta(0, *pair)

    def _delta(self, target: Target, module: ModuleTensors, dtype: torch.dtype) -> Delta:
        one = target.part
        stored = one.stored_rows or one.size
        if module.base is not None:
            self._check_base(target, module.base)
        _check_shape(module, "lora_A", module.a, 1, target.in_features)
        for name, tensor in (("lora_B", module.b), ("lora_B.bias", module.b_bias), ("bias", module.bias)):
            _check_shape(module, name, tensor, 0, stored)
        b = None if module.b is None else (in_order(one, module.b.float()) * module.scale).to(dtype)
        bias = None
        if module.b_bias is not None:
            bias = in_order(one, module.b_bias.float()) * module.scale
        if module.bias is not None:
            other = in_order(one, module.bias.float()) - self._bias_of(target)
            bias = other if bias is None else bias + other
        a = None if module.a is None else module.a.to(dtype).contiguous()
        _check_finite(module, dtype, a, b)
        b = None if b is None else b.contiguous()
        return Delta(target.start, a, b, None if bias is None else bias.to(dtype).contiguous())

    def _check_base(self, target: Target, stored: Tensor) -> None:
        """Raises AdapterError if a weight that came with the adapter is not the model's, by some of its columns."""
        size = target.in_features
        columns = torch.arange(0, size, max(1, size // COMPARED))
        differs = AdapterError(
            f"the adapter has a weight of its own for {target.name}, which is not the model's: merge it into its base"
        )
        if stored.shape != (target.part.stored_rows or target.part.size, size):
            raise differs
        units = torch.eye(size, dtype=self._table.dtype)[columns].to(self._table.device)
        product, end = _product(self._layers[target.layer]), target.start + target.part.size
        with torch.inference_mode():
            bias = product(torch.zeros_like(units[:1]))
            own = (product(units) - bias)[:, target.start : end].float().cpu().T
        given = in_order(target.part, stored[:, columns].float())
        if not torch.allclose(own, given, rtol=0.05, atol=0.05 * float(given.abs().mean())):
            raise differs

    def _bias_of(self, target: Target) -> Tensor:
        """The bias of the model itself, which any format gives as the product of zeros."""
        layer = self._layers[target.layer]
        if not layer.spec.bias:
            raise AdapterError(f"the adapter has a bias for {target.name}, which has none in this model")
        zeros = torch.zeros(1, target.in_features, dtype=self._table.dtype, device=self._table.device)
        with torch.inference_mode():
            return _product(layer)(zeros)[0, target.start : target.start + target.part.size].float().cpu()


def _product(layer: AdaptedLayer) -> Product:
    """The product of the model itself, without adapters."""
    return layer.product if isinstance(layer, UpProjection) else layer.method.apply


def _shape(layer: AdaptedLayer) -> tuple[int, int]:
    return layer.spec.in_features, sum(one.size for one in layer.spec.parts)


def _key(name: str) -> str:
    """The name by which a module is found: transformers calls the mixtures of some checkpoints otherwise."""
    return bare(name).replace("block_sparse_moe.", "mlp.")


def _stack(module: ModuleTensors) -> str:
    return _key(module.name.removesuffix(STACK_SUFFIX))


def in_order(one: MatrixPart, rows: Tensor) -> Tensor:
    """Brings a part's rows [out, ...] from the checkpoint's order into that of the product."""
    if one.interleaved:
        rows = torch.unflatten(rows, 0, (-1, len(one.rows))).transpose(0, 1).flatten(0, 1)
    return rows if one.arrange is None else one.arrange(rows)


def _check_shape(module: ModuleTensors, name: str, tensor: Tensor | None, dim: int, size: int) -> None:
    if tensor is not None and tensor.shape[dim] != size:
        raise AdapterError(f"{name} of {module.name} has the shape {tuple(tensor.shape)}; this model has {size} there")


def _check_finite(module: ModuleTensors, dtype: torch.dtype, *tensors: Tensor | None) -> None:
    if not all(is_finite(one) for one in tensors if one is not None):
        raise AdapterError(f"the matrices of {module.name} are too large for {str(dtype).removeprefix('torch.')}")
