"""Settings of a tokenizer."""

from typing import Any, Literal

import msgspec

from blockyard.shared.config.services.process import ProcessConfig
from blockyard.shared.messages import GrammarEngine

ContentFormat = Literal["auto", "string", "openai"]


class MessageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How texts become messages of the chat template."""

    writes_texts: bool = False  # each text is the message of a user, and the prompt before it that of the system
    has_parts: bool = False  # the content of a message is a list of parts
    values: dict[str, Any] = {}  # further values that templates read, such as add_generation_prompt


class TokenizerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    process: ProcessConfig
    tokenizer_path: str  # folder with tokenizer.json
    served_model_names: list[str]  # requests for these come here
    chat_template: str | None = None  # the template's text; None: the model's own
    chat_template_content_format: ContentFormat = "auto"
    block_size: int = 16  # tokens a KV block: full blocks are hashed
    block_scope: str = ""  # model, revision and KV dtype as text, hashed into the root of all block hashes
    trust_request_chat_template: bool = False  # requests may contain chat templates
    fim_template: str | None = None  # marks a hole between {prefix} and {suffix}; None: that of the tokenizer's family
    pair_template: str | None = None  # renders a query and a document for a reranker; None: the tokenizer joins them
    messages: MessageSettings = MessageSettings()  # of the texts of a pooling model
    grammar_engine: GrammarEngine = GrammarEngine.AUTO  # of requests that name none: loaded with the service
