"""From the system prompt and the blocks of a request to chat messages, as a tokenizer takes them.

Neighbouring messages of one role are one turn. Results of tools come directly behind their calls, and a user's text
behind the results. System messages stay where they are: the tokenizer knows what the model's template makes of them.
"""

import msgspec

from blockyard.services.api_gateway.apis.hidden_reasoning import read_hidden_reasoning
from blockyard.services.api_gateway.apis.messages.schemas import (
    Block,
    InputMessage,
    ResultBlock,
    SystemBlock,
)
from blockyard.shared.errors import RequestError, not_built
from blockyard.shared.ring_client.request_fields.chat_messages import CalledFunction, ContentPart, Message, ToolCall

# the first block of Claude Code's system prompt: it differs in every request, and no prefix would be cached
BILLING_HEADER = "x-anthropic-billing-header"
EMPTY = (b"null", b"[]", b"{}")  # values of a field that ask for nothing
FAILED = "Error: "  # before the result of a tool that failed


def read_conversation(system: str | list[SystemBlock] | None, messages: list[InputMessage] | None) -> bytes:
    """The messages as JSON for Tokenize. Raises RequestError."""
    if not messages:
        raise RequestError("`messages` is empty" if messages == [] else "`messages` is missing", "messages")
    conversation = _BlockReader()
    if system is not None:
        conversation.add_system(_system_texts(system))
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    for i, message in enumerate(messages):
        where = f"messages[{i}].content"
        if bytes(message.output_config) not in EMPTY:
            raise not_built(f"messages[{i}].output_config", "the request's own output_config holds for all turns")
        match message.role:
            case "user":
                conversation.add_user(_blocks(message), where)
            case "assistant":
                conversation.add_assistant(_blocks(message), where)
            case _ if message.clear_at != "next_user_message" or i > last_user:
                texts = [_text(block, f"{where}[{j}]") for j, block in enumerate(_blocks(message))]
                conversation.add_instruction(message.role, texts)
    return msgspec.json.encode(conversation.ended())


class _BlockReader:
    def __init__(self) -> None:
        self._out: list[Message] = []
        self._texts: list[str] = []  # of the user's turn, which has not ended
        self._answer: Message | None = None  # the assistant's turn, which has not ended
        self._said: list[str] = []  # its texts
        self._ids: set[str] = set()  # of all calls
        self._open: dict[str, str] = {}  # ids of calls without a result, and where they are

    def add_system(self, texts: list[str]) -> None:
        if any(texts):
            self._out.append(Message(role="system", content=_content(texts)))

    def add_instruction(self, role: str, texts: list[str]) -> None:
        self._end_answer()
        if not self._open:
            self._end_user()
        self._out.append(Message(role=role, content=_content(texts)))

    def add_user(self, blocks: list[Block], where: str) -> None:
        self._end_answer()
        for j, block in enumerate(blocks):
            at = f"{where}[{j}]"
            if block.type == "tool_result":
                self._out.append(self._result(block, at))
            else:
                self._texts.append(_text(block, at))
        if not blocks:
            self._texts.append("")

    def add_assistant(self, blocks: list[Block], where: str) -> None:
        if self._answer is None:
            self._end_user()
            self._check_answered()
            self._answer = Message(role="assistant", tool_calls=[], reasoning_content="")
        thoughts, calls = [self._answer.reasoning_content], self._answer.tool_calls
        assert calls is not None
        for j, block in enumerate(blocks):
            at = f"{where}[{j}]"
            match block.type:
                case "thinking" | "redacted_thinking":
                    thoughts.append(_thinking(block, at))
                case "tool_use":
                    calls.append(self._call(block, at))
                case _:
                    self._said.append(_text(block, at))
        self._answer.reasoning_content = "\n".join(filter(None, thoughts))

    def ended(self) -> list[Message]:
        """All messages. Raises RequestError for a call without a result."""
        self._end_answer()
        self._end_user()
        self._check_answered()
        return self._out

    def _end_answer(self) -> None:
        if self._answer is not None:
            answer, self._answer = self._answer, None
            answer.content, self._said = _content(self._said), []
            answer.tool_calls, answer.reasoning_content = answer.tool_calls or None, answer.reasoning_content or None
            self._out.append(answer)

    def _end_user(self) -> None:
        if self._texts:
            self._out.append(Message(role="user", content=_content(self._texts)))
            self._texts = []

    def _check_answered(self) -> None:
        for call_id, where in self._open.items():
            raise RequestError(f"no tool_result in the next message has the id {call_id[:80]!r} of this call", where)

    def _call(self, block: Block, where: str) -> ToolCall:
        for field in ("id", "name"):
            if not getattr(block, field):
                raise RequestError(f"a block of type tool_use needs the field {field}", f"{where}.{field}")
        call_id = block.id or ""
        if call_id in self._ids:
            raise RequestError(f"two blocks of type tool_use have the id {call_id[:80]!r}", f"{where}.id")
        if not bytes(block.input).startswith(b"{"):
            raise RequestError("the input of a call must be an object", f"{where}.input")
        self._ids.add(call_id)
        self._open[call_id] = f"{where}.id"
        function = CalledFunction(name=block.name or "", arguments=block.input)
        return ToolCall(id=call_id, type="function", function=function)

    def _result(self, block: Block, where: str) -> Message:
        call_id, at = block.tool_use_id, f"{where}.tool_use_id"
        if not call_id:
            raise RequestError("a block of type tool_result needs the id of its call", at)
        if self._open.pop(call_id, None) is None:
            said = "has a result already" if call_id in self._ids else "is not in the message before"
            raise RequestError(f"the tool_use block with the id {call_id[:80]!r} {said}", at)
        texts = _result_texts(block.content, f"{where}.content")
        if block.is_error:
            texts = [FAILED + (texts[0] if texts else ""), *texts[1:]]
        return Message(role="tool", content=_content(texts), tool_call_id=call_id)


def _system_texts(system: str | list[SystemBlock]) -> list[str]:
    if isinstance(system, str):
        return [system]
    texts = []
    for j, block in enumerate(system):
        if block.type != "text" or block.text is None:
            raise _refused(block.type, f"system[{j}]", block.text)
        if not block.text.startswith(BILLING_HEADER):
            texts.append(block.text)
    return texts


def _blocks(message: InputMessage) -> list[Block]:
    content = message.content
    return [Block(type="text", text=content)] if isinstance(content, str) else content


def _text(block: Block, where: str) -> str:
    if block.type != "text" or block.text is None:
        raise _refused(block.type, where, block.text)
    return block.text


def _thinking(block: Block, where: str) -> str:
    """The thinking; that of another server, of which only the signature is left, is empty."""
    if block.type == "redacted_thinking":
        if block.data is None:
            raise RequestError("a block of type redacted_thinking needs the field data", f"{where}.data")
        return _hidden_thinking(block.data)
    if block.thinking is None:
        raise RequestError("a block of type thinking needs the field thinking", f"{where}.thinking")
    return block.thinking or _hidden_thinking(block.signature or "")


def _hidden_thinking(text: str) -> str:
    """The thinking in a signature or in the data of a redacted block; empty if that is damaged or of another server."""
    try:
        return read_hidden_reasoning(text) or ""
    except ValueError:
        return ""


def _result_texts(content: str | list[ResultBlock] | None, where: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    texts = []
    for k, block in enumerate(content):
        if block.type == "tool_reference":
            if not block.tool_name:
                raise RequestError(
                    "a block of type tool_reference needs the field tool_name", f"{where}[{k}].tool_name"
                )
            texts.append(f"The tool {block.tool_name} is available.")
        elif block.type == "text" and block.text is not None:
            texts.append(block.text)
        else:
            raise _refused(block.type, f"{where}[{k}]", block.text)
    return texts


def _refused(kind: str, where: str, text: str | None) -> RequestError:
    """The error for a block that is not text where text has to be."""
    if kind == "text" and text is None:
        return RequestError("a block of type text needs the field text", f"{where}.text")
    if kind in ("tool_use", "tool_result", "thinking", "redacted_thinking"):
        role = "user" if kind == "tool_result" else "assistant"
        return RequestError(f"blocks of type {kind} belong into messages of the role {role}", f"{where}.type")
    said = f"this model takes text alone: blocks of type {kind[:40]!r} are not built yet"
    return RequestError(said, f"{where}.type", code="unsupported_content")


def _content(texts: list[str]) -> str | list[ContentPart]:
    """The text of a single part, or the list of parts."""
    if len(texts) <= 1:
        return texts[0] if texts else ""
    return [ContentPart(type="text", text=text) for text in texts]
