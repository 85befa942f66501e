"""Who goes first. A policy is a key: the smallest is served first and preempted last."""

from typing import Protocol

Key = tuple[int, ...]


class Policy(Protocol):
    def key(self, arrival: int, choice: int, priority: int) -> Key:
        """`arrival` counts requests in the order they came; keys of two choices must differ."""


class Fcfs:
    def key(self, arrival: int, choice: int, priority: int) -> Key:
        return (arrival, choice)


POLICIES: dict[str, Policy] = {"fcfs": Fcfs()}
