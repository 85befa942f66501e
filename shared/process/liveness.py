"""Signs of life of a service process, which its launcher reads from a pipe.

They need neither the message bus nor a link, so a process that the bus does not hear is told from one that hangs.
"""

import os
import threading
import time

SIGN_S = 0.5  # between two signs
RUNNING = b"."  # the process runs, and its loop has not turned since the last sign
TURNED = b"o"  # its loop has turned


class LivenessPipe:
    """A thread writes a sign twice a second: also while the loop loads, computes or waits for a device."""

    def __init__(self, fd: int | None) -> None:
        """`fd`: the pipe's end for writing; None: there is no launcher."""
        self._has_turned = False
        if fd is None:
            return
        os.set_inheritable(fd, False)
        os.set_blocking(fd, False)  # a launcher that stands still reads nothing
        threading.Thread(target=self._write, args=(fd,), name="liveness", daemon=True).start()

    def turned(self) -> None:
        """To be called by the loop, in every turn."""
        self._has_turned = True

    def _write(self, fd: int) -> None:
        while True:
            sign, self._has_turned = TURNED if self._has_turned else RUNNING, False
            try:
                os.write(fd, sign)
            except BlockingIOError:
                self._has_turned |= sign == TURNED
            except OSError:
                return  # the launcher has closed its end
            time.sleep(SIGN_S)
