"""Signs of life between a leader and its followers. A thread sends and reads them while the rank computes."""

import select
import threading
import time
from collections.abc import Callable, Mapping

from blockyard.services.gpu_worker.parallel.commands import LifeSign, RankFailed, Sign
from blockyard.shared.process.frame_pipe import FramePipe
from blockyard.shared.process.service_main import rss_bytes

SIGN_S = 0.5  # between two signs
SILENT_S = 4.0  # a rank that is silent for longer hangs
STARTING_SILENT_S = 120.0  # of a rank that starts: it imports torch before it sends any

OnLost = Callable[[int, str, RankFailed | None], None]  # takes the rank, what happened, and what the rank said


class RankSigns:
    """Watches other ranks by a pipe to each. `on_lost` is called once, in the thread."""

    def __init__(self, pipes: Mapping[int, FramePipe[Sign]], on_lost: OnLost) -> None:
        """pipes: by rank."""
        self._pipes, self._on_lost = dict(pipes), on_lost
        self._heard_s = dict.fromkeys(pipes, time.monotonic())
        self._rss_bytes = dict.fromkeys(pipes, 0)
        self._most_s = STARTING_SILENT_S
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="rank-signs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_serving(self) -> bool:
        return self._most_s == SILENT_S

    def serve(self) -> None:
        """The start is over: a silence of SILENT_S is a failure."""
        self._most_s = SILENT_S

    def last(self, rank: int) -> tuple[float, int]:
        """Returns for how many seconds a rank has been silent, and its resident memory in bytes."""
        return time.monotonic() - self._heard_s[rank], self._rss_bytes[rank]

    def stop(self) -> None:
        """Nothing is a failure from here on, and no pipe is read. Not in `on_lost`."""
        self._is_over = True
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        by_socket = {pipe.socket: rank for rank, pipe in self._pipes.items()}
        next_s = 0.0
        while not self._is_over:
            now = time.monotonic()
            if now >= next_s:
                next_s = now + SIGN_S
                self._send()
            readable = select.select(list(by_socket), [], [], max(next_s - now, 0.0))[0]
            for rank in [by_socket[one] for one in readable]:
                self._read(rank)
            self._check()

    def _send(self) -> None:
        for rank, pipe in self._pipes.items():
            try:
                pipe.send(LifeSign(rss_bytes()))
            except OSError:
                self._lost(rank, "has ended")

    def _read(self, rank: int) -> None:
        sign = self._pipes[rank].receive()
        if sign is None:
            self._lost(rank, "has ended")
        elif isinstance(sign, RankFailed):
            self._lost(rank, "failed", sign)
        else:
            self._heard_s[rank], self._rss_bytes[rank] = time.monotonic(), sign.rss_bytes

    def _check(self) -> None:
        now = time.monotonic()
        for rank, heard_s in self._heard_s.items():
            if now - heard_s > self._most_s:
                self._lost(rank, f"is silent for {now - heard_s:.0f} s")

    def _lost(self, rank: int, what: str, failed: RankFailed | None = None) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_lost(rank, what, failed)
