"""Follows a ring's start on its membership list, and displays that show it."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TextIO

from blockyard.shared.messages import Member
from blockyard.shared.process import pipes
from blockyard.shared.progress_bars import make_progress

if TYPE_CHECKING:
    from rich.console import Console

BUS = "message_bus"  # not on the list itself: it is ready once it has sent the list


class StartupDisplay(Protocol):
    def phase(self, name: str, phase: str, progress: float) -> None: ...
    def ready(self, name: str, seconds: float) -> None: ...
    def say(self, line: str) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _ServiceStart:
    """The part of a service's start that the display has shown."""

    incarnation: int = 0  # 0: it has not joined yet
    phase: str = "starting"
    progress: float = 0.0
    ready: bool = False
    num_notes: int = 0

    def new_notes(self, notes: Sequence[str]) -> Sequence[str]:
        """Returns the notes that no earlier call returned."""
        new, self.num_notes = notes[self.num_notes :], len(notes)
        return new

    def on_phase(self, phase: str, progress: float) -> bool:
        """Returns True if the phase or its progress changed."""
        changed = (phase, progress) != (self.phase, self.progress)
        self.phase, self.progress = phase, progress
        return changed

    def on_ready(self) -> None:
        self.ready = True


class StartupTracker:
    """`complete` is True once each of `names` was ready. After that only restarted services are reported."""

    def __init__(
        self, names: Sequence[str], display: StartupDisplay, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._starts = {name: _ServiceStart() for name in names}
        self._display = display
        self._clock = clock
        self._began = clock()
        self.complete = False

    @property
    def seconds(self) -> float:
        return self._clock() - self._began

    def on_member(self, member: Member) -> bool:
        """Takes a member's newest entry. Returns True if the ring is now complete for the first time."""
        if BUS in self._starts and not self._starts[BUS].ready:
            self._ready(BUS, self._starts[BUS])
        start = self._starts.get(member.name)
        if start is None:
            return False
        if start.incarnation != member.incarnation:
            start = self._starts[member.name] = _ServiceStart(member.incarnation)
        for note in start.new_notes(member.notes):
            self._display.say(f"  {member.name}: {note}")
        if member.ready and not start.ready:
            self._ready(member.name, start)
        elif not self.complete and not member.ready and start.on_phase(member.phase, member.progress):
            self._display.phase(member.name, member.phase, member.progress)
        if self.complete or not all(start.ready for start in self._starts.values()):
            return False
        self.complete = True
        return True

    def on_gone(self, member: Member) -> None:
        """Resets the service, unless another incarnation has already joined under its name."""
        start = self._starts.get(member.name)
        if start is not None and start.incarnation == member.incarnation:
            self._starts[member.name] = _ServiceStart()
            if not self.complete:
                self._display.phase(member.name, "starting", 0.0)

    def _ready(self, name: str, start: _ServiceStart) -> None:
        start.on_ready()
        if self.complete:
            self._display.say(f"{name} is ready again")
        else:
            self._display.ready(name, self.seconds)


class PlainDisplay:
    """Prints a line for each event, for logs and pipes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._phases: dict[str, str] = {}

    def phase(self, name: str, phase: str, progress: float) -> None:
        if self._phases.get(name) != phase and phase != "ready":  # only progress bars show progress within a phase
            self._phases[name] = phase
            self.say(f"{name}: {phase}")

    def ready(self, name: str, seconds: float) -> None:
        self.say(f"{name}: ready after {seconds:.1f} s")

    def say(self, line: str) -> None:
        """Prints a line. When the reader of a pipe is gone, the ring goes on without output."""
        try:
            print(line, file=self._out, flush=True)
        except BrokenPipeError:
            pipes.discard(self._out)

    def close(self) -> None:
        pass


class QuietDisplay(PlainDisplay):
    """Prints nothing."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def say(self, line: str) -> None:
        pass


class StartupProgressBars:
    """Shows a progress bar for each service on a terminal. After `close`, lines follow below the bars."""

    def __init__(self, names: Sequence[str], out: TextIO, shown_on: "Console | None" = None) -> None:
        width = max((len(name) for name in names), default=0)
        self._progress = make_progress(
            shown_on or out,
            "[dim]{task.fields[phase]}",
            first="{task.description:<" + str(width) + "}",
            bar_width=24,
            counts=False,
            spins=True,
            refreshes_per_s=5,  # leaves the cores to the starting services
        )
        self._tasks = {name: self._progress.add_task(name, total=None, phase="starting") for name in names}
        self._progress.start()

    def phase(self, name: str, phase: str, progress: float) -> None:
        """A phase without progress pulses."""
        self._progress.update(self._tasks[name], total=1.0 if progress > 0 else None, completed=progress, phase=phase)

    def ready(self, name: str, seconds: float) -> None:
        self._progress.update(self._tasks[name], total=1.0, completed=1.0, phase=f"ready after {seconds:.1f} s")

    def say(self, line: str) -> None:
        self._progress.console.print(line, highlight=False, markup=False)

    def close(self) -> None:
        self._progress.stop()
