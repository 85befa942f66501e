"""A ring and its one client, on an event loop in a thread of their own."""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from blockyard.services.launcher import gpus
from blockyard.services.launcher.models import model_files
from blockyard.services.launcher.supervision.child import MakeCommand
from blockyard.services.launcher.supervision.ring import Ring, local_bus
from blockyard.services.launcher.supervision.run_dir import RunDir
from blockyard.services.launcher.supervision.start_up import StartupDisplay
from blockyard.services.offline.batch import OfflineRequest, RequestBatch
from blockyard.services.offline.errors import RingLost
from blockyard.services.offline.inflight import InflightLimiter
from blockyard.shared.bus.links import Changed, Joined, Links
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.config.resolve import Deployment, resolve
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import GatewayIn, ModelCard, QueueCapacityChanged, Role, Stats
from blockyard.shared.ring_client.client import RingClient
from blockyard.shared.ring_client.metrics.member_counts import MemberCounts
from blockyard.shared.ring_client.metrics.meters import Meters

T = TypeVar("T")
NAME = "llm"
MakeDisplay = Callable[[Deployment], StartupDisplay]


class Session:
    """`start`, then `submit` from any thread, then `close`. Everything else lives on the session's own loop."""

    def __init__(self, values: Values, display: MakeDisplay, make_command: MakeCommand | None = None) -> None:
        """Finds the model and checks all flags; nothing is started yet. Raises ConfigError."""
        with contextlib.ExitStack() as undo:
            run_dir = undo.enter_context(RunDir(values.maybe("run-dir", str)))
            whole = resolve(values, model_files.find(values), local_bus(run_dir.path))
            self.config: GatewayConfig = whole.gateways[0]
            self.tokenizer_path = Path(whole.tokenizers[0].tokenizer_path)
            gpus.check(whole.workers, os.environ)
            # templates come from the script itself, through `LLM.chat`
            tokenizers = [msgspec.structs.replace(t, trust_request_chat_template=True) for t in whole.tokenizers]
            self._deployment = msgspec.structs.replace(whole, gateways=[], tokenizers=tokenizers)
            self._display = display(self._deployment)
            self._ring = Ring(self._deployment, run_dir.path, self._display, make_command)
            self._tidy_up = undo.pop_all()
        self._pid = os.getpid()
        self._ready: concurrent.futures.Future[ModelCard] = concurrent.futures.Future()
        self._served = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._batches: set[RequestBatch] = set()
        self._num_batches = 0
        self._end = ""  # why there is no ring any more
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="blockyard ring", daemon=True)

    @property
    def card(self) -> ModelCard:
        """Of the model, once it is served."""
        return self._ready.result()

    def start(self) -> None:
        """Returns when prompts can be served. Raises BlockyardError if that will not be."""
        self._thread.start()
        self._ready.result()

    def idle_work_done(self) -> float:
        """The part of what the workers do while they are idle (CUDA graphs, measuring) that is done; 1.0: all. Raises
        RingLost if the ring has ended."""
        if self._end:
            raise RingLost(self._end)
        return min((member.progress for member in self._links.of(Role.GPU_WORKER)), default=0.0)

    def submit(self, jobs: list[OfflineRequest]) -> tuple[RequestBatch, "concurrent.futures.Future[None]"]:
        """Cancelling the future cancels what runs. Raises RingLost, as the future does if the ring ends meanwhile."""
        if self._end:
            raise RingLost(self._end)
        self._num_batches += 1
        batch = RequestBatch(f"llm{self._num_batches}", jobs, self.card, self._client, self._gate)
        return batch, asyncio.run_coroutine_threadsafe(self._serve(batch), self._loop)

    def call(self, work: Callable[[RingClient], Coroutine[Any, Any, T]]) -> T:
        """What `work` returns, which runs on the session's loop. Raises RingLost, also if the ring ends meanwhile."""
        if self._end:
            raise RingLost(self._end)
        future = asyncio.run_coroutine_threadsafe(self._guarded(work(self._client)), self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # has an effect if waiting was interrupted

    def abort(self, why: str) -> None:
        """Fails all requests that are open. Raises RingLost."""

        async def fail(_: RingClient) -> None:
            for batch in list(self._batches):
                batch.abort(RequestError(why, status=503))

        self.call(fail)

    def look(self, read: Callable[[Meters, MemberCounts], T]) -> T:
        """What `read` makes of the counters, the schedulers' as of now. Raises RingLost."""

        async def reading(client: RingClient) -> T:
            await client.counts.refresh()
            return read(client.meters, client.counts)

        return self.call(reading)

    def close(self) -> None:
        """Stops the ring and waits until its last process is gone. May be called again, and in a fork."""
        if os.getpid() != self._pid or not self._thread.is_alive():
            return
        with contextlib.suppress(RuntimeError):  # the loop has closed this very moment
            self._loop.call_soon_threadsafe(self._stop)
        if threading.current_thread() is not self._thread:  # the garbage collector runs anywhere
            self._thread.join()

    def _run(self) -> None:
        """The thread."""
        try:
            with self._tidy_up, asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._main())
        except BaseException as e:
            if self._ready.done():
                raise
            self._ready.set_exception(e)
        if not self._ready.done():
            self._ready.set_exception(RingLost(self._end))

    async def _main(self) -> None:
        bus = self._deployment.registry.process.bus
        links: Links[GatewayIn] = Links(NAME, Role.API_GATEWAY, bus, GatewayIn)
        self._links = links
        names, patience_s = self.config.served_model_names, self.config.stall_timeout_s
        self._client = RingClient(links, names, patience_s, hold_s=patience_s)
        self._gate = InflightLimiter(self._client, names[0], patience_s)

        def each_round() -> None:
            links.count(_stats(self._client, len(self._gate)))
            self._gate.pump()

        try:
            with links:
                links.update(ready=True, phase="ready")
                async with asyncio.TaskGroup() as tasks:
                    helpers = [
                        tasks.create_task(self._listen(links)),
                        tasks.create_task(self._client.keep_time(each_round)),
                        tasks.create_task(self._greet()),
                    ]
                    await self._ring.run(drain_s=0.0)
                    for helper in helpers:
                        helper.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._display.close()
            self._give_up("the ring has ended")
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self, links: Links[GatewayIn]) -> None:
        async for peer, event in links:
            self._client.handle(peer, event)
            if isinstance(event, Joined | Changed | QueueCapacityChanged):
                self._gate.pump()
                model = self.config.served_model_names[0]
                if self._client.admission.schedulers(model) and self._client.tokenizer_client.serves(model):
                    self._served.set()

    async def _greet(self) -> None:
        await self._ring.ready.wait()
        await self._served.wait()
        self._display.close()
        self._display.say(f"{NAME}: ready after {self._ring.start_up.seconds:.1f} s")
        self._ready.set_result(self._client.admission.card(self.config.served_model_names[0]))

    async def _serve(self, batch: RequestBatch) -> None:
        self._batches.add(batch)
        try:
            await self._guarded(batch.run())
        finally:
            self._batches.discard(batch)

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        """Ends with RingLost when the ring does."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if self._end:
                raise RingLost(self._end) from None
            raise
        finally:
            self._tasks.discard(task)

    def _stop(self) -> None:
        self._give_up("the LLM is closed")
        self._ring.stop()

    def _give_up(self, why: str) -> None:
        """Nobody is left waiting for a ring that is gone."""
        self._end = self._end or why
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
