"""The file of measured tables of sums over ranks: a later start installs them without a measurement. No torch."""

import logging
import os
from pathlib import Path

import msgspec

from blockyard.services.gpu_worker.parallel.sums.sum_table import SIZES, SumTable, SumWay

log = logging.getLogger(__name__)

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
        whole = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            whole.write_bytes(msgspec.json.format(msgspec.json.encode(SumFile(VERSION, entries)), indent=1))
            whole.replace(self._path)
        except OSError as e:
            log.warning("%s cannot be written, the next start measures sums of ranks again: %s", self._path, e)

    def _read(self) -> list[SumEntry]:
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=SumFile)
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError) as e:
            log.warning("%s cannot be used, sums of ranks are measured anew: %s", self._path, e)
            return []
        return found.entries if found.version == VERSION else []
