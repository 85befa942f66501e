"""Items of the input as the messages of a prompt.

Reasoning, text and calls that follow each other are one message of the assistant. Messages between a call and its
output wait until behind the output, because chat templates take the two together.
"""

from collections.abc import Sequence

import msgspec

from blockyard.services.api_gateway.apis.hidden_reasoning import read_hidden_reasoning
from blockyard.services.api_gateway.apis.responses.schemas import InputItem, ItemPart, placed
from blockyard.services.api_gateway.apis.responses.tools import SEARCH, SERVER_TOOLS, ResponseTools
from blockyard.shared.errors import RequestError
from blockyard.shared.ring_client.request_fields.chat_messages import (
    TEXT_PARTS,
    CalledFunction,
    ContentPart,
    Message,
    ToolCall,
)
from blockyard.shared.tool_parsers.tools import CUSTOM_INPUT

ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}
REASONING_PARTS = ("reasoning_text", "summary_text", "text")
CALLS = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
CALLS["tool_search_call"] = "tool_search_output"
OUTPUTS = frozenset(CALLS.values())
# items of tools that a server runs, by the beginning of their type: left out like the tools
SERVER_ITEMS = (*SERVER_TOOLS, "program")
# items that this server can only read with state that it does not have
NOT_BUILT = ("compaction", "compaction_trigger", "configuration_update", "item_reference")


def _given_reasoning(text: str, where: str) -> str | None:
    """The reasoning in `encrypted_content`; None for that of another server. Raises RequestError."""
    try:
        return read_hidden_reasoning(text)
    except ValueError as e:
        raise RequestError("the encrypted content is damaged", where) from e


def read_input(
    given: str | list[InputItem] | None,
    history: Sequence[InputItem],
    instructions: str | None,
    tools: ResponseTools,
    strict: bool,
) -> bytes:
    """Returns the messages as JSON for Tokenize. `history`: items before the input.

    Adds items left out to `tools.ignored`. Raises RequestError.
    """
    if given is None or given == []:
        raise RequestError("`input` is missing" if given is None else "`input` is empty", "input")
    reader = _InputReader(tools, strict)
    if instructions:
        reader.messages.append(Message(role="system", content=instructions))
    for i, (where, item) in enumerate(placed(history, given)):
        reader.read(item, i, where)
    if isinstance(given, str):
        if not given:
            raise RequestError("`input` is empty", "input")
        reader.say(given)
    return msgspec.json.encode(reader.finish())


class _InputReader:
    def __init__(self, tools: ResponseTools, strict: bool) -> None:
        self._tools, self._strict = tools, strict
        self.messages: list[Message] = []
        self._waiting: list[Message] = []  # until the open calls have their outputs
        self._turn: Message | None = None  # of the assistant, while no other role has spoken
        self._ids: set[str] = set()
        self._calls: dict[str, tuple[str, str]] = {}  # of each call's id, its type and its place
        self._open: dict[str, str] = {}  # calls without an output, with their places

    def read(self, item: InputItem, index: int, where: str) -> None:
        """Raises RequestError. `index`: among all items of the conversation; `where` names it."""
        kind = item.type or ("message" if item.role is not None else "item_reference" if item.id else None)
        if kind is None:
            raise RequestError("an item needs its type", f"{where}.type")
        if kind == "item_reference" or kind in NOT_BUILT:
            said = f"an item of the type {kind} needs state that this server does not have: send the items themselves"
            raise RequestError(said, f"{where}.type", code="unsupported_parameter")
        if item.id:
            if item.id in self._ids:
                raise RequestError(f"two items have the id {item.id[:128]!r}", f"{where}.id")
            self._ids.add(item.id)
        is_search = kind in ("tool_search_call", "tool_search_output")
        is_server_search = is_search and (item.execution == "server" or not (item.execution or item.call_id))
        match kind:
            case "message":
                self._message(item, where)
            case "reasoning":
                self._reasoning(item, where)
            case "additional_tools" if index in self._tools.leading:
                pass  # the template shows them with the field's
            case "additional_tools":
                self._say(Message(role="system", content=self._loaded(index)))
            case _ if is_server_search or kind.startswith(SERVER_ITEMS):
                self._leave_out(kind, where)
            case _ if kind in CALLS:
                self._call(item, kind, where)
            case _ if kind in OUTPUTS:
                self._output(item, kind, index, where)
            case _:
                raise RequestError(f"an item of the type {kind[:40]!r} is not known", f"{where}.type")

    def say(self, text: str) -> None:
        """The user's text, behind all items."""
        self._say(Message(role="user", content=text))

    def finish(self) -> list[Message]:
        for call_id, where in self._open.items():
            raise RequestError(f"the call {call_id[:128]!r} has no output in the input", f"{where}.call_id")
        return self.messages

    def _message(self, item: InputItem, where: str) -> None:
        if item.role not in ROLES:
            raise RequestError(
                f"the role of a message is one of {', '.join(ROLES)}, got {str(item.role)[:40]!r}", f"{where}.role"
            )
        if item.content is None:
            raise RequestError("content is missing", f"{where}.content")
        role = ROLES[item.role]
        if role != "assistant":
            self._say(Message(role=role, content=_content(item.content, f"{where}.content")))
            return
        text = "".join(_texts(item.content, f"{where}.content"))
        turn = self._assistant(behind_text=False)
        turn.content = f"{turn.content}\n{text}" if turn.content and text else turn.content or text

    def _reasoning(self, item: InputItem, where: str) -> None:
        """Reads its text; without a text, the reasoning in `encrypted_content` of this server, or the summary."""
        content = [ItemPart(type="text", text=item.content)] if isinstance(item.content, str) else item.content
        text = _reasoning_text(content, f"{where}.content")
        if not text and item.encrypted_content:
            text = _given_reasoning(item.encrypted_content, f"{where}.encrypted_content") or ""
        text = text or _reasoning_text(item.summary, f"{where}.summary")
        if text:
            turn = self._assistant(behind_text=False)
            turn.reasoning_content = f"{turn.reasoning_content}\n{text}" if turn.reasoning_content else text

    def _call(self, item: InputItem, kind: str, where: str) -> None:
        call_id = _call_id(item, where)
        if call_id in self._calls:
            raise RequestError(f"two calls have the id {call_id[:128]!r}", f"{where}.call_id")
        name, arguments = item.name, item.arguments
        if kind == "tool_search_call":
            name = SEARCH
        elif not name:
            raise RequestError("a call needs the name of its tool", f"{where}.name")
        if kind == "custom_tool_call":
            if item.input is None:
                raise RequestError("a call of a custom tool needs its input", f"{where}.input")
            arguments = {CUSTOM_INPUT: item.input}  # as templates show the tool: a function with one argument
        self._calls[call_id] = kind, where
        self._open[call_id] = where
        function = CalledFunction(
            name=self._tools.shown_name(item.namespace, name), arguments={} if arguments is None else arguments
        )
        turn = self._assistant(behind_text=True)
        turn.tool_calls = [*(turn.tool_calls or ()), ToolCall(id=call_id, type="function", function=function)]

    def _output(self, item: InputItem, kind: str, index: int, where: str) -> None:
        call_id = _call_id(item, where)
        if call_id not in self._calls:
            raise RequestError(f"no call before this output has the id {call_id[:128]!r}", f"{where}.call_id")
        if call_id not in self._open:
            raise RequestError(f"two outputs are of the call {call_id[:128]!r}", f"{where}.call_id")
        called, place = self._calls[call_id]
        if (kind == "tool_search_output") != (called == "tool_search_call"):
            raise RequestError(f"{place} is a {called}, whose output is a {CALLS[called]}", f"{where}.type")
        content: str | list[ContentPart]
        if kind == "tool_search_output":
            content = self._loaded(index)
        elif isinstance(item.output, str | list):
            content = _content(item.output, f"{where}.output")
        else:
            raise RequestError("the output of a call is a text or a list of parts", f"{where}.output")
        del self._open[call_id]
        self._turn = None
        self.messages.append(Message(role="tool", tool_call_id=call_id, content=content))
        if not self._open:
            self.messages += self._waiting
            self._waiting = []

    def _say(self, message: Message) -> None:
        """Adds a message of another role than the assistant's."""
        if self._open:
            self._waiting.append(message)
        else:
            self._turn = None
            self.messages.append(message)

    def _assistant(self, behind_text: bool) -> Message:
        """The message that the next piece of the assistant's belongs to: behind text only calls go on with it."""
        turn = self._turn
        if turn is None or (turn.content and not behind_text and not turn.tool_calls):
            self._turn = turn = Message(role="assistant", content="")
            self.messages.append(turn)
        return turn

    def _loaded(self, index: int) -> str:
        """The tools in an item as text: behind all that was said, so that the prompt before it stays the same."""
        return msgspec.json.encode(self._tools.brought.get(index, [])).decode()

    def _leave_out(self, kind: str, where: str) -> None:
        if self._strict:
            raise RequestError(f"this server does not run tools, and reads no item of the type {kind}", f"{where}.type")
        name = f"input.{kind[:40]}"
        if name not in self._tools.ignored:
            self._tools.ignored.append(name)


def _call_id(item: InputItem, where: str) -> str:
    if not item.call_id:
        raise RequestError("the id of the call is missing", f"{where}.call_id")
    return item.call_id


def _content(content: str | list[ItemPart], where: str) -> str | list[ContentPart]:
    """The text of a single part, or the list of parts."""
    texts = _texts(content, where)
    return texts[0] if len(texts) == 1 else [ContentPart(type="text", text=text) for text in texts]


def _texts(content: str | list[ItemPart], where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_part(part, f"{where}[{i}]") for i, part in enumerate(content)] or [""]


def _part(part: ItemPart, where: str) -> str:
    field = TEXT_PARTS.get(part.type or "")
    if field is None or field == "thinking":
        raise RequestError(
            f"this model takes text alone: parts of type {str(part.type)[:40]!r} are not built yet",
            f"{where}.type",
            code="unsupported_content",
        )
    text: str | None = getattr(part, field)
    if text is None:
        raise RequestError(f"a part of type {part.type} needs the field {field}", f"{where}.{field}")
    return text


def _reasoning_text(parts: Sequence[ItemPart] | None, where: str) -> str:
    for i, part in enumerate(parts or ()):
        if part.type not in REASONING_PARTS or part.text is None:
            raise RequestError("reasoning has parts with a text", f"{where}[{i}]")
    return "\n".join(part.text or "" for part in parts or ())
