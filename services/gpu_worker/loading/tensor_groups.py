"""Tensors of a checkpoint that are converted together, such as the codes of a matrix and their scales.

They come in any order and from several threads. A group keeps its tensors until all of them are there, so that at most
the groups of the layers that are being read are in memory twice.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from blockyard.services.gpu_worker.host_link import HostLink

Convert = Callable[[Mapping[str, Tensor]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a group as checkpoints have it."""

    name: str
    shape: tuple[int, ...]
    dtypes: frozenset[torch.dtype]
    other_shapes: tuple[tuple[int, ...], ...] = ()  # that it may have instead; -1 stands for any size
    other_names: tuple[str, ...] = ()
    optional: bool = False  # checkpoints may lack it


class TensorGroup:
    """Calls `convert` with the tensors by key once the last one has come.

    What it launches has to be complete when it returns (`HostLink.synchronize_thread`): tensors of a group are from
    several streams.
    """

    def __init__(self, keys: Mapping[str, StoredTensor], convert: Convert, link: HostLink) -> None:
        self._missing, self._convert, self._link = set(keys), convert, link
        self._arrived: dict[str, Tensor] = {}
        self._lock = Lock()

    def put(self, key: str, value: Tensor) -> None:
        self._link.synchronize_thread()  # another thread may go on with the value
        with self._lock:
            self._arrived[key] = value
            self._missing.discard(key)
            if self._missing:
                return
        self.finish()

    def lack(self, key: str) -> None:
        """The checkpoint has no tensor for `key`. Called before any `put`."""
        self._missing.discard(key)

    def finish(self) -> None:
        """Converts the tensors so far, also without optional ones."""
        with self._lock:
            arrived, self._arrived = self._arrived, {}
        if arrived:
            self._convert(arrived)
