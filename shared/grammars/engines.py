"""The engines of one vocabulary, each made when it is first needed, and the choice between them."""

import threading
from collections.abc import Callable

import msgspec

from blockyard.shared.grammars.engine_order import engine_behind, engine_order
from blockyard.shared.grammars.error_texts import without_source
from blockyard.shared.grammars.guidance import GuidanceEngine
from blockyard.shared.grammars.interface import (
    CompiledGrammar,
    Engine,
    GrammarError,
    MatcherError,
    UnsupportedGrammar,
    Vocabulary,
)
from blockyard.shared.grammars.json_schemas.engine_schemas import refuse_lark_schema, xgrammar_schema
from blockyard.shared.grammars.lark_sources import replace_lark_schemas
from blockyard.shared.grammars.schemas import read_choices, read_schema
from blockyard.shared.grammars.token_texts import token_texts
from blockyard.shared.grammars.trial_walks import TrialWalks
from blockyard.shared.messages import MAX_GRAMMAR_BYTES, Grammar, GrammarEngine, GrammarKind


class Engines:
    """Compiles grammars for one vocabulary to check them. Several threads may use it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._walks: TrialWalks | None = None
        self._engines: dict[GrammarEngine, Engine | GrammarError] = {}
        self._lock = threading.Lock()

    def load(self, name: GrammarEngine) -> Engine:
        """Returns an engine, which may take seconds the first time. Raises GrammarError."""
        with self._lock:
            if name not in self._engines:
                self._engines[name] = self._made(name)
                if self._walks is None and not isinstance(self._engines[name], GrammarError):
                    self._walks = TrialWalks(token_texts(self._vocabulary), self._vocabulary.num_mask_words)
            engine = self._engines[name]
        if isinstance(engine, GrammarError):
            raise GrammarError(str(engine))
        return engine

    def _made(self, name: GrammarEngine) -> Engine | GrammarError:
        try:
            return make_engine(name, self._vocabulary)
        except GrammarError as e:
            return e

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises GrammarError for a grammar that its engine does not take, or that leads to no end or over a limit."""
        try:
            return self._compile(grammar)
        except GrammarError as e:
            raise type(e)(without_source(str(e), grammar.source)) from e

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        check_options(grammar)
        if grammar.markers and grammar.engine != GrammarEngine.GUIDANCE:
            raise UnsupportedGrammar(f"{grammar.engine.value} does not support grammars with markers")
        compiled = self.load(grammar.engine).compile(grammar)
        assert self._walks is not None
        try:
            self._walks.check(compiled)
        except MatcherError as e:
            raise UnsupportedGrammar(str(e)) from e
        return compiled

    def resolve(self, grammar: Grammar) -> Grammar:
        """Returns the grammar with the first engine that takes it. Raises GrammarError with the first one's cause."""
        refusals: list[GrammarError] = []
        name: GrammarEngine | None = engine_order(grammar)[0]
        while name is not None:
            try:
                return self.resolve_with(name, grammar)
            except GrammarError as e:
                refusals.append(e)
                name = fallback(grammar, name)
        raise refusals[0]

    def resolve_with(self, name: GrammarEngine, grammar: Grammar) -> Grammar:
        """Returns the grammar with this engine. Raises GrammarError if the engine does not take it."""
        _check_source(grammar)
        resolved = msgspec.structs.replace(grammar, engine=name)
        self.compile(resolved)
        return resolved


def fallback(grammar: Grammar, name: GrammarEngine) -> GrammarEngine | None:
    """Returns the engine that may take what this one has refused, if any."""
    if (behind := engine_behind(grammar, name)) is None:
        return None
    try:
        _check_source(grammar)
        _refuse_before_loading(grammar)
    except GrammarError:
        return None
    return behind


def _check_source(grammar: Grammar) -> None:
    """Raises GrammarError for what no engine takes."""
    check_options(grammar)
    if grammar.kind == GrammarKind.JSON_SCHEMA:
        read_schema(grammar.source)
    if grammar.kind == GrammarKind.CHOICE:
        read_choices(grammar.source)


def make_engine(name: GrammarEngine, vocabulary: Vocabulary) -> Engine:
    """Raises GrammarError."""
    return import_engine(name)(vocabulary)


def import_engine(name: GrammarEngine) -> Callable[[Vocabulary], Engine]:
    """Returns the class of an engine, other than AUTO. Raises GrammarError if its package is not installed."""
    try:
        match name:
            case GrammarEngine.XGRAMMAR:
                from blockyard.shared.grammars.xgrammar_engine import XgrammarEngine  # noqa: PLC0415  loads torch

                return XgrammarEngine
            case GrammarEngine.OUTLINES:
                from blockyard.shared.grammars.outlines_engine import OutlinesEngine  # noqa: PLC0415  optional package

                return OutlinesEngine
            case GrammarEngine.LM_FORMAT_ENFORCER:
                # an optional package
                from blockyard.shared.grammars.lm_format_enforcer_engine import LmFormatEnforcerEngine  # noqa: PLC0415

                return LmFormatEnforcerEngine
    except ImportError as e:
        package = f"'blockyard[{name.value}]'"
        raise GrammarError(f"the engine {name.value} is not installed ({e}): pip install {package}") from e
    return GuidanceEngine


def _refuse_before_loading(grammar: Grammar) -> None:
    """Raises UnsupportedGrammar for what xgrammar does not know, so that no client makes it load for nothing."""
    if grammar.whitespace_pattern:
        raise UnsupportedGrammar(f"{GrammarEngine.XGRAMMAR.value} does not support whitespace_pattern")
    if grammar.kind == GrammarKind.JSON_SCHEMA:
        xgrammar_schema(read_schema(grammar.source), grammar.additional_properties)
    if grammar.kind == GrammarKind.LARK:
        replace_lark_schemas(grammar.source, refuse_lark_schema)


def check_options(grammar: Grammar) -> None:
    """Raises GrammarError for a source that is too long, or options that exclude each other."""
    size = len(grammar.source.encode("utf-8", "surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"the grammar has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")
    if grammar.whitespace_pattern and not grammar.any_whitespace:
        raise GrammarError("whitespace_pattern and disable_any_whitespace exclude each other")
