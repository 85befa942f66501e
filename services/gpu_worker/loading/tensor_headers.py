"""Shapes and dtypes of a checkpoint's tensors, known before the tensors are read, and the file that an error is about.

A quantized weight is kept as its file has it: the dtype of scales, or the size of their blocks, may be written nowhere
else.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from blockyard.services.gpu_worker.loading.checkpoint_names import bare
from blockyard.shared.errors import LoadError


class TensorHeader(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    block_type: str = ""  # of GGUF's blocks of numbers, which `shape` has as bytes

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorHeaders:
    """The headers of a checkpoint by name, whatever its prefixes."""

    def __init__(self, headers: Iterable[tuple[str, TensorHeader]] = ()) -> None:
        self._headers = {bare(name): header for name, header in headers}

    def find(self, name: str) -> TensorHeader | None:
        """None: the checkpoint has no such tensor, or its headers are not known, as with dummy weights."""
        return self._headers.get(bare(name))

    def has_part(self, name: str) -> bool:
        """Whether the checkpoint has tensors of the module `name`."""
        prefix = f"{bare(name)}."
        return any(one.startswith(prefix) for one in self._headers)


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Puts a file's name in front of an error of its tensors."""
    try:
        yield
    except LoadError as e:
        raise LoadError(f"{file.name}: {e}") from e
