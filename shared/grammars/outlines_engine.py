"""The engine of outlines-core: a table of all states of a regular expression, with the tokens of each."""

import threading
from collections import OrderedDict

import msgspec
import outlines_core
from outlines_core.json_schema import build_regex_from_schema

from blockyard.shared.grammars.error_texts import one_line
from blockyard.shared.grammars.interface import GrammarError, MaskWords, UnsupportedGrammar, Vocabulary
from blockyard.shared.grammars.json_schemas.engine_schemas import outlines_schema
from blockyard.shared.grammars.matching import MatcherRules, SequenceMatcher, set_bits
from blockyard.shared.grammars.schemas import read_choices, read_schema
from blockyard.shared.grammars.token_texts import token_texts
from blockyard.shared.messages import Grammar, GrammarKind

NAME = "outlines"
MOST_MASKS = 256  # of the states used last, kept for each grammar
REGEX_SIGNS = frozenset(r"\.+*?()|[]{}^$#&-~/")


class OutlinesEngine:
    """One tokenizer in outlines-core."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._rules = MatcherRules(vocabulary)
        if not self._rules.eos_ids:
            raise GrammarError(f"{NAME} needs an end-of-sequence token, and the model has none")
        texts: dict[bytes | str, list[int]] = {}
        for token_id, text in enumerate(token_texts(vocabulary)):
            if text:
                texts.setdefault(text, []).append(token_id)
        self._vocabulary = outlines_core.Vocabulary(min(self._rules.eos_ids), texts)

    def compile(self, grammar: Grammar) -> "OutlinesGrammar":
        """Raises GrammarError."""
        try:
            return OutlinesGrammar(outlines_core.Index(_regex(grammar), self._vocabulary), self._rules)
        except (ValueError, TypeError, RuntimeError) as e:
            raise GrammarError(one_line(e)) from e


class OutlinesGrammar:
    """A source that outlines-core has taken."""

    def __init__(self, index: outlines_core.Index, rules: MatcherRules) -> None:
        self._index, self._rules = index, rules
        self._masks = StateMasks(index)

    def matcher(self) -> SequenceMatcher:
        return SequenceMatcher(OutlinesState(self._index, self._masks), self._rules)


class StateMasks:
    """Masks of the states used last. Several threads use it."""

    def __init__(self, index: outlines_core.Index) -> None:
        self._index = index
        self._masks: OrderedDict[int, MaskWords] = OrderedDict()
        self._lock = threading.Lock()

    def write(self, state: int, words: MaskWords) -> None:
        with self._lock:
            known = self._masks.get(state)
            if known is not None:
                self._masks.move_to_end(state)
        if known is not None:
            words[:] = known
            return
        set_bits(words, self._index.get_allowed_tokens(state) or [])
        with self._lock:
            self._masks[state] = words.copy()
            if len(self._masks) > MOST_MASKS:
                self._masks.popitem(last=False)


class OutlinesState:
    def __init__(self, index: outlines_core.Index, masks: StateMasks) -> None:
        self._index, self._masks, self._state = index, masks, index.get_initial_state()

    def advance(self, token_id: int) -> bool:
        state = self._index.get_next_state(self._state, token_id)
        if state is None:
            return False
        self._state = state
        return True

    def write_mask(self, words: MaskWords) -> None:
        self._masks.write(self._state, words)

    def is_complete(self) -> bool:
        return bool(self._index.is_final_state(self._state))

    def forced(self) -> list[int]:
        return []


def _regex(grammar: Grammar) -> str:
    """The grammar as a regular expression. Raises GrammarError, or ValueError from outlines-core."""
    match grammar.kind:
        case GrammarKind.REGEX:
            return grammar.source.removeprefix("^").removesuffix("$")  # it knows no anchors; the whole text matches
        case GrammarKind.CHOICE:
            # the longest first: its automaton ends at the first alternative that matches
            return "|".join(map(_escaped, sorted(read_choices(grammar.source), key=len, reverse=True)))
        case GrammarKind.JSON_SCHEMA:
            whitespace = grammar.whitespace_pattern or (None if grammar.any_whitespace else "")
            source = msgspec.json.encode(outlines_schema(read_schema(grammar.source))).decode()
            return str(build_regex_from_schema(source, whitespace))
    raise UnsupportedGrammar(f"{NAME} does not support grammars of the kind {grammar.kind.value}")


def _escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in REGEX_SIGNS else c for c in text)
