"""The values of --scheduling-policy."""

from collections.abc import Callable

from blockyard.services.scheduler.queue.fair_policy import FairPolicy
from blockyard.services.scheduler.queue.policy import OrderedPolicy, Policy

POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": lambda: OrderedPolicy(lambda sequence: 0),
    "priority": lambda: OrderedPolicy(lambda sequence: sequence.request.frame.priority),
    "fair": FairPolicy,
}
