"""Steps with prefill ahead of the host: it knows which tokens of prompts are computed, the device knows the others.

Rows are those of decodes first, whose ids and positions are gathered from the slots, then those of prefills, which come
from the host with everything else in one copy. No graphs: there are as many shapes as prompts.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard.kernels.gather_rows import NUM_WORDS, Rows
from blockyard.services.gpu_worker.decode_steps import DecodeSteps
from blockyard.services.gpu_worker.pinned_ring import Entry
from blockyard.services.gpu_worker.slots import Slots
from blockyard.services.gpu_worker.step import Step

Ints = npt.NDArray[np.int64]

ALIGNED = 16  # words: views at other places would have kernels compiled anew


def _up(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


@dataclass(frozen=True, slots=True)
class Layout:
    """Of the words of a step, int64. Behind the tokens there is one of no slot, for sequences that pad."""

    tokens: int
    seqs: int  # padded
    prefills: int

    @property
    def pitch(self) -> int:
        return _up(self.tokens + 1)

    @property
    def parts(self) -> list[int]:
        """Tokens, last token of each sequence twice, counts, first row of each prefill."""
        sizes = (NUM_WORDS * self.pitch, self.seqs, self.seqs, (self.seqs + 1) // 2, self.prefills // 2 + 1)
        return [_up(size) for size in sizes]


class MixedSteps:
    """On the slots, buffers and kernels of the decode steps."""

    def __init__(self, steps: DecodeSteps) -> None:
        self._steps, self._device = steps, steps.pool.device

    def prepare(self, entry: Entry, slots: Ints, counts: Ints, table: Slots) -> "MixedStep":
        """`counts` tokens of each slot, ones first. Where there are more, the host knows them all."""
        num_decodes = int((counts == 1).sum())
        seqs = self._steps.fits(len(slots))
        layout = Layout(int(counts.sum()), seqs, len(slots) - num_decodes)
        words = entry.words(sum(layout.parts))
        host = [part.numpy() for part in torch.split(words, layout.parts)]
        ends = np.cumsum(counts)
        rows = host[0].reshape(NUM_WORDS, -1)
        rows[:, layout.tokens :] = 0
        rows[[2, 4], layout.tokens :] = -1
        prefills, many = slots[num_decodes:], counts[num_decodes:]
        owners = np.repeat(prefills, many)
        begins = table.computed[prefills]
        positions = np.arange(num_decodes, layout.tokens) - np.repeat(ends[num_decodes:] - many - begins, many)
        part = rows[:, num_decodes : layout.tokens]
        draws = np.where(positions + 1 >= table.known[owners], owners, -1)
        part[:] = table.token_ids[owners, positions], positions, owners, positions + 1, draws
        host[1][:] = layout.tokens
        host[2][:] = 0
        host[1][: len(slots)] = host[2][: len(slots)] = ends - 1
        host[3].view(np.int32)[: len(slots)] = counts
        starts = host[4].view(np.int32)
        starts[0] = num_decodes
        starts[1 : layout.prefills + 1] = ends[num_decodes:]
        device = torch.split(words.to(self._device, non_blocking=True), layout.parts)
        return MixedStep(self._steps, layout, num_decodes, list(device))


class MixedStep:
    """One of them, prepared."""

    def __init__(self, steps: DecodeSteps, layout: Layout, num_decodes: int, words: list[Tensor]) -> None:
        self._steps, self._layout, self._num_decodes, self._words = steps, layout, num_decodes, words
        self._rows = Rows(*(row[: layout.tokens] for row in words[0].view(NUM_WORDS, -1)))

    def forward(self) -> Tensor:
        """Hidden rows of all tokens, [tokens, hidden]."""
        steps, layout, rows = self._steps, self._layout, self._rows
        if self._num_decodes:
            steps.ops.gather(steps.slots.state, rows.first(self._num_decodes))
        starts = self._words[4].view(torch.int32)[: layout.prefills + 1]
        attend = steps.ops.attend(steps.pool, rows, steps.slots.state.tables, starts, self._num_decodes)
        return steps.model.forward(Step(rows.token_ids, rows.positions, attend))

    def sample(self, hidden: Tensor, asked: bool) -> None:
        """The slots whose known tokens are all computed draw; all go on or end."""
        steps, words, seqs = self._steps, self._words, self._layout.seqs
        last = words[0].view(NUM_WORDS, -1).index_select(1, words[1][:seqs])
        logits = steps.model.logits(hidden.index_select(0, words[2][:seqs]))
        steps.draw(Rows(*last), logits, asked, words[3].view(torch.int32)[:seqs])
