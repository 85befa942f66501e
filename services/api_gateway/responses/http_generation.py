"""Open generation requests: the journal entries of each, the events that its handler waits for, and bounds on all.

The scheduler's bounds are for what waits there. --max-num-queued-reqs bounds what a gateway has open at all, and
--max-num-queued-tokens its prompts without output.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import msgspec

from blockyard.services.api_gateway.apis.interface import Api, Usage
from blockyard.services.api_gateway.requests.generate_request import GenerateRequest
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import FinishReason, TextDelta
from blockyard.shared.ring_client.choice_reader import ChoiceReader
from blockyard.shared.ring_client.journal import JournalEntry
from blockyard.shared.ring_client.schedulers import too_busy

RETRY_AFTER_S = 1.0  # of a request beyond a bound


class HttpGeneration:
    """The owner of its journal entries. One failed entry fails all of them."""

    def __init__(self, api: Api, request: GenerateRequest, close: Callable[[JournalEntry], None]) -> None:
        self.api, self.request = api, request
        self.events = api.events(request.options)  # of a streamed answer
        self.entries: list[JournalEntry] = []
        self._prompt_texts: dict[str, str] = {}  # by request id, of prompts that are shown as text
        self._reasoning_readers: list[ChoiceReader] = []  # they count its tokens of reasoning
        self.error: RequestError | None = None
        self.on_ending: Callable[[], None] | None = None  # called before the end of a streamed answer is sent
        self._close = close
        self.num_prompts = self._num_unaccepted = self._num_unfinished = len(request.prompts)
        self._accepted = asyncio.Event()  # every prompt was accepted, or one failed
        self._begun = asyncio.Event()  # some choice has output or ended, or one failed
        self._finished = asyncio.Event()  # every choice ended, or one failed

    def add_prompt_text(self, request_id: str, text: str) -> None:
        """The answer shows the text of this prompt."""
        self._prompt_texts[request_id] = text

    def prompt_text(self, entry: JournalEntry) -> str:
        return self._prompt_texts[entry.request_id]

    def count_reasoning_of(self, reader: ChoiceReader) -> None:
        """The usage shows this reader's tokens of reasoning."""
        self._reasoning_readers.append(reader)

    def accepted(self, entry: JournalEntry) -> None:
        self._num_unaccepted -= 1
        if self._num_unaccepted == 0:
            self._accepted.set()

    def begun(self, entry: JournalEntry) -> None:
        self._begun.set()

    def finished(self, entry: JournalEntry) -> None:
        self._num_unfinished -= 1
        self._begun.set()
        if self._num_unfinished == 0:
            self._finished.set()

    def failed(self, entry: JournalEntry, error: RequestError) -> None:
        self.fail(error)

    def fail(self, error: RequestError) -> None:
        """Ends the request with this error and cancels its running choices."""
        if self.error is None and not self._finished.is_set():
            self.error = error
        self.close()
        self._accepted.set()
        self._begun.set()
        self._finished.set()

    def close(self) -> None:
        for entry in self.entries:
            self._close(entry)

    async def wait_begun(self, patience_s: float) -> None:
        """Waits for the first output of an accepted request, but not longer than `patience_s`.

        The HTTP status is 200 then. Raises RequestError if it is another one.
        """
        await self._accepted.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._begun.wait()
        if self.error is not None:
            raise self.error

    async def wait_finished(self) -> None:
        """Waits for the last text, or for an `error`."""
        await self._finished.wait()

    def ending(self) -> bytes:
        """The end of a streamed answer."""
        data = self.events.ending(self.usage) if self.error is None else self.events.failed(self.error)
        if self.on_ending is not None:
            self.on_ending()
        return data

    def usage(self) -> Usage:
        options = self.request.options
        prompt = sum(e.num_prompt_tokens for e in self.entries)
        completion = 0 if options.no_output else sum(len(c.output_ids) for e in self.entries for c in e.choices)
        cached = sum(e.cached_tokens for e in self.entries) if options.prompt_tokens_details else None
        readers = self._reasoning_readers
        reasoning = sum(reader.num_reasoning for reader in readers) if readers else None
        return Usage(prompt, completion, cached, reasoning)


class OpenRequests:
    """Counts requests from their parsed body to the end of their answer, and keeps the requests in the ring."""

    def __init__(
        self, max_choices: int | None, max_tokens: int | None, num_pooled_tokens: Callable[[], int] = lambda: 0
    ) -> None:
        """None: no bound. num_pooled_tokens: returns the tokens of texts without results yet."""
        self.num_requests = 0
        self._max_choices, self._max_tokens = max_choices, max_tokens
        self._num_choices, self._num_pooled_tokens = 0, num_pooled_tokens
        self._in_ring: set[HttpGeneration] = set()

    @contextlib.contextmanager
    def counted(self, num_choices: int) -> Iterator[None]:
        """Counts a request until the block is left. One that is alone may have any number of choices. Raises a 429."""
        most, already = self._max_choices, self._num_choices
        if most is not None and already and already + num_choices > most:
            raise too_busy(RETRY_AFTER_S)
        self._num_choices += num_choices
        self.num_requests += 1
        try:
            yield
        finally:
            self._num_choices -= num_choices
            self.num_requests -= 1

    def check_tokens(self) -> None:
        """Raises a 429 if the prompts without output have as many tokens as they may."""
        if self._max_tokens is None:
            return
        entries = (entry for generation in self._in_ring for entry in generation.entries)
        waiting = sum(e.num_prompt_tokens for e in entries if not e.has_output and e.num_open)
        if waiting + self._num_pooled_tokens() >= self._max_tokens:
            raise too_busy(RETRY_AFTER_S)

    def add(self, generation: HttpGeneration) -> None:
        """The request is sent into the ring."""
        self._in_ring.add(generation)

    def remove(self, generation: HttpGeneration) -> None:
        self._in_ring.discard(generation)

    def fail_named(self, names: set[str], error: RequestError) -> int:
        """Ends the requests in the ring with these answer ids. Returns how many."""
        found = [generation for generation in self._in_ring if generation.request.options.answer_id in names]
        for generation in found:
            generation.fail(error)
        return len(found)

    def fail_all(self, error: RequestError) -> None:
        """Ends every request in the ring with this error."""
        for generation in list(self._in_ring):
            generation.fail(error)


def without_output(delta: TextDelta) -> TextDelta:
    """For max_tokens 0: hides the one token that was generated to get the prompt's log-probabilities."""
    finish = None if delta.finish is None else FinishReason.LENGTH
    return msgspec.structs.replace(delta, token_ids=[], text="", logprobs=[], finish=finish, stop_reason=None)
