"""API gateway <-> tokenizer pool: text to token ids and back, and what the tokenizer is."""

from blockyard.shared.messages.base import Frame, FrameStruct
from blockyard.shared.messages.grammars import Grammar

# codes of a TextRejected that says nothing about the input: try again later
BUSY = "rate_limit_exceeded"
UNAVAILABLE = "service_unavailable"
TAKES_LONG = "takes_long"  # of a job with `quick`: it takes longer than such a job may; ask again without


class AdapterTokenizer(FrameStruct, frozen=True):
    """The tokenizer of requests for an adapter that brings one, or that adds tokens."""

    path: str  # of the adapter's folder; empty: it has none, and the model's is used
    digest: bytes  # of the adapter
    num_added_tokens: int = 0  # ids behind the model's vocabulary


class Tokenize(Frame, frozen=True):
    """Turns one prompt into ids. Exactly one of `text`, `messages` and `token_ids` is set."""

    request_id: str
    model: str
    text: str | None = None
    messages: bytes | None = None  # JSON list of chat messages
    token_ids: bytes | None = None  # a prompt in ids: it is checked against the vocabulary, and its blocks are hashed
    tools: bytes = b""  # JSON list
    template_kwargs: bytes = b""  # JSON object
    chat_template: str | None = None  # replaces the model's
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None  # None: True for text, False for messages
    bad_words: list[str] = []
    cache_salt: str = ""
    want_text: bool = False  # return the rendered prompt too
    want_pieces: bool = False  # return each token's text too
    content_format: str = ""  # of messages, a value of --chat-template-content-format; "": the flag's value
    max_tokens: int = 0  # a prompt that must be longer is rejected before it is encoded; 0: no limit
    grammar: Grammar | None = None  # is checked too: one that no engine takes is rejected
    reasoning_end: str = ""  # the marker that ends reasoning; empty: the model does not reason
    reasoning_markers: list[str] = []  # start and end: the answer says with which of them the prompt ends
    reasoning_start: str = ""  # the marker that begins reasoning; empty: answers begin inside of reasoning
    tenant: str = ""  # as in Generate: jobs of tenants are run in turns
    quick: bool = False  # is expected to take little time: runs before long jobs, with a small limit of CPU time
    inner_end: str = ""  # the special token that ends reasoning within the grammar; empty: there is none in it
    suffix: str | None = None  # the text behind the hole that follows `text`; both are cut to `max_tokens`
    want_offsets: bool = False  # return where each token is in the text
    want_assistant_mask: bool = False  # of messages: return which tokens the template marks as the assistant's
    adapter_digest: bytes = b""  # of the adapters' bytes: their blocks are no others'
    num_virtual_tokens: int = 0  # of a prompt adapter: its blocks begin with them, and `token_ids` do not
    adapter: AdapterTokenizer | None = None  # None: the model's tokenizer and vocabulary


class Tokenized(Frame, frozen=True):
    request_id: str
    token_ids: bytes
    block_hashes: bytes  # of the full blocks
    bad_words: list[list[int]] = []
    text: str = ""
    pieces: list[str] = []  # the text of each token
    grammar: Grammar | None = None  # the request's, with its engine
    begin_after: list[int] = []  # ids of `reasoning_end`; empty too if the prompt has ended reasoning
    reasoning_opened: bool | None = None  # the prompt ends with the start of `reasoning_markers`; False: with the end
    only_behind: list[int] = []  # ids of `reasoning_start`; empty too if the prompt ends with it
    inner_end: int | None = None  # id of `inner_end`; None too if it is no token
    stop_token_ids: list[int] = []  # end an answer that fills a hole
    offsets: bytes = b""  # uint32: the first character of each token and the one behind it; empty: not known
    assistant_mask: bytes = b""  # of each token, 1 for the assistant's; empty: the template marks none
    eos_token_ids: list[int] = []  # of an adapter's tokenizer, beside the model's


class Detokenize(Frame, frozen=True):
    request_id: str
    model: str
    token_ids: bytes
    tenant: str = ""  # as in Tokenize
    quick: bool = False
    adapter: AdapterTokenizer | None = None  # as in Tokenize


class Detokenized(Frame, frozen=True):
    request_id: str
    text: str


class DescribeTokenizer(Frame, frozen=True):
    """Asks for the settings of a model's tokenizer."""

    request_id: str
    model: str
    tenant: str = ""  # as in Tokenize
    quick: bool = False


class TokenizerDescription(Frame, frozen=True):
    request_id: str
    settings: bytes  # JSON object, as in tokenizer_config.json


class TextRejected(Frame, frozen=True):
    """The input cannot be turned into ids, or ids into text: a 4xx answer that names the field."""

    request_id: str
    field: str
    message: str
    code: str = ""  # OpenAI's error code, if there is one for this error
    num_tokens: int = 0  # of a prompt that is too long, as `TooLong` has it
    max_tokens: int = 0  # 0: the prompt is not too long
