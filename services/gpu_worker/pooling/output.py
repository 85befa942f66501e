"""From the rows of a step to the bytes of results: pooler, head, and the copy to host memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard.services.gpu_worker.arrays import Ints
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
    """Results of a step that are on their way to host memory. They may be read once `done` has passed.

    They are of the sequences that are complete. The columns are in the order of `numbers`.
    """

    slots: Ints
    places: Ints  # of the sequences in their chunk
    lengths: Ints  # float32 numbers of each result
    widths: Ints  # numbers of a row of it; 0: it is one row
    numbers: Tensor  # all of them, float32 in host memory
    done: LinkEvent

    def to_slot_results(self, lengths: Mapping[int, int]) -> list[SlotResult]:
        """Returns the finished slots. lengths: tokens of each slot. One with numbers that are not finite fails."""
        bad, found = self.not_finite(), []
        columns = zip(self.slots.tolist(), self.widths.tolist(), self._to_bytes(), bad, strict=True)
        for slot, width, data, is_bad in columns:
            if is_bad:
                found.append(SlotResult(slot, [], lengths[slot], FinishReason.FAILED, detail=NOT_FINITE))
            else:
                found.append(SlotResult(slot, [], lengths[slot], FinishReason.STOP, vector=data, width=width))
        return found

    def not_finite(self) -> "npt.NDArray[np.bool_]":
        """Of each result, whether it has numbers that are not finite."""
        finite = np.isfinite(self.numbers.numpy())
        bad = np.zeros(len(self.lengths), np.bool_)
        if not finite.all():
            bad[np.searchsorted(np.cumsum(self.lengths), np.flatnonzero(~finite), "right")] = True
        return bad

    def to_block(self) -> tuple[Ints, bytes, Ints]:
        """The lengths of the results, their little-endian float32 numbers, and their widths, in the order of places.

        A result with numbers that are not finite has none.
        """
        bad, is_sorted = self.not_finite(), bool((np.diff(self.places) > 0).all())
        if is_sorted and not bad.any():
            return self.lengths, self.numbers.numpy().astype("<f4", copy=False).tobytes(), self.widths
        order, data = np.argsort(self.places), self._to_bytes()
        lengths = np.where(bad, 0, self.lengths)[order]
        return lengths, b"".join([data[i] for i in order.tolist() if not bad[i]]), self.widths[order]

    def _to_bytes(self) -> list[bytes]:
        """The little-endian float32 numbers of each result."""
        whole = self.numbers.numpy().astype("<f4", copy=False)
        ends = np.cumsum(self.lengths).tolist()
        return [whole[end - n : end].tobytes() for n, end in zip(self.lengths.tolist(), ends, strict=True)]


OptionRuns = Sequence[tuple[int, PoolingOptions]]  # of neighbouring sequences: how many, and their options


class PoolingOutput:
    """Makes the results of sequences. It has what earlier steps computed of incomplete ones."""

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

    def add(self, chunk: PooledChunk, options: OptionRuns) -> PooledResults:
        """Adds the rows of a step. options: of its sequences, in order."""
        places: list[Ints] = []
        lengths: list[Ints] = []
        widths: list[Ints] = []
        found: list[Tensor] = []
        for part, of_part, part_places in _by_pooler(chunk, options):
            pooled = self._pooler(of_part[0][1]).add(part)
            complete = part.complete
            counts = np.ones(len(complete), np.int64) if pooled.counts is None else pooled.counts
            last = np.searchsorted(complete, np.cumsum([count for count, _ in of_part]))  # of each run of options
            first = first_row = 0
            for (_, option), end in zip(of_part, last.tolist(), strict=True):
                num_rows = int(counts[first:end].sum())
                made = self._apply(pooled.rows[first_row : first_row + num_rows], option)
                width = made.shape[1]
                lengths.append(counts[first:end] * width)
                widths.append(np.full(end - first, width if self._is_of_tokens(option) else 0))
                found.append(made.flatten())
                first, first_row = end, first_row + num_rows
            places.append(complete if part_places is None else part_places[complete])
        order = np.concatenate(places)
        flat = found[0] if len(found) == 1 else torch.cat(found)
        columns = chunk.slots[order], order, np.concatenate(lengths), np.concatenate(widths)
        return PooledResults(*columns, *self._to_host(flat))

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
        self._copies.keep(numbers)
        event.record()
        return host, event

    def drop(self, slot: int) -> None:
        """Drops the state of a sequence that ended or starts over."""
        for pooler in self._poolers.values():
            pooler.drop(slot)


def _by_pooler(
    chunk: PooledChunk, options: OptionRuns
) -> Iterator[tuple[PooledChunk, list[tuple[int, PoolingOptions]], Ints | None]]:
    """The sequences that one pooler reduces, with their options and places. Nearly always all of them: places None."""
    keys = {option.pooler for _, option in options}
    if len(keys) == 1:
        yield chunk, list(options), None
        return
    ends = np.cumsum([count for count, _ in options]).tolist()
    for key in sorted(keys, key=str):
        runs = [(end, *run) for end, run in zip(ends, options, strict=True) if run[1].pooler == key]
        places = np.concatenate([np.arange(end - count, end) for end, count, _ in runs])
        yield chunk.at(places), [(count, option) for _, count, option in runs], places


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
