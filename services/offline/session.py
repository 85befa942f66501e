"""Runs a ring and its one client on an event loop in a separate thread."""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from blockyard.services.launcher import executors
from blockyard.services.launcher.models import model_files
from blockyard.services.launcher.supervision.child import MakeCommand
from blockyard.services.launcher.supervision.ring import Ring, local_bus
from blockyard.services.launcher.supervision.run_dir import RunDir
from blockyard.services.launcher.supervision.start_up import StartupDisplay
from blockyard.services.offline.batch import BatchProgress, OfflineRequest, RequestBatch
from blockyard.services.offline.inflight import InflightLimiter
from blockyard.services.offline.outputs import RingLost
from blockyard.shared.bus.links import Links
from blockyard.shared.bus.member_list import Changed, Joined
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.config.resolve import Deployment, resolve
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import GatewayIn, ModelCard, QueueCapacityChanged, Role, Stats
from blockyard.shared.ring_client.client import RingClient
from blockyard.shared.ring_client.request_fields.output_format import OutputFormats


class OfflineBatch(Protocol):
    """What one call runs in the ring."""

    async def run(self) -> None: ...

    def abort(self, error: RequestError) -> None:
        """Ends it, with this error."""


T = TypeVar("T")
B = TypeVar("B", bound=OfflineBatch)
NAME = "llm"
MakeDisplay = Callable[[Deployment], StartupDisplay]


class Session:
    """Call `start`, then `submit` and `call` from any thread, then `close`. All else runs on the session's loop."""

    def __init__(self, values: Values, display: MakeDisplay, make_command: MakeCommand | None = None) -> None:
        """Finds the model and checks all flags without starting a process. Raises ConfigError."""
        with contextlib.ExitStack() as undo:
            run_dir = undo.enter_context(RunDir(values.maybe("run-dir", str)))
            whole = resolve(values, model_files.find(values), local_bus(run_dir.path))
            self.config: GatewayConfig = whole.gateways[0]
            self.settings = whole.scheduler.model
            self.formats = OutputFormats.load(self.settings.tools, self.config.parser_plugins)
            self.tokenizer_path = Path(whole.tokenizers[0].tokenizer_path)
            workers = executors.choose(whole.workers, values, os.environ)
            # `LLM.chat` passes templates of the calling script, which is trusted
            tokenizers = [msgspec.structs.replace(t, trust_request_chat_template=True) for t in whole.tokenizers]
            self._deployment = msgspec.structs.replace(whole, gateways=[], tokenizers=tokenizers, workers=workers)
            self._display = display(self._deployment)
            self._ring = Ring(self._deployment, run_dir.path, self._display, make_command)
            self._cleanup = undo.pop_all()
        self._pid = os.getpid()
        self._ready: concurrent.futures.Future[ModelCard] = concurrent.futures.Future()
        self._served = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._batches: set[OfflineBatch] = set()
        self._num_batches = 0
        self.adapter_numbers: dict[str, int] = {}  # by name: the caller's number of the bytes that were read last
        self._end_reason = ""  # why the ring has ended; empty while it runs
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="blockyard ring", daemon=True)

    @property
    def card(self) -> ModelCard:
        """The model's card. Waits until the ring is ready."""
        if not self._ready.done():
            self._check_alive()
        return self._ready.result()

    def start(self) -> None:
        """Starts the ring and returns when prompts can be served. Raises BlockyardError if it fails."""
        self._thread.start()
        self._ready.result()

    @property
    def end_reason(self) -> str:
        """Why the ring has ended; empty while it runs."""
        return self._end_reason

    def idle_work_done(self) -> float:
        """Returns the finished share of the workers' idle work (CUDA graphs, layer tuning), 1.0 for all.

        Raises RingLost if the ring has ended.
        """
        self._check_alive()
        return min((member.progress for member in self._links.of(Role.GPU_WORKER)), default=0.0)

    def submit(
        self, requests: list[OfflineRequest], progress: BatchProgress | None = None
    ) -> tuple[RequestBatch, "concurrent.futures.Future[None]"]:
        """Runs a batch; cancelling the future cancels it. Raises RingLost, and so does the future if the ring ends."""
        return self.submit_batch(
            lambda name, client: RequestBatch(name, requests, self.card, client, self._limiter, progress)
        )

    def submit_batch(self, make: Callable[[str, RingClient], B]) -> tuple[B, "concurrent.futures.Future[None]"]:
        """As `submit`, of any batch. `make` is called with a name of its own."""
        self._check_alive()
        self._num_batches += 1
        batch = make(f"llm{self._num_batches}", self._client)
        return batch, asyncio.run_coroutine_threadsafe(self._serve(batch), self._loop)

    def call(self, work: Callable[[RingClient], Coroutine[Any, Any, T]]) -> T:
        """Runs `work` on the session's loop and returns its result. Raises RingLost if the ring has ended or ends."""
        future = self.start_call(work)
        try:
            return future.result()
        finally:
            future.cancel()  # cancels it if waiting was interrupted

    def start_call(self, work: Callable[[RingClient], Coroutine[Any, Any, T]]) -> "concurrent.futures.Future[T]":
        """Starts a `call` without waiting for its result."""
        self._check_alive()
        return asyncio.run_coroutine_threadsafe(self._until_ring_ends(work(self._client)), self._loop)

    def abort(self, why: str) -> None:
        """Fails all open requests. Raises RingLost."""

        async def fail(_: RingClient) -> None:
            for batch in list(self._batches):
                batch.abort(RequestError(why, status=503))

        self.call(fail)

    def close(self) -> None:
        """Stops the ring and waits until its last process has ended. May be called again, and in a fork."""
        if os.getpid() != self._pid or not self._thread.is_alive():
            return
        with contextlib.suppress(RuntimeError):  # the loop has just closed
            self._loop.call_soon_threadsafe(self._stop)
        if threading.current_thread() is not self._thread:  # the garbage collector may call this from any thread
            self._thread.join()

    def _check_alive(self) -> None:
        """Raises RingLost if the ring has ended, or in a forked child, which has neither its thread nor its sockets."""
        if os.getpid() != self._pid:
            raise RingLost(
                f"this LLM was made in process {self._pid} and does not work in {os.getpid()}, forked from it: make it "
                "in the process that uses it, or start that one with the method spawn"
            )
        if self._end_reason:
            raise RingLost(self._end_reason)

    def _run(self) -> None:
        """Body of the thread."""
        try:
            with self._cleanup, asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._main())
        except BaseException as e:
            if self._ready.done():
                raise
            self._ready.set_exception(e)
        if not self._ready.done():
            self._ready.set_exception(RingLost(self._end_reason))

    async def _main(self) -> None:
        bus = self._deployment.registry.process.bus
        links: Links[GatewayIn] = Links(NAME, Role.API_GATEWAY, bus, GatewayIn)
        self._links = links
        names, timeout_s = self.config.served_model_names, self.config.stall_timeout_s
        self._client = RingClient(links, names, timeout_s, hold_s=timeout_s)
        self._limiter = InflightLimiter(self._client, names[0], timeout_s)

        def each_round() -> None:
            links.count(_stats(self._client, len(self._limiter)))
            self._limiter.send_pending()

        try:
            with links:
                links.update(ready=True, phase="ready")
                async with asyncio.TaskGroup() as tasks:
                    helpers = [
                        tasks.create_task(self._listen(links)),
                        tasks.create_task(self._client.keep_time(each_round)),
                        tasks.create_task(self._announce()),
                    ]
                    await self._ring.run(drain_s=0.0)
                    for helper in helpers:
                        helper.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._display.close()
            self._end_calls("the ring has ended")
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self, links: Links[GatewayIn]) -> None:
        async for peer, event in links:
            self._client.handle(peer, event)
            if isinstance(event, Joined | Changed | QueueCapacityChanged):
                self._limiter.send_pending()
                model = self.config.served_model_names[0]
                if self._client.schedulers.of(model) and self._client.tokenizer_client.serves(model):
                    self._served.set()

    async def _announce(self) -> None:
        await self._ring.ready.wait()
        await self._served.wait()
        self._display.close()
        self._display.say(f"{NAME}: ready after {self._ring.start_up.seconds:.1f} s")
        self._ready.set_result(self._client.schedulers.card(self.config.served_model_names[0]))

    async def _serve(self, batch: OfflineBatch) -> None:
        self._batches.add(batch)
        try:
            await self._until_ring_ends(batch.run())
        finally:
            self._batches.discard(batch)

    async def _until_ring_ends(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work`; raises RingLost if the ring ends first."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if self._end_reason:
                raise RingLost(self._end_reason) from None
            raise
        finally:
            self._tasks.discard(task)

    def _stop(self) -> None:
        self._end_calls("the LLM is closed")
        self._ring.stop()

    def _end_calls(self, why: str) -> None:
        self._end_reason = self._end_reason or why
        for task in self._tasks:
            task.cancel()


def _stats(client: RingClient, num_waiting: int) -> Stats:
    return Stats(
        running=client.num_open(),
        waiting=client.tokenizer_client.num_waiting + num_waiting,
        requests_total=client.meters.requests,
        prompt_tokens_total=client.meters.prompt_tokens,
        output_tokens_total=client.meters.output_tokens,
    )
