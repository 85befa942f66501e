"""Tells which layers of a step have stored K and V, so that blocks leave while later layers run.

An eager step that sends records a CUDA event after every few layers. A CUDA graph writes the number of its step into a
word of pinned memory instead, which the host polls.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.execution.cuda.device_ops import DeviceOps
from blockyard.services.gpu_worker.host_link import HostLink
from blockyard.services.gpu_worker.interfaces import StoredLayers
from blockyard.services.gpu_worker.step import Attend, LatentRows, LogitsIndices

GROUPS = 8  # of layers in a step; each is a copy and a message of every transfer


class LayerEvent(Protocol):
    """The part of `torch.cuda.Event` that is used here."""

    def record(self) -> None: ...
    def query(self) -> bool: ...


class LayerRecorder(Protocol):
    def around(self, attend: Attend) -> Attend:
        """Wraps the attention of a step: it also records which layers are stored."""


class LayerEvents:
    """Records an event after every few layers of one step. Only eager steps that send have one."""

    def __init__(self, num_layers: int, make_event: Callable[[], LayerEvent] = torch.cuda.Event) -> None:
        self.stored: list[StoredLayers] = []
        self._groups, self._make_event = layer_groups(num_layers), make_event

    def around(self, attend: Attend) -> Attend:
        return _after_groups(attend, self._groups, self._record)

    def _record(self, group: int) -> None:
        event = self._make_event()
        event.record()
        self.stored.append(StoredLayers(self._groups[group], event.query))


class LayerWords:
    """Words in pinned memory, one for each group of layers, that all CUDA graphs of a worker write.

    A kernel of the graph writes the number of the step when the group's K and V are stored. Steps run in the order of
    their numbers, so the group is stored for this step and all earlier ones. Numbers are compared modulo 2**32.
    """

    def __init__(self, groups: Sequence[range], ops: DeviceOps, step: Tensor, link: HostLink) -> None:
        """groups: see `layer_groups`. step: `SlotState.step`, which has the number of the step that runs."""
        self._groups, self._ops, self._step = groups, ops, step
        self._words = link.host_tensor((len(groups),), torch.int32).zero_()
        self._numbers = self._words.numpy().view("uint32")

    def around(self, attend: Attend) -> Attend:
        return _after_groups(attend, self._groups, self._record)

    def stored(self, step: int) -> list[StoredLayers]:
        """The layers of a step that is launched as a CUDA graph, by its number. It is at most 2**31 steps ago."""
        return [StoredLayers(layers, partial(self._is_stored, i, step)) for i, layers in enumerate(self._groups)]

    def _record(self, group: int) -> None:
        self._ops.record_step(self._step, self._words, group)

    def _is_stored(self, group: int, step: int) -> bool:
        return (int(self._numbers[group]) - step) % 2**32 < 2**31


def layer_groups(num_layers: int, most: int | None = None) -> list[range]:
    """Divides the layers of a model into up to `most` groups of successive layers; None: GROUPS."""
    size = -(-num_layers // (most or GROUPS))
    return [range(first, min(first + size, num_layers)) for first in range(0, num_layers, size)]


class AttendThen:
    """Calls a function with the number of a layer after its attention. Implements `Attend`."""

    def __init__(self, attend: Attend, then: Callable[[int], None]) -> None:
        self._attend, self._then = attend, then

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        out = self._attend(layer, qkv, rotation, norm)
        self._then(layer)
        return out

    def latent(self, layer: int, query: Tensor, rotation: Tensor | None, latent: LatentRows) -> Tensor:
        out = self._attend.latent(layer, query, rotation, latent)
        self._then(layer)
        return out

    def of_rows(self, indices: LogitsIndices) -> Attend:
        return AttendThen(self._attend.of_rows(indices), self._then)


def _after_groups(attend: Attend, groups: Sequence[range], record: Callable[[int], None]) -> Attend:
    """Calls `record` with the index of a group after the attention of its last layer."""
    ends = {layers.stop - 1: i for i, layers in enumerate(groups)}

    def record_end(layer: int) -> None:
        if layer in ends:
            record(ends[layer])

    return AttendThen(attend, record_end)
