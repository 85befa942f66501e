"""`python -m blockyard.services.tokenizer_pool.grammar_worker FD`: the fork server of workers that check grammars.

It imports the library of one engine at once, and makes the engine when the service has told it the model's vocabulary.
Its workers compile one grammar after the other. Their jobs are `Tokenize` frames with nothing but a grammar.
"""

import contextlib
import os
import socket

import msgspec

from blockyard.services.tokenizer_pool.workers import fork_server
from blockyard.services.tokenizer_pool.workers.fork_server import ServerSettings
from blockyard.services.tokenizer_pool.workers.job_limits import ProcessLimits
from blockyard.services.tokenizer_pool.workers.worker_frames import (
    MAX_FRAME_BYTES,
    OTHER_ENGINE,
    Answer,
    ModelVocabulary,
    Task,
    framed,
    read_frame,
)
from blockyard.shared import tokenizer_files
from blockyard.shared.errors import RequestError
from blockyard.shared.grammars.engines import Engines, fallback, import_engine
from blockyard.shared.grammars.interface import GrammarError, Vocabulary
from blockyard.shared.messages import Grammar, TextRejected, Tokenize, Tokenized
from blockyard.shared.process.settings import give_way


class GrammarWorkload:
    """An engine of the model's vocabulary."""

    def __init__(self, settings: ServerSettings, model: ModelVocabulary) -> None:
        files = tokenizer_files.load(settings.config.tokenizer_path)
        size = model.vocab_size or files.vocab_size
        self._engines = Engines(Vocabulary(files.tokenizer.to_str(), size, model.eos_token_ids))
        self._name, self._limits = settings.engine, settings.limits
        self.notes: list[str] = []
        # one that cannot be had is asked for again by each of its grammars, which are refused with the same words
        with contextlib.suppress(GrammarError):
            self._engines.load(self._name)

    def serve(self, sock: socket.socket) -> None:
        """Answers each job by a Tokenized with the grammar and its engine, or by TextRejected, with OTHER_ENGINE."""
        os.setsid()  # the server does not give way: while it loads, all new grammars wait
        give_way()
        limits = ProcessLimits(self._limits)
        decoder = msgspec.msgpack.Decoder(Task)
        with sock, sock.makefile("rb") as stream:
            while (data := read_frame(stream)) is not None:
                work = decoder.decode(data).work
                assert isinstance(work, Tokenize)
                limits.begin(0, work.quick)
                sock.sendall(framed(self._answer(work, limits)))
                if limits.has_grown():
                    return

    def _answer(self, work: Tokenize, limits: ProcessLimits) -> Answer:
        assert work.grammar is not None
        try:
            with limits.checking():
                return self._checked(work.request_id, work.grammar)
        except RequestError as e:
            return TextRejected(work.request_id, "grammar", str(e))

    def _checked(self, request_id: str, grammar: Grammar) -> Answer:
        try:
            resolved = self._engines.resolve_with(self._name, grammar)
            return Tokenized(request_id, b"", b"", grammar=resolved)
        except GrammarError as e:
            return TextRejected(request_id, "grammar", str(e), OTHER_ENGINE if fallback(grammar, self._name) else "")


def load(settings: ServerSettings, control: socket.socket) -> GrammarWorkload:
    """Imports what takes seconds before the model's vocabulary is known."""
    with contextlib.suppress(GrammarError):  # an optional package
        import_engine(settings.engine)
    data = control.recv(MAX_FRAME_BYTES)
    if not data:
        raise BrokenPipeError  # the service is gone
    return GrammarWorkload(settings, msgspec.msgpack.decode(data, type=ModelVocabulary))


if __name__ == "__main__":
    fork_server.run("grammar", load)
