"""Sequences that decode in step: every plan schedules one token of each, and every result has one token of each.

The cost of a step grows with what changes, not with the number of sequences. State that all of them share is kept once:
`SharedProgress` counts the tokens scheduled, and lists hold what a plan and a batch of text need of each sequence; the
lists are copied whole. A table of due steps says with which plan a sequence reaches the end of a block or of its
tokens; before that no plan looks at it. Everything else happens to a sequence outside the decode batch: it leaves the
batch for that and joins again later.
"""

from array import array
from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, MutableSequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from blockyard.services.scheduler.outbox import DetokenizerOutbox
from blockyard.services.scheduler.sequences.requests import (
    NOT_SHARED,
    RunningSequence,
    SharedProgress,
    TokenAccount,
)
from blockyard.shared.messages import SlotRun

_by_key = attrgetter("key")


@dataclass(slots=True)
class BatchRows:
    """Batch rows of one detokenizer in one plan. Immutable."""

    text_outbox: DetokenizerOutbox
    sequences: list[RunningSequence]
    slots: "array[int]"
    outputs: "list[array[int]]"  # of their sequences
    streams: "array[int]"  # their numbers at the detokenizer
    accounts: dict[TokenAccount, int]  # rows of each account

    def __len__(self) -> int:
        return len(self.sequences)

    def without(self, places: Iterable[int]) -> "BatchRows":
        """The rows except those at `places`."""
        sequences, slots, outputs = self.sequences.copy(), self.slots[:], self.outputs.copy()
        streams, accounts = self.streams[:], self.accounts.copy()
        for i in sorted(places, reverse=True):
            account = sequences[i].sequence.request.account
            if account is not None:
                accounts[account] -= 1
            del sequences[i], slots[i], outputs[i], streams[i]
        return BatchRows(self.text_outbox, sequences, slots, outputs, streams, accounts)


class OutboxRows:
    """The current rows of one detokenizer. A removed row is replaced by the last one."""

    def __init__(self, text_outbox: DetokenizerOutbox) -> None:
        self.runs: list[SlotRun] = []
        self._rows = BatchRows(text_outbox, [], array("I"), [], array("I"), {})
        self._row_of: dict[RunningSequence, int] = {}
        self._snapshot: BatchRows | None = None  # of `_rows`, until they change

    def add(self, running: RunningSequence) -> None:
        now, sequence = self._rows, running.sequence
        self._row_of[running] = len(now.sequences)
        self._snapshot = None
        self.runs.append(running.decode)
        now.sequences.append(running)
        now.slots.append(running.slot)
        now.outputs.append(sequence.outputs)
        now.streams.append(sequence.stream)
        account = sequence.request.account
        if account is not None:
            now.accounts[account] = now.accounts.get(account, 0) + 1

    def remove(self, running: RunningSequence) -> None:
        now, i = self._rows, self._row_of[running]
        self._snapshot = None
        self._row_of[now.sequences[-1]] = i
        del self._row_of[running]
        columns: tuple[MutableSequence[Any], ...] = (self.runs, now.sequences, now.slots, now.outputs, now.streams)
        for column in columns:
            column[i] = column[-1]
            del column[-1]
        account = running.sequence.request.account
        if account is not None:
            now.accounts[account] -= 1
            if not now.accounts[account]:
                del now.accounts[account]

    def snapshot(self) -> BatchRows:
        if self._snapshot is None:
            now = self._rows
            self._snapshot = BatchRows(
                now.text_outbox,
                now.sequences.copy(),
                now.slots[:],
                now.outputs.copy(),
                now.streams[:],
                now.accounts.copy(),
            )
        return self._snapshot


class DecodeBatch:
    """A decode batch of a worker group. `advance_all` is called for each plan that has its decodes."""

    def __init__(self, block_size: int, outside: list[RunningSequence]) -> None:
        """outside: the running sequences of the group that are in no decode batch, by key."""
        self.outside = outside
        self._progress = SharedProgress()
        self._block_size = block_size
        self._rows_by_outbox: dict[DetokenizerOutbox, OutboxRows] = {}
        # The batch handles a sequence by itself when the progress is at its due step. The list of a step may have stale
        # entries: of sequences that have left, or that have another due step since they joined again.
        self._due_step_of: dict[RunningSequence, int] = {}
        self._due_steps: defaultdict[int, list[RunningSequence]] = defaultdict(list)
        self.num_sequences = 0

    def __len__(self) -> int:
        return self.num_sequences

    def has(self, running: RunningSequence) -> bool:
        return running.progress is self._progress

    def accepts(self, running: RunningSequence) -> bool:
        """Whether a sequence that has sampled may join: it decodes for more than one step, and is no beam."""
        sequence = running.sequence
        return (
            running.num_scheduled_tokens + 1 < running.max_scheduled_tokens
            and sequence.stream > 0
            and sequence.hypothesis is None
        )

    def join(self, running: RunningSequence, number: int) -> None:
        """Adds a sequence, beginning with plan `number`, which is being built."""
        text_outbox = running.sequence.request.text_outbox
        assert text_outbox is not None
        self.outside.remove(running)
        running.share_progress(self._progress, number)
        self.num_sequences += 1
        outbox_rows = self._rows_by_outbox.get(text_outbox)
        if outbox_rows is None:
            outbox_rows = self._rows_by_outbox[text_outbox] = OutboxRows(text_outbox)
        outbox_rows.add(running)
        self._set_due_step(running, running.num_scheduled_tokens, running.num_scheduled_tokens + 1)

    def leave(self, running: RunningSequence) -> None:
        text_outbox = running.sequence.request.text_outbox
        assert text_outbox is not None
        running.share_progress(NOT_SHARED)
        self._due_step_of.pop(running, None)
        self.num_sequences -= 1
        self._rows_by_outbox[text_outbox].remove(running)
        insort(self.outside, running, key=_by_key)

    def clear(self) -> None:
        """Moves all sequences outside."""
        for outbox_rows in self._rows_by_outbox.values():
            for running in outbox_rows.snapshot().sequences:
                self.leave(running)

    @property
    def num_due(self) -> int:
        """An upper bound of the sequences that `take_due` handles."""
        return len(self._due_steps.get(self._progress.num_scheduled_tokens, ()))

    def take_due(self, leave: bool) -> list[RunningSequence]:
        """Returns the sequences at the end of a block. Called before each plan.

        A sequence with one more token to compute leaves the batch; with `leave`, all due sequences leave.
        """
        now, size, due_step_of = self._progress.num_scheduled_tokens, self._block_size, self._due_step_of
        at_end: list[RunningSequence] = []
        for running in self._due_steps.pop(now, ()):
            if running not in due_step_of or due_step_of[running] != now:
                continue
            del due_step_of[running]
            num_scheduled_tokens = running.own_tokens + now
            is_at_end = num_scheduled_tokens % size == 0
            if is_at_end:
                at_end.append(running)
            if leave or num_scheduled_tokens + 1 >= running.max_scheduled_tokens:
                self.leave(running)
            else:
                self._set_due_step(running, num_scheduled_tokens, num_scheduled_tokens + is_at_end)
        return at_end

    def advance_all(self, number: int) -> tuple[list[SlotRun], list[BatchRows]]:
        """Schedules one token of every sequence in plan `number`. Returns the runs and the rows of the plan."""
        if not self.num_sequences:
            return [], []
        self._progress.num_scheduled_tokens += 1
        self._progress.last_plan = number
        nonempty = [outbox_rows for outbox_rows in self._rows_by_outbox.values() if outbox_rows.runs]
        if len(nonempty) < len(self._rows_by_outbox):
            self._rows_by_outbox = {outbox_rows.snapshot().text_outbox: outbox_rows for outbox_rows in nonempty}
        runs = nonempty[0].runs.copy()
        for outbox_rows in nonempty[1:]:
            runs += outbox_rows.runs
        return runs, [outbox_rows.snapshot() for outbox_rows in nonempty]

    def _set_due_step(self, running: RunningSequence, num_scheduled_tokens: int, least: int) -> None:
        """Sets when a sequence is due: at the end of a block, or before its last token.

        `least`: its scheduled tokens when it may be due at the earliest.
        """
        size = self._block_size
        at = -(-least // size) * size
        if at >= running.max_scheduled_tokens:
            at = running.max_scheduled_tokens - 1
        self._due_step_of[running] = when = self._progress.num_scheduled_tokens + at - num_scheduled_tokens
        self._due_steps[when].append(running)
