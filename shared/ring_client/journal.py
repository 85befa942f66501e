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
from blockyard.shared.messages import ChoiceState, FinishReason, Generate, TextDelta, TextLogprobs
from blockyard.shared.ring_client.open_entry import OpenEntry, TokensMissing
from blockyard.shared.token_ids import num_ids


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


class JournalEntry(OpenEntry):
    """One open request for text: a prompt and its choices."""

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
        adapters = [name for name in (request.adapter, request.prompt_adapter) if name]
        super().__init__(request.request_id, request.model, now, adapters)
        self.request = request
        self.choices = choices
        self.owner = owner
        self.num_returned = len(choices) if num_returned is None else num_returned
        self.hides_output = hides_output
        self.num_open = len(choices)
        self.has_output = False  # of some choice
        self.cached_tokens = 0
        self.prompt_logprobs: list[TextLogprobs] = []  # from prompt position 1: position 0 has none
        self.kv_transfer_params = b""  # JSON object of the connector, with the end of a choice

    @property
    def num_prompt_tokens(self) -> int:
        return num_ids(self.request.prompt_ids)

    @property
    def num_held(self) -> tuple[int, int]:
        return len(self.choices), self.num_prompt_tokens * len(self.choices)

    def on_accepted(self) -> None:
        self.owner.accepted(self)

    def on_failed(self, error: RequestError) -> None:
        self.owner.failed(self, error)

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

    def _add_prompt_logprobs(self, delta: TextDelta) -> None:
        """They arrive in prompt order, from any choice, and again after a repetition."""
        skip = len(self.prompt_logprobs) - (delta.first_prompt - 1)
        if skip < 0:
            raise TokensMissing
        self.prompt_logprobs.extend(delta.prompt_logprobs[skip:])

    def frame(self) -> Generate:
        """Returns the frame that starts this attempt, behind the output that was delivered."""
        choices = [ChoiceState(c.index, c.output_ids.tobytes(), c.chars_sent) for c in self.choices if c.finish is None]
        return msgspec.structs.replace(self.request, attempt=self.attempt, choices=choices)


class Journal:
    """All open requests of this client."""

    def __init__(self) -> None:
        self.entries: dict[str, OpenEntry] = {}

    def open(self, entry: OpenEntry) -> None:
        self.entries[entry.request_id] = entry

    def close(self, request_id: str) -> OpenEntry | None:
        return self.entries.pop(request_id, None)

    def through(self, member: int) -> Iterator[OpenEntry]:
        """Yields the open requests at this scheduler or detokenizer."""
        return (e for e in list(self.entries.values()) if member in (e.scheduler, e.detokenizer))

    def along(self, scheduler: int, detokenizer: int | None) -> Iterator[OpenEntry]:
        """Yields the open requests at this scheduler; with `detokenizer` only requests that it decodes."""
        for entry in list(self.entries.values()):
            if entry.scheduler == scheduler and detokenizer in (None, entry.detokenizer):
                yield entry

    def silent_since(self, then: float) -> Iterator[OpenEntry]:
        """Yields the open requests at a scheduler without a frame since `then`."""
        return (e for e in list(self.entries.values()) if e.heard_s < then and e.scheduler is not None)
