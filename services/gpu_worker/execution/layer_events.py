"""CUDA events of one step that tell which layers have stored K and V, so that blocks leave while later layers run."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.interfaces import StoredLayers
from blockyard.services.gpu_worker.step import Attend

GROUPS = 8  # of layers in a step; each is a copy and a message of every transfer


class LayerEvent(Protocol):
    """The part of `torch.cuda.Event` that is used here."""

    def record(self) -> None: ...
    def query(self) -> bool: ...


class LayerEvents:
    """Wraps the attention of one step, and records an event after every few layers. Only steps that send have one."""

    def __init__(self, num_layers: int, make_event: Callable[[], LayerEvent] = torch.cuda.Event) -> None:
        self.stored: list[StoredLayers] = []
        self._num_layers, self._make_event = num_layers, make_event
        self._per_group = -(-num_layers // GROUPS)

    def around(self, attend: Attend) -> Attend:
        def attend_and_record(
            layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None
        ) -> Tensor:
            out = attend(layer, qkv, rotation, norm)
            end = layer + 1
            if end % self._per_group == 0 or end == self._num_layers:
                event = self._make_event()
                event.record()
                first = self.stored[-1].layers.stop if self.stored else 0
                self.stored.append(StoredLayers(range(first, end), event.query))
            return out

        return attend_and_record
