"""A grammar engine over token ids, and a matcher process with it: `python fake_grammar_engine.py SOCKET MEMORY PARENT`.

The source is a `FakeGrammar` as JSON. It needs no tokenizer, and it can be slow, fail, or end its process.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from blockyard.services.gpu_worker.structured_output.mask_program import mask_of
from blockyard.services.gpu_worker.structured_output.matcher_frames import MatcherSettings
from blockyard.services.gpu_worker.structured_output.matcher_process import main
from blockyard.shared.grammars.interface import CompiledGrammar, GrammarError, MaskWords, Matcher, MatcherError
from blockyard.shared.messages import Grammar, GrammarEngine, GrammarKind, OutputConstraint

COMMAND = (str(Path(__file__)),)


class FakeGrammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Either one of `choices`, or `length` tokens of which the one at place i is equal to i modulo `modulus`."""

    choices: list[list[int]] = []
    modulus: int = 0
    length: int = 0
    compile_s: float = 0.0
    mask_s: float = 0.0
    fails_at: int = -1  # the mask behind so many tokens raises MatcherError
    dies_at: int = -1  # ... kills the process
    error: str = ""  # it does not compile


def constraint(begin_after: list[int] | None = None, budget: int | None = None, **fields: object) -> OutputConstraint:
    source = msgspec.json.encode(FakeGrammar(**fields)).decode()  # type: ignore[arg-type]
    return OutputConstraint(Grammar(GrammarKind.EBNF, source, GrammarEngine.GUIDANCE), begin_after or [], budget)


class FakeMatcher:
    def __init__(self, grammar: FakeGrammar, vocab_size: int, eos: Sequence[int], ids: tuple[int, ...] = ()) -> None:
        self._grammar, self._vocab_size, self._eos, self._ids = grammar, vocab_size, eos, ids

    def accept(self, token_ids: Sequence[int]) -> int:
        for place, token in enumerate(token_ids):
            if token not in self._next():
                return place
            self._ids = (*self._ids, token)
        return len(token_ids)

    def fill(self, words: MaskWords) -> None:
        time.sleep(self._grammar.mask_s)
        if len(self._ids) == self._grammar.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if len(self._ids) == self._grammar.fails_at:
            raise MatcherError("the fake grammar fails here")
        allowed = [*self._next(), *(self._eos if self.is_complete() else ())]
        words[:] = mask_of(allowed, self._vocab_size)

    def is_complete(self) -> bool:
        return (
            len(self._ids) == self._grammar.length if self._grammar.modulus else [*self._ids] in self._grammar.choices
        )

    def forced(self) -> list[int]:
        return []

    def _next(self) -> list[int]:
        num, modulus = len(self._ids), self._grammar.modulus
        if modulus:
            ids = range(num % modulus, self._vocab_size, modulus) if num < self._grammar.length else range(0)
            return [token for token in ids if token not in self._eos]
        return [one[num] for one in self._grammar.choices if len(one) > num and tuple(one[:num]) == self._ids]


class FakeCompiled:
    def __init__(self, grammar: FakeGrammar, vocab_size: int, eos: Sequence[int]) -> None:
        self._make = lambda: FakeMatcher(grammar, vocab_size, eos)

    def matcher(self) -> Matcher:
        return self._make()


class FakeEngine:
    def __init__(self, vocab_size: int, eos: Sequence[int]) -> None:
        self._vocab_size, self._eos = vocab_size, eos
        self.num_compiled = 0

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        decoded = msgspec.json.decode(grammar.source, type=FakeGrammar)
        self.num_compiled += 1
        time.sleep(decoded.compile_s)
        if decoded.error:
            raise GrammarError(decoded.error)
        return FakeCompiled(decoded, self._vocab_size, self._eos)


def allowed_ids(words: MaskWords) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def load(settings: MatcherSettings) -> FakeEngine:
    """The folder of the tokenizer may be `broken: CAUSE`."""
    if settings.tokenizer_path.startswith("broken"):
        raise GrammarError(settings.tokenizer_path)
    return FakeEngine(settings.vocab_size, settings.eos_token_ids)


if __name__ == "__main__":
    main(sys.argv[1:], load)
    os._exit(0)
