"""gpt-oss: the harmony format. An answer is a list of messages, each with a header and perhaps a recipient.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather
    <|constrain|>json<|message|>{"city": "Paris"}<|call|>

The prompt ends with <|start|>assistant. The recipient stands behind the role or behind the channel. Analysis is
reasoning; final messages, and commentary without a recipient, are content. <|call|> and <|return|> end the answer and
are mostly not in its text.
"""

from collections.abc import Sequence
from typing import NamedTuple

from blockyard.shared.output_parsing.json_text import object_value
from blockyard.shared.output_parsing.markers import Markers
from blockyard.shared.output_parsing.parts import CALL_END, Part, PartKind, Reading
from blockyard.shared.output_parsing.text_input import TextInput
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules, any_of
from blockyard.shared.tool_parsers.interface import ToolFormat
from blockyard.shared.tool_parsers.tools import Tool

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
FINAL = f"{CHANNEL}final{MESSAGE}"
_FIRST = Markers(START, CHANNEL, MESSAGE, " to=", "to=")  # what a header begins with at the start of an answer
_IN_HEADER = Markers(*MARKERS)
_BEHIND_BODY = Markers(START, CHANNEL, END, CALL, RETURN)
_MAX_HEADER_CHARS = 300  # between two markers
_KINDS = {"": PartKind.CONTENT, "analysis": PartKind.REASONING} | dict.fromkeys(
    ("commentary", "final"), PartKind.CONTENT
)
_CONTENT_TYPES = frozenset({"json", "code", "text"})
_WORDS = ("assistant", "to=", *_CONTENT_TYPES, *filter(None, _KINDS))  # of headers, besides recipients
_FUNCTIONS = "functions."
_BUILT_IN = frozenset({"python", "browser.search", "browser.open", "browser.find"})  # the server does not run them


class _MessageHeader(NamedTuple):
    channel: str
    recipient: str

    @property
    def tool(self) -> str:
        """The name of the function that the message calls."""
        return "" if self.recipient in _BUILT_IN else self.recipient.removeprefix(_FUNCTIONS)


def read(text: TextInput, tools: Sequence[Tool]) -> Reading[None]:
    last: PartKind | None = None
    header = yield from _first_header(text)
    while True:
        if header is None:
            kind = PartKind.CONTENT
        elif header.tool:
            yield from _call(text, header.tool)
            kind = PartKind.CONTENT  # of what follows the arguments
        else:
            kind = _KINDS[header.channel]
            if kind == last:
                yield Part(kind, "\n")  # between two messages that the client sees as one text
        if header is not None:
            last = None if header.tool else kind
        found = yield from text.until(kind, _BEHIND_BODY)
        if not found:
            return
        header = None
        if found in (START, CHANNEL):
            text.back(len(found))
            header = yield from _header(text)
            if header is None:
                text.skip(len(found))
                yield Part(PartKind.CONTENT, found)


def read_reasoning(text: TextInput, opened: bool | None) -> Reading[None]:
    """Reads up to the beginning of the final message, or of a call, without which all is read."""
    last: PartKind | None = None
    place = text.keep()
    header = yield from _first_header(text)
    while header is not None and header.channel != "final" and not header.tool:
        text.release()
        kind = _KINDS[header.channel]
        if kind == last:
            yield Part(kind, "\n")
        last = kind
        found = yield from text.until(kind, _BEHIND_BODY)
        while found in (END, CALL, RETURN):
            found = yield from text.one_of(_BEHIND_BODY)
        text.back(len(found))
        place = text.keep()
        header = yield from _header(text)
    if header is not None and header.channel == "final" and not header.tool:
        text.release()
    else:
        text.rewind(place)


def _first_header(text: TextInput) -> Reading[_MessageHeader | None]:
    """The header of the first message, which begins in the prompt."""
    return (yield from _header(text)) if (yield from text.next_marker(_FIRST)) else None


def _header(text: TextInput) -> Reading[_MessageHeader | None]:
    """Reads a header up to the message. None, with nothing read, if something else follows."""
    place = text.keep()
    found = yield from _header_fields(text)
    if found is None:
        text.rewind(place)
    else:
        text.release()
    return found


def _header_fields(text: TextInput) -> Reading[_MessageHeader | None]:
    yield from text.literal(START)
    words = yield from _words(text)
    if words is None:
        return None
    words = words[words[:1] == ["assistant"] :]
    channel = ""
    if (yield from text.literal(CHANNEL)):
        behind = yield from _words(text)
        if not behind:
            return None
        channel = behind[0]
        words += behind[1:]
    if (yield from text.literal(CONSTRAIN)):
        words += (yield from _words(text)) or ["?"]
    if not (yield from text.literal(MESSAGE)):
        return None
    recipients = [word.removeprefix("to=") for word in words if word.startswith("to=")]
    others = {word for word in words if not word.startswith("to=")}
    if channel not in _KINDS or len(recipients) > 1 or "" in recipients or not others <= _CONTENT_TYPES:
        return None
    return _MessageHeader(channel, "".join(recipients))


def _words(text: TextInput) -> Reading[list[str] | None]:
    """The words up to the next marker. None if none comes."""
    found = yield from text.before(_IN_HEADER, _MAX_HEADER_CHARS, _may_be_header)
    return None if found is None else found.split()


def _may_be_header(text: str) -> bool:
    """Whether each word is one of a header, or its beginning."""
    return all(word.startswith("to=") or any(one.startswith(word) for one in _WORDS) for word in text.split())


def _call(text: TextInput, name: str) -> Reading[None]:
    yield Part(PartKind.CALL, name)
    yield from text.spaces()
    first = yield from text.peek()
    value = (yield from object_value(text, PartKind.ARGUMENTS, _BEHIND_BODY)) if first and first in '{"nN' else None
    if value is not None:
        yield from value
        yield CALL_END
        yield from text.spaces()
        return
    if not first or (yield from text.next_marker(_BEHIND_BODY)):
        yield Part(PartKind.ARGUMENTS, "{}")
    else:
        found = yield from text.until(PartKind.ARGUMENTS, _BEHIND_BODY)
        text.back(len(found))
    yield CALL_END


def write_grammar(rules: GrammarRules, tools: Sequence[Tool], parallel: bool) -> str:
    """One call behind <|start|>assistant, perhaps after one message of reasoning; its end ends the answer."""
    calls = []
    for tool in tools:
        head = f"{rules.text(f' to={_FUNCTIONS}{tool.name}')} {rules.marker(CHANNEL)} {rules.text('commentary json')}"
        calls.append(f"{head} {rules.marker(MESSAGE)} {rules.arguments(tool)}")
    return f"({_message(rules, 'analysis')})? {any_of(calls)}"


def write_answer(rules: GrammarRules, tools: Sequence[Tool], content: str) -> str:
    """Messages of reasoning and of plans, then one call, in each of the forms of its header, or the final message."""
    channel, message = rules.marker(CHANNEL), rules.marker(MESSAGE)
    content_type = f'(" " {rules.marker(CONSTRAIN)} "json" | " json")?'
    final = f'{channel} "final" {message} {content or rules.text_without([END])}'
    endings = [final]
    for tool in tools:
        recipient = f" to={_FUNCTIONS}{tool.name}"
        behind_role = f'{rules.text(recipient)} {channel} "commentary"'
        behind_channel = f"{channel} {rules.text(f'commentary{recipient}')}"
        endings.append(f"({behind_role} | {behind_channel}) {content_type} {message} {rules.arguments(tool)}")
    return f"({_message(rules, 'analysis')} | {_message(rules, 'commentary')})* {any_of(endings)}"


def _message(rules: GrammarRules, channel: str) -> str:
    """A whole message without recipient, and the beginning of the next one."""
    head = f"{rules.marker(CHANNEL)} {rules.text(channel)} {rules.marker(MESSAGE)}"
    return f'{head} {rules.text_without([END])} {rules.marker(END)} {rules.marker(START)} "assistant"'


def openings(tools: Sequence[Tool]) -> Sequence[str]:
    """None: text before a call is in messages with headers, as `write_answer` has them."""
    return ()


OPENAI = ToolFormat(
    name="openai",
    models="gpt-oss",
    read=read,
    write_grammar=write_grammar,
    markers=MARKERS,
    openings=openings,
    write_answer=write_answer,
    template_marks=("<|channel|>analysis<|message|>",),
    reads_reasoning=True,
    reasoning_end=END,
)
