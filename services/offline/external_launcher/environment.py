"""The environment that torchrun gives to each process of a script."""

import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blockyard.services.launcher.supervision.run_dir import MAX_PATH_BYTES
from blockyard.shared.config.parsed_flags import ParsedFlag, Values
from blockyard.shared.errors import ConfigError

BACKEND = "external_launcher"
FLAG = "distributed-executor-backend"
PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
_STARTS = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")  # differ by start


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Which of the processes of a start this one is."""

    rank: int
    size: int
    folder: Path  # the same for all, which no other user may enter


def read_place(environ: Mapping[str, str]) -> ProcessPlace:
    """Makes the folder. Raises ConfigError if torchrun has not started this process, or on several hosts."""
    rank, size, local = (_number(environ, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if not 0 <= rank < size:
        raise ConfigError(f"--{FLAG} {BACKEND}: RANK {rank} is not below WORLD_SIZE {size}")
    if local != size:
        raise ConfigError(
            f"--{FLAG} {BACKEND}: of {size} processes {local} are on this host; all of them must be on one"
        )
    start = hashlib.sha256("|".join(environ.get(name, "") for name in _STARTS).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"blockyard-{os.getuid()}-{start}"
    if len(os.fsencode(folder)) > MAX_PATH_BYTES:
        raise ConfigError(
            f"--{FLAG} {BACKEND}: {folder} is longer than {MAX_PATH_BYTES} bytes; set TMPDIR to another folder"
        )
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"--{FLAG} {BACKEND}: {folder} is not a folder that this user alone may enter")
    return ProcessPlace(rank, size, folder)


def with_ranks(values: Values, size: int) -> Values:
    """Returns the flags of process 0's ring: its workers have as many ranks as there are processes.

    Raises ConfigError if flags ask for another number.
    """
    name, others = PARALLEL[0], PARALLEL[1:]
    rest = 1
    for other in others:
        rest *= values.get(other, int)
    asked = values.get(name, int) if values.is_given(name) else max(size // rest, 1)
    if asked * rest != size:
        raise ConfigError(f"--{FLAG} {BACKEND}: {size} processes for {asked * rest} ranks; start as many")
    return values.with_given({name: ParsedFlag(asked, "WORLD_SIZE"), FLAG: ParsedFlag("mp", FLAG)})


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise ConfigError(
            f"--{FLAG} {BACKEND}: {name} is not set: start the script by torchrun --nproc-per-node=N"
        ) from None
