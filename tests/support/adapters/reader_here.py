"""Reads adapters in the process that asks, at once."""

from pathlib import Path

from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits, ReadModules, read_modules
from blockyard.shared.errors import AdapterError


class ReaderHere:
    """Implements `AdapterReader`."""

    def __init__(self, limits: AdapterLimits) -> None:
        self._limits, self._read = limits, list[tuple[int, ReadModules | str]]()

    def ask(self, job: int, path: str) -> None:
        try:
            self._read.append((job, read_modules(Path(path), self._limits)))
        except AdapterError as e:
            self._read.append((job, str(e)))

    def receive(self) -> list[tuple[int, ReadModules | str]]:
        found, self._read = self._read, []
        return found

    def close(self) -> None:
        """It holds nothing."""
