"""The host's view of the slots on the device: collects the words to write there before the next step."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from blockyard.kernels.sampling.philox_gumbel import split_seed
from blockyard.kernels.sampling.sampling_state import SamplingTensors
from blockyard.kernels.slots.slot_state import MAX_STOP_IDS, NUM_FIELDS, Field, SlotState
from blockyard.services.gpu_worker.arrays import Ints, Words
from blockyard.services.gpu_worker.execution.device_writes import DeviceWrites
from blockyard.services.gpu_worker.host_link import HostLink
from blockyard.services.gpu_worker.sampling.logits_edits import DeviceLogitsEdits
from blockyard.services.gpu_worker.slots import Slots
from blockyard.shared.messages import SlotStart, StepPlan

SLOTS = 2  # slots for each row: schedulers keep spare slots


class DeviceSlots:
    """Tracks which state of `Slots` the device has, and collects the difference."""

    def __init__(
        self,
        state: SlotState,
        num_slots: int,
        vocab_size: int,
        eos_token_ids: list[int],
        link: HostLink,
        logits_edits: bool = False,
        mask_owner: Callable[[int], int] | None = None,
        num_extra_tokens: int = 0,
    ) -> None:
        """num_slots: that are used, of the slots in `state`, whose block tables are not written if they are empty.

        logits_edits: penalties, edits of tokens and log-probabilities are computed on the device, too. mask_owner: of a
        slot that has started, whose masks the device applies with them; 0: it has no constraint. None: no masks.
        num_extra_tokens: that adapters may add behind the vocabulary.
        """
        self.state = state
        self.params = SamplingTensors(
            temperature=state.floats(Field.TEMPERATURE),
            top_k=state.fields[Field.TOP_K],
            top_p=state.floats(Field.TOP_P),
            min_p=state.floats(Field.MIN_P),
            key=state.fields[Field.KEY : Field.KEY + 2],
            choice=state.fields[Field.CHOICE],
        )
        self.logits_edits = DeviceLogitsEdits(state, vocab_size, link, logits_edits, num_extra_tokens)
        self._mask_owner = mask_owner
        self.num_slots, self._vocab_size, self._eos = num_slots, vocab_size, eos_token_ids
        self._field_offsets = (np.arange(NUM_FIELDS) * state.fields.shape[1]).tolist()
        self._tables_offset, self._width = state.offset(state.tables), state.tables.shape[1]
        self._rows = np.full(len(state.row_slots), -1, np.int64)  # slots by row, as on the device
        self.samples_on_device = np.zeros(num_slots, np.bool_)  # by slot: it needs no host between its tokens
        self.host_sampled: set[int] = set()  # the slots in use that need it
        self.has_mask = np.zeros(num_slots, np.bool_)  # by slot: the device applies its masks
        self.version = 0  # of the slots' parameters: it grows whenever a slot starts or ends
        self._logits_rows: dict[int, int] = {}  # by slot with logits that the next step copies for the host
        # by slot whose prompt is to get log-probabilities in the next steps: how many of the top tokens
        self.num_prompt_logprobs: dict[int, int] = {}
        self._sent = np.zeros(num_slots, np.int64)  # number of blocks
        self._writes = DeviceWrites()

    def reset(self, step: int) -> None:
        """Ends all slots. step: number of steps so far."""
        self._writes.clear()
        self.logits_edits.reset()
        self.samples_on_device[:] = self.has_mask[:] = False
        self.host_sampled.clear()
        self.version += 1
        self._logits_rows.clear()
        self.num_prompt_logprobs.clear()
        self._sent[:] = 0
        self._rows[:] = -1
        state = self.state
        self._set(Field.LIVE, np.arange(self.num_slots), 0)
        self._writes.add(np.arange(len(self._rows)) + state.offset(state.row_slots), self._rows)
        self.count_step(step)

    def count_step(self, step: int) -> None:
        """Sets the step counter, modulo 2**32, for a step that gathers no rows: the device counts it only while
        gathering."""
        self._writes.put(self.state.offset(self.state.step), step)

    def clear_rows(self) -> None:
        """Makes all rows padding, on the device at once: for trial steps."""
        self.state.row_slots.fill_(-1)
        self._rows[:] = -1

    def apply(self, plan: StepPlan, table: Slots) -> None:
        """Collects a plan's changes, after `table` has applied them."""
        for slot in plan.ends:
            if slot < self.num_slots:
                self._stop(slot)
                self._end(slot)
        for start in plan.starts:
            if start.slot < self.num_slots:
                self._start(start, table)
        for added in plan.blocks:
            if added.slot < self.num_slots:
                self._send_blocks(added.slot, table)
                if not table.live[added.slot]:
                    self._end(added.slot)

    def send_next_tokens(self, slots: Ints, table: Slots) -> None:
        """Sends the next token of slots where only the host has it."""
        if len(slots):
            positions = table.num_computed[slots]
            self._set(Field.NEXT, slots, table.token_ids[slots, np.minimum(positions, table.token_ids.shape[1] - 1)])

    def sync_from_host(self, slots: Ints, table: Slots) -> None:
        """Collects the state of slots that the host has sampled."""
        self.send_next_tokens(slots, table)
        for slot in slots.tolist():
            self.logits_edits.recount(slot, table)
        self._set(Field.POSITION, slots, table.num_computed[slots])
        self._set(Field.KNOWN, slots, table.num_tokens[slots])
        self._set(Field.LIVE, slots, table.live[slots])

    def copy_logits_of(self, slots: list[int]) -> None:
        """The next step copies the logits of these slots to rows of `DeviceLogitsEdits.host_logits`, in this order."""
        rows = {slot: row for row, slot in enumerate(slots)}
        offset = self._field_offsets[Field.LOGITS_ROW]
        for slot in self._logits_rows.keys() - rows.keys():
            self._writes.put(offset + slot, -1)
        for slot, row in rows.items():
            if self._logits_rows.get(slot) != row:
                self._writes.put(offset + slot, row)
        self._logits_rows = rows

    def assign(self, slots: Ints, rows: int) -> None:
        """Assigns the first rows of the next step to these slots; the others, up to `rows`, are padding."""
        wanted = np.full(rows, -1)
        wanted[: len(slots)] = slots
        different = np.flatnonzero(self._rows[:rows] != wanted)
        if len(different):
            self._writes.add(different + self.state.offset(self.state.row_slots), wanted[different])
            self._rows[:rows] = wanted

    def take(self) -> tuple[Words, Words]:
        """Index and value of all collected words, each index once."""
        return self._writes.take()

    def _start(self, start: SlotStart, table: Slots) -> None:
        slot, sampling = start.slot, start.sampling
        self._stop(slot)
        state = table.slots.get(slot)
        if state is None or not table.live[slot]:
            self._end(slot)
            return
        words = [0] * NUM_FIELDS
        endings = [i for i in {*self._eos, *state.stop_ids} if 0 <= i < state.vocab_size]
        needs_host = len(state.stop_ids) > MAX_STOP_IDS
        mask_owner = self._mask_owner(slot) if self._mask_owner is not None else 0
        edits = self.logits_edits.start(slot, sampling, table, endings, words, needs_host, mask_owner)
        self.samples_on_device[slot] = edits is not None
        if edits is None:
            self.host_sampled.add(slot)
        self.has_mask[slot] = edits is not None and mask_owner != 0
        words[Field.AWAITS_HOST] = edits is None
        if sampling.num_prompt_logprobs is not None:
            self.num_prompt_logprobs[slot] = min(sampling.num_prompt_logprobs, self._vocab_size)
        if edits:
            self._writes.add(*self.logits_edits.edit_words(slot, edits))
        stops = [i for i in state.stop_ids if 0 <= i < state.vocab_size][:MAX_STOP_IDS]
        words[Field.STOPS : Field.STOPS + len(stops)] = stops
        words[Field.POSITION] = computed = int(table.num_computed[slot])
        words[Field.NEXT], words[Field.KNOWN] = int(table.token_ids[slot, computed]), int(table.num_tokens[slot])
        words[Field.MAX_KNOWN], words[Field.LIVE] = state.max_num_tokens, 1
        words[Field.IGNORE_EOS], words[Field.NUM_STOPS] = not state.ends_at_eos, len(stops)
        words[Field.KEY : Field.KEY + 2] = split_seed(sampling.seed)
        words[Field.CHOICE] = start.choice
        words[Field.ADAPTER] = 0 if start.adapter_place is None else start.adapter_place + 1
        self._writes.put_all([offset + slot for offset in self._field_offsets], words)
        self._sent[slot] = 0
        self._send_blocks(slot, table)

    def _stop(self, slot: int) -> None:
        self.logits_edits.end(slot)
        self.samples_on_device[slot] = self.has_mask[slot] = False
        self.host_sampled.discard(slot)
        self.version += 1
        self.num_prompt_logprobs.pop(slot, None)
        if self._logits_rows.pop(slot, None) is not None:
            self._writes.put(self._field_offsets[Field.LOGITS_ROW] + slot, -1)

    def _end(self, slot: int) -> None:
        self._writes.put(self._field_offsets[Field.LIVE] + slot, 0)

    def _send_blocks(self, slot: int, table: Slots) -> None:
        begin, end = int(self._sent[slot]), int(table.num_blocks[slot])
        if self._width and begin < end:
            self._writes.put_run(self._tables_offset + slot * self._width + begin, table.tables[slot, begin:end])
            self._sent[slot] = end

    def _set(self, field: Field, slots: Ints, values: "npt.NDArray[np.generic] | int") -> None:
        self._writes.add(slots + self._field_offsets[field], np.broadcast_to(values, slots.shape))
