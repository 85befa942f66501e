"""The folder of an adapter: its config, the file of its weights, and what the header of that file says.

Errors name files without their folder, because clients get them; who logs an error adds the folder.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from blockyard.shared.errors import AdapterError
from blockyard.shared.lora.adapter_config import CONFIG_FILE, ParsedConfig, parse_config

SAFETENSORS = "adapter_model.safetensors"
BIN = "adapter_model.bin"
A_ENDINGS = (".lora_A.weight", ".lora_A.default.weight")  # of names of matrices [rank, in]
PREFIX = "base_model.model."  # of PEFT, before the names of modules
MAX_CONFIG_BYTES = 1 << 20
LENGTH_BYTES = 8  # of a safetensors file, before its header
MAX_HEADER_BYTES = 100_000_000  # as the safetensors library has it


READ_SUFFIXES = (".json", ".safetensors", ".bin", ".jinja", ".txt")  # of configs, weights and tokenizers

T = TypeVar("T")


def check_folder(folder: Path, max_rank: int) -> bool:
    """Checks what can be told without the model and without reading the weights. Raises AdapterError.

    max_rank: of a module. Stacks of experts are left to the worker, which knows how many experts there are. Returns
    whether the adapter may change experts: of a .bin file it is not known.
    """
    _, parsed = read_config(folder)
    path = weights_file(folder)
    if path.name != SAFETENSORS:
        return True
    entries = read_header(path)
    for name, entry in entries.items():
        ending = next((one for one in A_ENDINGS if name.endswith(one)), None)
        if ending is None or not entry.shape:
            continue
        rank, module = entry.shape[0], name.removeprefix(PREFIX).removesuffix(ending)
        if rank > max_rank and rank == parsed.config.rank_of(module):
            raise AdapterError(f"{path.name}: rank {rank} for {module}; --max-lora-rank is {max_rank}")
    return any(".experts." in name for name in entries)


class HeaderTensor(msgspec.Struct):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]  # from the end of the header


def read_header(path: Path, name: str = "") -> dict[str, HeaderTensor]:
    """Returns the tensors of a safetensors file by name. Raises AdapterError, also if the file is cut short.

    name: of the file in errors; empty: that of the path.
    """
    name = name or path.name
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            header = file.read(min(length, MAX_HEADER_BYTES))
    except OSError as e:
        raise AdapterError(f"{name} cannot be read: {e.strerror or e}") from e
    try:
        fields = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        fields.pop("__metadata__", None)
        found = {key: msgspec.json.decode(raw, type=HeaderTensor) for key, raw in fields.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise AdapterError(f"{name} is not a safetensors file: {e}") from e
    needed = LENGTH_BYTES + length + max((entry.data_offsets[1] for entry in found.values()), default=0)
    if size != needed:
        raise AdapterError(f"{name} has {size} bytes, its header says {needed}")
    return found


def read_config_bytes(folder: Path) -> bytes:
    """Returns the bytes of the config. Raises AdapterError."""
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise AdapterError("it is no folder")
    if not path.is_file():
        raise AdapterError(f"the folder has no {CONFIG_FILE}")
    return read_whole(path, MAX_CONFIG_BYTES)


def read_config(folder: Path) -> tuple[bytes, ParsedConfig]:
    """Returns the bytes of the config, and what they say. Raises AdapterError."""
    content = read_config_bytes(folder)
    return content, parse_config(content)


def read_unchanged(folder: Path, read: Callable[[], T]) -> T:
    """Calls `read` for files of a folder, and once more if they were changed meanwhile: it may have had parts of two
    versions. Raises AdapterError if they were changed again."""
    before = _versions(folder)
    for _ in range(2):
        error = None
        try:
            found = read()
        except AdapterError as e:
            error = e
        now = _versions(folder)
        if now == before:
            if error is not None:
                raise error
            return found
        before = now
    raise AdapterError("its files were changed while they were read, twice")


def _versions(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Of each file that may be read, what changes when it is written."""
    found = dict[str, tuple[int, int, int]]()
    with contextlib.suppress(OSError):  # its reader says why
        for path in folder.iterdir():
            if path.suffix in READ_SUFFIXES:
                stat = path.stat()
                found[path.name] = stat.st_size, stat.st_mtime_ns, stat.st_ino
    return found


def without_folder(cause: object, folder: Path) -> str:
    """Returns the text of a cause that names files in a folder, without that folder."""
    return str(cause).replace(f"{folder}/", "").replace(str(folder), "the folder")


def weights_file(folder: Path) -> Path:
    """Raises AdapterError if there is none."""
    path = next((folder / name for name in (SAFETENSORS, BIN) if (folder / name).is_file()), None)
    if path is None:
        raise AdapterError(f"the folder has neither {SAFETENSORS} nor {BIN}")
    return path


def read_whole(path: Path, most: int | None = None) -> bytes:
    """Reads a whole file once: what is checked is what is used, also if the file changes meanwhile."""
    try:
        size = path.stat().st_size
        if most is not None and size > most:
            raise AdapterError(f"{path.name} has {size} bytes, more than {most}")
        content = path.read_bytes()
    except OSError as e:
        raise AdapterError(f"{path.name} cannot be read: {e.strerror or e}") from e
    if len(content) != size:
        raise AdapterError(f"{path.name} had {size} bytes and {len(content)} could be read: it changes")
    return content
