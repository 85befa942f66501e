"""The processes of senders that have mapped this worker's arena: until one has ended, it may write to the arena."""

import os
import select


class SenderProcesses:
    """Holds a pidfd for each sender, registered once with one poll object."""

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}  # by sender
        self._senders: dict[int, int] = {}  # by pidfd
        self._waiting = select.poll()

    def __len__(self) -> int:
        return len(self._pidfds)

    def __contains__(self, sender: int) -> bool:
        return sender in self._pidfds

    def add(self, sender: int, pid: int) -> None:
        """Replaces an earlier process of the sender. Raises OSError, ValueError or OverflowError if there is none."""
        self.drop(sender)
        pidfd = os.pidfd_open(pid)
        self._pidfds[sender], self._senders[pidfd] = pidfd, sender
        self._waiting.register(pidfd, select.POLLIN)

    def drop(self, sender: int) -> None:
        pidfd = self._pidfds.pop(sender, None)
        if pidfd is not None:
            del self._senders[pidfd]
            self._waiting.unregister(pidfd)
            os.close(pidfd)

    def take_ended(self) -> list[int]:
        """Senders whose process has ended. They are dropped."""
        if not self._pidfds:
            return []
        ended = [self._senders[pidfd] for pidfd, _ in self._waiting.poll(0)]
        for sender in ended:
            self.drop(sender)
        return ended

    def close(self) -> None:
        for sender in list(self._pidfds):
            self.drop(sender)
