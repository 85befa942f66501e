"""Operations of an LLM besides generation: sleep, wake, reset the prefix cache, metrics."""

from collections.abc import Sequence
from typing import NoReturn

from blockyard.services.offline.metrics import Metric, snapshot
from blockyard.services.offline.session import Session
from blockyard.shared.errors import RequestError, not_built
from blockyard.shared.messages import Control, Controlled, ControlVerb, MemoryTag
from blockyard.shared.ring_client.client import RingClient

MODES = ("abort", "wait", "keep")
SCHEDULING = "scheduling"  # the part that sleep level 0 stops
PROFILE_FROM_OUTSIDE = "the services are processes: a profiler such as py-spy or Nsight Systems attaches to them"
TAGS = (*MemoryTag, SCHEDULING)


class RingOperations:
    """Base of LLM and LLMEngine. Methods raise RequestError, a ValueError, and without a ring RingLost."""

    _session: Session

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Frees GPU memory until `wake_up`; needs `enable_sleep_mode=True`.

        Level 1 moves the weights to host memory, level 2 drops them, level 0 only pauses scheduling. Running requests
        of other threads fail (`abort`), finish first (`wait`) or continue afterwards (`keep`).
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
        """Reallocates the memory, or only the parts in `tags`; requests wait until both parts are back."""
        unknown = sorted(set(tags or ()) - {*TAGS})
        if unknown:
            raise RequestError(f"tags are {', '.join(TAGS)}, got {unknown[0]!r}", "tags")
        parts = sorted({MemoryTag(tag) for tag in tags or () if tag != SCHEDULING})
        if parts or not tags:
            self._ask(Control("", ControlVerb.WAKE_UP, tags=parts))
        if not tags or SCHEDULING in tags:
            self._ask(Control("", ControlVerb.RESUME))

    def is_sleeping(self) -> bool:
        return any(state.sleep_level for state in self._ask(Control("", ControlVerb.STATUS)))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drops all cached KV. Running requests compute theirs again; the arguments have no effect."""
        self._ask(Control("", ControlVerb.RESET_PREFIX_CACHE))
        return True

    def get_metrics(self) -> list[Metric]:
        """Returns counters, gauges and histograms under vLLM's names."""

        async def read(client: RingClient) -> list[Metric]:
            await client.counts.refresh()
            return snapshot(client.meters, client.counts)

        return self._session.call(read)

    def start_profile(self, *_: object, **__: object) -> NoReturn:
        raise not_built("start_profile", PROFILE_FROM_OUTSIDE)

    def stop_profile(self, *_: object, **__: object) -> NoReturn:
        raise not_built("stop_profile", PROFILE_FROM_OUTSIDE)

    def collective_rpc(self, *_: object, **__: object) -> NoReturn:
        raise not_built("collective_rpc", "workers are processes that take the scheduler's steps alone")

    def apply_model(self, *_: object, **__: object) -> NoReturn:
        raise not_built("apply_model", "the model is in another process")

    def _ask(self, control: Control) -> list[Controlled]:
        return self._session.call(lambda client: client.controls.ask(control))
