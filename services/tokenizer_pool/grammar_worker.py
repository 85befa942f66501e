"""`python -m blockyard.services.tokenizer_pool.grammar_worker FD SETTINGS`: compiles grammars to check them.

A fork server of its own, started when the first grammar arrives: it loads the engines once, and forks a worker that
checks one grammar after the other and may be killed. Its jobs are `Tokenize` frames with nothing but a grammar.
"""

import os
import socket
import sys

import msgspec

from blockyard.services.tokenizer_pool.fork_server import ForkServer
from blockyard.services.tokenizer_pool.job_limits import JobLimits, ProcessLimits
from blockyard.services.tokenizer_pool.worker_frames import Answer, Task, framed, read_frame
from blockyard.shared import tokenizer_files
from blockyard.shared.errors import RequestError
from blockyard.shared.grammars.engines import EngineNotLoaded, Engines
from blockyard.shared.grammars.interface import GrammarError, Vocabulary
from blockyard.shared.messages import GrammarEngine, TextRejected, Tokenize, Tokenized
from blockyard.shared.process import settings

NEEDS_ENGINE = 64  # exit code of a worker that needs an engine: this, plus the engine's index
ENGINES = list(GrammarEngine)


class GrammarWorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str  # of the service
    tokenizer_path: str
    vocab_size: int  # 0: the tokenizer's own
    eos_token_ids: list[int]
    limits: JobLimits


class GrammarWorkload:
    """The engines of the model's vocabulary."""

    def __init__(self, config: GrammarWorkerConfig) -> None:
        files = tokenizer_files.load(config.tokenizer_path)
        size = config.vocab_size or files.vocab_size
        self._engines = Engines(Vocabulary(files.tokenizer.to_str(), size, config.eos_token_ids))
        self._limits = config.limits
        self.notes: list[str] = []
        self._load(GrammarEngine.GUIDANCE)

    def serve(self, sock: socket.socket) -> None:
        """Answers each job by a Tokenized with the grammar and its engine, or by TextRejected."""
        self._engines.load_no_more()
        limits = ProcessLimits(self._limits)
        decoder = msgspec.msgpack.Decoder(Task)
        with sock, sock.makefile("rb") as stream:
            while (data := read_frame(stream)) is not None:
                work = decoder.decode(data).work
                assert isinstance(work, Tokenize)
                limits.begin(0)
                sock.sendall(framed(self._answer(work, limits)))
                if limits.has_grown():
                    return

    def on_ended(self, exit_code: int) -> int:
        """Loads the engine that the worker needed; the next worker has it."""
        if exit_code < NEEDS_ENGINE:
            return exit_code
        self._load(ENGINES[exit_code - NEEDS_ENGINE])
        return 0

    def _answer(self, work: Tokenize, limits: ProcessLimits) -> Answer:
        assert work.grammar is not None
        try:
            with limits.checking():
                return Tokenized(work.request_id, b"", b"", grammar=self._engines.resolve(work.grammar))
        except EngineNotLoaded as e:
            os._exit(NEEDS_ENGINE + ENGINES.index(e.name))
        except (GrammarError, RequestError) as e:
            return TextRejected(work.request_id, "grammar", str(e))

    def _load(self, name: GrammarEngine) -> None:
        try:
            self._engines.load(name)
        except GrammarError as e:
            self.notes.append(str(e))  # each grammar for this engine is refused with the same words


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    config = msgspec.json.decode(sys.argv[2], type=GrammarWorkerConfig)
    settings.die_with(os.getppid())
    settings.give_way()
    ForkServer(control, f"{config.name}: grammar", lambda: GrammarWorkload(config)).run()


if __name__ == "__main__":
    main()
