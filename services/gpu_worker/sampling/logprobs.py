"""Log-probabilities of the raw logits, before temperature, penalties, masks and truncation.

vLLM reports them by default (`logprobs_mode=raw_logprobs`). They are comparable across sampling parameters.
"""

import msgspec
import numpy as np
import torch
from torch import Tensor

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.slots import Slot, Slots
from blockyard.shared.messages import SlotResult, TokenLogprobs

ROWS_AT_ONCE = 256  # bounds the logits in memory


def score(logprobs: Tensor, token_ids: Tensor, num_top: int) -> list[TokenLogprobs]:
    """One entry for each row of logprobs [rows, vocab]: its token and the `num_top` likeliest. Ranks start at 1."""
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(-1).add_(1)
    top = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1) if num_top else None
    columns = zip(token_ids.tolist(), chosen[:, 0].tolist(), ranks.tolist(), strict=True)
    if top is None:
        return [TokenLogprobs(token, value, rank, [], []) for token, value, rank in columns]
    rows = zip(columns, top.indices.tolist(), top.values.tolist(), strict=True)
    return [TokenLogprobs(token, value, rank, ids, values) for (token, value, rank), ids, values in rows]


class PromptLogprobs:
    """Scores prompt tokens. Position p's entry comes from the logits at p - 1; position 0 has none."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def add(
        self, table: Slots, slots: Ints, counts: Ints, begin: Ints, hidden: Tensor, results: list[SlotResult]
    ) -> list[SlotResult]:
        """Returns the results; slots with prompt log-probabilities get the entries of this step's tokens."""
        asked = {s: i for i, s in enumerate(slots.tolist()) if table.slots[s].sampling.num_prompt_logprobs is not None}
        if not asked:
            return results
        starts = np.cumsum(counts) - counts
        for i, result in enumerate(results):
            place = asked.get(result.slot)
            if place is None:
                continue
            slot, done = table.slots[result.slot], int(begin[place])
            positions = table.scored(result.slot, done, int(counts[place]))
            if not positions:
                continue
            first, last = positions.start, positions.stop
            offset = int(starts[place]) - done - 1  # position p is scored by row offset + p
            ids = table.token_ids[result.slot, first:last]
            entries = self._score(hidden[offset + first : offset + last], ids, slot)
            results[i] = msgspec.structs.replace(result, first_prompt=first, prompt_logprobs=entries)
        return results

    def _score(self, hidden: Tensor, ids: Ints, slot: Slot) -> list[TokenLogprobs]:
        num = slot.sampling.num_prompt_logprobs or 0
        entries: list[TokenLogprobs] = []
        for start in range(0, len(ids), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            logits = self._model.logits(hidden[part]).float()
            targets = torch.from_numpy(ids[part]).to(logits.device)
            entries.extend(score(logits.log_softmax(-1), targets, num))
        return entries
