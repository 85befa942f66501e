"""What else an LLM can do with its ring: sleep and wake, forget its prefix cache, tell its counters."""

from collections.abc import Sequence

from blockyard.services.offline.metrics import Metric, snapshot
from blockyard.services.offline.session import Session
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import Control, Controlled, ControlVerb, MemoryTag

MODES = ("abort", "wait", "keep")
SCHEDULING = "scheduling"  # what level 0 holds back
TAGS = (*MemoryTag, SCHEDULING)


class RingOperations:
    """Base of LLM. Each raises RequestError, a ValueError, for what cannot be done, and RingLost without a ring."""

    _session: Session

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Gives memory back until `wake_up`; needs `enable_sleep_mode=True`.

        Level 1 keeps the weights in host memory, level 2 drops them, level 0 only holds requests back. Requests of
        other threads fail (`abort`), end first (`wait`) or go on afterwards (`keep`).
        """
        if mode not in MODES:
            raise RequestError(f"mode must be one of {', '.join(MODES)}, got {mode!r}", "mode")
        if level not in (0, 1, 2):
            raise RequestError(f"level must be 0, 1 or 2, got {level!r}", "level")
        if mode == "abort":
            self._session.abort("the LLM was put to sleep")
        if level == 0:
            self._ask(Control("", ControlVerb.PAUSE, drain=mode == "wait", clear_cache=False))
        elif mode == "wait":
            self._ask(Control("", ControlVerb.PAUSE, drain=True, clear_cache=False))
            try:
                self._ask(Control("", ControlVerb.SLEEP, level=level))
            finally:
                self._ask(Control("", ControlVerb.RESUME))
        else:
            self._ask(Control("", ControlVerb.SLEEP, level=level))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes the memory back, with `tags` only that part of it; requests wait until both parts are there."""
        unknown = sorted(set(tags or ()) - {*TAGS})
        if unknown:
            raise RequestError(f"tags are {', '.join(TAGS)}, got {unknown[0]!r}", "tags")
        parts = sorted({MemoryTag(tag) for tag in tags or () if tag != SCHEDULING})
        if parts or not tags:
            self._ask(Control("", ControlVerb.WAKE_UP, tags=parts))
        if not tags or SCHEDULING in tags:
            self._ask(Control("", ControlVerb.RESUME))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forgets all KV that was computed; requests that run compute theirs again, whatever the arguments say."""
        self._ask(Control("", ControlVerb.RESET_PREFIX_CACHE))
        return True

    def get_metrics(self) -> list[Metric]:
        """Counters, gauges and histograms under vLLM's names."""
        return self._session.look(snapshot)

    def _ask(self, control: Control) -> list[Controlled]:
        return self._session.call(lambda client: client.controls.ask(control))
