"""Reads the answers of chats: content, reasoning and tool calls, as the parsers of the deployment find them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import GrammarDefaults, TextOptions, Tokenize
from blockyard.shared.output_parsing.parts import Part, PartKind
from blockyard.shared.ring_client.choice_reader import ChoiceReader, open_reader
from blockyard.shared.ring_client.request_fields.forced_calls import calls_grammar
from blockyard.shared.ring_client.request_fields.output_format import (
    OutputForm,
    OutputFormats,
    prompt_markers,
    read_output_form,
    shown_special,
)
from blockyard.shared.ring_client.request_fields.structured_outputs import FieldGrammar
from blockyard.shared.ring_client.request_fields.tools import ToolUse
from blockyard.shared.tool_parsers.tools import ToolKind

NO_FORMATS = OutputFormats()


@dataclass(slots=True)
class FunctionToolCall:
    name: str
    arguments: str  # JSON text


@dataclass(slots=True)
class CustomToolCall:
    name: str
    input: str


@dataclass(slots=True)
class CompletionToolCall:
    """A call as OpenAI's API has it: `dataclasses.asdict` makes it one of a message for the next chat."""

    id: str
    type: Literal["function", "custom"]
    function: FunctionToolCall | None = None
    custom: CustomToolCall | None = None


@dataclass(slots=True)
class ParsedAnswer:
    content: str | None = None  # None: there is none beside reasoning and calls
    reasoning: str | None = None
    tool_calls: list[CompletionToolCall] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """How the answers to one conversation are read."""

    form: OutputForm
    use: ToolUse | None
    formats: OutputFormats
    grammar: FieldGrammar | None = None  # of strict tools

    def prompt_work(self, work: Tokenize) -> Tokenize:
        return msgspec.structs.replace(work, reasoning_markers=prompt_markers(self.form, self.formats))

    def text_options(self, options: TextOptions) -> TextOptions:
        """The text has the special tokens that the formats need."""
        return msgspec.structs.replace(options, shown_special=shown_special(self.form, self.formats))

    def open(self, opened: bool | None, on_error: Callable[[RequestError], None]) -> ChoiceReader:
        """`opened` says how the prompt ends: see `ReasoningFormat`."""
        return open_reader(self.form, self.use, self.formats, opened, True, on_error)

    def answer(self, parts: Sequence[Part]) -> ParsedAnswer:
        custom = {tool.name for tool in self.use.tools if tool.kind == ToolKind.CUSTOM} if self.use else set()
        calls: list[tuple[Part, list[str]]] = []
        for part in parts:
            if part.kind == PartKind.CALL:
                calls.append((part, []))
            elif part.kind == PartKind.ARGUMENTS:
                calls[-1][1].append(part.text)
        return ParsedAnswer(
            _text(parts, PartKind.CONTENT),
            _text(parts, PartKind.REASONING),
            [_call(part, "".join(pieces), part.text in custom) for part, pieces in calls],
        )


def answer_reading(use: ToolUse | None, formats: OutputFormats, grammars: GrammarDefaults) -> AnswerReading | None:
    """None if answers are read by no format: all of their text is content. Raises RequestError for strict tools."""
    form = read_output_form(use, formats)
    if form is None:
        return None
    return AnswerReading(form, use, formats, None if use is None else calls_grammar(form, use, formats, grammars))


def _call(part: Part, arguments: str, is_custom: bool) -> CompletionToolCall:
    if is_custom:
        return CompletionToolCall(part.call_id, "custom", custom=CustomToolCall(part.text, arguments))
    return CompletionToolCall(part.call_id, "function", FunctionToolCall(part.text, arguments))


def _text(parts: Sequence[Part], kind: PartKind) -> str | None:
    texts = [part.text for part in parts if part.kind == kind]
    return "".join(texts) if texts else None
