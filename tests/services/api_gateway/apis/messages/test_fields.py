"""Every field of the official client's types is known: honoured, without effect, or refused by name."""

from typing import Any

import pytest
from anthropic import types
from anthropic.types import beta, message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_create_params

from blockyard.services.api_gateway.apis.messages import schemas

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
