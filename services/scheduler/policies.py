"""The values of --scheduling-policy."""

from collections.abc import Callable

from blockyard.services.scheduler.fair import Fair
from blockyard.services.scheduler.policy import Policy, fcfs, priority

POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": fcfs, "priority": priority, "fair": Fair}
