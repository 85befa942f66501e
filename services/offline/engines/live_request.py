"""One request of an engine: its outputs so far in the pieces that its `output_kind` asks for, or a pooling result."""

import asyncio
import concurrent.futures
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blockyard.services.offline.adapters.requests import Adapters
from blockyard.services.offline.batch import BatchProgress
from blockyard.services.offline.outputs import CompletionOutput, RequestOutput
from blockyard.services.offline.pooling import outputs
from blockyard.services.offline.pooling.methods import text_job
from blockyard.services.offline.pooling.outputs import PoolingOutput, PoolingRequestOutput
from blockyard.services.offline.pooling.params import Params
from blockyard.services.offline.pooling.pooling_batch import PoolingBatch
from blockyard.services.offline.prompts import read_prompts
from blockyard.services.offline.running_model import RunningModel, read_priorities
from blockyard.services.offline.sampling_params import RequestOutputKind, SamplingParams
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import PoolingTask
from blockyard.shared.ring_client.pooling.calls import PooledText

ABORTED = "abort"  # finish_reason
NO_RESULT = PooledText(b"", 0, 0)


class NewsReporter(BatchProgress):
    """Reports everything that happens to a request. Runs on the ring's event loop."""

    def __init__(self, on_news: Callable[[], None]) -> None:
        super().__init__()
        self._on_news = on_news
        self.started = threading.Event()  # the prompt is tokenized and fits, or the request has failed

    def on_begin(self, now: float) -> None:
        super().on_begin(now)
        self.started.set()

    def add_output_tokens(self, num: int) -> None:
        super().add_output_tokens(num)
        self._on_news()

    def on_finish(self, now: float) -> None:
        super().on_finish(now)
        self._on_news()

    def on_done(self, future: "concurrent.futures.Future[None]") -> None:
        self.started.set()
        self._on_news()


@dataclass(slots=True)
class Delivered:
    """How much of a choice earlier outputs had."""

    num_chars: int = 0
    num_tokens: int = 0
    finished: bool = False


class LiveRequest:
    """Runs from its construction to its last output. `take` runs on the ring's event loop, all else in any thread."""

    def __init__(
        self,
        running: RunningModel,
        request_id: str,
        prompt: object,
        params: SamplingParams | None,
        priority: int,
        on_news: Callable[[], None],
        adapters: Sequence[Adapters] = (),
    ) -> None:
        """`on_news` is called on the ring's event loop when `take` may return more. adapters: those of the one
        prompt. Raises RequestError, RingLost."""
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a text, got {request_id!r}", "request_id")
        prompts = read_prompts(prompt, running.name)
        if len(prompts) != 1:
            raise RequestError(f"a request has one prompt, got {len(prompts)}", "prompt")
        self.id = request_id
        self._kind = RequestOutputKind.CUMULATIVE if params is None else params.output_kind
        requests = running.requests(prompts, params, priority, adapters)
        choices = requests[0].params.choices
        if choices.beam is not None or choices.computed > choices.returned:
            self._kind = RequestOutputKind.FINAL_ONLY  # the returned choices are known at the end
        self._lora_request = requests[0].adapters.lora_request
        self._delivered: defaultdict[int, Delivered] = defaultdict(Delivered)
        self._aborted = False
        self._reporter = NewsReporter(on_news)
        self._batch, self._future = running.session.submit(requests, self._reporter)
        self._future.add_done_callback(self._reporter.on_done)

    def wait_started(self) -> None:
        """Waits until the prompt is tokenized. Raises RequestError if it cannot be served, RingLost without a ring."""
        self._reporter.started.wait()
        if self._future.done() and not self._future.cancelled():
            self._future.result()

    def abort(self) -> None:
        """Ends the request. `take` then returns the output so far, with the finish_reason `abort`."""
        self._aborted = True
        self._future.cancel()

    def take(self) -> RequestOutput | None:
        """Returns the next output; None if there is nothing new to show. Raises the error that ended the request."""
        if self._batch.failures:
            raise self._batch.failures[0]
        if self._future.done() and not self._future.cancelled():
            self._future.result()
        found = self._batch.outputs[0]
        if found is None and self._aborted:
            found = self._aborted_output()
        if found is None:
            if self._kind is RequestOutputKind.FINAL_ONLY:
                return None
            found = next(iter(self._batch.unfinished_outputs()), None)
        if found is None:
            return None
        found = replace(found, request_id=self.id)
        return self._new_part(found) if self._kind is RequestOutputKind.DELTA else found

    def _aborted_output(self) -> RequestOutput:
        for found in self._batch.unfinished_outputs():
            ended = [replace(one, finish_reason=one.finish_reason or ABORTED) for one in found.outputs]
            return replace(found, outputs=ended, finished=True)
        lora = self._lora_request
        choice = CompletionOutput(0, finish_reason=ABORTED, lora_request=lora)
        return RequestOutput(self.id, None, [], [choice], finished=True, lora_request=lora)

    def _new_part(self, output: RequestOutput) -> RequestOutput | None:
        """Returns the output with only the new part of each choice, without choices that have none."""
        parts = [part for choice in output.outputs if (part := self._new_part_of(choice)) is not None]
        return replace(output, outputs=parts) if parts or output.finished else None

    def _new_part_of(self, choice: CompletionOutput) -> CompletionOutput | None:
        seen = self._delivered[choice.index]
        text, token_ids = choice.text[seen.num_chars :], choice.token_ids[seen.num_tokens :]
        if not (text or token_ids) and choice.finished() == seen.finished:
            return None
        logprobs = None if choice.logprobs is None else choice.logprobs[seen.num_tokens :]
        self._delivered[choice.index] = Delivered(len(choice.text), len(choice.token_ids), choice.finished())
        return replace(choice, text=text, content=text, token_ids=token_ids, logprobs=logprobs)


class LivePooling:
    """One text for a pooling model, which `AsyncLLMEngine.encode` awaits. Runs from its construction.

    `output` may be awaited once, on any event loop.
    """

    def __init__(
        self,
        running: RunningModel,
        request_id: str,
        prompt: Any,
        params: Params,
        priority: int,
        truncate: int | None,
    ) -> None:
        """Raises RequestError, RingLost."""
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a text, got {request_id!r}", "request_id")
        session, [order] = running.session, read_priorities(priority, 1)
        job = text_job(session.card, prompt, PoolingTask.ENCODE, params, truncate, priority=order)
        if len(job.inputs) != 1:
            raise RequestError(f"a request has one prompt, got {len(job.inputs)}", "prompt")
        self.id = request_id

        def make(_: str, item: PooledText, ids: list[int]) -> PoolingRequestOutput[PoolingOutput]:
            return outputs.pooled(request_id, item, ids)

        self._batch, self._future = session.submit_batch(lambda name, client: PoolingBatch(name, job, client, make))

    def abort(self) -> None:
        """Ends the request. Its output is then empty, as vLLM's is."""
        self._future.cancel()

    async def output(self) -> PoolingRequestOutput[PoolingOutput]:
        """Raises the error that ended the request."""
        done = asyncio.wrap_future(self._future)
        await asyncio.wait([done])  # only the caller's own cancellation is raised here
        if done.cancelled():
            return outputs.pooled(self.id, NO_RESULT, [])
        done.result()
        [output] = self._batch.outputs
        return output
