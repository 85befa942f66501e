"""Counts rejected frames."""

import enum
import logging
from collections import Counter

log = logging.getLogger(__name__)


class DropReason(enum.StrEnum):
    MALFORMED = "malformed"  # it does not decode
    STRANGER = "stranger"  # no hello, or no valid ticket
    OTHER_SENDER = "other_sender"  # the transfer belongs to another sender
    UNKNOWN_TRANSFER = "unknown_transfer"
    ENDED = "ended"  # the transfer has ended or is ending
    OLD_GENERATION = "old_generation"
    WRONG_SIZE = "wrong_size"  # positions, layers or bytes outside of the transfer
    DOUBLED = "doubled"
    CONTRADICTION = "contradiction"  # the sending and the receiving worker were told of different blocks
    NOT_ALLOWED = "not_allowed"  # too early, for example blocks before WritesAllowed


class Drops:
    """Counts by reason. Logs the first drop of a reason, and then each time its count has doubled."""

    def __init__(self) -> None:
        self.by_reason: Counter[DropReason] = Counter()

    def count(self, reason: DropReason, detail: str) -> None:
        self.by_reason[reason] += 1
        total = self.by_reason[reason]
        if total & (total - 1) == 0:
            log.warning("dropped a frame of a KV transfer, %s (%d so far): %s", reason, total, detail)
