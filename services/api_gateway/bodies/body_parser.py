"""Parses request bodies: small ones in place, large ones in a process of their own, so that no open stream pauses."""

import asyncio
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field

import msgspec

from blockyard.services.api_gateway.adapter_folders import AdapterFolders
from blockyard.services.api_gateway.bodies.body_frames import (
    FAILED,
    HEAD,
    TOO_LONG,
    Rejected,
    decode_result,
    encode,
    framed,
)
from blockyard.services.api_gateway.bodies.parse_body import ParseContext, ParsedBody, parse_body
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.errors import RequestError
from blockyard.shared.ring_client.request_fields.output_format import ModelFormats

log = logging.getLogger(__name__)

LARGE_BYTES = 64 * 1024  # the slowest body of this size takes about 10 ms to parse
MAX_WAITING = 4  # large bodies: this many times the largest allowed size, in bytes
MAX_CPU_S = 10.0
MODULE = "blockyard.services.api_gateway.bodies.body_process"


@dataclass(order=True, slots=True)
class _LargeBody:
    size: int  # the queue's order: smallest first; with the conversation before the body
    number: int
    body: bytes = field(compare=False)
    context: ParseContext = field(compare=False)
    result: "asyncio.Future[ParsedBody]" = field(compare=False)


class BodyParser:
    """`run` parses large bodies until it is cancelled. The process is started for the first large body."""

    def __init__(
        self, config: GatewayConfig, formats: ModelFormats, folders: AdapterFolders, max_cpu_s: float = MAX_CPU_S
    ) -> None:
        """`max_cpu_s` limits the CPU time of one large body."""
        self._config, self._formats, self._folders, self._max_cpu_s = config, formats, folders, max_cpu_s
        self._waiting: asyncio.PriorityQueue[_LargeBody] = asyncio.PriorityQueue()
        self._num_bytes = 0  # of waiting bodies
        self._numbers = itertools.count()
        self.process: subprocess.Popen[bytes] | None = None
        self._stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def parse(self, body: bytes, context: ParseContext) -> ParsedBody:
        """A model that is not served may be an adapter that is loaded first. Raises RequestError."""
        try:
            return await self._parse(body, context)
        except RequestError as e:
            if e.code != "model_not_found" or not await self._folders.load_named(body):
                raise
        return await self._parse(body, msgspec.structs.replace(context, served=self._folders.served()))

    async def _parse(self, body: bytes, context: ParseContext) -> ParsedBody:
        size = len(body) + context.num_bytes
        if size < LARGE_BYTES:
            return parse_body(body, context, self._config, self._formats)
        if self._num_bytes + size > MAX_WAITING * self._config.max_body_bytes:
            raise RequestError(
                "The server has as many large bodies waiting as it takes.", status=503, retry_after_s=1.0
            )
        result: asyncio.Future[ParsedBody] = asyncio.get_running_loop().create_future()
        self._num_bytes += size
        self._waiting.put_nowait(_LargeBody(size, next(self._numbers), body, context, result))
        return await result

    async def run(self) -> None:
        try:
            while True:
                large = await self._waiting.get()
                self._num_bytes -= large.size
                if not large.result.done():  # its client may have disconnected
                    await self._serve(large)
                del large  # frees the body
        finally:
            if self.process is not None:
                self.process.kill()
                self._ended()

    async def _serve(self, large: _LargeBody) -> None:
        if self.process is None or self._stream is None:
            await self._start()
        try:
            result = await self._ask(large)
        except (asyncio.IncompleteReadError, ConnectionError):
            code = self._ended()
            log.warning("the body reader ended (%d) at a body of %d bytes, which is refused", code, large.size)
            result = TOO_LONG if code == -signal.SIGPROF else FAILED
        if large.result.done():
            return
        if isinstance(result, Rejected):
            large.result.set_exception(result.error())
        else:
            large.result.set_result(result)

    async def _start(self) -> None:
        arguments = [str(os.getpid()), self._config.process.name, str(self._max_cpu_s)]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path))
        }  # it finds the package as this process does
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, *arguments],
                stdin=theirs.fileno(),
                env=env,
                start_new_session=True,
            )
        self._stream = await asyncio.open_connection(sock=ours)
        self._stream[1].write(framed(self._config))

    async def _ask(self, large: _LargeBody) -> ParsedBody | Rejected:
        assert self._stream is not None
        reader, writer = self._stream
        head = encode(large.context)
        writer.write(HEAD.pack(len(head), len(large.body)) + head)
        writer.write(large.body)
        await writer.drain()
        num_bytes, _ = HEAD.unpack(await reader.readexactly(HEAD.size))
        result: ParsedBody | Rejected = decode_result(await reader.readexactly(num_bytes))
        return result

    def _ended(self) -> int:
        """Returns the exit code of the process, which has ended or was killed. The next large body starts a new one."""
        assert self.process is not None
        code = self.process.wait()
        if self._stream is not None:
            self._stream[1].close()
        self.process = self._stream = None
        return code
