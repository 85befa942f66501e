"""Tokenize and Detokenize: handed to the tokenizer pool, awaited by the request that needs them."""

import asyncio

import msgspec

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Detokenize, Detokenized, Member, Role, TextRejected, Tokenize, Tokenized
from blockyard.shared.ring_client.ring_links import RingLinks
from blockyard.shared.ring_client.tokenizer_jobs import JobPool

Answer = Tokenized | Detokenized
Work = Tokenize | Detokenize

SHORT_IDS = 8192  # ids that no tokenizer needs to see: the scheduler names their blocks in the time of a hop, 0.4 ms


class TokenizerClient:
    """A tokenizer that dies costs its texts a second trip and nothing else."""

    def __init__(self, links: RingLinks) -> None:
        self._links = links
        self._pool: JobPool[Work] = JobPool()
        self._waiting: dict[str, tuple[asyncio.Future[Answer], str, float]] = {}  # with model and when it came

    @property
    def num_waiting(self) -> int:
        return self._pool.num_waiting

    def serves(self, model: str) -> bool:
        return self._pool.serves(model)

    def submit(self, work: Work) -> asyncio.Future[Answer]:
        """The answer, or a RequestError. Cancelling the future gives the work up."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        self._waiting[work.request_id] = (future, work.model, loop.time())
        future.add_done_callback(lambda _: self._forget(work.request_id))
        self._send(self._pool.submit(work.request_id, work.model, work))
        return future

    async def tokenize(
        self, prompts: list[Tokenize], name: str, truncate: int | None = None, want_text: bool = False
    ) -> list[Tokenized]:
        """In order, as many at once as the pool takes; their ids begin with `name`. Raises RequestError.

        With `truncate` only so many of a prompt's last ids are kept; `want_text` is then the text of those.
        A short prompt of ids, whose vocabulary the caller has checked, comes back at once and without block names.
        """
        named = [msgspec.structs.replace(p, request_id=f"{name}-{i}") for i, p in enumerate(prompts)]
        done = await self._all(named)
        if truncate is None:
            return done
        cut = [kept_end(p, d, truncate, want_text) for p, d in zip(named, done, strict=True)]
        return await self._all(cut)

    def answered(self, peer: int, frame: Answer | TextRejected) -> None:
        future, _, _ = self._waiting.get(frame.request_id, (None, "", 0.0))
        if future is not None and not future.done():
            if isinstance(frame, TextRejected):
                future.set_exception(RequestError(frame.message, frame.field, code=frame.code or None))
            else:
                future.set_result(frame)
        self._send(self._pool.answered(peer, frame.request_id))

    def changed(self, member: Member) -> None:
        if member.role == Role.TOKENIZER_POOL:
            if member.ready:
                self._send(self._pool.join(member.incarnation, member.model))
            else:
                self.gone(member)

    def gone(self, member: Member) -> None:
        if member.role != Role.TOKENIZER_POOL:
            return
        out, given_up = self._pool.gone(member.incarnation)
        for request_id in given_up:
            future, _, _ = self._waiting.get(request_id, (None, "", 0.0))
            if future is not None and not future.done():
                future.set_exception(RequestError("Two tokenizers were lost with this text.", status=500))
        self._send(out)

    def tick(self, now: float, patience_s: float) -> None:
        """Gives up what has waited so long while there was nobody to do it."""
        for future, model, since in list(self._waiting.values()):
            if now - since > patience_s and not self._pool.serves(model) and not future.done():
                future.set_exception(RequestError("No tokenizer is ready.", status=503, retry_after_s=1.0))

    async def _all(self, works: list[Tokenize]) -> list[Tokenized]:
        if all(map(_is_done, works)):
            return [Tokenized(work.request_id, work.token_ids or b"", b"") for work in works]
        futures = [self.submit(work) for work in works]
        try:
            answers = await asyncio.gather(*futures)
        except RequestError as e:
            raise _located(e, futures) from e
        finally:
            for future in futures:
                future.cancel()
        return [a for a in answers if isinstance(a, Tokenized)]

    def _forget(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._pool.forget(request_id)

    def _send(self, out: list[tuple[int, Work]]) -> None:
        """A send that fails means the member is lost: its Gone is on the way and brings the work back."""
        for member, frame in out:
            self._links.send(member, frame)


def _located(error: RequestError, futures: list[asyncio.Future[Answer]]) -> RequestError:
    """Of several prompts it names the one that is refused."""
    if error.field != "prompt" or len(futures) == 1:
        return error
    index = next(i for i, f in enumerate(futures) if f.done() and not f.cancelled() and f.exception() is error)
    return RequestError(str(error), f"prompt[{index}]", error.status, error.code, error.retry_after_s)


def _is_done(work: Tokenize) -> bool:
    """Nothing is asked of it that takes a tokenizer."""
    ids = work.token_ids
    return ids is not None and len(ids) <= 4 * SHORT_IDS and not (work.want_text or work.want_pieces or work.bad_words)


def kept_end(work: Tokenize, done: Tokenized, num_tokens: int, want_text: bool = False) -> Tokenize:
    """The work of naming the blocks of a prompt of which only so many last ids are kept."""
    ids = done.token_ids[-4 * num_tokens :]
    return msgspec.structs.replace(work, text=None, messages=None, token_ids=ids, want_text=want_text)
