"""Seats that decode in step: each is granted one token by every plan and says one with every result, no more.

A step costs as much as what changes in it. What all of a lane's seats have in common is written down once: how far they
have been granted (`Pace`), and lists of what a plan and a batch of text need of each, which are copied and not made
anew. A calendar says with which plan a seat comes to the end of a block or of its tokens: until then nobody looks at
it. Whatever else happens to a seat happens outside of the lane, which it leaves for that and joins again later.
"""

from array import array
from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, MutableSequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from blockyard.services.scheduler.sequences.detokenizer_outbox import TextSink
from blockyard.services.scheduler.sequences.requests import ALONE, NEVER, Pace, Seat, TokenAccount
from blockyard.shared.messages import SlotRun

_by_key = attrgetter("key")


@dataclass(slots=True)
class Rows:
    """Those of a lane whose text one detokenizer makes, side by side, as of one plan. Not to be changed."""

    sink: TextSink
    seats: list[Seat]
    slots: "array[int]"
    outputs: "list[array[int]]"  # of their choices
    streams: "array[int]"  # what the detokenizer calls them
    accounts: dict[TokenAccount, int]  # how many rows each pays for

    def __len__(self) -> int:
        return len(self.seats)

    def without(self, places: Iterable[int]) -> "Rows":
        """All but these."""
        seats, slots, outputs = self.seats.copy(), self.slots[:], self.outputs.copy()
        streams, accounts = self.streams[:], self.accounts.copy()
        for i in sorted(places, reverse=True):
            account = seats[i].choice.request.account
            if account is not None:
                accounts[account] -= 1
            del seats[i], slots[i], outputs[i], streams[i]
        return Rows(self.sink, seats, slots, outputs, streams, accounts)


class Bunch:
    """Rows that change: one who leaves has the last one in its place."""

    def __init__(self, sink: TextSink) -> None:
        self.runs: list[SlotRun] = []
        self._now = Rows(sink, [], array("I"), [], array("I"), {})
        self._copy: Rows | None = None  # as it is now

    def add(self, seat: Seat) -> None:
        now, choice = self._now, seat.choice
        seat.row = len(now.seats)
        self._copy = None
        self.runs.append(seat.decode)
        now.seats.append(seat)
        now.slots.append(seat.slot)
        now.outputs.append(choice.outputs)
        now.streams.append(choice.stream)
        account = choice.request.account
        if account is not None:
            now.accounts[account] = now.accounts.get(account, 0) + 1

    def remove(self, seat: Seat) -> None:
        now, i = self._now, seat.row
        self._copy = None
        now.seats[-1].row = i
        columns: tuple[MutableSequence[Any], ...] = (self.runs, now.seats, now.slots, now.outputs, now.streams)
        for column in columns:
            column[i] = column[-1]
            del column[-1]
        account = seat.choice.request.account
        if account is not None:
            now.accounts[account] -= 1
            if not now.accounts[account]:
                del now.accounts[account]

    def copy(self) -> Rows:
        if self._copy is None:
            now = self._now
            self._copy = Rows(
                now.sink, now.seats.copy(), now.slots[:], now.outputs.copy(), now.streams[:], now.accounts.copy()
            )
        return self._copy


class Lane:
    """The lane of one worker group. `advance` belongs to each plan that is sent."""

    def __init__(self, block_size: int) -> None:
        self.apart: list[Seat] = []  # those of the group's seats that are not in here, by key
        self._pace = Pace()
        self._block_size = block_size
        self._bunches: dict[TextSink, Bunch] = {}
        self._calendar: defaultdict[int, list[Seat]] = defaultdict(list)  # by what the pace will have granted then
        self._num_seats = 0

    def __len__(self) -> int:
        return self._num_seats

    def enter(self, seat: Seat) -> None:
        """A new seat of the group."""
        insort(self.apart, seat, key=_by_key)

    def has(self, seat: Seat) -> bool:
        return seat.pace is self._pace

    def takes(self, seat: Seat) -> bool:
        """Whether a seat that is to decode now may do so in here, and not only for its last token."""
        choice = seat.choice
        return (
            seat.drawn
            and seat.granted + 1 < seat.ceiling
            and choice.stream > 0
            and choice.hypothesis is None
            and choice.request.frame.sampling.num_logprobs is None
        )

    def join(self, seat: Seat, number: int) -> None:
        """From the plan of this number on, which is being made, it decodes here."""
        sink = seat.choice.request.sink
        assert sink is not None
        self.apart.remove(seat)
        seat.last_plan = number
        seat.keep_to(self._pace)
        self._num_seats += 1
        bunch = self._bunches.get(sink)
        if bunch is None:
            bunch = self._bunches[sink] = Bunch(sink)
        bunch.add(seat)
        self._note(seat, seat.granted, seat.granted + 1)

    def leave(self, seat: Seat) -> None:
        sink = seat.choice.request.sink
        assert sink is not None
        seat.keep_to(ALONE)
        self._num_seats -= 1
        self._bunches[sink].remove(seat)
        insort(self.apart, seat, key=_by_key)

    def break_up(self) -> None:
        """All leave."""
        for bunch in self._bunches.values():
            for seat in bunch.copy().seats:
                self.leave(seat)

    @property
    def num_due(self) -> int:
        """Seats to be looked at before the next plan, at most."""
        return len(self._calendar.get(self._pace.granted, ()))

    def look(self, leave: bool) -> list[Seat]:
        """Before a plan: returns the seats that have come to the end of a block.

        Those with one more token to go leave, or, if `leave`, all that are due.
        """
        pace, now, size = self._pace, self._pace.granted, self._block_size
        at_end: list[Seat] = []
        for seat in self._calendar.pop(now, ()):
            if seat.pace is not pace or seat.look_at != now:
                continue  # it has left since
            seat.look_at = NEVER  # who left and came back may be there twice
            granted = seat.base + now
            is_at_end = granted % size == 0
            if is_at_end:
                at_end.append(seat)
            if leave or granted + 1 >= seat.ceiling:
                self.leave(seat)
            else:
                self._note(seat, granted, granted + is_at_end)
        return at_end

    def advance(self, number: int) -> tuple[list[SlotRun], list[Rows]]:
        """All run in the plan of this number, which is about to be sent: how the plan and its record say it."""
        if not self._num_seats:
            return [], []
        self._pace.granted += 1
        self._pace.last_plan = number
        bunches = [bunch for bunch in self._bunches.values() if bunch.runs]
        if len(bunches) < len(self._bunches):
            self._bunches = {bunch.copy().sink: bunch for bunch in bunches}
        runs = bunches[0].runs.copy()
        for bunch in bunches[1:]:
            runs += bunch.runs
        return runs, [bunch.copy() for bunch in bunches]

    def _note(self, seat: Seat, granted: int, least: int) -> None:
        """It is to be looked at where a block ends, and before its last token; the plans before that it goes through.

        `least`: what it will have been granted when it may be looked at first.
        """
        size = self._block_size
        at = -(-least // size) * size
        if at >= seat.ceiling:
            at = seat.ceiling - 1
        seat.look_at = when = self._pace.granted + at - granted
        self._calendar[when].append(seat)
