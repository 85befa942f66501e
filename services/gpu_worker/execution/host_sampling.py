"""Samples tokens on the host while later steps run, for slots with parameters that no kernel supports.

On the device such a slot waits: each step computes its last known token again and writes the same KV. One of these
steps copies its logits. When that step is done and its plan is answered, the host samples the token: the next launch
writes it to the slot, and the answer of the slot's next plan has it. So on a GPU the slot gets a token in every second
step or so, on the CPU in every step, and the others do not wait for it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.batch import Batch
from blockyard.services.gpu_worker.execution.device_slots import DeviceSlots
from blockyard.services.gpu_worker.host_link import HostLink
from blockyard.services.gpu_worker.sampling.host_rows import HostRows, Sampled
from blockyard.shared.config.services.worker import LogprobsMode
from blockyard.shared.messages import FinishReason, SlotResult, StepPlan


@dataclass(slots=True)
class _CopiedRows:
    """Rows of a step that is done, not sampled yet."""

    logits: Tensor  # [any, vocab], `LaunchedStep.host_logits`
    places: list[int]  # the row of each slot in them
    slots: Ints
    owners: Ints


class HostSampling:
    """Decides which logits a step copies, and samples from them on a stream of its own."""

    def __init__(
        self,
        batch: Batch,
        slots: DeviceSlots,
        vocab_size: int,
        eos_token_ids: list[int],
        mode: LogprobsMode,
        link: HostLink,
    ) -> None:
        self._batch, self._slots, self._eos = batch, slots, frozenset(eos_token_ids)
        self._pending: dict[int, int] = {}  # owner by slot, of slots with logits that a step in flight copies
        self._copied_at = np.zeros(slots.num_slots, np.int64)  # number of the last copy of each slot
        self._num_copies = 0
        self._copied: list[_CopiedRows] = []
        self._sampled: dict[int, tuple[int, SlotResult]] = {}  # by slot: its owner, and a result no plan has had yet
        device = slots.state.arena.device
        self._stream = link.stream(is_urgent=True)
        self._rows = HostRows(vocab_size, eos_token_ids, device, batch.matchers, self._stream, link.copies, mode)

    def reset(self) -> None:
        """No step is in flight."""
        self._pending.clear()
        self._copied.clear()
        self._sampled.clear()
        self._rows.reset()

    def end(self, slot: int) -> None:
        """Drops the state of the slot's parameters."""
        self._rows.end(slot)

    def choose(self, slots: Ints, counts: Ints) -> list[int]:
        """Rows of the next step with logits that it is to copy. Slots beyond the buffer's rows get a later step."""
        awaits = ~self._slots.samples_on_device[slots]
        table, rows = self._batch.slots, list[int]()
        if awaits.any():
            awaits &= table.num_computed[slots] + counts == table.num_tokens[slots]
            owners = table.owners[slots]
            rows = [i for i in np.flatnonzero(awaits).tolist() if self._pending.get(int(slots[i])) != owners[i]]
            rows.sort(key=lambda i: self._copied_at[slots[i]])
            rows = rows[: len(self._slots.logits_edits.host_logits)]
            self._copied_at[slots[rows]] = np.arange(len(rows)) + self._num_copies
            self._num_copies += len(rows)
            rows.sort()
            self._pending |= {int(slots[i]): int(owners[i]) for i in rows}
        return rows

    def on_done(self, slots: Ints, owners: Ints) -> None:
        """The step that copied logits of these slots is done."""
        for slot, owner in zip(slots.tolist(), owners.tolist(), strict=True):
            if self._pending.get(slot) == owner:
                del self._pending[slot]

    def add(self, logits: Tensor, places: list[int], slots: Ints, owners: Ints) -> None:
        """Has a token of each slot sampled by the next `sample`.

        logits [any, vocab] are the `host_logits` of a step that is done; places: the row of each slot in them.
        """
        self._copied.append(_CopiedRows(logits, places, slots, owners))

    def sample(self) -> None:
        """Samples all rows that were added, and sends the tokens to the device with the next step.

        To be called before the next plan is applied.
        """
        copied, self._copied = self._copied, []
        for rows in copied:
            with torch.inference_mode():
                results = self._sample(rows)
            for owner, result in zip(rows.owners.tolist(), results, strict=True):
                if result.token_ids or result.finish is not None:  # a row that waits for its mask has neither
                    self._sampled[result.slot] = owner, result

    def take_results(self, plan: StepPlan, results: list[SlotResult]) -> list[SlotResult]:
        """The results of slots that run in this plan and were sampled for an earlier one, each once.

        `results` are the plan's others: a slot has one in each plan.
        """
        if not self._sampled:
            return []
        table, has_result, taken = self._batch.slots, {result.slot for result in results}, list[SlotResult]()
        for run in plan.runs:
            if run.slot in self._sampled and run.slot not in has_result:
                owner, result = self._sampled.pop(run.slot)
                if table.owners[run.slot] == owner:
                    taken.append(result)
        return taken

    def _sample(self, rows: _CopiedRows) -> list[SlotResult]:
        table, logits, slots = self._batch.slots, rows.logits, rows.slots
        with self._stream.use():
            self._stream.keep(logits)
            logits = logits if rows.places == [*range(len(logits))] else logits[rows.places]
            sampled = self._rows.sample(logits, slots, table)
        table.advance(slots, np.ones_like(slots))
        results = self._append(sampled, slots)
        self._slots.sync_from_host(slots, table)
        return results

    def _append(self, sampled: Sampled, slots: Ints) -> list[SlotResult]:
        """Adds a token to each slot, which has computed all its tokens. Slots with a problem fail.

        Slots that wait get none, and compute their last token again.
        """
        table, results = self._batch.slots, list[SlotResult]()
        token_ids = np.array(sampled.token_ids, np.int64)
        waits = np.isin(np.arange(len(slots)), list(sampled.waiting))
        table.step_back(slots[waits])
        table.append(slots[~waits], token_ids[~waits])
        lengths = table.num_computed[slots].tolist()
        for i, (slot, length) in enumerate(zip(slots.tolist(), lengths, strict=True)):
            if (problem := sampled.problems.get(i)) is not None:
                self._batch.fail_slot(slot, int(table.owners[slot]))
                cause, status = problem
                results.append(SlotResult(slot, [], length, FinishReason.FAILED, detail=cause, status=status))
                continue
            if i in sampled.waiting:
                results.append(SlotResult(slot, [], length))
                continue
            token = sampled.token_ids[i]
            finish, stop = self._finish_reason_of(slot, token, length + 1)
            if finish is not None:
                table.finish(slot)
            logprobs = sampled.logprobs.get(i)
            results.append(SlotResult(slot, [token], length, finish, stop, [logprobs] if logprobs else []))
        return results

    def _finish_reason_of(self, slot: int, token: int, known: int) -> tuple[FinishReason | None, int | None]:
        """Returns the finish reason, if any, and the matched stop token. known: number of tokens with this one."""
        state = self._batch.slots.slots[slot]
        if token in self._eos and state.ends_at_eos:
            return FinishReason.STOP, None
        if token in state.stop_ids:
            return FinishReason.STOP, token
        return (FinishReason.LENGTH if known >= state.max_num_tokens else None), None
