"""The values of --scheduling-policy."""

from collections.abc import Callable

from blockyard.services.scheduler.queue.fair_policy import FairPolicy
from blockyard.services.scheduler.queue.policy import OrderedPolicy, Policy

POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": lambda: OrderedPolicy(by_priority=False),
    "priority": lambda: OrderedPolicy(by_priority=True),
    "fair": FairPolicy,
}
