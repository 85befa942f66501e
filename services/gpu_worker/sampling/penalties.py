"""Repetition, presence and frequency penalties, with counts only for the slots that ask."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard.shared.messages import Sampling

Ints = npt.NDArray[np.int64]


class Penalties:
    """Counts on the device. Repetition looks at prompt and output, presence and frequency at the output alone."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._rows: dict[int, int] = {}  # by slot
        self._free: list[int] = []
        self._seen = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._weights = torch.zeros((0, 3), dtype=torch.float32, device=device)  # repetition, presence, frequency

    def start(self, slot: int, sampling: Sampling, token_ids: Ints, num_prompt_tokens: int) -> bool:
        """Whether this slot is penalised at all."""
        weights = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        if weights == (1.0, 0.0, 0.0):
            return False
        if not self._free:
            self._grow()
        row = self._rows[slot] = self._free.pop()
        ids = torch.from_numpy(token_ids).to(self._device)
        self._seen[row].fill_(False)
        self._seen[row, ids] = True
        self._counts[row] = torch.bincount(ids[num_prompt_tokens:], minlength=self._counts.shape[1])
        self._weights[row] = torch.tensor(weights, device=self._device)
        return True

    def end(self, slot: int) -> None:
        row = self._rows.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def rows(self, slots: list[int]) -> list[tuple[int, int]]:
        """(place in `slots`, row here) of those that are penalised."""
        return [(i, self._rows[s]) for i, s in enumerate(slots) if s in self._rows]

    def apply(self, logits: Tensor, rows: list[tuple[int, int]]) -> None:
        """Changes the rows of logits [rows, vocab] in place."""
        index = torch.tensor(rows, device=self._device)
        places, mine = index[:, 0], index[:, 1]
        weights, counts = self._weights[mine], self._counts[mine]
        repeated = torch.where(self._seen[mine], weights[:, 0:1], 1.0)
        part = logits[places]
        part = torch.where(part > 0, part / repeated, part * repeated)
        part -= weights[:, 2:3] * counts
        part -= weights[:, 1:2] * (counts > 0)
        logits[places] = part

    def count(self, rows: list[tuple[int, int]], token_ids: list[int]) -> None:
        """Adds the tokens that were chosen; `rows` as `rows` gave them."""
        mine = torch.tensor([row for _, row in rows], device=self._device)
        tokens = torch.tensor([token_ids[place] for place, _ in rows], device=self._device)
        self._seen[mine, tokens] = True
        self._counts[mine, tokens] += 1

    def _grow(self) -> None:
        have = len(self._weights)
        more = max(have, 4)
        self._free += range(have, have + more)
        self._seen = torch.cat((self._seen, self._seen.new_zeros((more, self._seen.shape[1]))))
        self._counts = torch.cat((self._counts, self._counts.new_zeros((more, self._counts.shape[1]))))
        self._weights = torch.cat((self._weights, self._weights.new_zeros((more, 3))))
