"""Checks a model before its memory is allocated: names, shapes and dtypes in the checkpoint, and free memory."""

import math
from pathlib import Path

from blockyard.services.gpu_worker.host_link import HostLink
from blockyard.services.gpu_worker.loading.checkpoint import find_files, has_header, headers_of
from blockyard.services.gpu_worker.loading.tensor_headers import naming
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.memory import GIB
from blockyard.shared.config.services.worker import DUMMY_FORMATS
from blockyard.shared.errors import LoadError

ROTATION_BYTES = 3 * 8  # of a complex number and its angles


def check_tensors(table: WeightTable, folder: Path, load_format: str, ignore_patterns: list[str]) -> None:
    """table: of a model on the meta device. Raises LoadError if names, shapes or dtypes differ from the
    checkpoint's.

    Shapes in torch files are unknown before they are read: the number of weights has to fit the files' size.
    """
    if load_format in DUMMY_FORMATS:
        return
    files = find_files(folder, load_format, ignore_patterns)
    if all(has_header(file) for file in files):
        for file in files:
            for name, header in headers_of(file):
                with naming(file):
                    if table.wants(name):
                        table.mark_loaded(name, header.shape, header.dtype)
        table.check_complete()
        return
    stored = sum(file.stat().st_size for file in files)
    wanted = sum(math.prod(place.shape) for place in table.places.values())  # a number takes a byte or more
    if wanted > stored:
        raise LoadError(f"config.json means {wanted} weights, more than the {stored} bytes in {folder} can hold")


def check_memory(
    table: WeightTable, host_bytes: int, head_dim: int, max_model_len: int, link: HostLink, free_bytes: int
) -> None:
    """Raises LoadError if weights, or the rotations of all positions, need more than `free_bytes` of the device.

    host_bytes: of the layers' weights, which stay in host memory.
    """
    where = link.memory
    weights = table.size_bytes - host_bytes
    if weights > free_bytes:
        dtype, missing = str(table.dtype).removeprefix("torch."), weights - free_bytes
        raise LoadError(
            f"the weights that config.json describes take {weights / GIB:.2f} GiB in {dtype}, "
            f"{missing / GIB:.2f} GiB more than the {free_bytes / GIB:.2f} GiB of {where} that are free; "
            f"{_what_fits(table, host_bytes, link, free_bytes)}"
        )
    rotations = max_model_len * (head_dim // 2) * ROTATION_BYTES
    if rotations > free_bytes:
        raise LoadError(
            f"a context of {max_model_len} tokens takes {rotations / GIB:.2f} GiB for its positions alone, "
            f"{free_bytes / GIB:.2f} GiB of {where} are free; --max-model-len sets a shorter one"
        )


def _what_fits(table: WeightTable, host_bytes: int, link: HostLink, free_bytes: int) -> str:
    """Returns advice on how weights larger than `free_bytes` could fit."""
    missing = table.size_bytes - host_bytes - free_bytes
    halved = table.size_bytes // 2
    if link.copies and missing < table.matrix_bytes + table.expert_bytes - host_bytes:
        moved = math.ceil((host_bytes + missing) / GIB)
        return f"--cpu-offload-gb {moved} or more would keep enough of them in host memory"
    if table.dtype.itemsize == 4 and halved <= free_bytes:
        return f"--dtype bfloat16 would fit, with {halved / GIB:.2f} GiB"
    return f"a model of at most {free_bytes / 2e9:.1f} billion weights in bfloat16 would fit"
