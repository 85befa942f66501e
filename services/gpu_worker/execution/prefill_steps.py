"""Steps with prefill ahead of the host: it knows which tokens of prompts are computed, the device knows the others.

Rows are those of decodes first, whose ids and positions are gathered from the slots, then those of prefills, which come
from the host with everything else in one copy. The last layer and the logits are computed for the last token of each
sequence alone, and not at all where no sequence comes to its end.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard.kernels.slots.gather_inputs import NUM_INPUT_WORDS, StepInputs
from blockyard.services.gpu_worker.execution.decode_graphs import DecodeSteps
from blockyard.services.gpu_worker.execution.pinned_ring import Entry
from blockyard.services.gpu_worker.slots import Slots
from blockyard.services.gpu_worker.step import Step, Wanted

Ints = npt.NDArray[np.int64]

ALIGNED = 16  # words: views at other places would have kernels compiled anew


def _up(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


@dataclass(frozen=True, slots=True)
class Layout:
    """Of the words of a step, int64. Behind the tokens there is one of no slot, for sequences that pad."""

    decodes: int  # rows of them; the last ones may pad, as in all that follows
    fresh: int  # tokens of prompts; those that pad are one more prefill, of no slot
    prefills: int
    seqs: int  # that may draw a token

    @property
    def tokens(self) -> int:
        return self.decodes + self.fresh

    @property
    def pitch(self) -> int:
        return _up(self.tokens + 1)

    @property
    def parts(self) -> list[int]:
        """Tokens, last token of each sequence twice, counts, first row of each prefill."""
        sizes = (NUM_INPUT_WORDS * self.pitch, self.seqs, self.seqs, (self.seqs + 1) // 2, self.prefills // 2 + 1)
        return [_up(size) for size in sizes]


def clear(words: Tensor, layout: Layout) -> None:
    """Writes a step on the host in which everything pads."""
    rows, last, places, counts, starts = (part.numpy() for part in torch.split(words, layout.parts))
    table = rows.reshape(NUM_INPUT_WORDS, -1)
    table[:] = 0
    table[[2, 4]] = -1
    last[:] = layout.tokens
    places[:] = counts[:] = 0
    starts.view(np.int32)[: layout.prefills] = layout.decodes
    starts.view(np.int32)[layout.prefills] = layout.tokens


def fill(words: Tensor, layout: Layout, slots: Ints, counts: Ints, table: Slots) -> bool:
    """Writes a step on the host: `counts` tokens of each slot, ones first. Where there are more, the host knows them
    all. Returns whether a slot may be due for a token."""
    clear(words, layout)
    rows, last, places, sizes, starts = (part.numpy() for part in torch.split(words, layout.parts))
    ids, positions, owners, index, sampled_slots = rows.reshape(NUM_INPUT_WORDS, -1)
    first_rows = starts.view(np.int32)
    num_decodes, row = int((counts == 1).sum()), layout.decodes
    is_due = num_decodes > 0
    last[: len(slots)] = np.arange(len(slots))
    for i in range(num_decodes, len(slots)):
        slot, count = int(slots[i]), int(counts[i])
        begin, end, stop = int(table.computed[slot]), row + count, int(table.computed[slot]) + count
        ids[row:end] = table.token_ids[slot, begin:stop]
        positions[row:end] = np.arange(begin, stop)
        index[row:end] = np.arange(begin + 1, stop + 1)
        owners[row:end] = slot
        due = int(table.known[slot]) - 1 - begin  # the row from which on tokens that follow are not known
        if due < count:
            sampled_slots[row + max(due, 0) : end] = slot
            is_due = True
        last[i] = end - 1
        first_rows[i - num_decodes + 1] = row = end
    places[: len(slots)] = last[: len(slots)]
    sizes.view(np.int32)[: len(slots)] = counts
    first_rows[len(slots) - num_decodes + 1 : layout.prefills] = row
    return is_due


class MixedSteps:
    """On the slots, buffers and kernels of the decode steps."""

    def __init__(self, steps: DecodeSteps) -> None:
        self._steps, self._device = steps, steps.pool.device

    def layout(self, counts: Ints) -> Layout:
        """Of so many tokens of each slot."""
        num_decodes = int((counts == 1).sum())
        fresh, num_seqs = int(counts.sum()) - num_decodes, len(counts)
        return Layout(num_decodes, fresh, num_seqs - num_decodes, self._steps.fits(num_seqs))

    def prepare(self, entry: Entry, layout: Layout, slots: Ints, counts: Ints, table: Slots) -> "MixedStep":
        words = entry.words(sum(layout.parts))
        is_due, reach = fill(words, layout, slots, counts, table), int((table.computed[slots] + counts).max())
        return MixedStep(self._steps, layout, words.to(self._device, non_blocking=True), is_due, reach)


@dataclass(frozen=True, slots=True)
class Due:
    """What a forward pass leaves for the sampler, of each sequence."""

    last: StepInputs  # its last token
    counts: Tensor  # [seqs] int32, tokens computed
    logits: Tensor | None  # [seqs, vocab_size]; None: no sequence is due for a token


class MixedStep:
    """One of them, prepared: words as from `fill`, on the device."""

    def __init__(
        self, steps: DecodeSteps, layout: Layout, words: Tensor, is_due: bool = True, reach: int | None = None
    ) -> None:
        """is_due: a slot may draw a token. No position of a prompt is beyond `reach`."""
        self._steps, self._layout, self._is_due, self._reach = steps, layout, is_due, reach
        self._words = list(torch.split(words, layout.parts))
        self._table = self._words[0].view(NUM_INPUT_WORDS, -1)
        self._rows = StepInputs(*(row[: layout.tokens] for row in self._table))

    def forward_all(self) -> Tensor:
        """Hidden rows of all tokens, [tokens, hidden]."""
        self._gather()
        return self._forward(None)

    def forward(self) -> Due:
        seqs, is_due = self._layout.seqs, self._is_due
        self._gather()
        last = StepInputs(*(row[:seqs] for row in self._table.index_select(1, self._words[1])))
        num_wanted = seqs if is_due else 0
        wanted = Wanted(self._words[2][:num_wanted], last.slots[:num_wanted], last.positions[:num_wanted])
        hidden, counts = self._forward(wanted), self._words[3].view(torch.int32)[:seqs]
        return Due(last, counts, self._steps.model.logits(hidden) if is_due else None)

    def sample(self, due: Due, asked: bool) -> None:
        """The slots whose known tokens are all computed draw; all go on or end. asked: see `DecodeSteps.sample`."""
        if due.logits is not None:
            self._steps.draw(due.last, due.logits, asked, due.counts)
        else:
            self._steps.pass_over(due.last, due.counts)

    def _gather(self) -> None:
        if self._layout.decodes:
            self._steps.ops.gather(self._steps.slots.state, self._rows.first(self._layout.decodes))

    def _forward(self, wanted: Wanted | None) -> Tensor:
        steps, layout, rows = self._steps, self._layout, self._rows
        starts = self._words[4].view(torch.int32)[: layout.prefills + 1]
        attend = steps.ops.attend(
            steps.pool, rows, steps.slots.state.tables, starts, layout.decodes, wanted, self._reach
        )
        chosen = None if wanted is None else wanted.rows
        return steps.model.forward(Step(rows.token_ids, rows.positions, attend, chosen))
