"""Answers the lines of stored batches, behind all online requests. One gateway answers a batch at a time."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from blockyard.services.api_gateway.batch_api.objects import (
    ENDED,
    BatchFault,
    BatchFaults,
    BatchObject,
    RequestCounts,
)
from blockyard.services.api_gateway.batch_api.store import BatchStore
from blockyard.services.api_gateway.batches.batch_files import PIECE_BYTES, OutputFile
from blockyard.services.api_gateway.batches.batch_run import BatchRun, LineLimits
from blockyard.services.api_gateway.batches.line_records import LineRecords
from blockyard.services.api_gateway.bodies.body_parser import BodyParser
from blockyard.services.api_gateway.request_pipeline import RequestPipeline
from blockyard.shared.config.services.batch import BatchConfig
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.errors import BatchError, RequestError

log = logging.getLogger(__name__)

LOOK_S = 0.25  # between two looks at the records, and between two counts of a batch that runs
SWEEP_S = 600.0  # between two removals of expired files
RETRY_S = 10.0  # after the disk failed, before this gateway tries the batch again
CANCEL_S = 10.0  # a cancelled batch waits so long for the lines that are being answered
MAX_RUNNING = 4  # batches of one gateway at a time
OUTPUT, ERRORS = "-output", "-errors"  # behind the batch's number in the ids of its files


class BatchJobs:
    def __init__(
        self, config: GatewayConfig, store: BatchStore, pipeline: RequestPipeline, body_parser: BodyParser
    ) -> None:
        self._config, self._store, self._pipeline, self._body_parser = config, store, pipeline, body_parser
        self._running: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, float] = {}  # batches that the disk failed

    async def run(self) -> None:
        """Answers batches until it is cancelled, and then stops in the middle: the files have the answers so far."""
        next_sweep_s = 0.0
        try:
            while True:
                try:
                    if time.monotonic() >= next_sweep_s:
                        next_sweep_s = time.monotonic() + SWEEP_S
                        self._store.sweep(time.time())
                    self._start()
                except (BatchError, OSError) as e:
                    log.error("the batches: %s", e)
                    await asyncio.sleep(RETRY_S)
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)
            self._store.close()

    def _start(self) -> None:
        """Starts batches that do not run here. A batch of another gateway stops at its lock."""
        self._running = {name: task for name, task in self._running.items() if not task.done()}
        for tenant, batch in self._store.open_batches():
            if len(self._running) >= MAX_RUNNING:
                return
            if batch.id not in self._running and self._not_before.get(batch.id, 0.0) <= time.monotonic():
                self._running[batch.id] = asyncio.create_task(self._own(tenant, batch.id))

    async def _own(self, tenant: str, batch_id: str) -> None:
        try:
            with self._store.owned(batch_id) as is_owned:
                if is_owned:
                    job = BatchJob(tenant, batch_id, self._store, self._make_run)
                    await job.run()
        except (BatchError, OSError) as e:
            log.error("%s: %s", batch_id, e)
            self._not_before[batch_id] = time.monotonic() + RETRY_S
        except Exception:  # a bug: the other batches go on
            log.exception("%s failed", batch_id)
            self._not_before[batch_id] = time.monotonic() + RETRY_S

    def _make_run(
        self, tenant: str, batch: BatchObject, output: OutputFile, errors: OutputFile, records: LineRecords
    ) -> BatchRun:
        place = self._store.path(batch.input_file_id)
        config = BatchConfig(input=str(place), output=str(output.path), max_lines=self._config.batch_lines)
        limits = LineLimits(
            self._config.max_body_bytes, tenant, batch.endpoint, behind_online=True, patience_s=float("inf")
        )
        return BatchRun(config, limits, self._pipeline, self._body_parser, output, errors, records)


MakeRun = Callable[[str, BatchObject, OutputFile, OutputFile, LineRecords], BatchRun]


class BatchJob:
    """One batch, from where an earlier process left it to its end."""

    def __init__(self, tenant: str, batch_id: str, store: BatchStore, make_run: MakeRun) -> None:
        self._tenant, self._id, self._store, self._make_run = tenant, batch_id, store, make_run
        number = batch_id.removeprefix("batch_")
        self._output_id, self._errors_id = f"file-{number}{OUTPUT}", f"file-{number}{ERRORS}"

    async def run(self) -> None:
        """Raises BatchError only if the records cannot be written."""
        batch = self._store.batch(self._tenant, self._id)
        if batch.has_ended:
            return
        try:
            if batch.status == "validating":
                batch = await self._validate(batch)
            if batch.status == "cancelling" and not self._store.path(self._output_id).exists():
                self._end("cancelled")
            elif not batch.has_ended:
                await self._answer(batch)
        except BatchError as e:
            self._end("failed", self._write_error(e))

    async def _validate(self, batch: BatchObject) -> BatchObject:
        """Counts the lines. A batch without any fails."""
        try:
            total = await asyncio.to_thread(_num_lines, self._store.path(batch.input_file_id))
        except OSError as e:
            return self._end("failed", BatchFault("input_error", f"the input file cannot be read: {e.strerror or e}"))
        if not total:
            return self._end("failed", BatchFault("empty_file", "the input file has no lines", "input_file_id"))
        return self._change(
            lambda b: replace(
                b,
                status="in_progress" if b.status == "validating" else b.status,
                in_progress_at=int(time.time()),
                request_counts=RequestCounts(total),
            )
        )

    async def _answer(self, batch: BatchObject) -> None:
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(contextlib.closing(OutputFile(self._store.path(self._output_id))))
            errors = stack.enter_context(contextlib.closing(OutputFile(self._store.path(self._errors_id))))
            records = stack.enter_context(contextlib.closing(LineRecords()))
            run = self._make_run(self._tenant, batch, output, errors, records)
            fault: BatchFault | None = None
            try:
                ended = await self._watch(run, batch, output, errors)
            except BatchError as e:
                ended, fault = "failed", self._write_error(e)
            counts = RequestCounts(batch.request_counts.total, output.num_lines, errors.num_lines)
        now = int(time.time())
        self._keep_files(
            self._change(lambda b: replace(b, status="finalizing", finalizing_at=now, request_counts=counts))
        )
        self._end(ended, fault)

    async def _watch(self, run: BatchRun, batch: BatchObject, output: OutputFile, errors: OutputFile) -> str:
        """Runs the batch, counts its lines, and stops it when it is cancelled or expires. Returns how it ended."""
        running, ended = asyncio.ensure_future(run.run()), "completed"
        try:
            while not running.done():
                seen = self._count(batch, output, errors)
                if seen.cancelling_at is not None:
                    ended = "cancelled"
                elif time.time() >= batch.expires_at:
                    ended = "expired"
                if ended != "completed":
                    run.stop()
                    await asyncio.wait((running,), timeout=CANCEL_S)
                    break
                await asyncio.wait((running,), timeout=LOOK_S)
            if running.done():
                running.result()
        finally:
            running.cancel()
            await asyncio.wait((running,))
        return ended

    def _count(self, batch: BatchObject, output: OutputFile, errors: OutputFile) -> BatchObject:
        """Shows how far the batch is. Returns it as it is now, after changes of other gateways."""
        counts = RequestCounts(batch.request_counts.total, output.num_lines, errors.num_lines)
        seen = self._store.batch(self._tenant, self._id)
        if seen.request_counts == counts:
            return seen
        return self._change(lambda b: replace(b, request_counts=counts))

    def _keep_files(self, batch: BatchObject) -> None:
        """Makes the records of the files that have lines."""
        counts, expires = batch.request_counts, batch.output_expires_after
        for file_id, num_lines in ((self._output_id, counts.completed), (self._errors_id, counts.failed)):
            if num_lines:
                name = f"{self._id}_{'output' if file_id == self._output_id else 'error'}.jsonl"
                self._store.add_file(self._tenant, file_id, name, "batch_output", expires)
            else:
                self._store.path(file_id).unlink(missing_ok=True)

        def with_files(b: BatchObject) -> BatchObject:
            output, errors = self._output_id if counts.completed else None, self._errors_id if counts.failed else None
            return replace(b, output_file_id=output, error_file_id=errors)

        self._change(with_files)

    def _write_error(self, error: BatchError) -> BatchFault:
        log.error("%s: %s", self._id, error)
        return BatchFault("write_error", f"the server cannot read or write the files of the batch: {error.cause}")

    def _end(self, status: str, fault: BatchFault | None = None) -> BatchObject:
        assert status in ENDED
        faults = None if fault is None else BatchFaults([fault])
        times = {f"{status}_at": int(time.time())}
        return self._change(lambda b: replace(b, status=status, errors=faults, **times))

    def _change(self, change: Callable[[BatchObject], BatchObject]) -> BatchObject:
        """Raises BatchError, also if the batch is gone."""
        try:
            return self._store.update_batch(self._tenant, self._id, change)
        except RequestError as e:
            raise BatchError(str(e)) from e


def _num_lines(path: Path) -> int:
    """Lines that are not blank, of any length."""
    num_lines, is_open = 0, False
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            *ended, rest = piece.split(b"\n")
            for part in ended:
                num_lines += is_open or bool(part.strip())
                is_open = False
            is_open = is_open or bool(rest.strip())
    return num_lines + is_open
