"""Samples tokens on the host while later steps run, for slots with parameters that no kernel supports.

On the device such a slot waits: each step computes its last known token again and writes the same KV. One of these
steps copies its logits. When that step is done, the host samples the token, and the next launch writes it to the slot.
So the slot gets a token in every second step or so, and the others do not wait for it.
"""

import contextlib

import numpy as np
import torch
from torch import Tensor

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.batch import Batch
from blockyard.services.gpu_worker.execution.device_slots import DeviceSlots
from blockyard.shared.messages import SlotResult


class HostSampling:
    """Decides which logits a step copies, and samples from them on a stream of its own."""

    def __init__(self, batch: Batch, slots: DeviceSlots) -> None:
        self._batch, self._slots = batch, slots
        self._pending: dict[int, int] = {}  # owner by slot, of slots whose logits a step in flight copies
        self._copied_at = np.zeros(slots.num_slots, np.int64)  # number of the last copy of each slot
        self._num_copies = 0
        device = slots.state.arena.device
        # steps in flight fill the GPU: with a high priority the few small kernels of the sampler start between theirs
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def reset(self) -> None:
        """No step is in flight."""
        self._pending.clear()

    def choose(self, slots: Ints, counts: Ints) -> list[int]:
        """Rows of the next step whose logits it is to copy. Slots beyond the buffer's rows get a later step."""
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
        self._slots.copy_logits_of([int(slots[i]) for i in rows])
        return rows

    def copied_logits(self, rows: list[int]) -> Tensor | None:
        """The logits that the step just launched copies, [len(rows), vocab]. Later steps do not change them."""
        return self._slots.logits_edits.host_logits[: len(rows)].clone() if rows else None

    def on_done(self, slots: Ints, owners: Ints) -> None:
        """The step that copied logits of these slots is done."""
        for slot, owner in zip(slots.tolist(), owners.tolist(), strict=True):
            if self._pending.get(slot) == owner:
                del self._pending[slot]

    def sample(self, logits: Tensor, places: list[int], slots: Ints) -> list[SlotResult]:
        """Samples a token of each slot, and sends it to the device with the next step.

        logits [any, vocab] are from `copied_logits`, of a step that is done; places: the row of each slot in them.
        """
        table = self._batch.slots
        with torch.inference_mode(), self._on_stream():
            if self._stream is not None:
                logits.record_stream(self._stream)
            logits = logits if places == [*range(len(logits))] else logits[places]
            sampled = self._batch.sampler.sample(logits, slots, table)
        table.advance(slots, np.ones_like(slots))
        with torch.inference_mode():
            results = self._batch.append_sampled(sampled, slots)
        self._slots.sync_from_host(slots, table)
        return results

    def finish_stream(self) -> None:
        """Waits for both streams, before the sampler is used on the other one."""
        if self._stream is not None:
            self._stream.synchronize()
            torch.cuda.current_stream(self._stream.device).synchronize()

    def _on_stream(self) -> "contextlib.AbstractContextManager[object]":
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
