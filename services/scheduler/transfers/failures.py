"""Counts repeated failures: transfers between two workers, and blocks that arrive with a wrong checksum."""

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass

FIRST_S = 1.0  # after the first failure
MOST_S = 60.0
MAX_BLOCKS = 1 << 12  # that failed once and are remembered

Pair = tuple[int, int]  # incarnations of source and target


@dataclass(slots=True)
class FailingLink:
    delay_s: float
    until_s: float
    last_opened: int  # number of the last transfer that was opened before the last failure


class LinkBackoff:
    """Pairs of workers between which no sequence is handed over for a while, because a transfer failed.

    After a failure a pair is avoided for 1 s, then one transfer is tried; each further failure doubles the time.

    It holds the pairs with a failed last transfer, and costs nothing while there are none.
    """

    def __init__(self) -> None:
        self.avoided: Container[Pair] = frozenset()
        self.failing: dict[Pair, FailingLink] = {}  # written here only

    def on_failed(self, pair: Pair, number: int, last_opened: int, now: float) -> None:
        """Transfer `number` did not land. `last_opened`: the number of the newest transfer.

        Transfers that were open at an earlier failure count as one with it.
        """
        link = self.failing.get(pair)
        if link is not None and number <= link.last_opened:
            return
        delay_s = FIRST_S if link is None else min(2 * link.delay_s, MOST_S)
        self.failing[pair] = FailingLink(delay_s, now + delay_s, last_opened)
        self.update(now)

    def on_landed(self, pair: Pair, now: float) -> None:
        if self.failing.pop(pair, None) is not None:
            self.update(now)

    def on_chosen(self, pair: Pair, now: float) -> None:
        """A sequence tries the pair. Others avoid it until this one has landed, or the delay is over again."""
        link = self.failing.get(pair)
        if link is not None:
            link.until_s = now + link.delay_s
            self.update(now)

    def on_detached(self, worker: int, now: float) -> None:
        """A worker left, or begins anew."""
        self.failing = {pair: link for pair, link in self.failing.items() if worker not in pair}
        self.update(now)

    def update(self, now: float) -> None:
        """Brings `avoided` up to date."""
        self.avoided = frozenset(pair for pair, link in self.failing.items() if link.until_s > now)


class FailedBlocks:
    """Source blocks that arrived with another checksum than the sender's, by their hashes."""

    def __init__(self) -> None:
        self._failed: OrderedDict[tuple[int, bytes], None] = OrderedDict()  # once, by worker

    def on_failed(self, worker: int, block_hash: bytes) -> bool:
        """Whether the block of this source has failed for the second time. Then it counts anew."""
        key = worker, block_hash
        if key in self._failed:
            del self._failed[key]
            return True
        self._failed[key] = None
        if len(self._failed) > MAX_BLOCKS:
            self._failed.popitem(last=False)
        return False
