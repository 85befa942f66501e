"""The adapters of one worker: read into host memory beside the steps, and placed by plans."""

import logging
import queue
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockyard.services.gpu_worker.interfaces import LoadedAdapter
from blockyard.services.gpu_worker.lora.places import AdapterPlaces, HostAdapter
from blockyard.services.gpu_worker.lora.read_adapter import AdapterLimits, read_adapter
from blockyard.services.gpu_worker.lora.targets import ModelTargets
from blockyard.shared.errors import AdapterError
from blockyard.shared.messages import AdapterPlaced

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _ReadJob:
    """An adapter to read. It has all that the thread needs, which keeps nothing between jobs."""

    number: int  # of the round
    adapter: int
    path: str
    targets: ModelTargets
    limits: AdapterLimits
    places: AdapterPlaces

    def read(self) -> tuple[LoadedAdapter, HostAdapter | None]:
        try:
            held, notes = read_adapter(Path(self.path), self.targets, self.limits)
            held = self.places.prepare(held)
        except AdapterError as e:
            return LoadedAdapter(self.adapter, error=str(e)), None
        except Exception as e:  # a broken folder is no reason to end the worker
            log.exception("adapter %s cannot be read", self.path)
            return LoadedAdapter(self.adapter, error=f"{self.path}: {e!r}"), None
        return LoadedAdapter(self.adapter, held.digest, held.size_bytes, notes=notes), held


_ReadResult = tuple[int, LoadedAdapter, HostAdapter | None]  # of a round


class WorkerAdapters:
    """Implements `AdapterHost`. A thread reads folders, one at a time: files and conversions release the lock."""

    def __init__(self, targets: ModelTargets, places: AdapterPlaces, limits: AdapterLimits) -> None:
        self.places = places
        self._targets, self._limits = targets, limits
        self._held: dict[int, HostAdapter] = {}  # by the scheduler's number
        self._round = 0  # rises with each reset: what was asked before it is dropped
        self._num_open = 0
        self._jobs: queue.SimpleQueue[_ReadJob | None] = queue.SimpleQueue()  # None: no more
        self._results: queue.SimpleQueue[_ReadResult] = queue.SimpleQueue()
        threading.Thread(target=_read_all, args=(self._jobs, self._results), name="adapters", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)  # the thread holds no model whose memory is to be freed

    @property
    def is_loading(self) -> bool:
        return self._num_open > 0

    def load(self, adapter: int, path: str) -> None:
        self._num_open += 1
        self._jobs.put(_ReadJob(self._round, adapter, path, self._targets, self._limits, self.places))

    def drop(self, adapter: int) -> None:
        self._held.pop(adapter, None)

    def reset(self) -> None:
        self._round += 1
        self._num_open = 0
        self._held.clear()

    def poll(self) -> list[LoadedAdapter]:
        done: list[LoadedAdapter] = []
        while not self._results.empty():
            number, loaded, adapter = self._results.get()
            if number != self._round:
                continue
            self._num_open -= 1
            if adapter is not None:
                self._held[loaded.adapter] = adapter
            done.append(loaded)
        return done

    def place(self, placed: Sequence[AdapterPlaced]) -> None:
        """Call it at the launch of the plan that places them."""
        for one in placed:
            self.places.put(one.place, self._held[one.adapter])


def _read_all(jobs: "queue.SimpleQueue[_ReadJob | None]", results: "queue.SimpleQueue[_ReadResult]") -> None:
    while (job := jobs.get()) is not None:
        results.put((job.number, *job.read()))
        del job
