"""What all open requests have in common: their attempts, where they are, and when something was heard of them."""

from collections.abc import Sequence

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Frame

MAX_GAPS = 8  # in a row without a result in between: the request then fails, since repetition does not help


class TokensMissing(Exception):
    """Frames of a request were lost: it must be sent again."""


class OpenEntry:
    """One open request. Subclasses know what it asks, and what of the answer is there."""

    def __init__(self, request_id: str, model: str, now: float, adapters: Sequence[str] = ()) -> None:
        """now: arrival of the client's request. adapters: names of adapters of the model."""
        self.request_id, self.model, self.adapters = request_id, model, adapters
        self.attempt = 0
        self.scheduler: int | None = None  # incarnation; None while no scheduler is ready
        self.detokenizer: int | None = None
        self.accepted = False  # by any attempt
        self.arrived_s = self.opened_s = now
        self.heard_s = now  # time of its last frame
        self.not_before_s = 0.0  # a repetition waits until then
        self.gaps = 0
        self.num_open = 0  # choices or prompts without all results

    # what subclasses know

    def frame(self) -> Frame:
        """Returns the frame that starts this attempt."""
        raise NotImplementedError

    @property
    def num_held(self) -> tuple[int, int]:
        """Sequences and prompt tokens that it counts as while no scheduler has it."""
        raise NotImplementedError

    def on_accepted(self) -> None:
        """It was accepted for the first time."""
        raise NotImplementedError

    def on_failed(self, error: RequestError) -> None:
        raise NotImplementedError

    # attempts

    def accept(self) -> None:
        """The ring accepted it: from now on a failure is an event in the answer instead of a status code."""
        if not self.accepted:
            self.accepted = True
            self.on_accepted()

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
