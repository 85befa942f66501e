"""Follows a ring's start from its membership list and tells it, phase by phase."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TextIO

from blockyard.shared import pipes
from blockyard.shared.messages import Member

BUS = "message_bus"  # no member: it is there once it has told of anybody


class StartupDisplay(Protocol):
    def phase(self, name: str, phase: str, progress: float) -> None: ...
    def ready(self, name: str, seconds: float) -> None: ...
    def say(self, line: str) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _Row:
    incarnation: int = 0
    phase: str = "starting"
    progress: float = 0.0
    ready: bool = False
    notes_told: int = 0


class StartupTracker:
    """`complete` once every one of `names` was ready; later it only tells who is ready again."""

    def __init__(
        self, names: Sequence[str], display: StartupDisplay, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rows = {name: _Row() for name in names}
        self._display = display
        self._clock = clock
        self._began = clock()
        self.complete = False

    @property
    def seconds(self) -> float:
        return self._clock() - self._began

    def saw(self, member: Member) -> bool:
        """Takes a member's newest entry; True if that makes the ring complete for the first time."""
        if BUS in self._rows and not self._rows[BUS].ready:
            self._ready(BUS, self._rows[BUS])
        row = self._rows.get(member.name)
        if row is None:
            return False
        if row.incarnation not in (0, member.incarnation):
            row = self._rows[member.name] = _Row()
        row.incarnation = member.incarnation
        for note in member.notes[row.notes_told :]:
            self._display.say(f"  {member.name}: {note}")
        row.notes_told = len(member.notes)
        if member.ready and not row.ready:
            self._ready(member.name, row)
        elif not self.complete and not member.ready and (member.phase, member.progress) != (row.phase, row.progress):
            row.phase, row.progress = member.phase, member.progress
            self._display.phase(member.name, member.phase, member.progress)
        if self.complete or not all(row.ready for row in self._rows.values()):
            return False
        self.complete = True
        return True

    def lost(self, member: Member) -> None:
        """Unless another incarnation has come under the same name already."""
        row = self._rows.get(member.name)
        if row is not None and row.incarnation == member.incarnation:
            self._rows[member.name] = _Row()
            if not self.complete:
                self._display.phase(member.name, "starting", 0.0)

    def _ready(self, name: str, row: _Row) -> None:
        row.ready = True
        if self.complete:
            self._display.say(f"{name} is ready again")
        else:
            self._display.ready(name, self.seconds)


class PlainDisplay:
    """A line an event, for logs and pipes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._phases: dict[str, str] = {}

    def phase(self, name: str, phase: str, progress: float) -> None:
        if self._phases.get(name) != phase and phase != "ready":  # progress within a phase is for bars
            self._phases[name] = phase
            self.say(f"{name}: {phase}")

    def ready(self, name: str, seconds: float) -> None:
        self.say(f"{name}: ready after {seconds:.1f} s")

    def say(self, line: str) -> None:
        """A pipe that has no reader any more gets nothing: the ring goes on."""
        try:
            print(line, file=self._out, flush=True)
        except BrokenPipeError:
            pipes.leave(self._out)

    def close(self) -> None:
        pass


class QuietDisplay:
    """Says nothing."""

    def phase(self, name: str, phase: str, progress: float) -> None:
        pass

    def ready(self, name: str, seconds: float) -> None:
        pass

    def say(self, line: str) -> None:
        pass

    def close(self) -> None:
        pass
