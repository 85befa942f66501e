"""The JSON fields of /v1/messages. A wrong type is a 400 that names the field; an unknown field is ignored.

Fields typed `Raw` are known and not read: they change nothing in an answer, or are refused by name in `parse`.
"""

from typing import Any, Literal

import msgspec

from blockyard.services.api_gateway.requests.schemas import SharedSampling
from blockyard.shared.ring_client.request_fields.chat_messages import NULL

Effort = Literal["low", "medium", "high", "xhigh", "max"]
Display = Literal["summarized", "omitted", "updates"]


class Fields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of all objects here: an unknown field is reported."""


class SystemBlock(Fields):
    """Also the content of a system message."""

    type: str
    text: str | None = None
    cache_control: msgspec.Raw = NULL
    citations: msgspec.Raw = NULL


class ResultBlock(Fields):
    """Content of a tool's result."""

    type: str
    text: str | None = None
    tool_name: str | None = None
    cache_control: msgspec.Raw = NULL
    citations: msgspec.Raw = NULL
    source: msgspec.Raw = NULL


class Block(Fields):
    """Content of a message: the fields of all types of blocks."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = NULL
    tool_use_id: str | None = None
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None
    # no effect on an answer
    cache_control: msgspec.Raw = NULL
    citations: msgspec.Raw = NULL
    caller: msgspec.Raw = NULL
    toolset_name: msgspec.Raw = NULL
    # of blocks that are refused
    source: msgspec.Raw = NULL


class InputMessage(Fields):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Block]
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: msgspec.Raw = NULL  # refused by name
    # of an answer that is sent back as it came
    id: msgspec.Raw = NULL
    type: msgspec.Raw = NULL
    model: msgspec.Raw = NULL
    stop_reason: msgspec.Raw = NULL
    stop_sequence: msgspec.Raw = NULL
    usage: msgspec.Raw = NULL


class Thinking(Fields):
    type: Literal["enabled", "adaptive", "disabled", "between_tools"]
    budget_tokens: int | None = None
    display: Display | None = None
    block_binding: msgspec.Raw = NULL


class AnswerFormat(Fields):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Fields):
    effort: Effort | None = None
    format: AnswerFormat | None = None
    task_budget: msgspec.Raw = NULL


class RequestMetadata(Fields):
    user_id: str | None = None


class DefinedTool(Fields):
    """A tool of the client's, or one that Anthropic's servers run or know."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    # no effect on an answer
    cache_control: msgspec.Raw = NULL
    defer_loading: msgspec.Raw = NULL
    allowed_callers: msgspec.Raw = NULL
    eager_input_streaming: msgspec.Raw = NULL
    input_examples: msgspec.Raw = NULL


class ToolSelection(Fields):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesRequest(SharedSampling):
    """The body of /v1/messages and of count_tokens."""

    model: str | None = None
    messages: list[InputMessage] | None = None
    system: str | list[SystemBlock] | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    metadata: RequestMetadata | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: AnswerFormat | None = None  # the older place of `output_config.format`
    tools: list[DefinedTool] | None = None
    tool_choice: ToolSelection | None = None
    # vLLM's fields
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # no effect on an answer
    cache_control: msgspec.Raw = NULL
    context_management: msgspec.Raw = NULL
    diagnostics: msgspec.Raw = NULL
    inference_geo: msgspec.Raw = NULL
    service_tier: msgspec.Raw = NULL
    speed: msgspec.Raw = NULL
    billing_policy: msgspec.Raw = NULL
    fallbacks: msgspec.Raw = NULL
    fallback_credit_token: msgspec.Raw = NULL
    user_profile_id: msgspec.Raw = NULL
    workspace_id: msgspec.Raw = NULL
    betas: msgspec.Raw = NULL
    # refused by name
    container: msgspec.Raw = NULL
    compaction: msgspec.Raw = NULL
    mcp_servers: msgspec.Raw = NULL
    thread: msgspec.Raw = NULL
