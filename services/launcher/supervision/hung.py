"""Finds hung children: processes that run while their loop stands still. It needs no message bus and no link.

A child writes signs of life into a pipe (`shared/process/liveness.py`). A child that the bus does not hear is therefore
not taken for hung, and neither is the bus when this process does not hear it.
"""

from collections.abc import Container
from dataclasses import dataclass

from blockyard.shared.process.liveness import SIGN_S, TURNED

STARTING_TIMES = 6  # factor on the timeout for a child before its loop begins: importing may hold up its signs
LONG_TURN_TIMES = 30  # factor for the loop of a child with long turns that still gives signs: a step on a CPU


@dataclass(slots=True)
class _Signs:
    start: int  # number of the child's start
    signed_at: float  # time of the last sign; before the first, of the start
    turned_at: float | None = None  # time of the last turn of its loop; None: the loop has not begun
    has_signed: bool = False
    reported: bool = False

    def on_signs(self, signs: bytes, now: float) -> None:
        self.signed_at, self.has_signed = now, True
        if TURNED in signs:
            self.turned_at = now

    def on_reported(self) -> None:
        self.reported = True


class HungDetector:
    """Detects hung children from their signs of life. Times are seconds of one clock, which stands still while this
    process does.

    `timeout_s`: silence after which a child is hung; 0 turns detection off. `long_turns`: names of children whose loop
    may be busy for longer, as long as they give signs.
    """

    def __init__(self, timeout_s: float, long_turns: Container[str] = ()) -> None:
        self._timeout_s, self._long_turns = timeout_s, long_turns
        self._children: dict[str, _Signs] = {}

    def on_running(self, name: str, start: int, signs: bytes, now: float) -> None:
        """Call while the child runs; `start` is the number of its start, `signs` arrived since the last call."""
        child = self._children.get(name)
        if child is None or child.start != start:
            child = self._children[name] = _Signs(start, now)
        if signs:
            child.on_signs(signs, now)

    def on_ended(self, name: str) -> None:
        self._children.pop(name, None)

    def find_hung(self, now: float, settled: bool) -> dict[str, float]:
        """Returns the children to kill with their seconds of silence. Each start of a child is returned once.

        Until the ring is `settled`, a child that never gave a sign is not hung: importing its packages from a slow disk
        may take any time.
        """
        found = {}
        for name, child in self._children.items():
            if self._timeout_s and not child.reported and (settled or child.has_signed):
                silent_s = self._silent_s(name, child, now)
                if silent_s is not None:
                    child.on_reported()
                    found[name] = silent_s
        return found

    def _silent_s(self, name: str, child: _Signs, now: float) -> float | None:
        """Returns None for a child that is not hung."""
        silent_s = now - child.signed_at - SIGN_S  # it may have stopped just before its next sign
        if child.turned_at is None:
            return silent_s if silent_s >= STARTING_TIMES * self._timeout_s else None
        if silent_s >= self._timeout_s:
            return silent_s
        still_s = now - child.turned_at - SIGN_S
        return still_s if still_s >= self._timeout_s * (LONG_TURN_TIMES if name in self._long_turns else 1) else None
