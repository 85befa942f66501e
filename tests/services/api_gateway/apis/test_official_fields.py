"""Every field of the official client's request types is known: honoured, without effect, or refused by name."""

from typing import Any

import msgspec
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from openai.types.responses.input_token_count_params import InputTokenCountParams

from blockyard.services.api_gateway.apis.responses.schemas import ResponsesRequest
from blockyard.services.api_gateway.requests.schemas import ChatRequest, CompletionRequest


@pytest.mark.parametrize(
    ("params", "request_type"),
    [
        (chat_create_params, ChatRequest),
        (completion_create_params, CompletionRequest),
        (response_create_params, ResponsesRequest),
    ],
)
def test_every_field_is_declared(params: Any, request_type: type[msgspec.Struct]) -> None:
    declared = set(request_type.__struct_encode_fields__)
    kinds = [kind for name, kind in vars(params).items() if name.endswith(("ParamsBase", "Streaming"))]
    assert len(kinds) >= 3
    official = {name for kind in kinds for name in kind.__annotations__}
    assert "model" in official and official - declared == set()


def test_every_field_of_a_count_of_input_tokens_is_declared() -> None:
    official = set(InputTokenCountParams.__annotations__)
    assert "previous_response_id" in official and official - set(ResponsesRequest.__struct_encode_fields__) == set()
