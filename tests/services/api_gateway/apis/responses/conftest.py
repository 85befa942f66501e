"""Parses bodies of /v1/responses as a gateway does."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from fake_ring import CARD

from blockyard.services.api_gateway.bodies.parse_body import ParseContext, ParsedGeneration, parse_body
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.messages import ModelSettings, ToolDefaults
from blockyard.shared.ring_client.request_fields.output_format import ModelFormats
from blockyard.shared.ring_client.schedulers import Served

CONFIG = GatewayConfig(process=ProcessConfig(name="g", bus=BusConfig(registry="ipc:///none", bind="ipc:///none")))
SETTINGS = ModelSettings(
    tools=ToolDefaults(auto_choice=True, parser="hermes", reasoning_parser="qwen3", reasoning_end="</think>")
)

Parse = Callable[..., ParsedGeneration]


@pytest.fixture
def parse() -> Parse:
    """`parse(**fields of the body)`, or of the bytes `data`. Raises RequestError."""

    def parsed(
        strict: bool = False, settings: ModelSettings = SETTINGS, data: bytes = b"", **body: Any
    ) -> ParsedGeneration:
        config = msgspec.structs.replace(CONFIG, strict_fields=strict)
        card = msgspec.structs.replace(CARD, settings=settings)
        data = data or msgspec.json.encode({"input": "hi"} | body)
        context = ParseContext("responses", "r1", Served([card], []))
        found = parse_body(data, context, config, ModelFormats(config.parser_plugins))
        assert isinstance(found, ParsedGeneration)
        return found

    return parsed
