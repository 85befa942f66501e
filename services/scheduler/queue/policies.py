"""The values of --scheduling-policy."""

from collections.abc import Callable

from blockyard.services.scheduler.queue.fair_policy import FairPolicy
from blockyard.services.scheduler.queue.policy import Policy, fcfs, priority

POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": fcfs, "priority": priority, "fair": FairPolicy}
