"""The journal of open requests: their parameters and delivered output, from which any of them can be sent again.

When a member of a request is lost or nothing arrives for too long, the request is sent again with attempt + 1 and the
ids delivered so far. Only the next ids of the current attempt are accepted. So lost, late and repeated frames are one
case: every token is delivered once and every choice ends once.
"""

from array import array
from collections.abc import Iterator
from typing import Protocol

import msgspec

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import ChoiceState, FinishReason, Generate, TextDelta, TextLogprobs, VectorResult
from blockyard.shared.token_ids import num_ids

MAX_GAPS = 8  # in a row without a token in between: the request then fails, since repetition does not help


class TokensMissing(Exception):
    """Frames of a request were lost: it must be sent again."""


class Sink(Protocol):
    """Receives the text of one choice."""

    def push(self, delta: TextDelta, now: float, stamp_s: float) -> None: ...


class RequestOwner(Protocol):
    """Receives the events of a request, each at most once but `begun`, which is once a choice."""

    def accepted(self, entry: "JournalEntry") -> None: ...
    def begun(self, entry: "JournalEntry") -> None: ...  # a choice has output
    def failed(self, entry: "JournalEntry", error: RequestError) -> None: ...
    def finished(self, entry: "JournalEntry") -> None: ...


class ChoiceLog:
    """One choice: its delivered output and times."""

    def __init__(self, index: int, sink: Sink) -> None:
        self.index = index
        self.sink = sink
        self.output_ids = array("I")
        self.chars_sent = 0
        self.finish: FinishReason | None = None
        self.reopened = -1  # attempt that repeated text of delivered ids when it opened
        self.first_s = 0.0  # time of its first tokens; 0 before
        self.last_s = 0.0  # time of its latest tokens
        self.itl_s = 0.0  # between its latest two arrivals of tokens; unset before the second
        self.queued_s = 0.0  # time in the scheduler's queue until it was first scheduled

    def on_first_token(self, now: float, queued_s: float) -> None:
        self.first_s, self.queued_s = now, queued_s

    def append(self, delta: TextDelta, now: float) -> None:
        """Records the next output. Raises TokensMissing, and records nothing, if an id is beyond uint32."""
        if token_ids := delta.token_ids:
            try:
                self.output_ids.extend(token_ids)
            except OverflowError as e:  # the frame is corrupt: its ids are sent again
                del self.output_ids[delta.first :]
                raise TokensMissing from e
            self.itl_s, self.last_s = now - self.last_s, now
        self.chars_sent += len(delta.text)
        self.finish = delta.finish

    def repeats_text(self, delta: TextDelta) -> bool:
        """True for a delta without ids that repeats text: a reopened stream may send it once per attempt."""
        if not delta.text or delta.finish is not None:
            return False
        repeated = self.reopened == delta.attempt
        self.reopened = delta.attempt
        return repeated


class JournalEntry:
    """One open request: a prompt and its choices."""

    def __init__(
        self,
        request: Generate,
        choices: list[ChoiceLog],
        owner: RequestOwner,
        now: float,
        num_returned: int | None = None,
        hides_output: bool = False,
    ) -> None:
        """`request`: the frame to send, without attempt and choices. `now`: arrival of the client's request.

        `num_returned`: choices returned to the client; None: all. `hides_output`: its one token is sampled for the
        log-probabilities of the prompt, and counts nowhere.
        """
        self.request = request
        self.request_id = request.request_id
        self.choices = choices
        self.owner = owner
        self.num_returned = len(choices) if num_returned is None else num_returned
        self.hides_output = hides_output
        self.attempt = 0
        self.scheduler: int | None = None  # incarnation; None while no scheduler is ready
        self.detokenizer: int | None = None
        self.accepted = False  # by any attempt
        self.num_open = len(choices)
        self.arrived_s = self.opened_s = now
        self.has_output = False  # of some choice
        self.heard_s = now  # time of its last frame
        self.not_before_s = 0.0  # a repetition waits until then
        self.gaps = 0
        self.cached_tokens = 0
        self.prompt_logprobs: list[TextLogprobs] = []  # from prompt position 1: position 0 has none
        self.kv_transfer_params = b""  # JSON object of the connector, with the end of a choice
        self.vector = b""  # float32: the result of a request without text, before its owner's `finished`

    @property
    def num_prompt_tokens(self) -> int:
        return num_ids(self.request.prompt_ids)

    def accept(self) -> None:
        """The ring accepted it: from now on a failure is an event in the answer instead of a status code."""
        if not self.accepted:
            self.accepted = True
            self.owner.accepted(self)

    def open(self, now: float) -> None:
        """It is sent for the first time."""
        self.opened_s = self.heard_s = now

    def assign(self, scheduler: int | None) -> None:
        """Sets the scheduler of the current attempt; None while no scheduler is ready."""
        self.scheduler = scheduler

    def heard(self, now: float) -> None:
        """Restarts the stall timeout."""
        self.heard_s = now

    def accepted_by(self, detokenizer: int | None, now: float) -> None:
        self.heard_s, self.detokenizer = now, detokenizer
        self.accept()

    def next_attempt(self, now: float) -> None:
        self.attempt += 1
        self.heard_s, self.detokenizer = now, None

    def postpone(self, when: float) -> None:
        """It must not be sent again before `when`."""
        self.not_before_s = when

    def count_gap(self) -> int:
        """Returns the gaps in a row, with this one."""
        self.gaps += 1
        return self.gaps

    def first_output(self) -> bool:
        """True for the first call: the first output of any choice."""
        first, self.has_output = not self.has_output, True
        return first

    def take(self, delta: TextDelta, now: float) -> ChoiceLog | None:
        """Records the output of `delta` and returns its choice; None if `delta` must not be delivered.

        Raises TokensMissing after a gap.
        """
        if delta.attempt != self.attempt or not 0 <= delta.choice < len(self.choices):
            return None
        choice = self.choices[delta.choice]
        if choice.finish is not None:
            return None
        first, token_ids = delta.first, delta.token_ids
        known = len(choice.output_ids)
        if first != known:
            if first + len(token_ids) > known or delta.finish is not None:
                raise TokensMissing
            return None
        if delta.prompt_logprobs:
            self._add_prompt_logprobs(delta)
        if not token_ids and choice.repeats_text(delta):
            return None
        choice.append(delta, now)
        self.heard_s = now
        if token_ids:
            self.gaps = 0
            if not known and delta.choice == 0 and delta.cached_tokens:  # once per prompt
                self.cached_tokens = delta.cached_tokens
        if delta.finish is not None:
            self.num_open -= 1
            self.kv_transfer_params = delta.kv_transfer_params or self.kv_transfer_params
        return choice

    def take_vector(self, vector: VectorResult) -> bool:
        """Records the result of a request without text, which has one choice. False if it must not be delivered."""
        if vector.attempt != self.attempt or self.num_open == 0:
            return False
        self.vector, self.cached_tokens, self.num_open = vector.data, vector.cached_tokens, 0
        return True

    def _add_prompt_logprobs(self, delta: TextDelta) -> None:
        """They arrive in prompt order, from any choice, and again after a repetition."""
        skip = len(self.prompt_logprobs) - (delta.first_prompt - 1)
        if skip < 0:
            raise TokensMissing
        self.prompt_logprobs.extend(delta.prompt_logprobs[skip:])

    def generate(self) -> Generate:
        """Returns the frame that starts this attempt."""
        choices = [ChoiceState(c.index, c.output_ids.tobytes(), c.chars_sent) for c in self.choices if c.finish is None]
        return msgspec.structs.replace(self.request, attempt=self.attempt, choices=choices)


class Journal:
    """All open requests of this client."""

    def __init__(self) -> None:
        self.entries: dict[str, JournalEntry] = {}

    def open(self, entry: JournalEntry) -> None:
        self.entries[entry.request_id] = entry

    def close(self, request_id: str) -> JournalEntry | None:
        return self.entries.pop(request_id, None)

    def through(self, member: int) -> Iterator[JournalEntry]:
        """Yields the open requests at this scheduler or detokenizer."""
        return (e for e in list(self.entries.values()) if member in (e.scheduler, e.detokenizer))

    def along(self, scheduler: int, detokenizer: int | None) -> Iterator[JournalEntry]:
        """Yields the open requests at this scheduler; with `detokenizer` only requests that it decodes."""
        for entry in list(self.entries.values()):
            if entry.scheduler == scheduler and detokenizer in (None, entry.detokenizer):
                yield entry

    def silent_since(self, then: float) -> Iterator[JournalEntry]:
        """Yields the open requests at a scheduler without a frame since `then`."""
        return (e for e in list(self.entries.values()) if e.heard_s < then and e.scheduler is not None)
