"""Signs of life between a leader and its followers. A thread sends and reads them while the rank computes."""

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping

from blockyard.services.gpu_worker.parallel.commands import LifeSign, RankFailed, Sign
from blockyard.shared.bus.frame_links import FrameEnd
from blockyard.shared.bus.poller import Poller
from blockyard.shared.process.service_main import rss_bytes

SIGN_S = 0.5  # between two signs
SILENT_S = 4.0  # a rank that is silent for longer hangs
ENDED = "has ended"
STARTING_SILENT_S = 120.0  # of a rank that starts: it imports torch before it sends any

OnLost = Callable[[int, str, RankFailed | None], None]  # takes the rank, what happened, and what the rank said


class RankSigns:
    """Watches other ranks by a pipe or link to each, which belongs to the thread. `on_lost` is called once, in it."""

    def __init__(self, pipes: Mapping[int, FrameEnd[Sign]], on_lost: OnLost) -> None:
        """pipes: by rank."""
        self._pipes, self._on_lost = dict(pipes), on_lost
        self._said: queue.SimpleQueue[RankFailed] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        self._heard_s = dict.fromkeys(pipes, time.monotonic())
        self._rss_bytes = dict.fromkeys(pipes, 0)
        self._serving = set[int]()  # ranks whose start is over
        self._most_s = STARTING_SILENT_S
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="rank-signs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_serving(self) -> bool:
        return self._most_s == SILENT_S

    @property
    def all_serve(self) -> bool:
        """Whether the start of all other ranks is over."""
        return len(self._serving) == len(self._pipes)

    def serve(self) -> None:
        """The start is over: a silence of SILENT_S is a failure."""
        self._most_s = SILENT_S

    def last(self, rank: int) -> tuple[float, int]:
        """Returns for how many seconds a rank has been silent, and its resident memory in bytes."""
        return time.monotonic() - self._heard_s[rank], self._rss_bytes[rank]

    def say(self, failed: RankFailed) -> None:
        """Tells all why this rank ends."""
        self._said.put(failed)
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Nothing is a failure from here on, and no pipe is read. Not in `on_lost`."""
        self._is_over = True
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        poller = Poller()
        poller.add(self._wake, *dict.fromkeys(source for pipe in self._pipes.values() for source in pipe.sources))
        next_s = 0.0
        while not self._is_over:
            now = time.monotonic()
            if now >= next_s:
                next_s = now + SIGN_S
                self._send(LifeSign(rss_bytes(), self.is_serving))
            poller.wait(max(next_s - now, 0.0))
            while not self._said.empty():
                os.eventfd_read(self._wake)
                self._send(self._said.get())
            for rank, pipe in self._pipes.items():
                while not self._is_over and pipe.is_readable:
                    self._read(rank, pipe)
            self._check()

    def _send(self, sign: Sign) -> None:
        for rank, pipe in self._pipes.items():
            try:
                pipe.send(sign)
            except OSError:
                self._lost(rank, ENDED)

    def _read(self, rank: int, pipe: FrameEnd[Sign]) -> None:
        sign = pipe.receive()
        if sign is None:
            self._lost(rank, ENDED)
        elif isinstance(sign, RankFailed):
            self._lost(rank, "failed", sign)
        else:
            self._heard_s[rank], self._rss_bytes[rank] = time.monotonic(), sign.rss_bytes
            if sign.is_serving:
                self._serving.add(rank)

    def _check(self) -> None:
        now = time.monotonic()
        for rank, heard_s in self._heard_s.items():
            if now - heard_s > (SILENT_S if rank in self._serving else self._most_s):
                self._lost(rank, f"is silent for {now - heard_s:.0f} s")

    def _lost(self, rank: int, what: str, failed: RankFailed | None = None) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_lost(rank, what, failed)
