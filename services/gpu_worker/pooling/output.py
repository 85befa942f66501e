"""From the rows of a step to the bytes of results: pooler, head, and the copy to host memory."""

from collections.abc import Iterator, Mapping, Sequence
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
from blockyard.services.gpu_worker.pooling.poolers import Pooler, RowsNeeded, make_poolers
from blockyard.shared.config.pooling.activations import Activation
from blockyard.shared.config.pooling.modes import PoolingMode, read_vllm_name
from blockyard.shared.config.pooling.pooling_choice import PoolingChoice
from blockyard.shared.messages import FinishReason, PoolingParams, SlotResult


class PoolingOptions(NamedTuple):
    """What a request says about its results. None: as the model's settings say."""

    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool = True  # of scores and classes; False: logits
    softmax: bool | None = None  # in place of their function; False: no function
    mode: PoolingMode | None = None
    step_tag_id: int | None = None
    returned_ids: tuple[int, ...] | None = None  # the outputs of a classifier that are kept

    @property
    def pooler(self) -> tuple[PoolingMode | None, int | None]:
        return self.mode, self.step_tag_id


def options_of(params: PoolingParams | None) -> PoolingOptions:
    """Raises ConfigError for a pooling type of another name."""
    if params is None:
        return DEFAULT
    returned = params.returned_token_ids
    return PoolingOptions(
        params.dimensions,
        params.normalize,
        params.use_activation is not False,
        params.softmax,
        None if params.pooling_type is None else read_vllm_name(params.pooling_type, "pooling_type"),
        params.step_tag_id,
        None if returned is None else tuple(returned),
    )


DEFAULT = PoolingOptions()
NOT_FINITE = "the model's vectors are not finite"


@dataclass(slots=True)
class PooledResults:
    """Results of a step that are on their way to host memory. They may be read once `done` has passed."""

    slots: list[int]
    lengths: list[int]  # float32 numbers of each slot's result
    widths: list[int]  # numbers of a row of it; 0: it is one row
    numbers: Tensor  # all of them, float32 in host memory
    done: LinkEvent

    def to_slot_results(self, lengths: Mapping[int, int]) -> list[SlotResult]:
        """Returns the finished slots. lengths: tokens of each slot. One with numbers that are not finite fails."""
        bad, found = self.not_finite(), []
        for slot, width, data in zip(self.slots, self.widths, self.to_bytes(), strict=True):
            if slot in bad:
                found.append(SlotResult(slot, [], lengths[slot], FinishReason.FAILED, detail=NOT_FINITE))
            else:
                found.append(SlotResult(slot, [], lengths[slot], FinishReason.STOP, vector=data, width=width))
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

    def __init__(
        self,
        pooler: Pooler,
        head: VectorHead | ClassHead,
        link: HostLink,
        modes: Sequence[PoolingMode] = (),
        step_tag_id: int | None = None,
    ) -> None:
        """modes, step_tag_id: of `pooler`."""
        self.pooler, self.head, self._link = pooler, head, link
        self._modes, self._step_tag_id = modes, step_tag_id
        self._poolers: dict[tuple[PoolingMode | None, int | None], Pooler] = {DEFAULT.pooler: pooler}
        self._copies = link.stream()

    def tensors(self) -> list[Tensor]:
        """The weights that are not the model's."""
        return self.head.tensors()

    def add(self, chunk: PooledChunk, options: Sequence[PoolingOptions]) -> PooledResults:
        """Adds the rows of a step. options: of each of its sequences."""
        slots: list[int] = []
        lengths: list[int] = []
        widths: list[int] = []
        found: list[Tensor] = []
        for part, of_part in _by_pooler(chunk, options):
            rows = self._pooler(of_part[0]).add(part)
            complete = [i for i, one in enumerate(part.sequences) if one.is_complete]
            counts = [len(one) for one in rows]
            slots += [part.sequences[i].slot for i in complete]
            first = 0
            for option, group in groupby(of_part[i] for i in complete):  # nearly always one: those of one request
                count = len(list(group))
                made = self._apply(torch.cat(rows[first : first + count]), option)
                width = made.shape[1]
                lengths += [n * width for n in counts[first : first + count]]
                widths += [width if self._is_of_tokens(option) else 0] * count
                found.append(made.flatten())
                first += count
        flat = torch.cat(found) if found else torch.empty(0, device=chunk.hidden.device)
        return PooledResults(slots, lengths, widths, *self._to_host(flat))

    def _pooler(self, option: PoolingOptions) -> Pooler:
        pooler = self._poolers.get(option.pooler)
        if pooler is None:
            modes = self._modes if option.mode is None else (option.mode,)
            pooler = self._poolers[option.pooler] = make_poolers(
                modes, self._step_tag_id if option.step_tag_id is None else option.step_tag_id
            )
        return pooler

    def _is_of_tokens(self, option: PoolingOptions) -> bool:
        return any(mode.is_of_tokens for mode in (self._modes if option.mode is None else (option.mode,)))

    def needs_all_rows(self, option: PoolingOptions) -> bool:
        """Whether a sequence must be computed from its first token on."""
        return self._pooler(option).rows is RowsNeeded.ALL

    def _apply(self, rows: Tensor, option: PoolingOptions) -> Tensor:
        if isinstance(self.head, ClassHead):
            return self.head(
                rows, use_activation=option.use_activation, softmax=option.softmax, returned_ids=option.returned_ids
            )
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
        for pooler in self._poolers.values():
            pooler.drop(slot)


def _by_pooler(
    chunk: PooledChunk, options: Sequence[PoolingOptions]
) -> Iterator[tuple[PooledChunk, list[PoolingOptions]]]:
    """The sequences that one pooler reduces, with their options. Nearly always all of them."""
    keys = {option.pooler for option in options}
    if len(keys) == 1:
        yield chunk, list(options)
        return
    starts, counts = chunk.starts, chunk.counts
    for key in sorted(keys, key=str):
        places = [i for i, option in enumerate(options) if option.pooler == key]
        rows = np.concatenate([np.arange(starts[i], starts[i] + counts[i]) for i in places])
        hidden = chunk.hidden.index_select(0, chunk.on_device(rows))
        sequences = [chunk.sequences[i] for i in places]
        yield PooledChunk(hidden, sequences, chunk.token_ids[rows], chunk.link), [options[i] for i in places]


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
    return PoolingOutput(pooler, head, link, choice.modes, choice.step_tag_id)
