"""Reads prompts and conversations in the forms that vLLM accepts and turns them into Tokenize frames."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec

from blockyard.services.offline.answers import NO_FORMATS, AnswerReading, answer_reading
from blockyard.services.offline.sampling_params import DEFAULT_GRAMMARS, plain
from blockyard.shared.errors import RequestError, not_built
from blockyard.shared.messages import GrammarDefaults, Tokenize
from blockyard.shared.ring_client.request_fields.chat_messages import Message, read_messages
from blockyard.shared.ring_client.request_fields.known_fields import decode_known
from blockyard.shared.ring_client.request_fields.output_format import OutputFormats
from blockyard.shared.ring_client.request_fields.sampling_fields import read_salt
from blockyard.shared.ring_client.request_fields.tools import read_offered_tools
from blockyard.shared.token_ids import pack

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
UNSUPPORTED = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "prompt_embeds", "encoder_prompt")


class TextPrompt(TypedDict):
    """A text prompt as a dict."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt of token ids as a dict; `prompt` is the text shown in the output."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Prompt:
    where: str  # its name in error messages
    work: Tokenize  # without request id and bad words
    text: str | None = None  # shown in outputs; None: the tokenizer's text, if it returns one
    reading: AnswerReading | None = None  # None: the answer's text is not parsed


def read_prompts(prompts: object, model: str) -> list[Prompt]:
    """Reads one prompt or a list of them: texts, lists of ids, {"prompt": ...} or {"prompt_token_ids": ...}.

    Raises RequestError naming the prompt.
    """
    prompts = _listed_ids(prompts)
    if isinstance(prompts, str | Mapping) or _is_ids(prompts):
        return [_prompt(prompts, "prompts", model)]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise RequestError(f"prompts must be a text, token ids or a list of them, got {_type_name(prompts)}", "prompts")
    return [_prompt(p, f"prompts[{i}]", model) for i, p in enumerate(prompts)]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Arguments of `LLM.chat` for the chat template."""

    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] | None = None
    content_format: str = ""  # string or openai; "": the value of --chat-template-content-format
    tools: Sequence[Any] | None = None
    formats: OutputFormats = NO_FORMATS  # that read the answers
    grammars: GrammarDefaults = DEFAULT_GRAMMARS


def with_token_ids(prompts: object, ids: object) -> object:
    """Combines `prompts` and `prompt_token_ids` into one list of prompts. Raises RequestError."""
    if ids is None:
        return prompts
    ids = _listed_ids(ids)
    single = _is_ids(ids)
    rows: Any = [ids] if single else ids
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        raise RequestError(f"prompt_token_ids must be a list of ids or of such lists, got {_type_name(ids)}", "prompts")
    texts: Any = [None] * len(rows) if prompts is None else [prompts] if isinstance(prompts, str) else prompts
    if len(texts) != len(rows):
        raise RequestError(f"{len(texts)} prompts and {len(rows)} prompt_token_ids", "prompt_token_ids")
    return [{"prompt": text, "prompt_token_ids": row} for text, row in zip(texts, rows, strict=True)]


def read_conversations(messages: object, options: ChatOptions, model: str) -> list[Prompt]:
    """Reads one conversation (a list of messages) or a list of conversations. Raises RequestError."""
    if options.continue_final_message and options.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt cannot both be true", "continue_final_message"
        )
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(
            f"messages must be a list of messages or of such lists, got {_type_name(messages)}", "messages"
        )
    if not messages:
        return []
    if isinstance(messages[0], Mapping):
        return [_conversation(messages, "messages", options, model)]
    return [_conversation(m, f"messages[{i}]", options, model) for i, m in enumerate(messages)]


def _prompt(prompt: object, where: str, model: str) -> Prompt:
    prompt = _listed_ids(prompt)
    if isinstance(prompt, str):
        return _text(prompt, where, model)
    if isinstance(prompt, Mapping):
        return _mapping(prompt, where, model)
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        return _ids(prompt, where, model)
    raise RequestError(f"{where} must be a text, token ids or a dict of either, got {_type_name(prompt)}", where)


def _mapping(prompt: Mapping[Any, Any], where: str, model: str) -> Prompt:
    given = {key: value for key, value in prompt.items() if value is not None}
    for name in UNSUPPORTED:
        if name in given:
            raise not_built(f"{where}.{name}")
    if unknown := given.keys() - {"prompt", "prompt_token_ids", "cache_salt"}:
        raise RequestError(f"{where} has an unknown field {sorted(map(str, unknown))[0]!r}", where)
    text, ids, salt = given.get("prompt"), given.get("prompt_token_ids"), given.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise RequestError(f"{where}.cache_salt must be a text, got {_type_name(salt)}", f"{where}.cache_salt")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"{where}.prompt must be a text, got {_type_name(text)}", f"{where}.prompt")
    if ids is not None:
        made = _ids(ids, f"{where}.prompt_token_ids", model, text)
    elif text is not None:
        made = _text(text, f"{where}.prompt", model)
    else:
        raise RequestError(f"{where} needs prompt or prompt_token_ids", where)
    return Prompt(where, msgspec.structs.replace(made.work, cache_salt=read_salt(salt)), made.text)


def _text(text: str, where: str, model: str) -> Prompt:
    if not text:
        raise RequestError(f"`{where}` is empty", where)
    return Prompt(where, Tokenize("", model, text=text), text)


def _ids(ids: Any, where: str, model: str, text: str | None = None) -> Prompt:
    """The tokenizer checks that the ids are in the vocabulary."""
    try:
        try:
            listed = msgspec.convert(ids, list[TokenId])
        except msgspec.ValidationError:  # ids of numpy
            listed = msgspec.convert(plain(ids), list[TokenId])
    except msgspec.ValidationError as e:
        raise RequestError(f"{where}: not a list of token ids: {e}", where) from e
    if not listed:
        raise RequestError(f"`{where}` is empty", where)
    return Prompt(where, Tokenize("", model, token_ids=pack(listed)), text)


def _conversation(messages: object, where: str, options: ChatOptions, model: str) -> Prompt:
    try:
        typed, ignored = decode_known(msgspec.json.encode(messages), list[Message])
        kwargs = msgspec.json.encode(dict(options.template_kwargs)) if options.template_kwargs else b""
    except (msgspec.MsgspecError, TypeError, RecursionError) as e:
        raise RequestError(f"{where}: {str(e).replace('`$', f'`{where}')}", where) from e
    if ignored:
        warnings.warn(f"messages have unknown fields that are ignored: {', '.join(ignored)}", stacklevel=2)
    try:
        data = read_messages(typed)
    except RequestError as e:
        field = e.field.replace("messages", where, 1)
        raise RequestError(f"{field}: {e}", field, code=e.code) from e
    use = read_offered_tools(_listed(options.tools))
    reading = answer_reading(use, options.formats, options.grammars)
    work = Tokenize(
        "",
        model,
        messages=data,
        tools=b"" if use is None else use.template_tools,
        template_kwargs=kwargs,
        chat_template=options.chat_template,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        content_format=options.content_format,
        want_text=True,
    )
    return Prompt(where, work if reading is None else reading.prompt_work(work), reading=reading)


def _listed(tools: Sequence[Any] | None) -> object:
    """The tools as JSON has them. Raises RequestError."""
    try:
        return msgspec.json.decode(msgspec.json.encode(tools))
    except (msgspec.MsgspecError, TypeError, RecursionError) as e:
        raise RequestError(f"tools are not JSON: {e}", "tools") from e


def _is_ids(prompts: object) -> bool:
    return (
        isinstance(prompts, Sequence)
        and not isinstance(prompts, str | bytes | bytearray)
        and len(prompts) > 0
        and all(isinstance(p, Integral) for p in prompts)
    )


def _listed_ids(prompts: Any) -> Any:
    """Converts an array of ids, one row or several, to lists."""
    return prompts.tolist() if hasattr(prompts, "tolist") else prompts


def _type_name(value: object) -> str:
    return type(value).__name__
