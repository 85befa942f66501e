"""A real ring that serves a pooling model, asked by a client in this process."""

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from blockyard.services.launcher.supervision.start_up import PlainDisplay
from blockyard.services.offline.session import Session
from blockyard.shared.config.parsed_flags import Values, from_command_line
from blockyard.shared.config.resolve import Deployment
from blockyard.shared.messages import ModelCard, PoolingCard
from blockyard.shared.ring_client.client import RingClient
from blockyard.shared.ring_client.pooling.calls import PooledAnswer, PoolingCall, PoolingInput

T = TypeVar("T")
TIMEOUT_S = 60.0


class PoolingRing:
    def __init__(self, session: Session, log: Path) -> None:
        self.session, self.log = session, log
        self._names = map("call-{}".format, itertools.count())

    @property
    def card(self) -> ModelCard:
        return self.session.card

    @property
    def pooling(self) -> PoolingCard:
        assert self.card.pooling is not None
        return self.card.pooling

    def call(self, inputs: Sequence[PoolingInput], **fields: Any) -> PoolingCall:
        return PoolingCall(request_id=next(self._names), model=None, inputs=inputs, **fields)

    def pool(self, inputs: Sequence[PoolingInput], **fields: Any) -> PooledAnswer:
        """Raises RequestError."""
        return self.run(lambda client: client.pooling.pool(self.call(inputs, **fields)))

    def vectors(self, inputs: Sequence[PoolingInput], **fields: Any) -> "npt.NDArray[np.float32]":
        """Results of one shape, [inputs, numbers]."""
        return np.stack([item.data for item in self.pool(inputs, **fields).items])

    def run(self, work: Callable[[RingClient], Awaitable[T]]) -> T:
        async def limited(client: RingClient) -> T:
            return await asyncio.wait_for(work(client), TIMEOUT_S)

        return self.session.call(limited)

    def kill(self, title: str) -> None:
        """kill -9 of one service."""
        os.kill(self.pid_of(title), signal.SIGKILL)

    def pid_of(self, title: str) -> int:
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text()
                is_child = int(stat.rpartition(")")[2].split()[1]) == os.getpid()
                if is_child and (entry / "cmdline").read_bytes().startswith(f"blockyard: {title}".encode()):
                    return int(entry.name)
        raise AssertionError(f"no process {title}")


@contextlib.contextmanager
def pooling_ring(folder: Path, *flags: str, log: Path) -> Iterator[PoolingRing]:
    words = ["--model", str(folder), "--device", "cpu", "--dtype", "float32", *flags]
    with log.open("w") as out:

        def display(deployment: Deployment) -> PlainDisplay:
            out.writelines(f"{note}\n" for note in deployment.notes)
            return PlainDisplay(out)

        session = Session(Values(from_command_line(words)[0]), display)
        try:
            session.start()
            yield PoolingRing(session, log)
        finally:
            session.close()
