"""Verdicts about grammars, from a cache or from the workers of engines. The service loop never waits for them."""

import asyncio
import hashlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable

import msgspec

from blockyard.services.tokenizer_pool.workers.fork_server import ServerSettings
from blockyard.services.tokenizer_pool.workers.job_limits import JobLimits
from blockyard.services.tokenizer_pool.workers.job_workers import JobWorkers, OnAnswer
from blockyard.services.tokenizer_pool.workers.worker_frames import OTHER_ENGINE, Answer, ModelVocabulary
from blockyard.shared.config.services.tokenizer import TokenizerConfig
from blockyard.shared.errors import BlockyardError
from blockyard.shared.grammars.engine_order import AUTO_ORDER, engine_behind, engine_order
from blockyard.shared.messages import (
    BUSY,
    MAX_GRAMMAR_BYTES,
    TAKES_LONG,
    UNAVAILABLE,
    Grammar,
    GrammarEngine,
    TextRejected,
    Tokenize,
    Tokenized,
)

log = logging.getLogger(__name__)

Verdict = Grammar | TextRejected
OnFailure = Callable[[GrammarEngine, str], None]
OnVerdict = Callable[[int, Tokenize, Verdict], None]

MODULE = "blockyard.services.tokenizer_pool.grammar_worker"
MAX_KNOWN = 4096  # verdicts in the cache; each has at most the 400 characters of its message
MAX_WAITING = 256  # different grammars of one tenant that wait; gateways send a few at a time
FIELD = "grammar"  # of a rejection; the gateway names the request's own field
FALLBACK_S = 20.0  # after the start; by then a ring serves, and an import of seconds delays no one's first request


class EngineWorkers:
    """The workers of one engine. They start when they are needed: xgrammar and lm-format-enforcer load torch."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._model: ModelVocabulary | None = None
        self._pending: list[Tokenize] = []  # jobs that came before the workers started
        self._workers: JobWorkers | None = None
        self._needed = asyncio.Event()

    @property
    def pids(self) -> list[int]:
        return self._workers.worker_pids if self._workers is not None else []

    def start(self, *, gives_way: bool = False) -> None:
        """Starts the fork server, if it does not run. It imports the engine and waits for the vocabulary.

        gives_way: at low priority, before a grammar waits for it.
        """
        if self._workers is not None:
            return
        self._needed.set()
        self._workers = JobWorkers(MODULE, msgspec.structs.replace(self._settings, gives_way=gives_way))
        if self._model is not None:
            self._workers.set_vocabulary(self._model)
        for job in self._pending:
            self._workers.submit(0, job)
        self._pending.clear()

    def set_model(self, model: ModelVocabulary) -> None:
        self._model = model
        if self._workers is not None:
            self._workers.set_vocabulary(model)

    def submit(self, job: Tokenize) -> None:
        if self._workers is not None:
            self._workers.submit(0, job)
        else:
            self._pending.append(job)
            self._needed.set()

    async def run(self, on_answer: OnAnswer, on_failure: OnFailure) -> None:
        """Serves until cancelled. If no worker can be had, forgets all jobs and calls `on_failure` with the cause."""
        while True:
            await self._needed.wait()
            self.start()
            assert self._workers is not None
            try:
                await self._workers.load()
                await self._workers.run(on_answer)
            except BlockyardError as e:
                log.warning("no grammars can be checked by %s: %s", self._settings.engine.value, e)
                self._needed.clear()
                on_failure(self._settings.engine, str(e))
            finally:
                self._workers.close()
                self._workers = None


class _Check:
    """A grammar that waits for its verdict, with all works that have it. The first is the job that workers have."""

    def __init__(self, peer: int, work: Tokenize) -> None:
        self.works = [(peer, work)]
        self.engine = engine_order(self.grammar)[0]  # whose workers have the job
        self.cause = ""  # of the first engine that has refused the grammar

    @property
    def grammar(self) -> Grammar:
        assert self.job.grammar is not None
        return self.job.grammar

    @property
    def job(self) -> Tokenize:
        return self.works[0][1]

    def take_quick(self) -> list[tuple[int, Tokenize]]:
        """Removes and returns the works that wait for no long check."""
        quick = [(peer, work) for peer, work in self.works if work.quick]
        self.works = [(peer, work) for peer, work in self.works if not work.quick]
        return quick


class GrammarChecks:
    """Asks the workers of an engine about each grammar once, and those of the next engine if it is refused."""

    def __init__(self, config: TokenizerConfig, limits: JobLimits) -> None:
        self._engines: dict[GrammarEngine, EngineWorkers] = {
            name: EngineWorkers(ServerSettings(config=config, limits=limits, engine=name))
            for name in GrammarEngine
            if name != GrammarEngine.AUTO
        }
        usual = config.grammar_engine
        self._usual, *self._fallbacks = (
            [self._engines[name] for name in AUTO_ORDER] if usual == GrammarEngine.AUTO else [self._engines[usual]]
        )
        self._model: ModelVocabulary | None = None
        self._known: OrderedDict[bytes, Grammar | str] = OrderedDict()  # with its engine and no source; or why not
        self._waiting: dict[str, _Check] = {}  # by the hash of the grammar, in hexadecimal
        self._num_waiting: Counter[str] = Counter()  # by tenant
        self._on_verdict: OnVerdict = lambda peer, work, verdict: None

    @property
    def worker_pids(self) -> list[int]:
        return [pid for workers in self._engines.values() for pid in workers.pids]

    def start(self) -> None:
        """Starts the workers of the usual engine before a grammar needs them."""
        self._usual.start()

    def set_model(self, vocab_size: int, eos_token_ids: list[int]) -> None:
        """Sets the model's vocabulary. Verdicts about another one are forgotten."""
        model = ModelVocabulary(vocab_size, eos_token_ids)
        if model != self._model:
            self._model = model
            self._known.clear()
            for workers in self._engines.values():
                workers.set_model(model)

    def submit(self, peer: int, work: Tokenize) -> None:
        """Calls `on_verdict` for this work: now, or when the grammar was compiled."""
        grammar = work.grammar
        assert grammar is not None
        size = len(grammar.source.encode("utf-8", "surrogatepass"))
        if size > MAX_GRAMMAR_BYTES:
            message = f"the grammar has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed"
            self._on_verdict(peer, work, TextRejected(work.request_id, FIELD, message))
            return
        digest = hashlib.sha256(msgspec.msgpack.encode(grammar)).digest()
        if (known := self._known.get(digest)) is not None:
            self._known.move_to_end(digest)
            self._on_verdict(peer, work, _verdict(work, known))
            return
        check = self._waiting.get(key := digest.hex())
        if check is None:
            self._begin(key, peer, work)
        elif work.quick and not check.job.quick:
            self._on_verdict(peer, work, TextRejected(work.request_id, FIELD, "its check takes long", TAKES_LONG))
        else:
            check.works.append((peer, work))

    async def run(self, on_verdict: OnVerdict) -> None:
        """Serves until cancelled. Imports the engines behind the usual one after `FALLBACK_S`, at low priority."""
        self._on_verdict = on_verdict
        async with asyncio.TaskGroup() as tasks:
            for workers in self._engines.values():
                tasks.create_task(workers.run(self._answered, self._reject_waiting))
            await asyncio.sleep(FALLBACK_S)
            for workers in self._fallbacks:
                workers.start(gives_way=True)

    def _begin(self, key: str, peer: int, work: Tokenize) -> None:
        if self._num_waiting[work.tenant] >= MAX_WAITING:
            message = f"{self._num_waiting[work.tenant]} grammars wait to be compiled; try again"
            self._on_verdict(peer, work, TextRejected(work.request_id, FIELD, message, BUSY))
            return
        self._waiting[key] = check = _Check(peer, work)
        self._num_waiting[work.tenant] += 1
        if self._model is None:  # no scheduler has joined
            self.set_model(0, [])
        self._send(key, check)

    def _send(self, key: str, check: _Check) -> None:
        self._engines[check.engine].submit(_job(key, check.job))

    def _end(self, key: str) -> _Check:
        check = self._waiting.pop(key)
        self._num_waiting -= Counter([check.job.tenant])
        return check

    def _answered(self, _peer: int, answer: Answer) -> None:
        key = answer.request_id
        if isinstance(answer, TextRejected) and answer.code == OTHER_ENGINE:
            self._ask_next(key, answer.message)
            return
        check = self._end(key)
        if isinstance(answer, TextRejected) and answer.code == TAKES_LONG:
            for peer, work in check.take_quick():
                self._on_verdict(peer, work, msgspec.structs.replace(answer, request_id=work.request_id))
            for peer, work in check.works:
                self.submit(peer, work)
            return
        if isinstance(answer, TextRejected) and answer.code == UNAVAILABLE:  # no verdict
            for peer, work in check.works:
                self._on_verdict(peer, work, msgspec.structs.replace(answer, request_id=work.request_id))
            return
        known: Grammar | str = ""
        if isinstance(answer, Tokenized) and answer.grammar is not None:
            known = msgspec.structs.replace(answer.grammar, source="")
        elif isinstance(answer, TextRejected):
            known = check.cause or answer.message
        self._known[bytes.fromhex(key)] = known
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        for peer, work in check.works:
            self._on_verdict(peer, work, _verdict(work, known))

    def _ask_next(self, key: str, cause: str) -> None:
        check = self._waiting[key]
        behind = engine_behind(check.grammar, check.engine)
        assert behind is not None, "a worker has said that there is another engine"
        check.engine, check.cause = behind, check.cause or cause
        self._send(key, check)

    def _reject_waiting(self, engine: GrammarEngine, why: str) -> None:
        for key in [key for key, check in self._waiting.items() if check.engine == engine]:
            check = self._end(key)
            for peer, work in check.works:
                answer = TextRejected(work.request_id, FIELD, check.cause)  # of the engine before
                if not check.cause:
                    message = f"the grammar could not be compiled: {why}"
                    answer = TextRejected(work.request_id, FIELD, message, UNAVAILABLE)
                self._on_verdict(peer, work, answer)


def _job(key: str, work: Tokenize) -> Tokenize:
    """The job of checking this work's grammar; its answer has the hash as its request id."""
    return Tokenize(key, work.model, grammar=work.grammar, tenant=work.tenant, quick=work.quick)


def _verdict(work: Tokenize, known: Grammar | str) -> Verdict:
    if isinstance(known, str):
        return TextRejected(work.request_id, FIELD, known)
    assert work.grammar is not None
    return msgspec.structs.replace(work.grammar, engine=known.engine)
