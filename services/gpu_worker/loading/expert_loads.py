"""Counts how often experts are chosen, for `/metrics` and for benchmarks whose floors depend on how many are read.

The products of a layer's experts write the layer's counts of each step, over the step before. They are sampled
when counters are published, about twice a second: no step waits, and a sample may mix the layers of two steps.
"""

from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from blockyard.services.gpu_worker.host_link import HostLink, LinkEvent
from blockyard.shared.messages import Stats

MOST_LAYERS = 128
DECAY = 0.95  # of older samples, a sample; loads are of about the last 20


@dataclass(slots=True)
class LayerLoad:
    """The counts of a layer's experts in its last step."""

    pairs: Tensor  # [experts] int32: pairs of row and expert
    top_k: int = 0  # experts of each row; 0: not counted

    def watch(self, top_k: int) -> Tensor:
        """Returns `pairs`, which the caller writes in each step."""
        self.top_k = top_k
        return self.pairs


class ExpertLoads:
    """The counts of all layers of a model, on its device, and the sums of samples of them."""

    def __init__(self, device: torch.device, link: HostLink) -> None:
        """link: of the device."""
        self._device, self._link = device, link
        self._layers: list[LayerLoad] = []
        self._counts: Tensor | None = None  # [MOST_LAYERS, experts] int32, one copy for all layers
        self._copy: _SideCopy | None = None
        self._steps = 0  # at the last sample
        self._recent: np.ndarray | None = None  # [layers, experts] float64
        self.num_samples = self.num_hit = 0
        self.num_even = 0.0  # experts that would have been hit if each were chosen equally often

    def add_layer(self, num_experts: int) -> LayerLoad | None:
        """None: it has another number of experts than earlier layers, or is one too many, and is not counted."""
        if self._counts is None:
            self._counts = torch.zeros(MOST_LAYERS, num_experts, dtype=torch.int32, device=self._device)
        if self._counts.shape[1] != num_experts or len(self._layers) == MOST_LAYERS:
            return None
        self._layers.append(LayerLoad(self._counts[len(self._layers)]))
        return self._layers[-1]

    def clear(self) -> None:
        """Forgets the last step. Called after trial steps, such as steps before a graph is captured: their rows are
        equal and choose the same experts."""
        if self._counts is not None:
            self._counts.zero_()

    def count(self, stats: Stats) -> Stats:
        """Returns the worker's counters with these. Takes a sample if there were steps since the last one."""
        if self._counts is None or not self._layers:
            return stats
        if stats.steps_total != self._steps:
            self._steps = stats.steps_total
            self._sample(self._counts[: len(self._layers)])
        if self._recent is None:
            return stats
        return msgspec.structs.replace(
            stats,
            expert_samples_total=self.num_samples,
            experts_hit_total=self.num_hit,
            experts_hit_if_even_total=round(self.num_even),
            expert_loads=[round(float(load), 4) for load in self._recent.max(1) / self._recent.mean(1).clip(1e-9)],
        )

    def _sample(self, counts: Tensor) -> None:
        if self._link.copies:
            if self._copy is None:
                self._copy = _SideCopy(counts, self._link)
            arrived = self._copy.exchange()
        else:
            arrived = counts
        if arrived is not None:
            self._add(arrived.numpy().astype(np.float64))

    def _add(self, pairs: np.ndarray) -> None:
        num_experts = pairs.shape[1]
        top_k = np.array([layer.top_k for layer in self._layers], np.float64)
        rows = pairs.sum(1) / np.maximum(top_k, 1)
        if not rows.any():
            return
        self.num_samples += 1
        self.num_hit += int((pairs > 0).sum())
        self.num_even += float((num_experts * (1 - (1 - top_k / num_experts) ** rows)).sum())
        self._recent = pairs if self._recent is None else self._recent * DECAY + pairs


class _SideCopy:
    """Copies a tensor of a GPU to the host on a stream of its own, while steps run."""

    def __init__(self, source: Tensor, link: HostLink) -> None:
        self._source, self._stream = source, link.stream()
        self._host = link.host_tensor(source.shape, source.dtype)
        self._event: LinkEvent | None = None

    def exchange(self) -> Tensor | None:
        """Starts a copy and returns what the one before brought. None: there was none, or it is under way."""
        arrived = None
        if self._event is not None:
            if not self._event.query():
                return None
            arrived = self._host.clone()
        self._stream.follow_steps()  # behind `clear` after trial steps
        with self._stream.use():
            self._host.copy_(self._source, non_blocking=True)
            self._event = self._stream.event()
            self._event.record()
        return arrived
