"""`LLMEngine`: requests are added one by one, and `step` returns their outputs."""

import queue
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from blockyard.services.offline.adapters.loading import list_loras, read_adapters, remove_lora
from blockyard.services.offline.adapters.requests import LoRARequest, PromptAdapterRequest
from blockyard.services.offline.engine_args import EngineArgsBase
from blockyard.services.offline.engines.live_request import LiveRequest
from blockyard.services.offline.operations import RingOperations
from blockyard.services.offline.outputs import RequestOutput
from blockyard.services.offline.running_model import RunningModel
from blockyard.services.offline.sampling_params import SamplingParams
from blockyard.services.offline.tokenizer import LLMTokenizer
from blockyard.shared.errors import BlockyardError, RequestError, not_built
from blockyard.shared.messages import ModelCard
from blockyard.shared.ring_client.client import RingClient

NO_PINS = "`max_loras` and `max_cpu_loras` say how many adapters are held"


@dataclass(frozen=True, slots=True)
class EngineModelConfig:
    """The fields of an engine's `model_config` that scripts read."""

    model: str
    served_model_name: str
    max_model_len: int
    vocab_size: int

    @classmethod
    def of(cls, card: ModelCard) -> "EngineModelConfig":
        return cls(card.root, card.names[0], card.max_model_len, card.vocab_size)

    def get_vocab_size(self) -> int:
        return self.vocab_size


class LLMEngine(RingOperations):
    """An engine for one thread. `LLM.llm_engine` is one on the LLM's ring; `from_engine_args` starts a ring."""

    def __init__(self, running: RunningModel) -> None:
        self._running, self._session = running, running.session
        self._requests: dict[str, LiveRequest] = {}  # until the last output is returned
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()  # ids, once for each change
        self._kept: list[RequestOutput] = []  # of a step that raised

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgsBase, *_: object, **__: object) -> "LLMEngine":
        """Starts the ring. vLLM's other arguments (usage_context, stat_loggers) have no effect."""
        return cls(RunningModel(None, engine_args.keywords()))

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        prompt_adapter_request: PromptAdapterRequest | None = None,
    ) -> None:
        """Sends a request, a prompt in any form of `LLM.generate`, once it is tokenized.

        `arrival_time` and `trace_headers` have no effect. Raises RequestError if it cannot be served.
        """
        refuse_arguments(tokenization_kwargs=tokenization_kwargs)
        if request_id in self._requests:
            raise RequestError(f"request_id {request_id!r} is in use by an unfinished request", "request_id")
        adapters = read_adapters(self._session, lora_request, 1, prompt_adapter_request)
        live = LiveRequest(
            self._running, request_id, prompt, params, priority, lambda: self._news.put_nowait(request_id), adapters
        )
        live.wait_started()
        self._requests[request_id] = live

    def step(self) -> list[RequestOutput]:
        """Waits until something has arrived, and returns it, as the `output_kind` of each request asks.

        Returns an empty list if no request is open, or if nothing is to be shown yet. Raises the error of a request
        that failed; the others go on.
        """
        if self._kept:
            outputs, self._kept = self._kept, []
            return outputs
        if not self._requests:
            return []
        live = [self._requests[one] for one in self._names_with_news() if one in self._requests]
        try:
            taken = self._session.call(lambda client: _take(client, live))
        except BlockyardError:
            self._requests.clear()  # the ring has ended
            raise
        outputs, errors = [], []
        for request, found in zip(live, taken, strict=True):
            if isinstance(found, Exception):
                errors.append(found)
            elif found is not None:
                outputs.append(found)
            if isinstance(found, Exception) or (found is not None and found.finished):
                del self._requests[request.id]
        if errors:
            self._kept = outputs
            raise errors[0]
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests or self._kept)

    def get_num_unfinished_requests(self) -> int:
        return len(self._requests)

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Ends requests without further output. Unknown ids are ignored."""
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            if (live := self._requests.pop(one, None)) is not None:
                live.abort()

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Loads an adapter, so that its first request need not wait for it."""
        read_adapters(self._session, lora_request, 1)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Unloads the adapters of a `lora_int_id` once no request uses them. Returns whether there was one."""
        return remove_lora(self._session, lora_id)

    def list_loras(self) -> set[int]:
        """The `lora_int_id`s of the loaded adapters."""
        return list_loras(self._session)

    def pin_lora(self, lora_id: int) -> NoReturn:
        raise not_built("pin_lora", NO_PINS)

    def get_tokenizer(self) -> LLMTokenizer:
        return self._running.tokenizer()

    @property
    def tokenizer(self) -> LLMTokenizer:
        return self.get_tokenizer()

    @property
    def model_config(self) -> EngineModelConfig:
        return EngineModelConfig.of(self._session.card)

    def get_model_config(self) -> EngineModelConfig:
        return self.model_config

    def close(self) -> None:
        """Ends the ring, also the ring of an `LLM` with this `llm_engine`."""
        self._running.close()

    def _names_with_news(self) -> list[str]:
        names = {self._news.get(): None}
        while not self._news.empty():
            names[self._news.get()] = None
        return list(names)


def refuse_arguments(**arguments: object) -> None:
    """Raises RequestError for an argument that has a value and is not built."""
    for name, value in arguments.items():
        if value:
            raise not_built(name)


async def _take(_: RingClient, live: list[LiveRequest]) -> list[RequestOutput | Exception | None]:
    return list(_outputs(live))


def _outputs(live: list[LiveRequest]) -> Iterator[RequestOutput | Exception | None]:
    for request in live:
        try:
            yield request.take()
        except BlockyardError as e:
            yield e
