"""The API of /v1/responses."""

from collections.abc import Sequence

from blockyard.services.api_gateway.apis.interface import Api, FinishedChoice, Usage
from blockyard.services.api_gateway.apis.openai_fields import error_body
from blockyard.services.api_gateway.apis.responses.events import ResponsesEvents
from blockyard.services.api_gateway.apis.responses.fields import ResponsesRequest
from blockyard.services.api_gateway.apis.responses.output_items import whole_items
from blockyard.services.api_gateway.apis.responses.parse import parse_responses
from blockyard.services.api_gateway.apis.responses.response_object import finished, response_object
from blockyard.services.api_gateway.requests.generate_request import ResponseOptions
from blockyard.shared.messages import FinishReason


def _whole(options: ResponseOptions, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
    [choice] = choices
    cut = choice.finish is FinishReason.LENGTH
    items = whole_items(options, choice.parts, choice.logprobs, choice.logprob_ends, cut)
    return response_object(options, finished(usage, cut), items)


RESPONSES = Api(
    name="responses",
    paths=("/v1/responses",),
    schema=ResponsesRequest,
    parse=parse_responses,
    events=ResponsesEvents,
    whole=_whole,
    error_body=error_body,
    streamed_codes=("context_length_exceeded",),
    tries_websocket=True,
)
