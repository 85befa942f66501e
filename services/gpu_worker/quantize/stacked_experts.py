"""Cuts stacks of experts into the matrices of each expert: no layout of compressed-tensors has quantized stacks.

A checkpoint has the experts of a layer as `experts.gate_up_proj` and `experts.down_proj`, with a leading dimension of
experts. The quantized one has `experts.0.gate_proj.weight`, `up_proj` and `down_proj`, [outputs, inputs], and so on, as
llm-compressor writes them: it makes linear layers of experts before it quantizes them.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from blockyard.services.gpu_worker.loading.linear_spec import SUFFIXES
from blockyard.services.gpu_worker.quantization.names import NamePatterns

GATE_UP, DOWN, BIAS = "gate_up_proj", "down_proj", "_bias"
PARTS = {GATE_UP: ("gate_proj", "up_proj"), DOWN: (DOWN,)}
IN_PAIRS = frozenset({"gpt_oss"})  # values of model_type: an output of gate and one of up in turn


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """One stored tensor of all experts of a layer."""

    prefix: str  # "model.layers.0.mlp.experts"
    parts: tuple[str, ...]  # last parts of the names of its matrices
    is_bias: bool
    is_transposed: bool  # matrices are [inputs, outputs]
    is_in_pairs: bool
    shape: tuple[int, ...]

    def bases(self) -> Iterator[str]:
        """Names of its matrices."""
        yield from (f"{self.prefix}.{expert}.{one}" for expert in range(self.shape[0]) for one in self.parts)

    @property
    def inputs(self) -> int | None:
        """Of its matrices; None: it has biases."""
        return None if self.is_bias else self.shape[1 if self.is_transposed else 2]

    def cut(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Names and values of the tensors of each expert. tensor: of `shape`."""
        suffix, count = SUFFIXES[self.is_bias], len(self.parts)
        for expert, one in enumerate(tensor.mT if self.is_transposed else tensor):
            rows = [one[i::count] for i in range(count)] if self.is_in_pairs else one.chunk(count)
            for part, own in zip(self.parts, rows, strict=True):
                yield f"{self.prefix}.{expert}.{part}{suffix}", own.contiguous()


def find_stacks(
    shapes: Mapping[str, Sequence[int]], config: Mapping[str, Any], patterns: NamePatterns
) -> dict[str, ExpertStack]:
    """Stacks to cut, by the name of the stored tensor. Layers whose stacks the patterns mean both stay as they are.

    shapes: of all tensors of the checkpoint. config: of the text model.
    """
    found, is_in_pairs = dict[str, ExpertStack](), config.get("model_type") in IN_PAIRS
    for name, shape in shapes.items():
        prefix, _, last = name.rpartition(".")
        down = shapes.get(f"{prefix}.{DOWN}", ())
        if last != GATE_UP or not prefix.endswith("experts") or len(shape) != 3 or len(down) != 3:
            continue
        if all([patterns.match(f"{prefix}.{key}") for key in PARTS]):
            continue
        is_transposed = shape[2] == 2 * down[1]  # and not outputs first, [2 * inner, hidden] and [hidden, inner]
        for key, parts in PARTS.items():
            for stored in (f"{prefix}.{key}", f"{prefix}.{key}{BIAS}"):
                if stored in shapes:
                    is_bias, in_pairs = stored.endswith(BIAS), is_in_pairs and len(parts) > 1
                    found[stored] = ExpertStack(
                        prefix, parts, is_bias, is_transposed and not is_bias, in_pairs, tuple(shapes[stored])
                    )
    return found


def are_left_out(stacks: Collection[ExpertStack], patterns: NamePatterns) -> set[str]:
    """Names of matrices of these stacks that the patterns mean, by their own names or that of the stack."""
    made = set[str]()
    for stack in stacks:
        whole = patterns.match(f"{stack.prefix}.{GATE_UP if len(stack.parts) > 1 else DOWN}")
        made.update(base for base in stack.bases() if patterns.match(base) or whole)
    return made
