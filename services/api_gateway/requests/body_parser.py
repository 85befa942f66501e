"""Bodies to checked requests: small ones at once, large ones in a process of their own, so that no stream pauses."""

import asyncio
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field

from blockyard.services.api_gateway.requests.body_frames import (
    FAILED,
    HEAD,
    TOO_LONG,
    Rejected,
    decode_answer,
    encode,
    framed,
)
from blockyard.services.api_gateway.requests.parse_body import Asked, Terms, read_body
from blockyard.services.api_gateway.responses.error_body import ApiError
from blockyard.shared.config.gateway import GatewayConfig

log = logging.getLogger(__name__)

LARGE_BYTES = 64 * 1024  # the worst body of this size is read in some 10 ms
MAX_WAITING = 4  # large bodies, times the size of the largest that is taken
MAX_CPU_S = 10.0
MODULE = "blockyard.services.api_gateway.requests.body_process"


@dataclass(order=True, slots=True)
class _Large:
    size: int  # the smallest is next
    number: int
    body: bytes = field(compare=False)
    terms: Terms = field(compare=False)
    answer: "asyncio.Future[Asked]" = field(compare=False)


class Bodies:
    """`run` serves large bodies until it is cancelled; its process starts with the first of them."""

    def __init__(self, config: GatewayConfig, max_cpu_s: float = MAX_CPU_S) -> None:
        """`max_cpu_s`: what one large body may take."""
        self._config, self._max_cpu_s = config, max_cpu_s
        self._waiting: asyncio.PriorityQueue[_Large] = asyncio.PriorityQueue()
        self._num_bytes = 0  # of those that wait
        self._numbers = itertools.count()
        self.process: subprocess.Popen[bytes] | None = None
        self._stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def read(self, body: bytes, terms: Terms) -> Asked:
        """Raises ApiError."""
        if len(body) < LARGE_BYTES:
            return read_body(body, terms, self._config)
        if self._num_bytes + len(body) > MAX_WAITING * self._config.max_body_bytes:
            raise ApiError("The server has as many large bodies waiting as it takes.", status=503, retry_after_s=1.0)
        answer: asyncio.Future[Asked] = asyncio.get_running_loop().create_future()
        self._num_bytes += len(body)
        self._waiting.put_nowait(_Large(len(body), next(self._numbers), body, terms, answer))
        return await answer

    async def run(self) -> None:
        """For ever."""
        try:
            while True:
                large = await self._waiting.get()
                self._num_bytes -= large.size
                if not large.answer.done():  # its client may be gone
                    await self._serve(large)
                del large  # the body
        finally:
            if self.process is not None:
                self.process.kill()
                self._ended()

    async def _serve(self, large: _Large) -> None:
        if self.process is None or self._stream is None:
            await self._start()
        try:
            answer = await self._ask(large)
        except (asyncio.IncompleteReadError, ConnectionError):
            code = self._ended()
            log.warning("the body reader ended (%d) at a body of %d bytes, which is refused", code, large.size)
            answer = TOO_LONG if code == -signal.SIGPROF else FAILED
        if large.answer.done():
            return
        if isinstance(answer, Rejected):
            large.answer.set_exception(answer.error())
        else:
            large.answer.set_result(answer)

    async def _start(self) -> None:
        arguments = [str(os.getpid()), self._config.process.name, str(self._max_cpu_s)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # as this process finds the package
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, *arguments],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                env=env,
                start_new_session=True,
            )
        self._stream = await asyncio.open_connection(sock=ours)
        self._stream[1].write(framed(self._config))

    async def _ask(self, large: _Large) -> Asked | Rejected:
        assert self._stream is not None
        reader, writer = self._stream
        head = encode(large.terms)
        writer.write(HEAD.pack(len(head), large.size) + head)
        writer.write(large.body)
        await writer.drain()
        num_bytes, _ = HEAD.unpack(await reader.readexactly(HEAD.size))
        answer: Asked | Rejected = decode_answer(await reader.readexactly(num_bytes))
        return answer

    def _ended(self) -> int:
        """The exit code of the process, which has closed its end or was killed; the next body starts another."""
        assert self.process is not None
        code = self.process.wait()
        if self._stream is not None:
            self._stream[1].close()
        self.process = self._stream = None
        return code
