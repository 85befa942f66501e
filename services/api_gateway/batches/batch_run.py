"""Answers the lines of a batch, a bounded number at a time."""

import asyncio
import logging
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from blockyard.services.api_gateway.apis.pooling.registry import POOLING_APIS
from blockyard.services.api_gateway.apis.registry import APIS
from blockyard.services.api_gateway.batches.batch_files import OutputFile, read_lines
from blockyard.services.api_gateway.batches.batch_lines import (
    BatchRequest,
    LineResponse,
    WrongLine,
    answer_line,
    decode_written,
    error_line,
    other_url,
    read_line,
    repeated,
    too_long,
)
from blockyard.services.api_gateway.batches.line_groups import LineGroups
from blockyard.services.api_gateway.batches.line_records import Known, LineRecords
from blockyard.services.api_gateway.bodies.body_parser import BodyParser
from blockyard.services.api_gateway.bodies.parse_body import ParseContext, ParsedGeneration, ParsedPooling
from blockyard.services.api_gateway.request_pipeline import RequestPipeline
from blockyard.services.api_gateway.requests.ignored_fields import IgnoredFields
from blockyard.services.api_gateway.turns import Turns
from blockyard.shared.config.services.batch import BatchConfig
from blockyard.shared.errors import BatchError, RequestError

log = logging.getLogger(__name__)

READY_S = 0.05  # between two looks for a scheduler
PATIENCE_S = 600.0  # a line that the ring refuses for this long, because it is busy or not ready, has that answer
TURN_S = 0.01  # of reading the output, until the links get a turn
GROUPS = 4  # of lines that are answered at a time; groups of lines would disturb online requests
PROGRESS_S = 10.0  # between two lines of the log
ENVELOPE_BYTES = 64 * 1024  # of a line beside its body
MOST_OUTPUT_BYTES = 2**30  # of a line of the output that is read again


@dataclass(frozen=True, slots=True)
class LineLimits:
    """The kinds of lines that are allowed, and the user for the queue."""

    max_body_bytes: int  # of a request; the lines at a time have four times as many, or are one line
    tenant: str = ""
    url: str = ""  # all lines are for it; empty: for any
    behind_online: bool = False  # lines wait and run behind online requests
    patience_s: float = PATIENCE_S


FAILED = RequestError("The server failed at this request.", status=500)


class BatchRun:
    """`run` answers all lines. Work that runs at a time is bounded in lines, and in bytes of lines."""

    def __init__(
        self,
        config: BatchConfig,
        limits: LineLimits,
        pipeline: RequestPipeline,
        body_parser: BodyParser,
        output: OutputFile,
        errors: OutputFile,
        records: LineRecords,
    ) -> None:
        """`errors` gets the lines of failed requests; it may be the output."""
        self._config, self._pipeline, self._body_parser = config, pipeline, body_parser
        self._output, self._errors, self._records, self._limits = output, errors, records, limits
        max_body_bytes = limits.max_body_bytes
        self._max_line_bytes, self._max_bytes = max_body_bytes + ENVELOPE_BYTES, 4 * max_body_bytes
        self._num_bytes = 0  # of lines that are being answered
        self._reading = asyncio.Lock()  # held while a line is read and waits for room: one line waits, not one a task
        self._freed = asyncio.Event()  # a line is answered
        self._ignored = IgnoredFields()
        self._groups = LineGroups(1 if limits.behind_online else max(1, config.max_lines // GROUPS))
        # lines that start together end together: online requests go on between those that follow them
        self._turns = Turns(per_iteration=1) if limits.behind_online else None
        self._stopping = False
        self.num_answered = self.num_failed = self.num_skipped = 0  # failed ones are among the answered

    def stop(self) -> None:
        """Reads no further line; the run answers the lines that were read."""
        self._stopping = True

    async def run(self) -> None:
        """Returns when every line is answered, or after `stop` every line that was read. Raises BatchError."""
        for written in dict.fromkeys((self._output, self._errors)):
            await self._read_output(written)
        while not self._pipeline.schedulers.cards() and not self._stopping:
            await asyncio.sleep(READY_S)
        try:
            with open(self._config.input, "rb") as file:
                lines = read_lines(file, self._max_line_bytes)
                async with asyncio.TaskGroup() as tasks:
                    progress = tasks.create_task(self._log_progress())
                    workers = [tasks.create_task(self._answer_lines(lines)) for _ in range(self._config.max_lines)]
                    await asyncio.wait(workers)
                    progress.cancel()
        except OSError as e:
            raise BatchError(e.strerror or str(e), Path(self._config.input)) from e
        except ExceptionGroup as group:
            raise _cause(group) from None

    async def _read_output(self, file: OutputFile) -> None:
        """Raises BatchError if the output has a line that no batch writes: it may be another file."""
        turn_s = time.monotonic()
        for number, line in file.read(MOST_OUTPUT_BYTES):
            if (now := time.monotonic()) > turn_s + TURN_S:
                await asyncio.sleep(0)
                turn_s = now
            try:
                self._records.written(decode_written(line or b""))
            except (msgspec.DecodeError, UnicodeDecodeError) as e:
                raise BatchError(f"line {number} is no line of a batch's output: {e}", file.path) from e

    async def _answer_lines(self, lines: Iterator[tuple[int, bytes | None]]) -> None:
        """Answers lines until there are none. Several tasks share the iterator."""
        while not self._stopping:
            if self._turns is not None:
                await self._turns.take()
            else:
                await asyncio.sleep(0)  # the links go on while many lines are left out
            async with self._reading:
                number, line = next(lines, (0, None))
                if not number:
                    return
                size = 0 if line is None else len(line)
                while self._num_bytes and self._num_bytes + size > self._max_bytes:
                    self._freed.clear()
                    await self._freed.wait()
                self._num_bytes += size
            try:
                await self._answer(number, line)
            finally:
                self._num_bytes -= size
                self._freed.set()

    async def _answer(self, number: int, line: bytes | None) -> None:
        read = too_long(number, self._limits.max_body_bytes) if line is None else read_line(line, number)
        known = Known.NEW if read.custom_id is None else self._records.read(read.custom_id)
        if known is Known.ANSWERED:
            self.num_skipped += 1
            return
        if known is Known.READ and read.custom_id is not None:
            read = repeated(read.custom_id, number)
        if isinstance(read, BatchRequest) and self._limits.url not in ("", *read.api.paths):
            read = other_url(read.custom_id, number, self._limits.url)
        if isinstance(read, WrongLine):
            self._report(read)
            return
        name = secrets.token_hex(16)
        response = await self._respond(read, name)
        file = self._output if response.status_code < 400 else self._errors
        file.append(answer_line(f"batch_req_{name}", read.custom_id, response))
        self.num_answered += 1
        self.num_failed += response.status_code >= 400

    def _report(self, wrong: WrongLine) -> None:
        if self._records.is_reported(wrong):
            self.num_skipped += 1
            return
        self._errors.append(error_line(f"batch_req_{secrets.token_hex(16)}", wrong))
        self.num_answered += 1
        self.num_failed += 1

    async def _respond(self, line: BatchRequest, name: str) -> LineResponse:
        """The answer that a client would get, but for refusals of a busy ring, which it would repeat as this does."""
        api = line.api
        try:
            return LineResponse(200, name, msgspec.Raw(await self._repeat(line, name)))
        except RequestError as e:
            error = e
        except Exception:  # a bug: the line gets a 500 and the log the traceback
            log.exception("the line of custom_id %r failed", line.custom_id[:100])
            error = FAILED
        status = api.error_statuses.get(error.status, error.status)
        return LineResponse(status, name, msgspec.Raw(api.error_body(error)))

    async def _repeat(self, line: BatchRequest, name: str) -> bytes:
        until = self._pipeline.clock() + self._limits.patience_s
        while True:
            try:
                return await self._generate(line, name)
            except RequestError as e:
                if e.retry_after_s is None or self._pipeline.clock() > until:
                    raise
                await asyncio.sleep(e.retry_after_s)

    async def _generate(self, line: BatchRequest, name: str) -> bytes:
        context = ParseContext(line.api.name, name, self._pipeline.schedulers.served())
        if len(line.body) > self._limits.max_body_bytes:
            raise RequestError("The body is larger than this server takes.", "body", status=413)
        parsed = await self._body_parser.parse(line.body, context)
        assert isinstance(parsed, ParsedGeneration | ParsedPooling)
        if parsed.ignored:
            self._ignored.note(parsed.ignored)
        behind, tenant = self._limits.behind_online, self._limits.tenant
        if isinstance(parsed, ParsedPooling):
            asked = msgspec.structs.replace(parsed.request, batch_line=behind)
            return await self._pipeline.pooling.answer(POOLING_APIS[parsed.api], asked, tenant)
        if parsed.request.options.stream:
            raise RequestError("a line of a batch is answered whole; leave `stream` out", "stream")
        request = replace(parsed.request, batch_line=behind)
        turn = self._groups.turn()
        try:
            return await self._pipeline.whole_answer(APIS[parsed.api], request, tenant, turn.enter)
        finally:
            turn.leave()

    async def _log_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            log.info("%s", self.summary())

    def summary(self) -> str:
        skipped = f", {self.num_skipped} were answered before" if self.num_skipped else ""
        return f"{self.num_answered} lines are answered, {self.num_failed} of them with an error{skipped}"


def _cause(group: ExceptionGroup[Exception]) -> Exception:
    """The first failure of several tasks, which then have the same one, such as a full disk."""
    first = group.exceptions[0]
    return _cause(first) if isinstance(first, ExceptionGroup) else first
