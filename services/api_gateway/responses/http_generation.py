"""One HTTP request on the ring: its prompts' journal entries, and the moments its handler waits for."""

import asyncio
from collections.abc import Callable

import msgspec

from blockyard.services.api_gateway.requests.generate_request import Job
from blockyard.services.api_gateway.responses.chunks import encode
from blockyard.services.api_gateway.responses.error_body import ApiError
from blockyard.shared.ring_client.journal import Entry


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class Call:
    """The journal's Owner. An entry that fails fails the whole call."""

    def __init__(self, job: Job, arrived_s: float, close: Callable[[Entry], None]) -> None:
        self.job = job
        self.arrived_s = arrived_s
        self.entries: list[Entry] = []
        self.error: ApiError | None = None
        self._close = close
        self._num_unsettled = self._num_unfinished = len(job.prompts)
        self._settled = asyncio.Event()  # every prompt was accepted, or one failed
        self._finished = asyncio.Event()  # every choice ended, or one failed

    def accepted(self, entry: Entry) -> None:
        self._num_unsettled -= 1
        if self._num_unsettled == 0:
            self._settled.set()

    def finished(self, entry: Entry) -> None:
        self._num_unfinished -= 1
        if self._num_unfinished == 0:
            self._finished.set()

    def failed(self, entry: Entry, error: ApiError) -> None:
        self.fail(error)

    def fail(self, error: ApiError) -> None:
        """Ends the call for its caller; what still runs of it is cancelled."""
        if self.error is None and not self._finished.is_set():
            self.error = error
        self.close()
        self._settled.set()
        self._finished.set()

    def close(self) -> None:
        for entry in self.entries:
            self._close(entry)

    def is_finished(self) -> bool:
        return self._finished.is_set()

    async def settle(self) -> None:
        """Waits until the status is known. Raises ApiError where it is not 200."""
        await self._settled.wait()
        if self.error is not None:
            raise self.error

    async def finish(self) -> None:
        """Waits for the last text; `error` says how it ended."""
        await self._finished.wait()

    def usage(self) -> Usage:
        prompt = sum(e.num_prompt_tokens for e in self.entries)
        completion = 0 if self.job.shape.no_output else sum(len(c.output_ids) for e in self.entries for c in e.choices)
        details = None
        if self.job.shape.prompt_tokens_details:
            details = PromptTokensDetails(sum(e.cached_tokens for e in self.entries))
        return Usage(prompt, prompt + completion, completion, details)

    def usage_json(self) -> bytes:
        return encode(self.usage())
