"""An open generation request: the journal entries of its prompts, and the events that its handler waits for."""

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from blockyard.services.api_gateway.apis.interface import Api, Usage
from blockyard.services.api_gateway.requests.generate_request import GenerateRequest
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import FinishReason, TextDelta
from blockyard.shared.ring_client.choice_reader import ChoiceReader
from blockyard.shared.ring_client.journal import JournalEntry


class HttpGeneration:
    """The owner of its journal entries. One failed entry fails all of them."""

    def __init__(self, api: Api, request: GenerateRequest, close: Callable[[JournalEntry], None]) -> None:
        self.api, self.request = api, request
        self.events = api.events(request.options)  # of a streamed answer
        self.entries: list[JournalEntry] = []
        self._reasoning_readers: list[ChoiceReader] = []  # those that count its tokens
        self.error: RequestError | None = None
        self._close = close
        self._num_unaccepted = self._num_unfinished = len(request.prompts)
        self._accepted = asyncio.Event()  # every prompt was accepted, or one failed
        self._begun = asyncio.Event()  # some choice has output or ended, or one failed
        self._finished = asyncio.Event()  # every choice ended, or one failed

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
        return self.events.ending(self.usage) if self.error is None else self.events.failed(self.error)

    def usage(self) -> Usage:
        options = self.request.options
        prompt = sum(e.num_prompt_tokens for e in self.entries)
        completion = 0 if options.no_output else sum(len(c.output_ids) for e in self.entries for c in e.choices)
        cached = sum(e.cached_tokens for e in self.entries) if options.prompt_tokens_details else None
        readers = self._reasoning_readers
        reasoning = sum(reader.num_reasoning for reader in readers) if readers else None
        return Usage(prompt, completion, cached, reasoning)


def without_output(delta: TextDelta) -> TextDelta:
    """For max_tokens 0: hides the one token that was generated to get the prompt's log-probabilities."""
    finish = None if delta.finish is None else FinishReason.LENGTH
    return msgspec.structs.replace(delta, token_ids=[], text="", logprobs=[], finish=finish, stop_reason=None)
