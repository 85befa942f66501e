"""The host's side of the slots that live on the device: what is to be written there before the next step."""

import numpy as np
import numpy.typing as npt
import torch

from blockyard.kernels.draw_tokens import DrawParams
from blockyard.kernels.philox_gumbel import split_seed
from blockyard.kernels.slot_state import MOST_STOPS, NUM_FIELDS, Field, SlotState
from blockyard.services.gpu_worker.device_wishes import DeviceWishes
from blockyard.services.gpu_worker.slots import Slots
from blockyard.shared.messages import SlotStart, StepPlan

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.int32]


class DeviceSlots:
    """Keeps track of what the device knows of a `Slots`, and collects what it lacks."""

    def __init__(
        self,
        num_slots: int,
        capacity: int,
        width: int,
        vocab_size: int,
        eos_token_ids: list[int],
        device: torch.device,
        wishes: bool = False,
    ) -> None:
        """`wishes`: penalties, lists of tokens and log-probabilities are the device's too."""
        self.state = state = SlotState.make(num_slots, capacity, width, device)
        self.params = DrawParams(
            temperature=state.floats(Field.TEMPERATURE),
            top_k=state.fields[Field.TOP_K],
            top_p=state.floats(Field.TOP_P),
            min_p=state.floats(Field.MIN_P),
            key=state.fields[Field.KEY : Field.KEY + 2],
            choice=state.fields[Field.CHOICE],
        )
        self.wishes = DeviceWishes(state, capacity, vocab_size, wishes)
        self.num_slots, self._vocab_size, self._eos = num_slots, vocab_size, eos_token_ids
        self._field_places = np.arange(NUM_FIELDS) * state.fields.shape[1]
        self._rows = np.full(capacity, -1, np.int64)  # as the device has them
        self.drawn = np.zeros(num_slots, np.bool_)  # slots that need no host between their tokens
        self._sent = np.zeros(num_slots, np.int64)  # blocks
        self._index: list[Words] = []
        self._values: list[Words] = []

    def reset(self, step: int) -> None:
        """No slot is live, and so many steps have begun."""
        self._index, self._values = [], []
        self.wishes.reset()
        self.drawn[:] = False
        self._sent[:] = 0
        self._rows[:] = -1
        state = self.state
        self._add(np.arange(self.num_slots) + self._field_places[Field.LIVE], np.zeros(self.num_slots))
        self._add(np.arange(len(self._rows)) + state.place(state.rows), self._rows)
        self.count_step(step)

    def count_step(self, step: int) -> None:
        """A step begins that gathers nothing: the device would not count it."""
        self._add(np.array([self.state.place(self.state.step)]), np.array([step]))

    def clear_rows(self) -> None:
        """A step that is only tried: all rows pad, on the device at once."""
        self.state.rows.fill_(-1)
        self._rows[:] = -1

    def note(self, plan: StepPlan, table: Slots) -> None:
        """What a plan changed, once `table` has it."""
        for slot in plan.ends:
            if slot < self.num_slots:
                self._stop(slot)
        for start in plan.starts:
            if start.slot < self.num_slots:
                self._start(start, table)
        for added in plan.blocks:
            if added.slot < self.num_slots:
                self._send_blocks(added.slot, table)
                if not table.live[added.slot]:
                    self._set(Field.LIVE, np.array([added.slot]), 0)

    def feed(self, slots: Ints, table: Slots) -> None:
        """Sets what these slots compute next, where the host knows that and the device does not."""
        if len(slots):
            positions = table.computed[slots]
            self._set(Field.NEXT, slots, table.token_ids[slots, np.minimum(positions, table.token_ids.shape[1] - 1)])

    def renew(self, slots: Ints, table: Slots) -> None:
        """The host has computed a step of these slots by itself."""
        slots = slots[slots < self.num_slots]
        self.feed(slots, table)
        for slot in slots.tolist():
            self.wishes.count(slot, table)
        self._set(Field.POSITION, slots, table.computed[slots])
        self._set(Field.KNOWN, slots, table.known[slots])
        self._set(Field.LIVE, slots, table.live[slots])

    def assign(self, slots: Ints, rows: int) -> None:
        """The first rows of the next step are these slots', those up to `rows` pad."""
        wanted = np.full(rows, -1)
        wanted[: len(slots)] = slots
        different = np.flatnonzero(self._rows[:rows] != wanted)
        if len(different):
            self._add(different + self.state.place(self.state.rows), wanted[different])
            self._rows[:rows] = wanted

    def take(self) -> tuple[Words, Words]:
        """Index and value of everything that is to be written; the last of what was said of a place."""
        if not self._index:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        index, values = np.concatenate(self._index), np.concatenate(self._values)
        parts, self._index, self._values = len(self._index), [], []
        if parts > 1:
            _, last = np.unique(index[::-1], return_index=True)
            if len(last) < len(index):
                keep = len(index) - 1 - last
                index, values = index[keep], values[keep]
        return index, values

    def _start(self, start: SlotStart, table: Slots) -> None:
        slot, sampling = start.slot, start.sampling
        self._stop(slot)
        state = table.slots.get(slot)
        if state is None or not table.live[slot]:
            return
        words = np.zeros(NUM_FIELDS, np.int32)
        endings = [i for i in {*self._eos, *state.stop_ids} if 0 <= i < self._vocab_size]
        change = self.wishes.start(slot, sampling, table, endings) if len(state.stop_ids) <= MOST_STOPS else None
        self.drawn[slot] = change is not None
        words[Field.WISH_ROW] = words[Field.NUM_TOP] = -1
        if change is not None:
            change.put(words)
            self._add(*self.wishes.places(slot, change.listed))
        stops = [i for i in state.stop_ids if 0 <= i < self._vocab_size][:MOST_STOPS]
        top_k = sampling.top_k if 0 < sampling.top_k < self._vocab_size else self._vocab_size
        for field, value in (
            (Field.NEXT, table.token_ids[slot, table.computed[slot]]),
            (Field.POSITION, table.computed[slot]),
            (Field.KNOWN, table.known[slot]),
            (Field.MAX_KNOWN, state.max_known),
            (Field.LIVE, 1),
            (Field.IGNORE_EOS, sampling.ignore_eos),
            (Field.NUM_STOPS, len(stops)),
            (Field.TOP_K, top_k),
            (Field.CHOICE, start.choice),
        ):
            words[field] = value
        words[Field.STOPS : Field.STOPS + len(stops)] = stops
        words[Field.KEY : Field.KEY + 2] = np.array(split_seed(sampling.seed), np.uint32).view(np.int32)
        floats = words.view(np.float32)
        floats[Field.TEMPERATURE], floats[Field.TOP_P] = sampling.temperature, sampling.top_p
        floats[Field.MIN_P] = sampling.min_p
        self._add(self._field_places + slot, words)
        self._sent[slot] = 0
        self._send_blocks(slot, table)

    def _stop(self, slot: int) -> None:
        self._set(Field.LIVE, np.array([slot]), 0)
        self.wishes.end(slot)
        self.drawn[slot] = False

    def _send_blocks(self, slot: int, table: Slots) -> None:
        state = self.state
        begin, end = int(self._sent[slot]), int(table.num_blocks[slot])
        if begin < end:
            place = state.place(state.tables) + slot * state.tables.shape[1]
            self._add(np.arange(place + begin, place + end), table.tables[slot, begin:end])
            self._sent[slot] = end

    def _set(self, field: Field, slots: Ints, values: "npt.NDArray[np.generic] | int") -> None:
        self._add(slots + self._field_places[field], np.broadcast_to(values, slots.shape))

    def _add(self, index: "npt.NDArray[np.generic]", values: "npt.NDArray[np.generic]") -> None:
        self._index.append(index.astype(np.int32))
        self._values.append(values.astype(np.int32))
