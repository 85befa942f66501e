"""Sends Tokenize and Detokenize to the tokenizer pool and returns the answers."""

import asyncio
import math
from dataclasses import dataclass

import msgspec

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import (
    BUSY,
    UNAVAILABLE,
    Detokenize,
    Detokenized,
    Member,
    Role,
    TextRejected,
    Tokenize,
    Tokenized,
)
from blockyard.shared.ring_client.grammar_verdicts import TAKEN, GrammarVerdicts
from blockyard.shared.ring_client.ring_links import RingLinks
from blockyard.shared.ring_client.tokenizer_jobs import JobPool

Answer = Tokenized | Detokenized
Work = Tokenize | Detokenize

SHORT_IDS = 8192  # shorter prompts of ids skip the pool: the scheduler hashes their blocks in 0.4 ms, a hop's time


@dataclass(slots=True)
class _Unanswered:
    """Work without an answer."""

    answer: asyncio.Future[Answer]
    model: str
    since_s: float
    grammar: bytes | None  # its key in `GrammarVerdicts`
    is_check: bool  # the grammar is not known yet


class TokenizerClient:
    """Texts of a lost tokenizer are sent to another one."""

    def __init__(self, links: RingLinks, check_wait_s: float = math.inf) -> None:
        """check_wait_s: a grammar that no tokenizer has begun to check by then is refused with a 429."""
        self._links, self._check_wait_s = links, check_wait_s
        self._pool: JobPool[Work] = JobPool()
        self._verdicts = GrammarVerdicts()
        self._waiting: dict[str, _Unanswered] = {}

    @property
    def num_waiting(self) -> int:
        return self._pool.num_waiting

    def serves(self, model: str) -> bool:
        return self._pool.serves(model)

    def submit(self, work: Work) -> asyncio.Future[Answer]:
        """Returns a future of the answer, which may raise RequestError. Cancelling it drops the work."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        grammar = self._verdicts.key(work) if isinstance(work, Tokenize) else None
        verdict = self._verdicts.find(grammar) if grammar is not None else TAKEN
        if verdict:
            future.set_exception(RequestError(verdict, "grammar"))
            return future
        asked = _Unanswered(future, work.model, loop.time(), grammar, verdict is None)
        self._waiting[work.request_id] = asked
        future.add_done_callback(lambda _: self._forget(work.request_id))
        self._send(self._pool.submit(work.request_id, work.model, work, asked.is_check))
        return future

    async def tokenize(
        self,
        prompts: list[Tokenize],
        name: str,
        truncate: int | None = None,
        want_text: bool = False,
        grammar_field: str = "",
    ) -> list[Tokenized]:
        """Returns the answers in order of `prompts`; `name` prefixes their request ids. Raises RequestError.

        With `truncate` only this many last ids of a prompt are kept; `want_text` then returns the text of these ids. A
        short prompt of ids, already checked by the caller, is returned at once and without block hashes. The error
        of a grammar that no engine takes names `grammar_field`.
        """
        named = [msgspec.structs.replace(p, request_id=f"{name}-{i}") for i, p in enumerate(prompts)]
        done = await self._all(named, grammar_field)
        if truncate is None:
            return done
        cut = [kept_end(p, d, truncate, want_text) for p, d in zip(named, done, strict=True)]
        return await self._all(cut, grammar_field)

    def answered(self, peer: int, frame: Answer | TextRejected) -> None:
        asked = self._waiting.get(frame.request_id)
        if asked is not None and not asked.answer.done():
            if isinstance(frame, TextRejected):
                asked.answer.set_exception(_rejection(frame))
            else:
                asked.answer.set_result(frame)
            self._learn(asked, frame)
        self._send(self._pool.answered(peer, frame.request_id))

    def changed(self, member: Member) -> None:
        self._verdicts.changed(member)
        if member.role == Role.TOKENIZER_POOL:
            if member.ready:
                self._send(self._pool.join(member.incarnation, member.model))
            else:
                self.gone(member)

    def gone(self, member: Member) -> None:
        self._verdicts.gone(member)
        if member.role != Role.TOKENIZER_POOL:
            return
        out, given_up = self._pool.gone(member.incarnation)
        for request_id in given_up:
            asked = self._waiting.get(request_id)
            if asked is not None and not asked.answer.done():
                asked.answer.set_exception(RequestError("Two tokenizers were lost with this text.", status=500))
        self._send(out)

    def tick(self, now: float, timeout_s: float) -> None:
        """Fails work that waited for `timeout_s` without a tokenizer, and grammars that waited for other grammars."""
        for request_id, asked in list(self._waiting.items()):
            waited_s = now - asked.since_s
            if asked.answer.done():
                continue
            if waited_s > timeout_s and not self._pool.serves(asked.model):
                asked.answer.set_exception(RequestError("No tokenizer is ready.", status=503, retry_after_s=1.0))
            elif asked.is_check and waited_s > self._check_wait_s and self._pool.waits(request_id):
                message = "more grammars wait to be checked than can be; try again"
                error = RequestError(message, "grammar", 429, BUSY, retry_after_s=self._check_wait_s)
                asked.answer.set_exception(error)

    async def _all(self, works: list[Tokenize], grammar_field: str = "") -> list[Tokenized]:
        if all(map(_is_done, works)):
            return [Tokenized(work.request_id, work.token_ids or b"", b"") for work in works]
        futures = [self.submit(work) for work in works]
        try:
            answers = await asyncio.gather(*futures)
        except RequestError as e:
            raise _located(e, futures, grammar_field) from e
        finally:
            for future in futures:
                future.cancel()
        return [a for a in answers if isinstance(a, Tokenized)]

    def _learn(self, asked: _Unanswered, frame: Answer | TextRejected) -> None:
        if asked.grammar is None:
            return
        if isinstance(frame, Tokenized):
            self._verdicts.learn(asked.grammar, TAKEN)
        elif isinstance(frame, TextRejected) and frame.field == "grammar" and not frame.code:
            self._verdicts.learn(asked.grammar, frame.message)

    def _forget(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._pool.forget(request_id)

    def _send(self, out: list[tuple[int, Work]]) -> None:
        """A failed send means that the member is lost: its Gone event follows and returns the work."""
        for member, frame in out:
            self._links.send(member, frame)


def _rejection(frame: TextRejected) -> RequestError:
    if frame.code == BUSY:
        return RequestError(frame.message, frame.field, 429, BUSY, retry_after_s=1.0)
    if frame.code == UNAVAILABLE:
        return RequestError(frame.message, frame.field, 503, UNAVAILABLE, retry_after_s=1.0)
    return RequestError(frame.message, frame.field, code=frame.code or None)


def _located(error: RequestError, futures: list[asyncio.Future[Answer]], grammar_field: str) -> RequestError:
    """Returns the error with the index of the refused prompt, if there are several, or the grammar's field."""
    if error.field == "grammar":
        return RequestError(f"{grammar_field}: {error}", grammar_field, error.status, error.code, error.retry_after_s)
    if error.field != "prompt" or len(futures) == 1:
        return error
    index = next(i for i, f in enumerate(futures) if f.done() and not f.cancelled() and f.exception() is error)
    return RequestError(str(error), f"prompt[{index}]", error.status, error.code, error.retry_after_s)


def _is_done(work: Tokenize) -> bool:
    """True if the work needs no tokenizer."""
    ids = work.token_ids
    if ids is None or len(ids) > 4 * SHORT_IDS:
        return False
    asks_of_end = work.reasoning_end or work.reasoning_markers
    return not (work.want_text or work.want_pieces or work.bad_words or work.grammar or asks_of_end)


def kept_end(work: Tokenize, done: Tokenized, num_tokens: int, want_text: bool = False) -> Tokenize:
    """Returns the work of hashing the blocks of a prompt cut to its last `num_tokens` ids."""
    ids = done.token_ids[-4 * num_tokens :]
    return msgspec.structs.replace(work, text=None, messages=None, token_ids=ids, want_text=want_text)
