"""Every field of the official client's types is known: honoured, without effect, or refused by name."""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest
from anthropic import types
from anthropic.types import beta, message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params

from blockyard.services.api_gateway.apis.messages import schemas
from blockyard.services.api_gateway.apis.messages.conversation import read_conversation
from blockyard.services.api_gateway.apis.messages.tools import read_offered_tools
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import ToolDefaults

BLOCKS = (
    types.TextBlockParam,
    types.ThinkingBlockParam,
    types.RedactedThinkingBlockParam,
    types.ToolUseBlockParam,
    types.ToolResultBlockParam,
)


@pytest.mark.parametrize(
    ("kinds", "fields"),
    [
        (
            (
                message_create_params.MessageCreateParamsBase,
                message_create_params.MessageCreateParamsStreaming,
                message_count_tokens_params.MessageCountTokensParams,
                beta_create_params.MessageCreateParamsBase,
            ),
            schemas.MessagesRequest,
        ),
        (BLOCKS, schemas.Block),
        ((types.TextBlockParam, types.ToolReferenceBlockParam), schemas.ResultBlock),
        ((types.TextBlockParam,), schemas.SystemBlock),
        ((types.ToolParam, beta.BetaToolParam), schemas.DefinedTool),
        ((types.ThinkingConfigEnabledParam, beta.BetaThinkingConfigEnabledParam), schemas.Thinking),
        ((types.ThinkingConfigAdaptiveParam, beta.BetaThinkingConfigAdaptiveParam), schemas.Thinking),
        ((types.OutputConfigParam, beta.BetaOutputConfigParam), schemas.OutputConfig),
        ((types.JSONOutputFormatParam,), schemas.AnswerFormat),
        ((types.ToolChoiceAnyParam, types.ToolChoiceToolParam, types.ToolChoiceNoneParam), schemas.ToolSelection),
        ((types.MetadataParam,), schemas.RequestMetadata),
        ((types.MessageParam, beta.BetaSystemMessageParam), schemas.InputMessage),
    ],
)
def test_every_field_is_declared(kinds: tuple[Any, ...], fields: Any) -> None:
    known = set(fields.__struct_fields__)
    for kind in kinds:
        for one in getattr(kind, "__args__", (kind,)):  # a union of types
            assert set(one.__annotations__) - known == set(), one


def parts(kind: Any) -> Iterator[Any]:
    """The members of unions and the items of lists."""
    if get_origin(kind) is Literal or not get_args(kind):
        yield kind
    else:
        for one in get_args(kind):
            yield from parts(one)


def literals(kind: Any) -> set[Any]:
    return {value for one in parts(kind) if get_origin(one) is Literal for value in get_args(one)}


def structs(kind: Any) -> list[type[msgspec.Struct]]:
    return [one for one in parts(kind) if isinstance(one, type) and issubclass(one, msgspec.Struct)]


def error_of(kind: str, fields: type[msgspec.Struct]) -> RequestError | None:
    """The error of a block or a tool that has its type alone."""
    try:
        if fields is schemas.DefinedTool:
            read_offered_tools([schemas.DefinedTool(type=kind)], None, ToolDefaults(), strict=True)
        elif fields is schemas.ResultBlock:
            call = schemas.Block(type="tool_use", id="1", name="Read", input=msgspec.Raw(b"{}"))
            result = schemas.Block(type="tool_result", tool_use_id="1", content=[schemas.ResultBlock(type=kind)])
            read_conversation(None, [message("assistant", call), message("user", result)])
        else:
            read_conversation(None, [message("assistant", schemas.Block(type=kind))])
    except RequestError as e:
        return e
    return None


def message(role: Literal["user", "assistant"], block: schemas.Block) -> schemas.InputMessage:
    return schemas.InputMessage(role=role, content=[block])


class Walk:
    """All objects that a request may hold, each beside the struct that reads it."""

    def __init__(self) -> None:
        self.seen: set[tuple[Any, type]] = set()
        self.unknown: list[tuple[str, ...]] = []  # fields and values
        self.served: dict[type, set[str]] = {}  # types of blocks and tools
        self.refused: dict[type, set[str]] = {}  # by name

    def walk(self, kind: Any, fields: type[msgspec.Struct]) -> None:
        if (kind, fields) in self.seen:
            return
        self.seen.add((kind, fields))
        hints, read = get_type_hints(kind), get_type_hints(fields)
        if fields in (schemas.Block, schemas.ResultBlock, schemas.DefinedTool) and self._refuses(hints, fields):
            return
        for name, hint in hints.items():
            if name not in read:
                self.unknown.append((kind.__name__, name))
            elif known := literals(read[name]):
                self.unknown += [(kind.__name__, name, value) for value in literals(hint) - known]
            for inner in structs(read.get(name)):
                for one in parts(hint):
                    if hasattr(one, "__required_keys__"):  # a TypedDict
                        self.walk(one, inner)

    def _refuses(self, hints: dict[str, Any], fields: type[msgspec.Struct]) -> bool:
        refuses = False
        for kind in literals(hints.get("type")):
            error = error_of(kind, fields)
            refuses = error is not None and error.field.endswith(".type") and kind[:40] in str(error)
            misplaced = error is not None and "belong into messages" in str(error) and fields is schemas.Block
            refuses = refuses and not misplaced
            (self.refused if refuses else self.served).setdefault(fields, set()).add(kind)
        return refuses


def test_every_type_that_a_request_holds_is_known_or_refused_by_name() -> None:
    found = Walk()
    for kind in (
        message_create_params.MessageCreateParamsNonStreaming,
        message_count_tokens_params.MessageCountTokensParams,
        beta_create_params.MessageCreateParamsNonStreaming,
        beta_create_params.ParseMessageCreateParamsBase,
        beta_count_params.MessageCountTokensParams,
    ):
        found.walk(kind, schemas.MessagesRequest)
    assert found.unknown == []
    assert found.served == {
        schemas.Block: {"text", "thinking", "redacted_thinking", "tool_use", "tool_result"},
        schemas.ResultBlock: {"text", "tool_reference"},
        schemas.DefinedTool: {"custom"},
    }
    assert {"image", "document", "server_tool_use", "container_upload", "compaction"} <= found.refused[schemas.Block]
    assert {"image", "search_result"} <= found.refused[schemas.ResultBlock]
    assert {"bash_20250124", "web_search_20250305", "mcp_toolset"} <= found.refused[schemas.DefinedTool]
