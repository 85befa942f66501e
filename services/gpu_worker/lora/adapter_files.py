"""Reads the folder of an adapter: its config, its tensors, and a digest of their bytes."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_safetensors
from torch import Tensor

from blockyard.services.gpu_worker.lora.file_memory import ALIGNED_BYTES, MAPPED, FileMemory, MemoryPool
from blockyard.services.gpu_worker.lora.module_tensors import ADDED, EarlyChecks, listed, pattern_names
from blockyard.shared.errors import AdapterError
from blockyard.shared.lora.adapter_config import AdapterConfig
from blockyard.shared.lora.adapter_folder import LENGTH_BYTES, read_config, read_header, read_whole, weights_file
from blockyard.shared.lora.pattern_check import check_patterns

DIGEST_BYTES = 16
SAFETENSORS_SUFFIX = ".safetensors"
# where vLLM takes the rows of added tokens, if they are not in the file of weights: [added tokens, width] each, by the
# module that they continue
EMBEDDINGS = ("new_embeddings.safetensors", "new_embeddings.bin")
CONTINUED = {"input_embeddings": "embed_tokens", "output_embeddings": "lm_head"}
# torch.load raises it for a file with other objects than tensors; no object is unpickled here
_NOT_PLAIN: type[Exception] = torch.serialization.pickle.UnpicklingError  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """What an adapter's folder has."""

    weights_path: Path
    config: AdapterConfig
    tensors: Mapping[str, Tensor]  # by their names in the file; each has memory of its own
    digest: bytes  # of the bytes of config and weights; the name and the path are no part of it
    notes: list[str]
    memory: FileMemory  # where tensors of a safetensors file are
    checks: EarlyChecks  # of these tensors


def read_folder(folder: Path, threads: int, dtype: torch.dtype, pool: MemoryPool | None = None) -> AdapterFiles:
    """Reads an adapter. Raises AdapterError with the cause in one line.

    threads: that read, hash and check its weights. dtype: of products. pool: of memory; None: it is new.
    """
    content, parsed = read_config(folder)
    path, checks = weights_file(folder), EarlyChecks(parsed.config, dtype)
    memory = FileMemory() if pool is None else pool.take(size_of(path))
    if path.suffix == SAFETENSORS_SUFFIX:
        check_patterns(parsed.config, pattern_names([*read_header(path), *CONTINUED.values()]))
        parts = [content, memory.copy_safetensors(path, threads, checks.take)]
        tensors = _map_tensors(path, memory)
    else:
        parts = [content, read_whole(path)]
        read = read_tensors(path, parts[1])  # of which some may share memory
        check_patterns(parsed.config, pattern_names([*read, *CONTINUED.values()]))
        tensors = {name: value.detach().clone() for name, value in read.items()}
    for added in filter(Path.is_file, (folder / name for name in EMBEDDINGS)):
        parts.append(rows := read_whole(added))
        tensors |= _added_rows(added, read_tensors(added, rows))
    return AdapterFiles(path, parsed.config, tensors, digest_of(*parts), parsed.notes, memory, checks)


def size_of(path: Path) -> int:
    """0 for a file that is not there any more."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _map_tensors(path: Path, memory: FileMemory) -> dict[str, Tensor]:
    """The tensors of a copied safetensors file, without another copy. Raises AdapterError."""
    copied = Path(f"/proc/self/fd/{memory.descriptor}")
    try:
        with safe_open(copied, "pt") as checked:  # it refuses tensors that overlap
            mapped, found = memory.map(), dict[str, Tensor]()
            start = LENGTH_BYTES + int.from_bytes(mapped[:LENGTH_BYTES], "little")
            for name, entry in read_header(copied, path.name).items():
                dtype, count = MAPPED.get(entry.dtype), torch.Size(entry.shape).numel()
                first = start + entry.data_offsets[0]
                if dtype is None or not count or first % ALIGNED_BYTES:
                    found[name] = checked.get_tensor(name).clone()
                    continue
                found[name] = torch.frombuffer(mapped, dtype=dtype, count=count, offset=first).view(entry.shape)
            return found
    except (SafetensorError, KeyError, ValueError, RuntimeError, OSError) as e:
        raise AdapterError(f"{path.name} is not a safetensors file: {first_line(e)}") from e


def _added_rows(path: Path, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The rows under names of tensors of an adapter. Raises AdapterError."""
    if unknown := sorted(found.keys() - CONTINUED.keys()):
        raise AdapterError(f"{path.name}: these tensors are not known: {listed(unknown)}")
    return {f"{CONTINUED[name]}.{ADDED}": rows for name, rows in found.items()}


def digest_of(*files: bytes) -> bytes:
    digest = blake2b(digest_size=DIGEST_BYTES)
    for part in files:  # lengths, so that no bytes move from one file to the other unseen
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def read_tensors(path: Path, content: bytes) -> Mapping[str, Tensor]:
    """The tensors in the bytes of a file of weights. Raises AdapterError."""
    if path.suffix == SAFETENSORS_SUFFIX:
        try:
            return load_safetensors(content)
        except (SafetensorError, KeyError, ValueError, RuntimeError) as e:
            raise AdapterError(f"{path.name} is not a safetensors file: {first_line(e)}") from e
    try:
        # `weights_only` reads tensors and nothing that could run code; from memory, because the bytes are hashed
        found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except _NOT_PLAIN as e:  # whose text advises to read it without `weights_only`
        raise AdapterError(f"{path.name} is damaged, or has other objects than tensors: it is not read") from e
    except (RuntimeError, EOFError, ValueError, KeyError) as e:
        raise AdapterError(f"{path.name} cannot be read by torch.load: {first_line(e)}") from e
    if not isinstance(found, dict) or not all(isinstance(one, Tensor) and not one.is_meta for one in found.values()):
        raise AdapterError(f"{path.name} has to be a dictionary of tensors")
    try:
        return {str(name): value.contiguous() for name, value in found.items()}
    except RuntimeError as e:  # a sparse one, or a view that repeats few values
        raise AdapterError(f"{path.name} has a tensor that is no plain matrix: {first_line(e)}") from e


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
