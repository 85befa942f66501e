"""The start of the `blockyard` command: Ctrl-C ends it quietly while its modules load, too."""

import os
import signal
from types import FrameType


def main() -> int:
    """Returns the exit code."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a shell's background job ignores it
        signal.signal(signal.SIGINT, _leave)
    # behind the handler, because it takes 0.3 s
    from blockyard.services.cli.main import main as run_command  # noqa: PLC0415

    signal.signal(signal.SIGINT, before)
    return run_command()


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
