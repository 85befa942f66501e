"""The journal of open requests: their parameters and delivered output, from which any of them can be sent again.

When a member of a request is lost or nothing arrives for too long, the request is sent again with attempt + 1 and the
ids delivered so far. Only the next ids of the current attempt are accepted. So lost, late and repeated frames are one
case: every token is delivered once and every choice ends once.
"""

from array import array
from collections.abc import Iterator
from typing import Protocol

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import (
    Beam,
    ChoiceState,
    FinishReason,
    Generate,
    Sampling,
    TextDelta,
    TextLogprobs,
    TextOptions,
)

MAX_GAPS = 8  # in a row without a token in between: the request then fails, since repetition does not help


class Sink(Protocol):
    """Receives the text of one choice."""

    def push(self, delta: TextDelta, now: float, stamp_s: float) -> None: ...


class Owner(Protocol):
    """Receives the events of a request, each at most once."""

    def accepted(self, entry: "JournalEntry") -> None: ...
    def failed(self, entry: "JournalEntry", error: RequestError) -> None: ...
    def finished(self, entry: "JournalEntry") -> None: ...


class ChoiceLog:
    """One choice: its delivered output and times."""

    __slots__ = (
        "arrived_s",
        "chars_sent",
        "finish",
        "first_s",
        "index",
        "output_ids",
        "queued_s",
        "reopened",
        "sink",
    )

    def __init__(self, index: int, sink: Sink) -> None:
        self.index = index
        self.sink = sink
        self.output_ids = array("I")
        self.chars_sent = 0
        self.finish: FinishReason | None = None
        self.reopened = -1  # attempt that repeated text of delivered ids when it opened
        self.arrived_s = 0.0  # time of its last text; 0 before the first
        self.first_s = 0.0  # time of its first text
        self.queued_s = 0.0  # time in the scheduler's queue until it was first scheduled


class JournalEntry:
    """One open request: a prompt and its choices."""

    __slots__ = (
        "accepted",
        "attempt",
        "beam",
        "block_hashes",
        "cache_salt",
        "cached_tokens",
        "came_s",
        "choices",
        "detokenizer",
        "gaps",
        "has_output",
        "heard_s",
        "model",
        "n",
        "not_before_s",
        "num_open",
        "opened_s",
        "owner",
        "priority",
        "prompt_ids",
        "prompt_logprobs",
        "request_id",
        "sampling",
        "scheduler",
        "sent_s",
        "tenant",
        "text",
        "user",
    )

    def __init__(  # noqa: PLR0913 -- one call site, all by name
        self,
        *,
        request_id: str,
        model: str,
        prompt_ids: bytes,
        block_hashes: bytes,
        sampling: Sampling,
        text: TextOptions,
        choices: list[ChoiceLog],
        owner: Owner,
        now: float,
        priority: int = 0,
        tenant: str = "",
        user: str = "",
        cache_salt: str = "",
        beam: Beam | None = None,
        n: int | None = None,
    ) -> None:
        """`now`: arrival of the client's request. `n`: choices returned to the client; None: all."""
        self.request_id = request_id
        self.model = model
        self.prompt_ids = prompt_ids
        self.block_hashes = block_hashes
        self.sampling = sampling
        self.text = text
        self.choices = choices
        self.owner = owner
        self.priority = priority
        self.tenant = tenant
        self.user = user
        self.cache_salt = cache_salt
        self.beam = beam
        self.n = len(choices) if n is None else n
        self.attempt = 0
        self.scheduler: int | None = None  # incarnation; None while no scheduler is ready
        self.detokenizer: int | None = None
        self.accepted = False  # by any attempt
        self.num_open = len(choices)
        self.came_s = self.opened_s = self.sent_s = now
        self.has_output = False  # of some choice
        self.heard_s = now  # time of its last frame
        self.not_before_s = 0.0  # a repetition waits until then
        self.gaps = 0
        self.cached_tokens = 0
        self.prompt_logprobs: list[TextLogprobs] = []  # from prompt position 1: position 0 has none

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids) // 4

    def accept(self) -> None:
        """The ring accepted it: from now on a failure is an event in the answer instead of a status code."""
        if not self.accepted:
            self.accepted = True
            self.owner.accepted(self)

    def open(self, now: float) -> None:
        """It is sent for the first time."""
        self.opened_s = self.heard_s = self.sent_s = now

    def assign(self, scheduler: int | None) -> None:
        """Sets the scheduler of the current attempt; None while no scheduler is ready."""
        self.scheduler = scheduler

    def heard(self, now: float) -> None:
        """Restarts the stall timeout."""
        self.heard_s = now

    def accepted_by(self, detokenizer: int, now: float) -> None:
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

    def generate(self) -> Generate:
        """Returns the frame that starts this attempt."""
        return Generate(
            request_id=self.request_id,
            attempt=self.attempt,
            model=self.model,
            prompt_ids=self.prompt_ids,
            block_hashes=self.block_hashes,
            sampling=self.sampling,
            text=self.text,
            choices=[
                ChoiceState(c.index, c.output_ids.tobytes(), c.chars_sent) for c in self.choices if c.finish is None
            ],
            priority=self.priority,
            tenant=self.tenant,
            user=self.user,
            cache_salt=self.cache_salt,
            beam=self.beam,
        )


class Journal:
    """All open requests of this client."""

    def __init__(self) -> None:
        self.entries: dict[str, JournalEntry] = {}
        self.unknown_ids: dict[str, int] = {}  # ids of frames without an open request -> their attempt
        self.incomplete: list[JournalEntry] = []  # requests with missing tokens, to be sent again

    def open(self, entry: JournalEntry) -> None:
        self.entries[entry.request_id] = entry

    def close(self, request_id: str) -> JournalEntry | None:
        return self.entries.pop(request_id, None)

    def take(self, delta: TextDelta, now: float) -> ChoiceLog | None:
        """Records the output of `delta` and returns its choice; None if `delta` must not be delivered."""
        entry = self.entries.get(delta.request_id)
        if entry is None:
            self.unknown_ids[delta.request_id] = delta.attempt
            return None
        if delta.attempt != entry.attempt or not 0 <= delta.choice < len(entry.choices):
            return None
        choice = entry.choices[delta.choice]
        if choice.finish is not None:
            return None
        known = len(choice.output_ids)
        if delta.first != known:
            if delta.first + len(delta.token_ids) > known or delta.finish is not None:
                self.incomplete.append(entry)
            return None
        if delta.prompt_logprobs and not self._take_prompt_logprobs(entry, delta):
            return None
        if delta.token_ids:
            if not known and delta.choice == 0 and delta.cached_tokens:  # once per prompt
                entry.cached_tokens = delta.cached_tokens
            try:
                choice.output_ids.extend(delta.token_ids)
            except OverflowError:  # not a token id: the frame is corrupt, ask for its ids again
                del choice.output_ids[known:]
                self.incomplete.append(entry)
                return None
            entry.gaps = 0
        elif _is_doubled(choice, delta):
            return None
        choice.chars_sent += len(delta.text)
        entry.heard_s = now
        if delta.finish is not None:
            choice.finish = delta.finish
            entry.num_open -= 1
        return choice

    def _take_prompt_logprobs(self, entry: JournalEntry, delta: TextDelta) -> bool:
        """They arrive in prompt order, from any choice, and again after a repetition."""
        known = len(entry.prompt_logprobs)
        skip = known - (delta.first_prompt - 1)
        if skip < 0:
            self.incomplete.append(entry)
            return False
        entry.prompt_logprobs.extend(delta.prompt_logprobs[skip:])
        return True

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


def _is_doubled(choice: ChoiceLog, delta: TextDelta) -> bool:
    """True for repeated text: a reopened stream may send text of delivered ids once per attempt."""
    if not delta.text or delta.finish is not None:
        return False
    doubled = choice.reopened == delta.attempt
    choice.reopened = delta.attempt
    return doubled
