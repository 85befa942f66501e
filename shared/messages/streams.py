"""Scheduler -> detokenizer -> API gateway: sampled tokens and their text. Scheduler -> API gateway: vectors."""

import msgspec

from blockyard.shared.messages.adapters import AddedToken
from blockyard.shared.messages.base import FinishReason, Frame, FrameStruct
from blockyard.shared.messages.pooling import VectorBlock
from blockyard.shared.messages.requests import Cancel, TextOptions
from blockyard.shared.token_ids import num_ids


class TokenLogprobs(FrameStruct, frozen=True):
    """Log-probabilities at one position: of its token and of the likeliest candidates."""

    token_id: int
    logprob: float
    rank: int  # 1 is the likeliest
    top_ids: list[int]
    top_logprobs: list[float]


NO_LOGPROBS = msgspec.Raw(b"\xc0")  # nil
_encode_logprobs = msgspec.msgpack.Encoder().encode
_decode_logprobs = msgspec.msgpack.Decoder(TokenLogprobs | None).decode


def encode_logprobs(logprobs: TokenLogprobs | None) -> msgspec.Raw:
    return NO_LOGPROBS if logprobs is None else msgspec.Raw(_encode_logprobs(logprobs))


def decode_logprobs(logprobs: msgspec.Raw) -> TokenLogprobs | None:
    """Raises msgspec.MsgspecError."""
    return None if logprobs == NO_LOGPROBS else _decode_logprobs(logprobs)


class StreamOpen(FrameStruct, frozen=True):
    """Opens one choice's stream at this detokenizer, after the `output_ids` and `chars_sent` of earlier attempts."""

    request_id: str
    attempt: int
    choice: int
    gateway: int  # incarnation
    context_ids: bytes  # the prompt's last few ids: they decide leading spaces
    output_ids: bytes
    chars_sent: int
    options: TextOptions
    stream: int = 0  # the scheduler's number of this stream in `TokenRows`; 0: it appears in no TokenRows
    num_added_tokens: int = 0  # ids behind the model's vocabulary, which the request's adapter adds
    added_tokens: list[AddedToken] = []  # tokens that its tokenizer has beside the model's


class TokenStep(FrameStruct, frozen=True):
    """Tokens one scheduler step produced for one choice, in order."""

    request_id: str
    attempt: int  # the highest attempt of an id wins, lower ones are dropped
    choice: int
    first: int  # index of token_ids[0] among the choice's output tokens
    token_ids: list[int]
    finish: FinishReason | None = None
    stop_token: int | None = None  # the stop id that ended it, None for end-of-sequence
    detail: str = ""  # human-readable cause, set only with FinishReason.FAILED
    logprobs: list[TokenLogprobs] = []  # one a token, if requested
    first_prompt: int = 0  # prompt position of prompt_logprobs[0]
    prompt_logprobs: list[TokenLogprobs] = []
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    queued_s: float | None = None  # with the first token: how long the request waited to be scheduled
    status: int = 500  # of HTTP, with FinishReason.FAILED: 4xx where the request is the cause, and not to be repeated
    kv_transfer_params: bytes = b""  # with `finish`: JSON object that the connector of KV transfers gives the client


class TokenRows(FrameStruct, frozen=True):
    """One token more for each of many streams, in columns of uint32. The usual form: TokenStep is for the rest."""

    streams: bytes  # `StreamOpen.stream`
    firsts: bytes  # index of the token among its choice's output tokens
    token_ids: bytes
    logprobs: list[msgspec.Raw] = []  # one a token, as in StepResult; empty: none has any

    def __post_init__(self) -> None:
        if not len(self.streams) == len(self.firsts) == len(self.token_ids) or len(self.streams) % 4:
            raise ValueError(f"{len(self.streams)}, {len(self.firsts)} and {len(self.token_ids)} bytes of uint32")
        if self.logprobs and 4 * len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.logprobs)} log-probabilities of {num_ids(self.token_ids)} tokens")


class TokenBatch(Frame, frozen=True):
    """A step's tokens for one detokenizer. It applies opens, rows, steps, closes in this order."""

    opens: list[StreamOpen]
    steps: list[TokenStep]
    closes: list[Cancel] = []
    stamp_s: float = 0.0  # when the worker ended the step: seconds of CLOCK_REALTIME
    rows: list[TokenRows] = []


class PathLost(Frame, frozen=True):
    """Text of open requests was lost on its way to a live gateway, which sends them again with the next attempt.

    detokenizer -> scheduler: text for the gateway `member` could not be sent. scheduler -> api_gateway: affected are
    the gateway's requests at this scheduler that the detokenizer `member` decodes, or all if `member` is the gateway.
    """

    member: int  # incarnation


class StreamRef(FrameStruct, frozen=True):
    request_id: str
    attempt: int
    choice: int


class Stop(Frame, frozen=True):
    """detokenizer -> scheduler: stop strings were found; these choices need no more tokens."""

    streams: list[StreamRef]


class TextLogprobs(FrameStruct, frozen=True):
    """`TokenLogprobs` with each token's text; bytes because one token may be part of a character."""

    token_id: int
    token: bytes
    logprob: float
    rank: int
    top_ids: list[int]
    top_tokens: list[bytes]
    top_logprobs: list[float]


class TextDelta(FrameStruct, frozen=True):
    """Final text and the ids it accounts for; `text` is empty while characters are held back."""

    request_id: str
    attempt: int
    choice: int
    first: int
    token_ids: list[int]
    text: str
    finish: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or string that ended it
    detail: str = ""
    logprobs: list[TextLogprobs] = []
    first_prompt: int = 0
    prompt_logprobs: list[TextLogprobs] = []
    cached_tokens: int = 0
    queued_s: float | None = None  # as in `TokenStep`
    status: int = 500  # as in `TokenStep`
    kv_transfer_params: bytes = b""  # as in `TokenStep`


class VectorBatch(Frame, frozen=True):
    """scheduler -> api_gateway: a step's vectors for one gateway, on the link that its requests came by."""

    blocks: list[VectorBlock]


class TextBatch(Frame, frozen=True):
    """A step's text for one gateway."""

    deltas: list[TextDelta]
    stamp_s: float = 0.0
