"""Renders chat messages to one prompt text with the template of the model or of the request."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Template
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from blockyard.services.tokenizer_pool.chats.chat_messages import (
    STYLES,
    ContentStyle,
    Message,
    content_style,
    for_template,
    with_objects,
)
from blockyard.services.tokenizer_pool.chats.instruction_turns import (
    InstructionTurns,
    place_instructions,
    probe_template,
)
from blockyard.services.tokenizer_pool.chats.sandbox import ASSISTANT_BEGIN, ASSISTANT_END, Sandbox
from blockyard.services.tokenizer_pool.token_spans import NO_MARKS, Marks
from blockyard.shared.errors import RequestError

MAX_COMPILED = 16
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # its trailing space shows whether the template trims
RESERVED = frozenset({"messages", "tools", "chat_template", "tokenize"})
# Errors that the template or its input causes while it runs.
RENDER_ERRORS = (
    TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class Compiled:
    template: Template
    style: ContentStyle
    turns: dict[ContentStyle, InstructionTurns] = field(default_factory=dict)  # by the style of its messages


@dataclass(frozen=True, slots=True)
class Chat:
    """The request's input of one rendering."""

    messages: list[Message]
    tools: list[Any]
    kwargs: dict[str, Any]
    template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    content_format: str = "auto"  # string, openai; auto: detected from the template
    marks: Marks = NO_MARKS  # around what the template marks as the assistant's


class ChatTemplates:
    """The model's templates by name, the sandbox, and a cache of compiled templates."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._templates = templates
        self._special_tokens = special_tokens
        self._sandbox = Sandbox()
        self._compiled: OrderedDict[str, Compiled] = OrderedDict()

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The tokenizer's, by their names in templates."""
        return self._special_tokens

    def render(self, chat: Chat, max_chars: int | None = None) -> str:
        """Returns the prompt. Raises RequestError naming the wrong field, also for more than `max_chars` characters.

        The process limits its CPU time and memory.
        """
        source = self._pick(chat)
        if not chat.messages:
            raise RequestError("messages must not be empty", "messages")
        if reserved := RESERVED & chat.kwargs.keys():
            raise RequestError(f"{sorted(reserved)[0]!r} cannot be set here", "chat_template_kwargs")
        if chat.continue_final_message and chat.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be set", "continue_final_message"
            )
        field = "messages" if chat.template is None else "chat_template"
        return self._render(chat, self._compile(source, field), max_chars)

    def check(self) -> None:
        """Compiles the model's templates ahead of the first request. Raises RequestError for one that is malformed."""
        for source in self._templates.values():
            self._compile(source, "chat_template")

    def _pick(self, chat: Chat) -> str:
        if chat.template is not None:
            return chat.template
        name = "tool_use" if chat.tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            has = f"only {sorted(self._templates)}" if self._templates else "none"
            raise RequestError(
                f"the model's tokenizer has no chat template ({has}); start with --chat-template", "messages"
            )
        return self._templates[name]

    def _compile(self, source: str, field: str) -> Compiled:
        compiled = self._compiled.get(source)
        if compiled is None:
            try:
                compiled = Compiled(self._sandbox.from_string(source), content_style(self._sandbox.parse(source)))
            except TemplateSyntaxError as e:
                raise RequestError(f"the chat template is wrong in line {e.lineno}: {e.message}", field) from e
            except (RuntimeError, SyntaxError, TypeError, ValueError) as e:  # too deep, or names Python rejects
                raise RequestError(f"the chat template does not compile: {e}", field) from e
            self._compiled[source] = compiled
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(source)
        return compiled

    def _render(self, chat: Chat, compiled: Compiled, max_chars: int | None) -> str:
        style = STYLES.get(chat.content_format, compiled.style)
        placed = place_instructions(chat.messages, lambda: self._turns(compiled, style))
        messages = for_template(placed, style)
        final = _tag_final(messages) if chat.continue_final_message else ""
        context = {"add_generation_prompt": chat.add_generation_prompt, **chat.kwargs, "tools": chat.tools or None}
        context |= {ASSISTANT_BEGIN: chat.marks.begin, ASSISTANT_END: chat.marks.end}
        try:
            text = self._text(compiled, context, messages, max_chars)
        except RequestError:
            objects = with_objects(messages)
            if objects == messages:
                raise
            text = self._text(compiled, context, objects, max_chars)
        return _cut_at_tag(text, final) if chat.continue_final_message else text

    def _text(
        self, compiled: Compiled, context: dict[str, Any], messages: list[Message], max_chars: int | None = None
    ) -> str:
        shown: dict[str, Any] = {ASSISTANT_BEGIN: "", ASSISTANT_END: "", **self._special_tokens}
        shown |= {"documents": None, "tools": None, **context, "messages": messages}
        return _rendered(compiled.template, shown, max_chars)

    def _turns(self, compiled: Compiled, style: ContentStyle) -> InstructionTurns:
        """What the template makes of instructions between turns, found when it is needed first."""
        if style not in compiled.turns:

            def render(messages: list[Message]) -> str:
                return self._text(compiled, {"add_generation_prompt": True}, for_template(messages, style))

            compiled.turns[style] = probe_template(render)
        return compiled.turns[style]


def _rendered(template: Template, context: dict[str, Any], max_chars: int | None) -> str:
    try:
        return _join(template.generate(context), max_chars)
    except RequestError:
        raise
    except RENDER_ERRORS as e:
        raise RequestError(str(e) or repr(e), "messages") from e


def _join(parts: Iterable[str], max_chars: int | None) -> str:
    taken: list[str] = []
    num_chars = 0
    for part in parts:
        num_chars += len(part)
        if max_chars is not None and num_chars > max_chars:
            raise RequestError(
                f"the rendered prompt has more than {max_chars} characters, and is longer than the model's context "
                "length. Please reduce the length of the messages.",
                "messages",
                code="context_length_exceeded",
            )
        taken.append(part)
    return "".join(taken)


def _tag_final(messages: list[Message]) -> str:
    """Marks the end of the last message's text, and returns that text."""
    last = messages[-1]
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + CONTINUE_TAG
        return content
    if isinstance(content, list):
        for index in range(len(content) - 1, -1, -1):
            text = content[index].get("text")
            if isinstance(text, str):
                last["content"] = [
                    *content[:index],
                    {**content[index], "text": text + CONTINUE_TAG},
                    *content[index + 1 :],
                ]
                return text
    raise RequestError("the final message has no text to continue", "continue_final_message")


def _cut_at_tag(text: str, final: str) -> str:
    """Returns the prompt up to the end of the final message's text."""
    at = text.rfind(CONTINUE_TAG.strip())
    if at < 0 or final.strip() not in text:
        raise RequestError("the chat template does not show the final message as it is", "continue_final_message")
    if text.startswith(CONTINUE_TAG, at):
        return text[:at]
    return text[:at].rstrip()  # the template trims messages
