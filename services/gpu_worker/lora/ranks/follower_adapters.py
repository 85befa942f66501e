"""Adapters of a follower: read and placed when the leader says so."""

from collections.abc import Callable

from blockyard.services.gpu_worker.lora.worker_adapters import WorkerAdapters
from blockyard.services.gpu_worker.parallel.commands import (
    AdapterCommand,
    AdapterRead,
    ForgetAdapter,
    ForgetAdapters,
    PlaceAdapters,
    ReadAdapter,
)


class FollowerAdapters:
    """Reads adapters when the leader says so, in pieces between its commands."""

    def __init__(self, own: WorkerAdapters, answer: Callable[[AdapterRead], None]) -> None:
        """own: of the follower's share. answer: to the leader."""
        self._own, self._answer = own, answer

    def do(self, command: AdapterCommand) -> None:
        match command:
            case ReadAdapter(job, adapter, path):
                self._own.load(adapter, path, job)
            case ForgetAdapter(adapter):
                self._own.drop(adapter)
            case ForgetAdapters():
                self._own.reset()
            case PlaceAdapters(placed):
                self._own.place(placed)

    def poll(self) -> bool:
        """Does a piece of the work, and answers what is done. Returns whether more is left."""
        if not self._own.is_loading:
            return False
        for one in self._own.poll():
            self._answer(AdapterRead(one.job, one.digest, one.size_bytes, one.error, one.status))
        return self._own.is_loading
