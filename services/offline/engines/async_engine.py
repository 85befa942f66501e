"""`AsyncLLMEngine`: an async iterator of outputs for each request, of text or of a pooling model."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any

from blockyard.services.offline.adapters.loading import read_adapters
from blockyard.services.offline.adapters.requests import LoRARequest, PromptAdapterRequest
from blockyard.services.offline.engine_args import EngineArgsBase
from blockyard.services.offline.engines.async_operations import AsyncOperations
from blockyard.services.offline.engines.live_request import LivePooling, LiveRequest
from blockyard.services.offline.engines.llm_engine import refuse_arguments
from blockyard.services.offline.outputs import RequestOutput
from blockyard.services.offline.pooling.outputs import PoolingOutput, PoolingRequestOutput
from blockyard.services.offline.pooling.params import Params, truncation_of
from blockyard.services.offline.running_model import RunningModel
from blockyard.services.offline.sampling_params import SamplingParams
from blockyard.shared.errors import RequestError
from blockyard.shared.ring_client.client import RingClient


class AsyncLLMEngine(AsyncOperations):
    """Generates from any number of tasks, of one or several event loops. The ring runs in a thread of its own."""

    def __init__(self, running: RunningModel) -> None:
        super().__init__(running)
        self._requests: dict[str, LiveRequest | LivePooling] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgsBase, *_: object, **__: object) -> "AsyncLLMEngine":
        """Starts the ring and waits for it. vLLM's other arguments (usage_context, stat_loggers) have no effect."""
        return cls(RunningModel(None, engine_args.keywords()))

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None,
        request_id: str,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        prompt_adapter_request: PromptAdapterRequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields outputs as they arrive, in the form of `sampling_params.output_kind`; the last one is finished.

        Text that arrives while the caller does something else is in one output. A request ends when its iterator is
        closed, or the task of its caller is cancelled. Raises RequestError if it cannot be served, and RingLost without
        a ring.
        """
        refuse_arguments(tokenization_kwargs=tokenization_kwargs)
        self._check_unused(request_id)
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def on_news() -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop was closed
                loop.call_soon_threadsafe(news.set)

        asked = lora_request, 1, prompt_adapter_request
        adapters = await asyncio.to_thread(read_adapters, self._session, *asked)
        live = LiveRequest(self._running, request_id, prompt, sampling_params, priority, on_news, adapters)
        self._requests[request_id] = live
        finished = False
        try:
            while not finished:
                await news.wait()
                news.clear()
                output = await asyncio.wrap_future(self._session.start_call(lambda client: _take(client, live)))
                if output is not None:
                    finished = output.finished
                    yield output
        finally:
            del self._requests[request_id]
            live.abort()  # has no effect on a finished one

    async def encode(
        self,
        prompt: Any,
        pooling_params: Params,
        request_id: str,
        lora_request: None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Yields one output: what the model's pooling makes of the prompt, as `LLM.encode` returns it.

        Ends and raises as `generate` does. After `abort` the output is empty.
        """
        refuse_arguments(lora_request=lora_request)
        self._check_unused(request_id)
        truncate = truncation_of(truncate_prompt_tokens, tokenization_kwargs)
        live = LivePooling(self._running, request_id, prompt, pooling_params, priority, truncate)
        self._requests[request_id] = live
        try:
            output = await live.output()
        finally:
            del self._requests[request_id]
            live.abort()  # has no effect on a finished one
        yield output

    def _check_unused(self, request_id: str) -> None:
        if request_id in self._requests:
            raise RequestError(f"request_id {request_id!r} is in use by an unfinished request", "request_id")

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests: their iterators yield the output so far with finish_reason `abort`. Ignores unknown ids."""
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            if (live := self._requests.get(one)) is not None:
                live.abort()

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the ring. Open requests fail. May be called again."""
        self._running.close()


AsyncLLM = AsyncLLMEngine  # its newer name


async def _take(_: RingClient, live: LiveRequest) -> RequestOutput | None:
    return live.take()
