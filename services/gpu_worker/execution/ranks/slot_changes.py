"""Carries what the steps change of their slots from the leader's device to those of followers, beside later steps.

The leader's device alone samples. What a step has changed of its slots is sent behind it, on a stream and by a group of
its own, so that no step waits for the transport. A follower takes a step's changes over before its first step that
reads them: with S pipeline stages S - 1 steps of other slots may come first, which earlier stages compute meanwhile.
"""

import itertools
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from blockyard.kernels.slots.slot_state import NUM_CHANGE_WORDS, Field, SlotState
from blockyard.services.gpu_worker.arrays import Ints, Words
from blockyard.services.gpu_worker.host_link import HostLink, LinkEvent
from blockyard.services.gpu_worker.parallel.collectives import PendingCollective
from blockyard.services.gpu_worker.parallel.commands import ReceiveChanges, TakeChanges
from blockyard.services.gpu_worker.parallel.team import RankGroups, SendCommand

NUM_ENTRIES = 8  # steps whose changes the leader keeps: a power of two, at least as many as may be in flight
ALIGNED_ROWS = 16  # kernels are compiled again for views at other alignments
NUM_TOKEN_FIELDS = Field.KNOWN + 1  # the first fields: an earlier step may change them, as the host may


class SentChanges:
    """Of a leader: its steps write their changes to `words`."""

    def __init__(self, send: SendCommand, ranks: RankGroups, state: SlotState, link: HostLink) -> None:
        """link: of the leader's device."""
        assert ranks.beside_steps is not None
        self._send, self._group = send, ranks.beside_steps
        shape = NUM_ENTRIES, len(state.row_slots), NUM_CHANGE_WORDS
        self.words = torch.zeros(shape, dtype=torch.int32, device=self._group.device)
        self._most_untaken = ranks.place.num_stages - 1
        self._untaken: deque[Ints] = deque()  # slots of each step whose changes followers have not taken over
        self._read = np.zeros(state.fields.shape[1], np.bool_)  # by slot
        self._stream = link.stream()
        self._sent = [self._stream.event() for _ in range(NUM_ENTRIES)]
        self._pending: list[PendingCollective | None] = [None] * NUM_ENTRIES

    def before_step(self, number: int, decodes: Ints, index: Words) -> None:
        """Followers take over all that step `number` needs.

        decodes: slots whose next token is computed. index: words of the state that the host writes. Prefills read
        nothing of a slot that a step changes.
        """
        num_slots = len(self._read)
        written = index[index < NUM_TOKEN_FIELDS * num_slots] % num_slots  # what an earlier step gives comes before
        self._read[decodes] = self._read[written] = True
        num_needed = max(len(self._untaken) - self._most_untaken, 0)
        for place, slots in enumerate(self._untaken, 1):
            if place > num_needed and self._read[slots].any():
                num_needed = place
        self._read[decodes] = self._read[written] = False
        self._take(num_needed)
        entry = number % NUM_ENTRIES  # which the step overwrites
        self._group.wait(self._pending[entry])
        self._sent[entry].hold_steps()

    def after_step(self, number: int, slots: Ints, num_rows: int) -> None:
        """Sends the changes of a step that is launched. num_rows: with padding."""
        self._send(ReceiveChanges(num_rows))
        entry = number % NUM_ENTRIES
        self._stream.follow_steps()
        with self._stream.use():
            self._pending[entry] = self._group.begin_copy_from_leader(self.words[entry, :num_rows])
        self._sent[entry].record()
        self._untaken.append(slots)

    def flush(self) -> None:
        """Followers take over all changes."""
        self._take(len(self._untaken))

    def _take(self, count: int) -> None:
        if count:
            self._send(TakeChanges(count))
            for _ in range(count):
                self._untaken.popleft()


class ReceivedChanges:
    """Of a follower."""

    def __init__(self, ranks: RankGroups, capacity: int, link: HostLink, write: Callable[[Tensor], None]) -> None:
        """link: of the follower's device. write: writes rows of changes to its slots, on the stream of steps."""
        assert ranks.beside_steps is not None
        self._group, self._write = ranks.beside_steps, write
        self._stream = link.stream()
        padded = -(-capacity // ALIGNED_ROWS) * ALIGNED_ROWS
        shape = ranks.place.num_stages + 1, padded, NUM_CHANGE_WORDS
        words = torch.zeros(shape, dtype=torch.int32, device=self._group.device)
        self._entries = itertools.cycle([(one, self._stream.event()) for one in words])
        self._untaken: deque[tuple[Tensor, LinkEvent, PendingCollective | None]] = deque()

    def receive(self, num_rows: int) -> None:
        """Gets the changes of the step that was launched last."""
        words, received = next(self._entries)
        rows = words[:num_rows]
        self._stream.follow_steps()  # they come behind the step on all ranks
        with self._stream.use():
            pending = self._group.begin_copy_from_leader(rows)
        received.record()
        self._untaken.append((rows, received, pending))

    def take(self, count: int) -> None:
        """Writes the changes of the oldest steps to the slots."""
        for _ in range(count):
            rows, received, pending = self._untaken.popleft()
            self._group.wait(pending)
            received.hold_steps()
            self._write(rows)

    def clear(self) -> None:
        """The slots start over."""
        while self._untaken:
            self._group.wait(self._untaken.popleft()[2])
