"""A trial of a transformers class on the CPU, which proves that it computes each token of a batch as if it were alone.

Weights are made up and take no memory: linear layers, the bulk of a model, become cheap functions of each row. All
other modules run as they are, over the very path of a step. Then

- each row must come out of every module as it does when it is the only row of the step. Convolutions, states and
  whatever else looks at neighbouring rows would mix requests, and would lack the rows of earlier steps;
- the rows of two sequences in one step must be what the class computes of each sequence alone, with its own attention
  and its own positions;
- with several ranks, a layer that is divided by inputs must get the rank's part of what it gets on one rank. Norms and
  choices over all numbers between two divided layers would see those of the rank alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from blockyard.services.gpu_worker.models.transformers_layers.connection import NAME, Connection
from blockyard.services.gpu_worker.models.transformers_layers.joint_products import is_linear
from blockyard.services.gpu_worker.models.transformers_layers.probes import Numbers
from blockyard.services.gpu_worker.models.transformers_layers.tensor_parallel import Division, TensorParallelPlan
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.shared.errors import ConfigError

LENGTHS = [7, 4]  # of the sequences
WINDOW = 3  # shorter than the sequences, in the place of the model's
# largest difference to the size of the result: of a row alone, which only rounding changes, and of other attention
ROW_TOLERANCE, TOLERANCE = 1e-4, 1e-3
STRIDES = (1, 61, 7, 3)  # of dimensions of made-up weights, the last one first

Product = Callable[[Tensor], Tensor]
Run = Callable[[Any, Tensor, Tensor, Tensor], Tensor]  # base model, token ids, positions, mask -> hidden states


def try_rows(causal: Any, connection: Connection, run: Run, vocab_size: int) -> None:
    """causal: a class in float32 on the meta device whose buffers are on the CPU. Raises ConfigError."""
    numbers = Numbers(torch.float32)
    _make_up_weights(causal, numbers)
    base = getattr(causal, causal.base_model_prefix)
    ids = torch.randint(7, max(vocab_size, 8), (sum(LENGTHS),), generator=numbers.generator, device="cpu")
    positions = torch.cat([torch.arange(n, device="cpu") for n in LENGTHS])
    mask = torch.zeros(1, 1, 1, 1, device="cpu")
    with torch.inference_mode():
        connection.computes = _RowAlone()
        together = _outputs(base, partial(run, base, ids, positions, mask))
        for i in (0, 1, LENGTHS[0] - 1, LENGTHS[0], len(ids) - 1):
            alone = _outputs(base, partial(run, base, ids[i : i + 1], positions[i : i + 1], mask))
            culprit = _first_difference(together, alone, i, len(ids))
            if culprit is not None and not bool(together[culprit].any()):
                raise ConfigError(
                    f"its {_describe(base, culprit[0])} computes only zeros in a trial with made-up weights: whether "
                    "it sees each token of a batch alone is not known"
                )
            if culprit is not None:
                raise ConfigError(
                    "it mixes the rows of a batch, which may be of several requests: what its "
                    f"{_describe(base, culprit[0])} computes for a token depends on the tokens around it"
                )
        connection.computes = _Causal()
        flat = run(base, ids, positions, mask)
        with _eager(causal):
            theirs = torch.cat(
                [base(input_ids=one[None], use_cache=False).last_hidden_state[0] for one in torch.split(ids, LENGTHS)]
            )
    if not _agree(flat, theirs, TOLERANCE):
        raise ConfigError(
            "it computes something else of two sequences in one batch than of each alone: it has other positions, or "
            "attends to other tokens than all earlier ones or those of a window"
        )


def try_rank(
    causal: Any, connection: Connection, run: Run, vocab_size: int, plan: TensorParallelPlan, shard: Shard
) -> None:
    """Runs a rank's part of a class beside the whole: see above. Raises ConfigError. causal: as in `try_rows`."""
    numbers = Numbers(torch.float32)
    _make_up_weights(causal, numbers)
    base, divided = getattr(causal, causal.base_model_prefix), list[_OwnOutputs | _PartialMix]()
    for name, division in plan.linears.items():
        module = causal.get_submodule(name)
        mix = module.__dict__["forward"]
        if division is Division.OUTPUTS:
            module.__dict__["forward"] = _OwnOutputs(mix, plan.outputs(name, module.out_features, shard).share(shard))
        elif division is Division.INPUTS:
            own = plan.inputs(name, module.in_features).share(shard)
            module.__dict__["forward"] = _PartialMix(mix, own, name)
        else:
            continue
        divided.append(module.__dict__["forward"])
    ids = torch.randint(7, max(vocab_size, 8), (sum(LENGTHS),), generator=numbers.generator, device="cpu")
    positions, mask = torch.arange(len(ids), device="cpu"), torch.zeros(1, 1, 1, 1, device="cpu")
    connection.computes = _RowAlone()
    with torch.inference_mode():
        run(base, ids, positions, mask)
        for one in divided:
            one.is_rank = True
        run(base, ids, positions, mask)


class _OwnOutputs:
    """A made-up product of which a rank has some outputs."""

    def __init__(self, mix: Product, own: range) -> None:
        self._mix, self._own, self.is_rank = mix, own, False

    def __call__(self, x: Tensor) -> Tensor:
        out = self._mix(x)
        return out[..., self._own.start : self._own.stop] if self.is_rank else out


class _PartialMix:
    """A made-up product of which a rank has some inputs. The sum over ranks is the whole product."""

    def __init__(self, mix: Product, own: range, name: str) -> None:
        self._mix, self._own, self._name, self.is_rank = mix, own, name, False
        self._inputs: list[Tensor] = []  # of the calls with all inputs

    def __call__(self, x: Tensor) -> Tensor:
        if not self.is_rank:
            self._inputs.append(x.clone())
            return self._mix(x)
        whole = self._inputs.pop(0)
        if not _agree(x, whole[..., self._own.start : self._own.stop], ROW_TOLERANCE):
            raise ConfigError(
                f"its plan for ranks does not fit it: {self._name} gets other numbers of a rank than of the whole, "
                "because a layer before it looks at numbers of all ranks"
            )
        return self._mix(whole)


def _make_up_weights(causal: Any, numbers: Numbers) -> None:
    for module in causal.modules():
        if is_linear(module) or type(module) is Conv1D:
            shape = module.weight.shape
            out_features, in_features = shape[::-1] if isinstance(module, Conv1D) else shape
            module.__dict__["forward"] = _Mix(in_features, out_features, numbers)
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                made = _made_up(parameter.shape, numbers).to(parameter.dtype)
                module._parameters[name] = nn.Parameter(made, requires_grad=False)


def _made_up(shape: torch.Size, numbers: Numbers) -> Tensor:
    """Random numbers of any shape, in the memory of a few: elements lie over each other."""
    strides = [STRIDES[min(i, len(STRIDES) - 1)] for i in reversed(range(len(shape)))]
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    scale = 1.0 if len(shape) < 2 else shape[-1] ** -0.5
    return numbers(max(size, 1), scale=scale).as_strided(shape, strides)


class _Mix:
    """Takes the place of a matrix product: numbers of each row in another order, with factors."""

    def __init__(self, in_features: int, out_features: int, numbers: Numbers) -> None:
        self._source = torch.randint(in_features, (out_features,), generator=numbers.generator, device="cpu")
        self._factors = numbers(out_features)

    def __call__(self, x: Tensor) -> Tensor:
        return x[..., self._source] * self._factors.to(x.dtype)


class _RowAlone:
    """Attention and experts that see one row at a time."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, **_: Any) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        scores = (query * key).sum(-1, keepdim=True) * (scaling or query.shape[-1] ** -0.5)
        return (value * scores.sigmoid()).transpose(1, 2).contiguous()

    def route(self, experts: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if int(chosen.min()) < 0 or int(chosen.max()) >= experts.num_experts:  # type: ignore[operator]
            raise ConfigError(f"its router chooses experts that {type(experts).__name__} does not have")
        factors = (1.0 + chosen) / experts.num_experts * weights  # type: ignore[operator]
        return x * factors.sum(-1, keepdim=True).to(x.dtype)


class _Causal(_RowAlone):
    """Attention of each sequence to its own tokens."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, **options: Any
    ) -> Tensor:
        groups, window = query.shape[1] // key.shape[1], options.get("sliding_window")
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        of_sequences = (torch.split(x, LENGTHS, 2) for x in (query, key, value))
        done = [_attend(q, k, v, scaling, window) for q, k, v in zip(*of_sequences, strict=True)]
        return torch.cat(done, 2).transpose(1, 2).contiguous()


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    index = torch.arange(query.shape[2], device="cpu")
    back = index[:, None] - index
    seen = (back >= 0) & (back < (window or len(index)))
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value


@contextmanager
def _eager(causal: Any) -> Iterator[None]:
    """The class with its own attention. It keeps the trial's experts, which see one row at a time."""
    causal.set_attn_implementation("eager")
    try:
        yield
    finally:
        causal.set_attn_implementation(NAME)


def _outputs(base: nn.Module, run: Callable[[], Tensor]) -> dict[tuple[str, int], Tensor]:
    """Returns each module's output by name and number of the call, and the whole output under an empty name."""
    found: dict[tuple[str, int], Tensor] = {}
    calls: dict[str, int] = {}

    def record(name: str, module: nn.Module, args: Any, out: Any) -> None:
        calls[name] = calls.get(name, -1) + 1
        first = out[0] if isinstance(out, tuple) and out else out
        if isinstance(first, Tensor):
            found[name, calls[name]] = first

    hooks = [module.register_forward_hook(partial(record, name)) for name, module in base.named_modules() if name]
    try:
        found["", 0] = run()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _first_difference(
    together: dict[tuple[str, int], Tensor], alone: dict[tuple[str, int], Tensor], row: int, rows: int
) -> tuple[str, int] | None:
    """The first call of a module whose output for the row `row` of `rows` is another one when the row is alone, or is
    zero for all rows."""
    for call, both in together.items():
        one = alone.get(call)
        if one is None or one.dim() != both.dim() or not both.is_floating_point():
            continue
        for dim in (0, 1):
            if both.dim() > dim and both.shape[dim] == rows and one.shape[dim] == 1:
                if not both.any() or not _agree(both.select(dim, row), one.select(dim, 0), ROW_TOLERANCE):
                    return call
                break
    return None


def _describe(base: nn.Module, name: str) -> str:
    """The class and name of a module. A layer that sees each row alone has only read what the one around it mixed."""
    module = base.get_submodule(name)
    if isinstance(module, nn.Linear) or "Norm" in type(module).__name__:
        name = name.rpartition(".")[0]
    return f"{type(base.get_submodule(name)).__name__} ({name or 'all layers'})"


def _agree(left: Tensor, right: Tensor, tolerance: float) -> bool:
    if left.shape != right.shape:
        return False
    left, right = left.float(), right.float()
    size = float(right[right.isfinite()].square().mean().sqrt()) if bool(right.isfinite().any()) else 0.0
    return torch.allclose(left, right, rtol=tolerance, atol=tolerance * size, equal_nan=True)
