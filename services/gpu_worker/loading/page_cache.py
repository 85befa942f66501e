"""Reads weight files into the page cache, before or while weights are copied: --safetensors-load-strategy.

On network disks, weights that are read one after the other wait for the disk each time. Threads that read whole blocks
in the order of the files keep it busy.

Ranks of a host take turns with the blocks, so that each is read ahead once. They do not wait for each other: a weight
of a block that another one is reading waits for it.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from threading import Event, Lock

from blockyard.services.gpu_worker.loading import checkpoint
from blockyard.services.gpu_worker.parallel.shares import WHOLE, Shard
from blockyard.shared.config.services.worker import DUMMY_FORMATS, WorkerConfig

log = logging.getLogger(__name__)


@contextmanager
def read_ahead(config: WorkerConfig, rank: int = 0) -> Iterator[None]:
    """Inside the block, weights are in the page cache (eager), or threads read them into it (prefetch); lazy: nothing.

    Of several ranks of a host, each reads its part. A file that cannot be read is left to the loader, which says why.
    Raises LoadError if there are no files.
    """
    if config.load_strategy == "lazy" or config.load_format in DUMMY_FORMATS:
        yield
        return
    files = checkpoint.find_files(Path(config.model_path), config.load_format, config.ignore_patterns)
    host = config.host_ranks
    turn = Shard(rank - host.start, len(host)) if rank in host else WHOLE  # Ray has put the rank on some host
    blocks = _blocks(files, config.prefetch_block_bytes, turn)
    ended = Event()
    with ThreadPoolExecutor(config.prefetch_threads, thread_name_prefix="read-ahead") as pool:
        try:
            reading = [pool.submit(_read, blocks, ended) for _ in range(config.prefetch_threads)]
            if config.load_strategy == "eager":
                for each in reading:
                    each.result()
            yield
        finally:
            ended.set()  # the rest is not needed any more


class _Blocks:
    """Blocks of all files, in order. Threads take the next one."""

    def __init__(self, blocks: Iterator[tuple[Path, int, int]]) -> None:
        self._blocks, self._lock = blocks, Lock()

    def next(self) -> tuple[Path, int, int] | None:
        with self._lock:
            return next(self._blocks, None)


def _blocks(files: Sequence[Path], size: int, turn: Shard) -> _Blocks:
    def each() -> Iterator[tuple[Path, int, int]]:
        for file in files:
            for start in range(0, file.stat().st_size if file.is_file() else 0, size):
                yield file, start, size

    return _Blocks(islice(each(), turn.rank, None, turn.size))


def _read(blocks: _Blocks, ended: Event) -> None:
    buffer = bytearray()
    while not ended.is_set() and (block := blocks.next()) is not None:
        file, start, size = block
        buffer = buffer if len(buffer) == size else bytearray(size)
        try:
            fd = os.open(file, os.O_RDONLY)
            try:
                os.preadv(fd, [buffer], start)
            finally:
                os.close(fd)
        except OSError as e:
            log.warning("%s is not read ahead: %s", file, e.strerror)
            return
