"""API gateway <-> scheduler: requests, their acceptance, and how much the waiting queue can take."""

import enum
from typing import Annotated

import msgspec

from blockyard.shared.messages.base import Frame, FrameStruct
from blockyard.shared.messages.grammars import OutputConstraint

# Ranges of the sampling parameters. HTTP requests, the offline API and the model's defaults are checked against them.
Temperature = Annotated[float, msgspec.Meta(ge=0, le=100)]  # 0 is greedy
TopK = Annotated[int, msgspec.Meta(ge=-1)]  # 0 and -1 are all
TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]
MinP = Annotated[float, msgspec.Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, msgspec.Meta(ge=0.01, le=100)]  # beyond it, scaled logits are not finite
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
NumTokens = Annotated[int, msgspec.Meta(ge=0)]


class LogitsProcessor(FrameStruct, frozen=True):
    """A logits processor of the user's, which the worker imports."""

    name: str  # package.module.name
    args: bytes = b""  # JSON list
    kwargs: bytes = b""  # JSON object


class Sampling(FrameStruct, frozen=True):
    """Sampling parameters with their ranges and defaults. The gateway validates them and the worker applies them."""

    max_tokens: int  # output tokens of one choice, over all attempts
    temperature: Temperature = 1.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    seed: int = 0  # 64 bits
    min_tokens: NumTokens = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []  # besides the model's end-of-sequence ids
    logit_bias: list[tuple[int, float]] = []
    bad_words: list[list[int]] = []
    allowed_token_ids: list[int] = []  # empty is all
    num_logprobs: int | None = None  # candidates besides the sampled token; 0 is the sampled one alone
    num_prompt_logprobs: int | None = None
    constraint: OutputConstraint | None = None  # structured output; None: every token is free
    logits_processors: list[LogitsProcessor] = []  # applied in order, before everything else
    extra_args: bytes = b""  # JSON object, for logits processors that ask for it
    logprob_token_ids: list[int] = []  # candidates in place of the `num_logprobs` likeliest


DEFAULT_SAMPLING = Sampling(max_tokens=16)


class RepetitionDetection(FrameStruct, frozen=True):
    """Ends a choice once its output ends with `min_count` copies of the same tokens, of one of these numbers."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2


class TextOptions(FrameStruct, frozen=True):
    """How the detokenizer turns ids into text."""

    stop: list[str] = []
    include_stop: bool = False  # include the stop string, or the text of the stop token
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    tokens_as_ids: bool = False  # show logprob tokens as `token_id:N`
    min_tokens: int = 0  # ignore stop strings and repetitions in this many output tokens
    shown_special: list[str] = []  # special tokens that are decoded although special tokens are skipped
    repetition: RepetitionDetection | None = None


class ChoiceState(FrameStruct, frozen=True):
    """One of the `n` choices of a request, with its output that was delivered before this attempt."""

    index: int
    output_ids: bytes = b""
    chars_sent: int = 0


class BeamStop(enum.IntEnum):
    """When a beam search with `width` finished hypotheses ends: the values of `early_stopping`."""

    LIKELY = 0  # false: when the best live hypothesis is now worse than the worst finished one
    FIRST = 1  # true: at once
    NEVER = 2  # "never": when the best live hypothesis cannot become better than the worst finished one
    VLLM = 3  # "vllm": as NEVER, with vLLM's rules of which hypotheses are finished and how they are scored


class Beam(FrameStruct, frozen=True):
    """Beam search: the request's choices are the best hypotheses, in order."""

    width: int
    length_penalty: float = 1.0
    stop: BeamStop = BeamStop.LIKELY


MAX_EXTRA_KEYS = 1024  # of a request: each block looks at all


class ExtraKey(FrameStruct, frozen=True):
    """What the KV of some tokens depends on besides the ids: an image, or an adapter."""

    first: NumTokens  # position of the first of these tokens, in prompt and outputs
    end: NumTokens  # ... and behind the last one
    digest: bytes


class Generate(Frame, frozen=True):
    """Submits a prompt and its choices. `attempt` rises by one each time the gateway sends it again."""

    request_id: str
    attempt: int
    model: str
    prompt_ids: bytes
    block_hashes: bytes
    sampling: Sampling
    text: TextOptions | None  # None: a prompt of a Pool, within a scheduler; no frame has it
    choices: list[ChoiceState]
    priority: int = 0  # lower is earlier
    tenant: str = ""
    cache_salt: str = ""
    user: str = ""  # divides the tenant's share
    beam: Beam | None = None
    extra_keys: Annotated[
        list[ExtraKey], msgspec.Meta(max_length=MAX_EXTRA_KEYS)
    ] = []  # `block_hashes` contain them, and hashes of generated blocks will
    batch_line: bool = False  # of a batch file: it waits behind every online request, and gives way to them
    kv_transfer_params: bytes = b""  # JSON object, for the connector of KV transfers
    adapter: str = ""  # name of the LoRA adapter; empty: the model itself
    adapter_digest: bytes = b""  # of its bytes, which `block_hashes` contain
    prompt_adapter: str = ""  # name of the prompt adapter; empty: none. Gateways leave out its virtual tokens
    prompt_adapter_digest: bytes = b""  # as `adapter_digest`; `block_hashes` begin with its virtual tokens


class Cancel(Frame, frozen=True):
    """The client is gone: drop all state of this request, up to this attempt. Unknown ids are ignored."""

    request_id: str
    attempt: int


class QueueCapacity(FrameStruct, frozen=True):
    """How much more the waiting queue takes. Gateways answer 429 by it before they tokenize anything."""

    choices: int
    tokens: int
    retry_after_s: float = 1.0  # estimated time until the waiting requests are served
    tenant: str | None = None  # if full for one user only: that user's tenant; None: full for all
    user: str | None = None  # that user
    asleep: bool = False  # the workers sleep: nothing is served until an operator wakes them


class Accepted(Frame, frozen=True):
    request_id: str
    attempt: int
    detokenizer: (
        int | None
    )  # incarnation of the detokenizer that will send its text; None: the scheduler sends a vector
    capacity: QueueCapacity


class Refused(Frame, frozen=True):
    request_id: str
    attempt: int
    status: int  # HTTP status
    field: str
    message: str
    capacity: QueueCapacity


class QueueCapacityChanged(Frame, frozen=True):
    """The queue became full or has capacity again. Sent to every linked gateway."""

    capacity: QueueCapacity
