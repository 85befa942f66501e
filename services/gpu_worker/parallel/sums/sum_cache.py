"""The file of measured tables of sums over ranks: a later start installs them without a measurement. No torch."""

from pathlib import Path

import msgspec

from blockyard.services.gpu_worker.parallel.sums.sum_table import SIZES, SumTable, SumWay
from blockyard.shared.measured_file import read_measured, write_measured

MEASURED = "sums of ranks"
VERSION = 1  # of the kernels of sums, of what is measured and of the fields below; other files are measured anew


class SumKey(msgspec.Struct, frozen=True):
    """What a table depends on, beside the GPU model and the versions of libraries, which name the file."""

    num_ranks: int
    width: int  # of a row
    dtype: str


class SumEntry(msgspec.Struct, frozen=True):
    """A table of `SIZES`."""

    key: SumKey
    sizes: list[int]
    alone: list[SumWay]
    with_norm: list[SumWay]


class SumFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of the file."""

    version: int
    entries: list[SumEntry]


class SumCache:
    """The tables of one machine. GPUs of one model are taken to be linked alike: a folder is of one kind of machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def find(self, key: SumKey) -> SumTable | None:
        """None: it is to be measured."""
        for entry in self._read():
            if (
                entry.key == key
                and entry.sizes == list(SIZES)
                and len(entry.alone) == len(entry.with_norm) == len(SIZES)
            ):
                return SumTable(SIZES, tuple(entry.alone), tuple(entry.with_norm))
        return None

    def keep(self, key: SumKey, table: SumTable) -> None:
        """Replaces the file atomically. If the folder is not writable, the next start measures again."""
        added = SumEntry(key, list(table.sizes), list(table.alone), list(table.with_norm))
        entries = [*(entry for entry in self._read() if entry.key != key), added]
        write_measured(self._path, SumFile(VERSION, entries), MEASURED)

    def _read(self) -> list[SumEntry]:
        found = read_measured(self._path, SumFile, MEASURED)
        return found.entries if found is not None and found.version == VERSION else []
