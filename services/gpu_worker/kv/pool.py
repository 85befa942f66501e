"""The KV blocks of all layers, as views of the worker's arena."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.kv_cache.kv_types import FP8_MAX
from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.models.interface import ModelShape
from blockyard.services.kv_transfer.arena import make_arena

_K_RANGE, _V_RANGE = 200.0, 100.0  # what vLLM takes
_SMALLEST = 1e-6  # lower bound of the largest value: scales stay above 0
_BLOCKS = 512  # blocks that are rescaled at once


class PoolMirror(Protocol):
    """What follows the changes of a pool beside steps: the parts of its blocks that other ranks have."""

    def copy(self, pairs: Ints) -> None: ...
    def scrub(self, blocks: Ints) -> None: ...
    def release(self, weights: bool) -> None: ...
    def reclaim(self, weights: bool, kv: bool) -> None: ...


LargestOfRanks = Callable[[Tensor], Tensor]  # the largest value of all ranks, element by element


class LayerKV(NamedTuple):
    """The cache of one layer, and the rules of its scores with the scales of its K and V."""

    memory: Tensor  # [num_blocks, planes, kv_heads, block_size, head_dim]
    rules: ScoreRules


class KVPool:
    """The blocks of an arena, one pool for all layers, which may differ in what they keep.

    `runs` has a tensor for successive layers that are alike: [layers, num_blocks, planes, kv_heads, block_size,
    head_dim]; planes are K and V, or K alone in latent attention. `layers` has that of each layer. Memory starts at
    zero and stays finite: kernels read values behind a sequence's end and multiply them by 0. In 8 bits there are
    `scales` [layers, 2] float32, which multiply stored K and V; `kv` has a layer's. While `scales_pending`,
    the next prefill sets them, unless it is one of `trial_steps`.
    """

    def __init__(
        self,
        shape: ModelShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool = False,
    ) -> None:
        """batch_invariant: attention over this pool computes each row as if it were alone in its batch."""
        self.shape, self.num_blocks, self.block_size, self.device = shape, num_blocks, block_size, device
        self.mirror: PoolMirror | None = None  # None: one rank has the whole blocks
        self.dtype = dtype
        self.scales = torch.ones((shape.num_layers, 2), device=device) if dtype in FP8_MAX else None
        self.model_scales: Tensor | None = None  # of a pipeline stage: those of all layers of the model
        self.scales_pending = False
        self.largest_scales: LargestOfRanks | None = None  # while they are measured; None: this rank has all heads
        scales = [None] * shape.num_layers if self.scales is None else self.scales.unbind()
        rules = [replace(it.rules, kv_scales=own) for it, own in zip(shape.attention, scales, strict=True)]
        self.batch_invariant = batch_invariant
        self.arena = make_arena(num_blocks * block_bytes(shape, block_size, dtype), device)
        values, start = self.arena.bytes.view(dtype), 0
        self.runs: list[Tensor] = []
        for layers, (planes, heads, head_dim) in shape.runs:
            size = (len(layers), num_blocks, planes, heads, block_size, head_dim)
            self.runs.append(values[start : start + math.prod(size)].view(size))
            start += math.prod(size)
        self.layers = [layer for run in self.runs for layer in run.unbind(0)]
        self.rows = [layer.view(-1, layer.shape[-1]) for layer in self.layers]  # view of a layer for writes
        self.kv = list(map(LayerKV, self.layers, rules))
        # view of a layer for reads: a block of one head
        self.chunks = [layer.view(-1, block_size * layer.shape[-1]) for layer in self.layers]

    def drop(self) -> None:
        """Frees the memory and its contents. Do not use the pool before `restore`."""
        self.arena.drop()

    def restore(self) -> None:
        """Allocates the memory again after `drop`, all zeros; on a GPU at another address."""
        self.arena.restore()

    def set_scales(self, scales: Tensor) -> None:
        """scales [layers, 2], of a pool in 8 bits. Rows of latent layers take that of K."""
        assert self.scales is not None
        self.scales.copy_(scales)
        for layer, shape in enumerate(self.shape.attention):
            if shape.latent_dim is not None:
                self.scales[layer, 1] = scales[layer, 0]

    def measure_next_prefill(self, largest: LargestOfRanks | None) -> None:
        """The next step with a prefill sets the scales. largest: of the ranks that have the heads of a layer; they
        measure in the same step."""
        self.scales_pending, self.largest_scales = True, largest

    @contextmanager
    def trial_steps(self) -> Iterator[None]:
        """Steps that serve no request: they set no scales."""
        pending, self.scales_pending = self.scales_pending, False
        try:
            yield
        finally:
            self.scales_pending = pending

    def measure_scales(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Sets scales from K and V of a prompt, with room for larger values."""
        key_scale = keys.abs().max().float().clamp_min(_SMALLEST) / _K_RANGE
        value_scale = values.abs().max().float().clamp_min(_SMALLEST) / _V_RANGE
        self._measured(layer, torch.stack((key_scale, value_scale)))

    def measure_row_scale(self, layer: int, rows: Tensor) -> None:
        """Measures the one scale of a latent layer's rows: see `measure_scales`."""
        self._measured(layer, (rows.abs().max().float().clamp_min(_SMALLEST) / _K_RANGE).expand(2))

    def _measured(self, layer: int, scales: Tensor) -> None:
        """Sets scales [2]. What prompts of one token have stored before is stored again with them."""
        assert self.scales is not None
        if self.largest_scales is not None:
            scales = self.largest_scales(scales.contiguous())
        stored = self.layers[layer]
        factors, most = (self.scales[layer] / scales)[: stored.shape[1], None, None, None], FP8_MAX[self.dtype]
        for first in range(0, self.num_blocks, _BLOCKS):
            blocks = stored[first : first + _BLOCKS]
            blocks.copy_(blocks.float().mul_(factors).clamp_(-most, most))
        self.scales[layer] = scales
        if layer == self.shape.num_layers - 1:
            self.scales_pending = False

    def copy(self, pairs: Ints) -> None:
        """Copies blocks in all layers: pairs [2, n] of sources and destinations. No block is both."""
        if self.mirror is not None:
            self.mirror.copy(pairs)
        src, dst = torch.from_numpy(pairs).to(self.device, non_blocking=True)
        for memory in self.runs:
            memory.index_copy_(1, dst, memory.index_select(1, src))

    @torch.inference_mode()
    def scrub(self, blocks: Ints) -> None:
        """Replaces values that are not finite, before these blocks have another owner."""
        if self.mirror is not None:
            self.mirror.scrub(blocks)
        index = torch.from_numpy(blocks).to(self.device)
        for memory in self.runs:
            values = memory[:, index]
            if self.scales is not None:
                values = values.float()
            memory[:, index] = torch.nan_to_num(values, posinf=0.0, neginf=0.0).to(self.dtype)


def block_bytes(shape: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block in all layers."""
    return sum(math.prod(layer.kept) for layer in shape.attention) * block_size * dtype.itemsize
