"""The interface between an API and the rest of the gateway."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from blockyard.services.api_gateway.requests.generate_request import GenerateRequest, ResponseOptions, StoredTurn
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import FinishReason, ModelCard, TextLogprobs
from blockyard.shared.output_parsing.parts import Part
from blockyard.shared.ring_client.request_fields.output_format import OutputFormats


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request so far, over all of its prompts and choices."""

    prompt: int
    completion: int
    cached: int | None = None  # of the prompt; None: not shown
    reasoning: int | None = None  # of the completion; None: nothing reads reasoning


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt, for an answer that begins with it."""

    text: str
    first_token: str  # its text; the first token has no log-probability
    logprobs: list[TextLogprobs]  # the journal's list, complete when the first output token arrives


@dataclass(frozen=True, slots=True)
class EventFields:
    """The fields of a streamed event besides its part."""

    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TextLogprobs] | None = None  # None: not shown
    token_ids: list[int] | None = None
    usage: Usage | None = None
    stamp_s: float | None = None
    echo: Echo | None = None  # the event begins with the prompt


PLAIN = EventFields()


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """A choice of an answer that is not streamed."""

    parts: Sequence[Part]
    finish: FinishReason
    stop_reason: int | str | None
    logprobs: list[TextLogprobs]
    prompt_logprobs: list[TextLogprobs]
    output_ids: list[int] | None = None  # None: not shown
    prompt_ids: list[int] | None = None
    echo: Echo | None = None
    logprob_ends: Sequence[int] = ()  # for each part, how many of the `logprobs` had come with it
    prompt_text: str | None = None  # None: not shown
    kv_transfer_params: bytes = b""  # JSON object of the connector of KV transfers


class ChoiceEvents(Protocol):
    """Writes the events of one choice, in order."""

    @property
    def same_around_text(self) -> tuple[bytes, bytes] | None:
        """What `around_text` returns without a stamp, if it is the same for every text of the choice."""
        ...

    def around_text(self, text: str, stamp_s: float | None) -> tuple[bytes, bytes] | None:
        """The bytes before and behind the JSON string of `text` in the next event, which has it alone.

        They are encoded once, as far as they are the same in every event. None: `event` has to write it, because more
        belongs to it, such as the opening of an item.
        """
        ...

    def opening(self, usage: Usage | None) -> bytes:
        """The event before all others; may be empty. `usage` is that of the prompt, if the options ask for it."""
        ...

    def event(self, part: Part | None, fields: EventFields) -> bytes:
        """The event of a part, or of the fields alone. That of a call's end, without other fields, may be empty."""
        ...


class AnswerEvents(Protocol):
    """Writes one streamed answer. Holds the state that its choices and its end share (a counter, an open item)."""

    def choice(self, index: int, prompt_ids: list[int] | None, prompt_text: str | None = None) -> ChoiceEvents:
        """`prompt_ids` and `prompt_text` are shown in the stream; None: they are not."""
        ...

    def ending(self, usage: Callable[[], Usage]) -> bytes:
        """Returns the events behind the last event of the choices."""
        ...

    def failed(self, error: RequestError) -> bytes:
        """Returns the events that end the answer of a failed request."""
        ...


ParseStored = Callable[[Any, ModelCard, GatewayConfig, OutputFormats, str, StoredTurn], GenerateRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """An API that clients speak: from its paths and the fields of its body to the bytes of its answers and errors."""

    name: str  # in `ResponseOptions.api`, and towards the process that parses large bodies
    paths: tuple[str, ...]  # of POST requests
    schema: type[Any]  # the Struct of its body; it has the field `model`
    refused: frozenset[str] = frozenset()  # fields of the Struct that `parse` refuses by name, besides `NOT_BUILT`
    parse: Callable[[Any, ModelCard, GatewayConfig, OutputFormats, str], GenerateRequest]  # the name is the answer's id
    # set: its answers can be stored, and this parses a request that may continue a stored one
    parse_stored: ParseStored | None = None
    events: Callable[[ResponseOptions], AnswerEvents]
    whole: Callable[[ResponseOptions, Sequence[FinishedChoice], Usage], bytes]  # an answer that is not streamed
    count: Callable[[int], bytes] | None = None  # set: nothing is generated, and this answers the prompt's tokens
    error_body: Callable[[RequestError], bytes]
    error_statuses: Mapping[int, int] = field(default_factory=dict)  # HTTP statuses that it has in place of others
    keep_alive: bytes = b": keep-alive\n\n"  # sent while a stream has nothing to say
    streamed_codes: tuple[str, ...] = ()  # errors by which a request for a stream gets one: clients look there alone
    scale_out: bool = False  # is served with --enable-scale-out alone
    tries_websocket: bool = False  # clients ask for one first, and go on with POST behind a 426
