"""A checked generation request: what to tokenize, what to generate and how the answer looks."""

from dataclasses import dataclass

from blockyard.shared.messages import ModelCard, Sampling, TextOptions, Tokenize, Tokenized
from blockyard.shared.ring_client.request_fields.choices import Choices
from blockyard.shared.ring_client.request_fields.finalize_sampling import finalize_sampling
from blockyard.shared.ring_client.request_fields.output_format import OutputForm
from blockyard.shared.ring_client.request_fields.tools import ToolUse

MAX_ID_CHARS = 128  # of a request's id, in the header or the body


@dataclass(frozen=True, slots=True)
class MessagesOptions:
    """Further options of the answers of /v1/messages."""

    max_tokens: int  # that the request asks for
    max_model_len: int
    shows_thinking: bool = True  # the blocks of thinking have its text


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """What a response that may be stored depends on besides its body."""

    name: str  # the unique part of its id; it begins with the gateway that keeps the response
    history: bytes = b""  # the items of the conversation before its input: a JSON list; empty: there are none
    referenced: bytes = b""  # the items that the references of its input mean, in their order: a JSON list


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How the answer of /v1/responses is stored."""

    input_items: bytes  # a JSON list
    previous: str = ""  # id of the response that it continues; empty: none
    background: bool = False  # it is generated without a connection


@dataclass(frozen=True, slots=True)
class ResponsesOptions:
    """Further options of the answers of /v1/responses."""

    repeated: bytes  # the fields of the request that its answer repeats: JSON without braces
    tool_names: dict[str, tuple[str, str]]  # of tools in a namespace, by the model's name: the namespace and their own
    search_tool: str = ""  # the function by which the client searches for tools; empty: there is none
    encrypted_reasoning: bool = False  # reasoning also comes as `encrypted_content`
    store: StoreOptions | None = None  # None: the answer is not stored


@dataclass(frozen=True, slots=True)
class TokensOptions:
    """Further options of the answers of /inference/v1/generate."""

    shows_text: bool = False  # besides token ids
    shows_prompt_ids: bool = False


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """How the HTTP answer looks; nothing here reaches a scheduler."""

    answer_id: str
    created: int
    model: str
    role: str = "assistant"
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    usage_at_start: bool = False  # a stream begins with the prompt's tokens
    logprobs: bool = False
    num_top: int = 0  # top candidates listed for each token
    listed_logprobs: bool = False  # by `logprob_token_ids`
    tokens_as_ids: bool = False  # log-probabilities show tokens as `token_id:N`
    prompt_logprobs: int | None = None  # top candidates listed for each prompt token; None: no prompt log-probabilities
    echo: bool = False
    token_ids: bool = False
    stamps: bool = False
    no_output: bool = False  # max_tokens 0: one token is generated for the prompt's log-probabilities and not shown
    prompt_tokens_details: bool = False
    include_reasoning: bool = True
    has_reader: bool = False  # the text is read into parts: an answer may be without content
    custom_tools: tuple[str, ...] = ()  # names of tools that take a text in place of arguments
    function_call: bool = False  # a call is shown as OpenAI's older function_call
    echo_message: str = ""  # of a chat: the answer begins with this text, of the message before it
    prompt_text: bool = False
    system_fingerprint: str | None = None
    service_tier: str | None = None  # None: the request asks for none
    messages: MessagesOptions | None = None  # set for /v1/messages
    responses: ResponsesOptions | None = None  # set for /v1/responses
    tokens: TokensOptions | None = None  # set for /inference/v1/generate


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One HTTP request of any API."""

    card: ModelCard
    options: ResponseOptions
    prompts: list[Tokenize]  # without request ids
    prompt_field: str  # "messages", "prompt" or "input": named in errors of the prompt
    sampling: Sampling  # max_tokens, seed, bad_words and constraint are set by `finalize_sampling`
    text: TextOptions
    choices: Choices
    seed: int | None
    max_tokens: int | None  # None: as many as the context leaves
    truncate: int | None  # truncate_prompt_tokens: keep this many of the prompt's ids
    priority: int
    user: str
    cache_salt: str
    grammar_field: str = ""  # where the grammar of `prompts` is from; empty: there is none
    thinking_budget: int | None = None  # tokens of reasoning; None: no limit
    tools: ToolUse | None = None
    output: OutputForm | None = None  # how the text is read; None: it is content
    shortened_tokens: int = 0  # of a prompt above it the oldest turns are dropped; 0: of none
    keeps_start: bool = False  # `truncate` keeps the prompt's first ids, not its last ones
    ignored: tuple[str, ...] = ()  # tools and items that this server leaves out, for a header of the answer
    kv_transfer_params: bytes = b""  # JSON object, for the connector
    calls_are_forced: bool = False  # by the grammar of a request that was rendered before
    wants_offsets: bool = False  # if it is rendered
    wants_assistant_mask: bool = False  # if it is rendered
    batch_line: bool = False  # of a batch file: it waits and runs behind every online request

    def drop_prompts(self) -> None:
        """Called when the ring has the ids: the texts are as large as the body, and an answer may be open for long."""
        self.prompts.clear()

    def finalize_sampling(self, prompt: Tokenized) -> Sampling:
        """The sampling of this prompt. Raises RequestError where it does not fit the context."""
        return finalize_sampling(
            self.sampling,
            prompt,
            card=self.card,
            max_tokens=self.max_tokens,
            seed=self.seed,
            max_new_tokens=self.card.settings.defaults.max_new_tokens,
            prompt_field=self.prompt_field,
            thinking_budget=self.thinking_budget,
            call_is_forced=self.calls_are_forced or (self.tools is not None and self.tools.is_forced),
        )
