"""What clients have not read yet of their answers: kept in the gateway, counted, and bounded.

A choice goes on whether its client reads or not, and no other service keeps what was delivered to the gateway: the
scheduler has the token ids of what still runs, and no log-probabilities. So a client that lags costs memory here alone.
When all of it together is more than the bound, the answer with most of it is ended.
"""

import logging
from typing import Protocol

from blockyard.shared.messages import TextDelta

log = logging.getLogger(__name__)

TOKEN_BYTES = 64  # a token with its text, once several are one delta
LOGPROB_BYTES, TOP_BYTES = 350, 120  # log-probabilities of a token, and of each of its candidates


def size_of(delta: TextDelta) -> int:
    """Bytes that it takes, about."""
    logprobs = delta.logprobs
    num_top = len(logprobs[0].top_ids) if logprobs else 0
    return len(delta.text) + TOKEN_BYTES * len(delta.token_ids) + len(logprobs) * (LOGPROB_BYTES + TOP_BYTES * num_top)


class Answer(Protocol):
    """An answer whose client may lag."""

    def abort(self) -> None: ...


class Unread:
    def __init__(self, most_bytes: int) -> None:
        self.num_bytes = 0
        self._most_bytes = most_bytes
        self._by_answer: dict[Answer, int] = {}

    def keep(self, answer: Answer, num_bytes: int) -> None:
        """So much more waits for a client."""
        self.num_bytes += num_bytes
        self._by_answer[answer] = self._by_answer.get(answer, 0) + num_bytes
        if self.num_bytes > self._most_bytes:
            slowest = max(self._by_answer, key=self._by_answer.__getitem__)
            log.warning(
                "clients have not read %d MiB of their answers, --max-unread-mib: the one with %d MiB is cancelled",
                self.num_bytes >> 20,
                self._by_answer[slowest] >> 20,
            )
            self.drop(slowest)
            slowest.abort()

    def drop(self, answer: Answer) -> None:
        """Nothing waits for this client any more."""
        self.num_bytes -= self._by_answer.pop(answer, 0)
