"""Sends Tokenize and Detokenize to the tokenizer pool and returns the answers."""

import asyncio
import math
from dataclasses import dataclass

import msgspec

from blockyard.shared.errors import RequestError, TooLong
from blockyard.shared.messages import (
    BUSY,
    TAKES_LONG,
    UNAVAILABLE,
    DescribeTokenizer,
    Detokenize,
    Detokenized,
    Member,
    Role,
    TextRejected,
    TextsTokenized,
    Tokenize,
    Tokenized,
    TokenizerDescription,
    TokenizeTexts,
)
from blockyard.shared.ring_client.grammar_verdicts import TAKEN, GrammarVerdicts
from blockyard.shared.ring_client.ring_links import RingLinks
from blockyard.shared.ring_client.tokenizer_jobs import MAX_LOST, MAX_WAITING, JobKind, JobPool
from blockyard.shared.token_ids import num_ids

Answer = Tokenized | TextsTokenized | Detokenized | TokenizerDescription
Work = Tokenize | TokenizeTexts | Detokenize | DescribeTokenizer

QUICK_BYTES = 64 << 10  # of a prompt, about 20 ms
QUICK_GRAMMAR_BYTES = 8 << 10
BRIEF_CHARS = 2 << 10  # of texts, about 0.5 ms: they do not wait for the many texts of another call
ALIVE_S = 5.0  # between answers to two checks of grammars, unless tokenizers stood still or restarted
MAX_CHECK_WAITS = 6  # a check waits at most so many times `check_wait_s`, whatever happens
SHORT_IDS = 8192  # shorter prompts of ids skip the pool: the scheduler hashes their blocks in 0.4 ms, a hop's time


@dataclass(slots=True)
class _Unanswered:
    """Work without an answer."""

    answer: asyncio.Future[Answer]
    work: Work
    since_s: float
    since_served_s: float  # by `ServedTime`
    grammar: bytes | None  # its key in `GrammarVerdicts`
    is_check: bool  # the grammar is not known yet


class ServedTime:
    """The time in which grammars were checked: what one waits while no tokenizer checks any is not counted."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._heard_s = -math.inf

    def heard(self, now: float) -> None:
        """A check was answered."""
        if now - self._heard_s < ALIVE_S:
            self.total_s += now - self._heard_s
        self._heard_s = now


class TokenizerClient:
    """Texts of a lost tokenizer are sent to another one."""

    def __init__(self, links: RingLinks, check_wait_s: float = math.inf, max_waiting: int = MAX_WAITING) -> None:
        """check_wait_s: a grammar that is still here after the checks of others went on for so long is a 429.
        max_waiting: jobs of one kind at a tokenizer."""
        self._links, self._check_wait_s = links, check_wait_s
        self._pool: JobPool[Work] = JobPool(max_waiting)
        self._verdicts = GrammarVerdicts()
        self._served = ServedTime()
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
        work = msgspec.structs.replace(work, quick=_is_quick(work, verdict is None))
        asked = _Unanswered(future, work, loop.time(), self._served.total_s, grammar, verdict is None)
        self._waiting[work.request_id] = asked
        future.add_done_callback(lambda _: self._forget(work.request_id))
        self._submit(asked)
        return future

    async def tokenize(
        self,
        prompts: list[Tokenize],
        name: str,
        truncate: int | None = None,
        want_text: bool = False,
        grammar_field: str = "",
        tenant: str = "",
        keeps_start: bool = False,
    ) -> list[Tokenized]:
        """Returns the answers in order of `prompts`; `name` prefixes their request ids. Raises RequestError.

        With `truncate` only this many last ids of a prompt are kept, or with `keeps_start` first ids; `want_text` then
        returns the text of these ids. A short prompt of ids, already checked by the caller, is returned at once and
        without block hashes. The error of a grammar that no engine takes names `grammar_field`.
        """
        named = [msgspec.structs.replace(p, request_id=f"{name}-{i}", tenant=tenant) for i, p in enumerate(prompts)]
        done = await self._all(named, grammar_field)
        if truncate is None:
            return done
        cut = [cut_prompt(p, d, truncate, want_text, keeps_start) for p, d in zip(named, done, strict=True)]
        kept = await self._all(cut, grammar_field)
        return [_with_spans(k, d, keeps_start) for k, d in zip(kept, done, strict=True)]

    def answered(self, peer: int, frame: Answer | TextRejected) -> None:
        asked = self._waiting.get(frame.request_id)
        if asked is not None and asked.is_check:
            self._served.heard(asyncio.get_running_loop().time())
        if asked is not None and not asked.answer.done():
            if isinstance(frame, TextRejected) and frame.code == TAKES_LONG and asked.work.quick:
                self._ask_as_long(peer, asked)
                return
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
        for waiting in self._waiting.values():
            waiting.since_served_s = self._served.total_s  # the others have its jobs to do, too
        for request_id in given_up:
            asked = self._waiting.get(request_id)
            if asked is not None and not asked.answer.done():
                asked.answer.set_exception(RequestError(f"{MAX_LOST} tokenizers were lost with this text.", status=500))
        self._send(out)

    def tick(self, now: float, timeout_s: float) -> None:
        """Fails work that waited for `timeout_s` without a tokenizer, and grammars that waited for other grammars."""
        num_checks = sum(asked.is_check for asked in self._waiting.values())
        for request_id, asked in list(self._waiting.items()):
            waited_s = now - asked.since_s
            if asked.answer.done():
                continue
            if not self._pool.serves(asked.work.model):
                if waited_s > timeout_s:
                    asked.answer.set_exception(RequestError("No tokenizer is ready.", status=503, retry_after_s=1.0))
            elif asked.is_check and self._waits_too_long(asked, waited_s) and self._pool.waits(request_id):
                message = f"{num_checks} new grammars wait to be checked, which is more than can be soon; try again"
                error = RequestError(message, "grammar", 429, BUSY, retry_after_s=self._check_wait_s)
                asked.answer.set_exception(error)

    def _waits_too_long(self, asked: _Unanswered, waited_s: float) -> bool:
        served_s = self._served.total_s - asked.since_served_s
        return served_s > self._check_wait_s or waited_s > MAX_CHECK_WAITS * self._check_wait_s

    def _submit(self, asked: _Unanswered) -> None:
        work = asked.work
        kind = JobKind(work.model, work.tenant, asked.is_check, work.quick, _is_brief(work))
        self._send(self._pool.submit(work.request_id, kind, work))

    def _ask_as_long(self, peer: int, asked: _Unanswered) -> None:
        """A job that was thought to be quick takes long: it waits again, with the long ones."""
        asked.work = msgspec.structs.replace(asked.work, quick=False)
        self._send(self._pool.answered(peer, asked.work.request_id))
        self._submit(asked)

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


def _is_quick(work: Work, is_check: bool) -> bool:
    """Whether a job should take little time: short texts, the model's own template, small grammars."""
    if isinstance(work, DescribeTokenizer):
        return True
    if isinstance(work, Detokenize):
        return len(work.token_ids) <= QUICK_BYTES
    if isinstance(work, TokenizeTexts):
        return _num_chars(work) <= QUICK_BYTES
    if is_check and work.grammar is not None and len(work.grammar.source) > QUICK_GRAMMAR_BYTES:
        return False
    texts = (work.text, work.suffix, work.messages, work.token_ids, work.tools, work.template_kwargs)
    return work.chat_template is None and sum(len(text) for text in texts if text) <= QUICK_BYTES


def _is_brief(work: Work) -> bool:
    return isinstance(work, TokenizeTexts) and _num_chars(work) <= BRIEF_CHARS


def _num_chars(work: TokenizeTexts) -> int:
    return sum(map(len, work.texts)) + sum(map(len, work.seconds))


def _rejection(frame: TextRejected) -> RequestError:
    if frame.code == BUSY:
        return RequestError(frame.message, frame.field, 429, BUSY, retry_after_s=1.0)
    if frame.code == UNAVAILABLE:
        return RequestError(frame.message, frame.field, 503, UNAVAILABLE, retry_after_s=1.0)
    too_long = TooLong(frame.num_tokens, frame.max_tokens) if frame.max_tokens else None
    return RequestError(frame.message, frame.field, code=frame.code or None, too_long=too_long)


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


def _with_spans(cut: Tokenized, whole: Tokenized, keeps_start: bool) -> Tokenized:
    """Where the tokens that are left of a prompt are in its whole text."""
    if not whole.offsets and not whole.assistant_mask:
        return cut
    num = num_ids(cut.token_ids)
    kept, pairs = (slice(num), slice(8 * num)) if keeps_start else (slice(-num, None), slice(-8 * num, None))
    return msgspec.structs.replace(cut, offsets=whole.offsets[pairs], assistant_mask=whole.assistant_mask[kept])


def cut_prompt(
    work: Tokenize, done: Tokenized, num_tokens: int, want_text: bool = False, keeps_start: bool = False
) -> Tokenize:
    """Returns the work of hashing the blocks of a prompt cut to its last (or first) `num_tokens` ids."""
    kept = slice(4 * num_tokens) if keeps_start else slice(-4 * num_tokens, None)
    ids = done.token_ids[kept]
    return msgspec.structs.replace(work, text=None, messages=None, token_ids=ids, want_text=want_text)
