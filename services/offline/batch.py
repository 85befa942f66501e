"""The prompts of one call on their way through the ring, and what became of each."""

import asyncio
import hashlib
import time
from dataclasses import dataclass

import msgspec

from blockyard.services.offline.answers import ArrivalTimes, OutputCollector, request_output
from blockyard.services.offline.errors import RingLost
from blockyard.services.offline.inflight import InflightLimiter
from blockyard.services.offline.outputs import RequestOutput
from blockyard.services.offline.prompts import Prompt
from blockyard.services.offline.sampling_params import CheckedParams
from blockyard.shared.errors import BlockyardError, RequestError
from blockyard.shared.messages import ModelCard, Tokenize, Tokenized
from blockyard.shared.ring_client.client import RingClient
from blockyard.shared.ring_client.recovery.journal import ChoiceLog, JournalEntry
from blockyard.shared.ring_client.request_fields.finalize_sampling import finalize_sampling
from blockyard.shared.ring_client.tokenizer_client import TokenizerClient, kept_end


@dataclass(frozen=True, slots=True)
class OfflineRequest:
    prompt: Prompt
    asked: CheckedParams
    seed: int  # where `asked` has none
    priority: int = 0


@dataclass(slots=True)
class BatchProgress:
    """Read by the thread that shows it. Times are the loop's clock."""

    began_s: float | None = None  # when all prompts were tokenized
    heard_s: float = 0.0  # when a prompt was last finished
    num_tokenized: int = 0
    num_finished: int = 0
    num_prompt_tokens: int = 0  # of finished prompts
    num_output_tokens: int = 0


class RequestBatch:
    """The journal's Owner of all its entries. Lives on the loop of the ring."""

    def __init__(
        self, name: str, jobs: list[OfflineRequest], card: ModelCard, client: RingClient, gate: InflightLimiter
    ) -> None:
        self._name, self._jobs, self._card, self._client, self._gate = name, jobs, card, client, gate
        self.progress = BatchProgress()
        self._arrival = ArrivalTimes(time.time(), client.clock())
        self._queued_s: dict[str, float] = {}  # request id -> when the scheduler took it
        self.outputs: list[RequestOutput | None] = [None] * len(jobs)
        self.failures: dict[int, Exception] = {}
        self._indexes: dict[str, int] = {}  # by request id
        self._prompts: list[Tokenized] = []
        self._open: dict[str, JournalEntry] = {}
        self._done = asyncio.Event()

    async def run(self) -> None:
        """Until each prompt has an output or a failure.

        Raises RequestError before anything ran if one of the prompts cannot be served.
        """
        self._prompts = await self._tokenize()
        for index in range(len(self._jobs)):
            entry = self._entry(index)
            self._indexes[entry.request_id] = index
            self._open[entry.request_id] = entry
        self.progress.began_s = self.progress.heard_s = self._client.clock()
        self._client.meters.requests += 1
        try:
            for entry in self._open.values():
                self._gate.put(entry)
            self._gate.pump()
            if self._open:
                await self._done.wait()
        finally:
            for entry in self._open.values():
                self._gate.drop(entry)
                self._client.dispatch.close(entry)

    def accepted(self, entry: JournalEntry) -> None:
        self._queued_s[entry.request_id] = self._client.clock()
        self._gate.answered(entry)
        self._gate.pump()

    def finished(self, entry: JournalEntry) -> None:
        index = self._indexes[entry.request_id]
        job, prompt = self._jobs[index], self._prompts[index]
        text = job.prompt.text if job.prompt.text is not None else prompt.text or None
        asked, queued_s = job.asked, self._queued_s[entry.request_id]
        self.outputs[index] = request_output(
            entry, text, asked.choices.returned, asked.num_logprobs, self._arrival, queued_s
        )
        self.progress.num_prompt_tokens += entry.num_prompt_tokens
        self._ended(entry)

    def failed(self, entry: JournalEntry, error: RequestError) -> None:
        if error.status == 429 and not entry.accepted:
            self._gate.refused(entry)
            return
        self.failures[self._indexes[entry.request_id]] = error
        self._ended(entry)

    def abort(self, error: RequestError) -> None:
        """Fails what has not ended."""
        for entry in list(self._open.values()):
            self._gate.drop(entry)
            self._client.dispatch.close(entry)
            self.failed(entry, error)

    def _ended(self, entry: JournalEntry) -> None:
        self._gate.answered(entry)
        del self._open[entry.request_id]
        self.progress.num_finished += 1
        self.progress.heard_s = self._client.clock()
        if not self._open:
            self._done.set()

    async def _tokenize(self) -> list[Tokenized]:
        """All prompts. Raises RequestError for the first that is refused."""
        works = [
            msgspec.structs.replace(
                job.prompt.work,
                request_id=f"{self._name}-{i}",
                bad_words=job.asked.bad_words,
                max_tokens=self._card.max_model_len if job.asked.truncate is None else 0,
            )
            for i, job in enumerate(self._jobs)
        ]
        done = await self._answers(works)
        cut = [
            kept_end(work, whole, job.asked.truncate, work.want_text)
            for work, whole, job in zip(works, done, self._jobs, strict=True)
            if job.asked.truncate is not None
        ]
        again = {answer.request_id: answer for answer in await self._answers(cut)}
        return [again.get(whole.request_id, whole) for whole in done]

    async def _answers(self, works: list[Tokenize]) -> list[Tokenized]:
        tokenizer_client: TokenizerClient = self._client.tokenizer_client
        futures = [tokenizer_client.submit(work) for work in works]
        out = []
        try:
            for future, work in zip(futures, works, strict=True):
                try:
                    answer = await future
                except RequestError as e:
                    raise self._located(e, int(work.request_id.rpartition("-")[2])) from e
                assert isinstance(answer, Tokenized)
                out.append(answer)
                self.progress.num_tokenized += 1
        finally:
            for future in futures:
                if not future.cancel() and not future.cancelled():
                    future.exception()  # seen, as asyncio wants it: only the first is told
        return out

    def _entry(self, index: int) -> JournalEntry:
        job, prompt = self._jobs[index], self._prompts[index]
        asked, where = job.asked, job.prompt.where
        sampling = finalize_sampling(
            asked.sampling,
            len(prompt.token_ids) // 4,
            prompt.bad_words,
            card=self._card,
            max_tokens=asked.max_tokens,
            seed=job.seed if asked.seed is None else asked.seed,
            prompt_field=where,
        )
        return JournalEntry(
            request_id=prompt.request_id,
            model=self._card.names[0],
            prompt_ids=prompt.token_ids,
            block_hashes=prompt.block_hashes,
            sampling=sampling,
            text=asked.text,
            choices=[
                ChoiceLog(i, OutputCollector(self.progress, asked.detokenize)) for i in range(asked.choices.computed)
            ],
            owner=self,
            now=self._arrival.clock_s,
            priority=job.priority,
            cache_salt=job.prompt.work.cache_salt,
            beam=asked.choices.beam,
            n=asked.choices.returned,
        )

    def _located(self, error: RequestError, index: int) -> BlockyardError:
        """The same error, saying which prompt it is about."""
        where = self._jobs[index].prompt.where
        if error.status >= 500:
            return RingLost(f"{where}: {error}")
        return RequestError(f"{where}: {error}", where, error.status, error.code, error.retry_after_s)


class Seeds:
    """For requests that bring none of their own."""

    def __init__(self, seed: int) -> None:
        self._seed, self._number = seed, 0

    def next(self, asked: CheckedParams) -> int:
        if asked.seed is not None:
            return asked.seed
        self._number += 1
        return derived_seed(self._seed, self._number)


def derived_seed(seed: int, number: int) -> int:
    """64 bits for the `number`th request of an LLM that brings no seed of its own."""
    digest = hashlib.sha256(b"blockyard offline" + seed.to_bytes(8, "little") + number.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:8], "little")
