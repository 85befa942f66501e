"""Verdicts about grammars, from a cache or from the grammar worker. The service loop never waits for them."""

import asyncio
import hashlib
import logging
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from blockyard.services.tokenizer_pool.job_limits import JobLimits
from blockyard.services.tokenizer_pool.text_process import TextProcess
from blockyard.services.tokenizer_pool.worker_frames import Answer, pair
from blockyard.shared.config.services.tokenizer import TokenizerConfig
from blockyard.shared.errors import BlockyardError
from blockyard.shared.messages import (
    BUSY,
    MAX_GRAMMAR_BYTES,
    UNAVAILABLE,
    Grammar,
    TextRejected,
    Tokenize,
    Tokenized,
)

log = logging.getLogger(__name__)

Verdict = Grammar | TextRejected
OnVerdict = Callable[[int, Tokenize, Verdict], None]

MODULE = "blockyard.services.tokenizer_pool.grammar_worker"
MAX_KNOWN = 4096  # verdicts in the cache; each has at most the 400 characters of its message
MAX_WAITING = 256  # different grammars that wait; each may take `check_cpu_s`
FIELD = "grammar"  # of a rejection; the gateway names the request's own field


class GrammarChecks:
    """Starts the grammar worker when it is needed, and again when it ended or the model changed."""

    def __init__(self, config: TokenizerConfig, limits: JobLimits) -> None:
        self._config, self._limits = config, limits
        self._model: tuple[int, list[int]] = (0, [])  # vocabulary size and end-of-sequence ids
        self._known: OrderedDict[bytes, Grammar | str] = OrderedDict()  # with its engine and no source; or why not
        self._waiting: dict[str, list[tuple[int, Tokenize]]] = {}  # by the hash of the grammar, in hexadecimal
        self._on_verdict: OnVerdict = lambda peer, work, verdict: None
        self._process: TextProcess | None = None
        self._serving: asyncio.Task[None] | None = None
        self._needed = asyncio.Event()

    @property
    def worker_pid(self) -> int | None:
        return self._process.worker_pid if self._process is not None else None

    def set_model(self, vocab_size: int, eos_token_ids: list[int]) -> None:
        """Sets the model's vocabulary. Verdicts about another one are forgotten."""
        if (vocab_size, eos_token_ids) != self._model:
            self._model = (vocab_size, eos_token_ids)
            self._known.clear()
            if self._serving is not None:
                self._serving.cancel()

    def submit(self, peer: int, work: Tokenize) -> None:
        """Calls `on_verdict` for this work: now, or when the grammar was compiled."""
        grammar = work.grammar
        assert grammar is not None
        size = len(grammar.source.encode("utf-8", "surrogatepass"))
        if size > MAX_GRAMMAR_BYTES:
            message = f"the grammar has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed"
            self._on_verdict(peer, work, TextRejected(work.request_id, FIELD, message))
            return
        key = hashlib.sha256(msgspec.msgpack.encode(grammar)).digest()
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            self._on_verdict(peer, work, _verdict(work, known))
        elif key.hex() in self._waiting:
            self._waiting[key.hex()].append((peer, work))
        elif len(self._waiting) >= MAX_WAITING:
            message = f"{len(self._waiting)} grammars wait to be compiled; try again"
            self._on_verdict(peer, work, TextRejected(work.request_id, FIELD, message, BUSY))
        else:
            self._waiting[key.hex()] = [(peer, work)]
            self._needed.set()
            if self._process is not None:
                self._process.submit(0, _job(key.hex(), work))

    async def run(self, on_verdict: OnVerdict) -> None:
        """Serves until cancelled."""
        self._on_verdict = on_verdict
        while True:
            await self._needed.wait()
            self._serving = asyncio.create_task(self._serve())
            try:
                await asyncio.wait([self._serving])
            finally:
                self._serving.cancel()
            if not self._serving.cancelled() and (error := self._serving.exception()) is not None:
                if not isinstance(error, BlockyardError):
                    raise error
                log.warning("the grammar worker ended: %s", error)
                self._reject_waiting(str(error))
            if not self._waiting:
                self._needed.clear()

    async def _serve(self) -> None:
        """Runs one grammar worker with its fork server. Raises BlockyardError if it ends."""
        control, theirs = pair(socket.SOCK_SEQPACKET)
        with theirs:
            child = self._start(theirs)
        process = TextProcess(control, self._limits)
        try:
            for note in await process.load():
                log.warning("grammars: %s", note)
            for key, works in self._waiting.items():
                process.submit(0, _job(key, works[0][1]))
            self._process = process
            await process.run(self._answered)
        finally:
            self._process = None
            process.close()
            child.kill()  # its workers end with it
            child.wait()

    def _answered(self, _peer: int, answer: Answer) -> None:
        works = self._waiting.pop(answer.request_id, [])
        if not works:
            return
        known: Grammar | str = ""
        if isinstance(answer, Tokenized) and answer.grammar is not None:
            known = msgspec.structs.replace(answer.grammar, source="")
        elif isinstance(answer, TextRejected):
            known = answer.message
        self._known[bytes.fromhex(answer.request_id)] = known
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        for peer, work in works:
            self._on_verdict(peer, work, _verdict(work, known))

    def _reject_waiting(self, why: str) -> None:
        waiting, self._waiting = self._waiting, {}
        for works in waiting.values():
            for peer, work in works:
                message = f"the grammar could not be compiled: {why}"
                self._on_verdict(peer, work, TextRejected(work.request_id, FIELD, message, UNAVAILABLE))

    def _start(self, theirs: socket.socket) -> "subprocess.Popen[bytes]":
        settings = msgspec.json.encode(
            {
                "name": self._config.process.name,
                "tokenizer_path": self._config.tokenizer_path,
                "vocab_size": self._model[0],
                "eos_token_ids": self._model[1],
                "limits": self._limits,
            }
        )
        command = [sys.executable, "-P", "-m", MODULE, str(theirs.fileno()), settings.decode()]
        fds = [theirs.fileno()]
        return subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True)


def _job(key: str, work: Tokenize) -> Tokenize:
    """The job of checking this work's grammar; its answer has the hash as its request id."""
    return Tokenize(key, work.model, grammar=work.grammar)


def _verdict(work: Tokenize, known: Grammar | str) -> Verdict:
    if isinstance(known, str):
        return TextRejected(work.request_id, FIELD, known)
    assert work.grammar is not None
    return msgspec.structs.replace(work.grammar, engine=known.engine)
