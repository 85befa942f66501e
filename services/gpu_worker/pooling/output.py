"""From the rows of a step to the bytes of results: pooler, head, and the copy to host memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockyard.services.gpu_worker.host_link import HostLink, LinkEvent
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.pooling.chunks import PooledChunk
from blockyard.services.gpu_worker.pooling.heads import ClassHead, VectorHead
from blockyard.services.gpu_worker.pooling.poolers import Pooler, make_poolers
from blockyard.shared.config.pooling.activations import Activation
from blockyard.shared.config.pooling.pooling_choice import PoolingChoice
from blockyard.shared.messages import FinishReason, SlotResult


class PoolingOptions(NamedTuple):
    """What a request says about its results."""

    dimensions: int | None = None
    normalize: bool | None = None  # None: as the model does
    use_activation: bool = True  # of scores and classes; False: logits


DEFAULT = PoolingOptions()
NOT_FINITE = "the model's vectors are not finite"


@dataclass(slots=True)
class PooledResults:
    """Results of a step that are on their way to host memory. They may be read once `done` has passed."""

    slots: list[int]
    lengths: list[int]  # float32 numbers of each slot's result
    numbers: Tensor  # all of them, float32 in host memory
    done: LinkEvent

    def to_slot_results(self, lengths: Mapping[int, int]) -> list[SlotResult]:
        """Returns the finished slots. lengths: tokens of each slot. One with numbers that are not finite fails."""
        bad, found = self.not_finite(), []
        for slot, data in zip(self.slots, self.to_bytes(), strict=True):
            if slot in bad:
                found.append(SlotResult(slot, [], lengths[slot], FinishReason.FAILED, detail=NOT_FINITE))
            else:
                found.append(SlotResult(slot, [], lengths[slot], FinishReason.STOP, vector=data))
        return found

    def not_finite(self) -> set[int]:
        """The slots whose results have numbers that are not finite."""
        finite = np.isfinite(self.numbers.numpy())
        if finite.all():
            return set()
        bad = set(np.searchsorted(np.cumsum(self.lengths), np.flatnonzero(~finite), "right").tolist())
        return {self.slots[place] for place in bad}

    def to_bytes(self) -> list[bytes]:
        """The little-endian float32 numbers of each slot."""
        whole = self.numbers.numpy().astype("<f4", copy=False)
        ends = np.cumsum(self.lengths).tolist()
        return [whole[end - n : end].tobytes() for n, end in zip(self.lengths, ends, strict=True)]


class PoolingOutput:
    """Makes the results of sequences. It has what earlier steps computed of those that are not complete."""

    def __init__(self, pooler: Pooler, head: VectorHead | ClassHead, link: HostLink) -> None:
        self.pooler, self.head, self._link = pooler, head, link
        self._copies = link.stream()

    def tensors(self) -> list[Tensor]:
        """The weights that are not the model's."""
        return self.head.tensors()

    def add(self, chunk: PooledChunk, options: Sequence[PoolingOptions]) -> PooledResults:
        """Adds the rows of a step. options: of each of its sequences."""
        rows = self.pooler.add(chunk)
        complete = [i for i, one in enumerate(chunk.sequences) if one.is_complete]
        slots = [chunk.sequences[i].slot for i in complete]
        counts = [len(one) for one in rows]
        found: list[Tensor] = []
        lengths: list[int] = []
        first = 0
        for option, group in groupby(options[i] for i in complete):  # nearly always one: those of one request
            count = len(list(group))
            made = self._apply(torch.cat(rows[first : first + count]), option)
            lengths += [n * made.shape[1] for n in counts[first : first + count]]
            found.append(made.flatten())
            first += count
        flat = torch.cat(found) if found else torch.empty(0, device=chunk.hidden.device)
        return PooledResults(slots, lengths, *self._to_host(flat))

    def _apply(self, rows: Tensor, option: PoolingOptions) -> Tensor:
        if isinstance(self.head, ClassHead):
            return self.head(rows, use_activation=option.use_activation)
        return self.head(rows, option.dimensions, option.normalize)

    def _to_host(self, numbers: Tensor) -> tuple[Tensor, LinkEvent]:
        event = self._copies.event()
        if not self._link.copies:
            return numbers, event
        host = self._link.host_tensor(numbers.shape, torch.float32)
        self._copies.follow_steps()
        with self._copies.use():
            host.copy_(numbers, non_blocking=True)
            numbers.record_stream(torch.cuda.current_stream())
        event.record()
        return host, event

    def drop(self, slot: int) -> None:
        """Forgets what is kept of a sequence that ended or starts over."""
        self.pooler.drop(slot)


def make_output(model: Model, choice: PoolingChoice, folder: Path, activation: Activation | None) -> PoolingOutput:
    """Makes the output of a model. folder: of the model. activation: of a classifier's logits; None: it makes vectors.

    Raises LoadError for weights of dense layers that do not fit.
    """
    device, link = model.table.device, model.table.link
    pooler = make_poolers(choice.modes, choice.step_tag_id)
    head: VectorHead | ClassHead = (
        VectorHead(choice, folder, device)
        if activation is None
        else ClassHead(model, activation, choice.returned_token_ids)
    )
    return PoolingOutput(pooler, head, link)
