"""How the text of an answer is read: the formats of a deployment, and which of them a request needs."""

import enum
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from blockyard.shared import parser_plugins
from blockyard.shared.config.services.gateway import ParserPlugins
from blockyard.shared.errors import ConfigError, RequestError
from blockyard.shared.messages import ModelCard, ToolDefaults
from blockyard.shared.output_parsing.compose import in_order, read_content, trimmed, with_custom_inputs, without_marks
from blockyard.shared.output_parsing.cut_calls import CALL_KINDS, CutCalls
from blockyard.shared.output_parsing.parts import PartKind, Reading
from blockyard.shared.output_parsing.reader import Format
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.reasoning_parsers.interface import ReasoningFormat
from blockyard.shared.ring_client.request_fields.tools import ToolMode, ToolUse
from blockyard.shared.tool_parsers import forced
from blockyard.shared.tool_parsers.interface import CallId, ToolFormat
from blockyard.shared.tool_parsers.tools import ToolKind

NO_PLUGINS = ParserPlugins()


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """The formats of --tool-call-parser and --reasoning-parser."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @classmethod
    def load(cls, defaults: ToolDefaults, plugins: ParserPlugins = NO_PLUGINS) -> "OutputFormats":
        """Raises ConfigError for an unknown name, or a plugin that does not import."""
        tools, reasoning = defaults.parser, defaults.reasoning_parser
        return cls(
            parser_plugins.tool_format(tools, plugins.tools) if tools else None,
            parser_plugins.reasoning_format(reasoning, plugins.reasoning) if reasoning else None,
        )


class ModelFormats:
    """The formats of all models. Files of plugins are run once, and not within a request."""

    def __init__(self, plugins: ParserPlugins) -> None:
        """Raises ConfigError for a plugin that does not import."""
        self._tools = parser_plugins.tool_formats(plugins.tools)
        self._reasoning = parser_plugins.reasoning_formats(plugins.reasoning)
        self._loaded: dict[tuple[str, str], OutputFormats] = {}  # by the names of their parsers

    def of(self, card: ModelCard) -> OutputFormats:
        """Raises RequestError for a parser that this process does not have."""
        names = tools, reasoning = card.settings.tools.parser, card.settings.tools.reasoning_parser
        if names not in self._loaded:
            try:
                self._loaded[names] = OutputFormats(
                    parser_plugins.find_tool_format(tools, self._tools) if tools else None,
                    parser_plugins.find_reasoning_format(reasoning, self._reasoning) if reasoning else None,
                )
            except ConfigError as e:
                raise RequestError(f"this server cannot read the model's answers: {e}", status=500) from e
        return self._loaded[names]


class CallForm(enum.StrEnum):
    """How an answer writes calls."""

    NONE = "none"  # it has none
    FAMILY = "family"  # as --tool-call-parser says
    LIST = "list"  # as `forced_calls` forces them: a JSON list
    ARGUMENTS = "arguments"  # the arguments of the only tool, or its text


class OutputForm(msgspec.Struct, frozen=True):
    """The parts that are read in an answer. Plain data, which other processes may send."""

    calls: CallForm
    reasons: bool  # by the format of --reasoning-parser


class ReasoningMeter:
    """Counts the tokens of reasoning: those of a piece of text in which a format found some, or which it left open."""

    __slots__ = ("_is_inside", "_was_inside", "num_tokens")

    def __init__(self) -> None:
        self._is_inside = False  # the text that was read last is reasoning
        self._was_inside = False  # some text since the last `count` is
        self.num_tokens = 0

    def watched(self, read: Format) -> Format:
        """The same format, watched by this meter."""

        def watched(text: TextInput) -> Reading[None]:
            for part in read(text):
                if part is not None:
                    self._is_inside = part.kind == PartKind.REASONING
                    self._was_inside |= self._is_inside
                yield part
            self._is_inside = False

        return watched

    def count(self, num_tokens: int) -> None:
        """Counts the tokens of the text that was read since the last call."""
        if self._was_inside:
            self.num_tokens += num_tokens
            self._was_inside = self._is_inside


def read_output_form(use: ToolUse | None, formats: OutputFormats) -> OutputForm | None:
    """Returns the form of answers to a chat request with these tools; None if they have content alone."""
    calls, reasons = CallForm.NONE if use is None else _call_form(use, formats), formats.reasoning is not None
    return OutputForm(calls, reasons) if reasons or calls != CallForm.NONE else None


def _call_form(use: ToolUse, formats: OutputFormats) -> CallForm:
    if use.mode == ToolMode.NONE:
        return CallForm.NONE
    if use.mode == ToolMode.NAMED and use.tools[0].grammar is not None:
        return CallForm.ARGUMENTS  # the answer is the text that the tool's own grammar allows
    if formats.tools is not None:
        return CallForm.FAMILY
    return {ToolMode.AUTO: CallForm.NONE, ToolMode.REQUIRED: CallForm.LIST, ToolMode.NAMED: CallForm.ARGUMENTS}[
        use.mode
    ]


def shown_special(form: OutputForm, formats: OutputFormats) -> list[str]:
    """Special tokens that the formats need as text."""
    used = [formats.reasoning] if form.reasons else []
    markers = {marker for one in used if one is not None for marker in one.markers}
    if form.calls == CallForm.FAMILY and formats.tools is not None:
        markers.update(formats.tools.markers)
    return sorted(markers)


def cut_calls(form: OutputForm, use: ToolUse | None, formats: OutputFormats) -> CutCalls:
    """Returns the rules that tell the beginning of a call or header from content where an answer ends in it."""
    openings = shown_special(form, formats)
    if use is None or form.calls == CallForm.NONE:
        return CutCalls.of(openings, only_calls=False, text_is_call=False)
    if form.calls == CallForm.FAMILY and formats.tools is not None and formats.tools.openings is not None:
        openings += formats.tools.openings(use.tools)
    text_is_call = form.calls == CallForm.ARGUMENTS and use.tools[0].kind == ToolKind.CUSTOM
    return CutCalls.of(openings, use.is_forced, text_is_call)


def prompt_markers(form: OutputForm, formats: OutputFormats) -> list[str]:
    """Start and end of reasoning, if the prompt's end has to be known; empty: it has not."""
    if not form.reasons or formats.reasoning is None or _reads_all(form, formats):
        return []
    return [formats.reasoning.start, formats.reasoning.end]


def call_id_form(formats: OutputFormats) -> CallId:
    """How ids are spelt, so that the model's chat template takes them back."""
    return CallId.OPENAI if formats.tools is None else formats.tools.call_id


def finds_reasoning(form: OutputForm, formats: OutputFormats) -> bool:
    return form.reasons or _reads_all(form, formats)


def format_names(form: OutputForm, formats: OutputFormats) -> str:
    """The flags that chose the formats of an answer, for errors."""
    names = []
    if form.reasons and formats.reasoning is not None:
        names.append(f"--reasoning-parser {formats.reasoning.name}")
    if form.calls == CallForm.FAMILY and formats.tools is not None:
        names.append(f"--tool-call-parser {formats.tools.name}")
    return " and ".join(names) or "the parser of forced calls"


def answer_format(
    form: OutputForm, use: ToolUse | None, formats: OutputFormats, opened: bool | None, meter: ReasoningMeter
) -> Format:
    """Reads one answer. `opened` says how its prompt ends: see `ReasoningFormat`."""
    read = _calls(form, use, formats)
    reasoning = formats.reasoning
    if _reads_all(form, formats):
        read = meter.watched(read)
    elif form.reasons and reasoning is not None:
        of_reasoning: Callable[[TextInput, bool | None], Reading[None]] = reasoning.read
        if reasoning.answer_marks:
            read = without_marks(read, *reasoning.answer_marks)
        read = in_order(meter.watched(lambda text: of_reasoning(text, opened)), read)
    return trimmed(read)


def _reads_all(form: OutputForm, formats: OutputFormats) -> bool:
    """True if the format of tool calls reads reasoning too."""
    return form.calls == CallForm.FAMILY and formats.tools is not None and formats.tools.reads_reasoning


def _calls(form: OutputForm, use: ToolUse | None, formats: OutputFormats) -> Format:
    if use is None or form.calls == CallForm.NONE:
        return read_content
    tools, custom = use.tools, {tool.name for tool in use.tools if tool.kind == ToolKind.CUSTOM}
    if form.calls == CallForm.ARGUMENTS:
        return lambda text: forced.read_arguments(text, tools)
    of_family = formats.tools
    if form.calls == CallForm.LIST or of_family is None:
        calls: Format = lambda text: forced.read_call_list(text, tools)  # noqa: E731
    else:
        of_calls = of_family.read
        calls = lambda text: of_calls(text, tools)  # noqa: E731
    if custom:
        calls = with_custom_inputs(calls, custom)
    return calls if use.max_calls is None else _first_calls(calls, use.max_calls)


def _first_calls(parts: Format, most: int) -> Format:
    """Without the calls after the first ones."""

    def read(text: TextInput) -> Reading[None]:
        num_calls = 0
        for part in parts(text):
            if part is not None and part.kind in CALL_KINDS:
                num_calls += part.kind == PartKind.CALL
                if num_calls > most:
                    continue
            yield part

    return read
