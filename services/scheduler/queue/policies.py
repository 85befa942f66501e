"""The values of --scheduling-policy. `fair` is in fair_policy.py."""

from collections.abc import Callable

from blockyard.services.scheduler.queue.fair_policy import FairPolicy
from blockyard.services.scheduler.queue.policy import Policy, SequenceHeap
from blockyard.services.scheduler.sequences.requests import Key, Sequence
from blockyard.shared.messages import TenantShare


class OrderedPolicy:
    """Orders by class and arrival. Implements `Policy`."""

    def __init__(self, class_of: Callable[[Sequence], int]) -> None:
        self._class_of = class_of
        self._queue = SequenceHeap()
        self.peek = self._queue.peek

    def push(self, sequence: Sequence) -> None:
        self._queue.push(self.key(sequence), sequence)

    def remove(self, sequence: Sequence) -> None:
        self._queue.remove()

    def key(self, sequence: Sequence) -> Key:
        return (self._class_of(sequence), sequence.request.arrival, sequence.index)

    def preemptible_by(self, running: Sequence, rank: int) -> bool:
        return running.key[0] > rank

    def over_share(self, sequence: Sequence, num_slots: int) -> bool:
        return False

    def on_scheduled(self, sequence: Sequence, num_tokens: int) -> None:
        pass

    def on_freed(self, sequence: Sequence) -> None:
        pass

    def largest_tenants(self, most: int) -> list[TenantShare]:
        return []


POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": lambda: OrderedPolicy(lambda sequence: 0),
    "priority": lambda: OrderedPolicy(lambda sequence: sequence.request.frame.priority),
    "fair": FairPolicy,
}
