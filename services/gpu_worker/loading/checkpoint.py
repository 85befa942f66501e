"""Reads the weights of a local folder into a model's table: safetensors, torch, GGUF files, or dummy weights."""

import fnmatch
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading import dummy_routers, gguf_file, parallel_load
from blockyard.services.gpu_worker.loading.tensor_headers import TensorHeader, TensorHeaders, naming
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.shared.config.services.worker import DUMMY_FORMATS
from blockyard.shared.errors import LoadError
from blockyard.shared.weight_files import SAFETENSORS, is_ignored

# torch.load raises it for a file with other objects than tensors; no object is unpickled here
_NOT_PLAIN: type[Exception] = torch.serialization.pickle.UnpicklingError  # type: ignore[attr-defined]

Progress = Callable[[float], None]  # takes the fraction done

_TORCH = ("pytorch_model.bin.index.json", "pytorch_model.bin", "*.bin", "*.pt", "*.pth")
SCALE = 0.02  # standard deviation of dummy weights
_FACTORS = ("weight", "scale", "scalar")  # vectors of such names multiply
_GGUF = ("*.gguf",)


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    size_bytes: int
    seconds: float
    files: int

    def __str__(self) -> str:
        if not self.files:
            return f"weights: {self.size_bytes / 1e9:.3f} GB of dummy weights in {self.seconds:.2f} s"
        rate = self.size_bytes / max(self.seconds, 1e-9) / 1e9
        return (
            f"weights: {self.size_bytes / 1e9:.3f} GB from {self.files} files in {self.seconds:.2f} s ({rate:.2f} GB/s)"
        )


def load(
    table: WeightTable, folder: Path, load_format: str, ignore_patterns: list[str], seed: int, progress: Progress
) -> LoadedWeights:
    """Fills the table and checks that nothing is missing or left over. Raises LoadError."""
    start = time.perf_counter()
    if load_format in DUMMY_FORMATS:
        fill_dummy(table, seed, progress, skewed=load_format != "dummy")
        table.finish()
        return LoadedWeights(table.size_bytes, _elapsed(table, start), 0)
    files = find_files(folder, load_format, ignore_patterns)
    total = sum(f.stat().st_size for f in files)
    if table.link.copies and files[0].suffix == ".safetensors":
        parallel_load.load(files, table, progress)
    else:
        _load_in_turn(files, total, table, progress)
    table.check_complete()
    table.finish()
    progress(1.0)
    return LoadedWeights(total, _elapsed(table, start), len(files))


def _load_in_turn(files: list[Path], total: int, table: WeightTable, progress: Progress) -> None:
    done = 0
    if all(has_header(file) for file in files):
        table.expect([name for file in files for name, _ in headers_of(file)])
    for file in files:
        for name, value in _read(file, table.wants):
            with naming(file):
                table.put(name, value.to(table.device) if file.suffix == gguf_file.SUFFIX else value)
            done += value.nbytes
            progress(min(done / max(total, 1), 1.0))


def _elapsed(table: WeightTable, start: float) -> float:
    table.link.synchronize()
    return time.perf_counter() - start


def fill_dummy(table: WeightTable, seed: int, progress: Progress, skewed: bool = False) -> None:
    """Seeded small random values; norm weights and factors are 1, and routers choose evenly unless `skewed`.

    The values of a name do not depend on which others there are: pipeline stages make parts of one model.
    What a quantization format stores fills itself. Other integers stay as the model has made them.
    """
    generator = torch.Generator(table.device)
    has_large_embedding = dummy_routers.wants_large_embedding(table.places)
    for i, (name, place) in enumerate(table.places.items()):
        generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        if place.fill is not None:
            place.fill(place.target, generator)
        elif not place.target.is_floating_point():
            continue
        elif name.endswith(_FACTORS) and (len(place.shape) == 1 or "norm" in name):
            place.target.fill_(1.0)
        elif dummy_routers.is_choice_bias(name):
            place.target.zero_()
        else:
            target = place.target  # a rank's share of the values that one rank would have
            is_made_there = target.device == table.device and place.cut is None
            made = target if is_made_there else target.new_empty(place.whole_shape(table.device), device=table.device)
            is_large = has_large_embedding and dummy_routers.is_embedding(name)
            scale = dummy_routers.EMBEDDING_SCALE if is_large else SCALE
            made.normal_(0.0, scale, generator=generator)  # the same values on every device
            if dummy_routers.is_router(name):
                dummy_routers.settle(made, SCALE, skewed)
            if made is not target:
                target.copy_(made if place.cut is None else place.cut(made))
        progress((i + 1) / len(table.places))


def find_files(folder: Path, load_format: str, ignore_patterns: list[str]) -> list[Path]:
    """Files of the weights, shards in order. Raises LoadError."""
    wanted = {
        "auto": (*SAFETENSORS, *_TORCH, *_GGUF),
        "safetensors": SAFETENSORS,
        "pt": _TORCH,
        "gguf": _GGUF,
    }[load_format]
    if not folder.is_dir():
        raise LoadError(f"{folder} is not a folder")
    for pattern in wanted:
        # not Path.glob: before Python 3.12 it leaves out broken links, which are errors here
        names = fnmatch.filter(sorted(os.listdir(folder)), pattern)
        found = [folder / name for name in names if not is_ignored(name, ignore_patterns)]
        if found and pattern.endswith(".index.json"):
            shards = [f for f in _shards(found[0]) if not is_ignored(f.name, ignore_patterns)]
            if not shards:
                raise LoadError(f"{found[0]} names no shard that is not ignored")
            return shards
        if found and pattern in _GGUF:
            gguf_file.check_files(found)
        if found:
            return [_whole(file) for file in found]
    kinds = " or ".join(p for p in wanted if not p.endswith(".json"))
    raise LoadError(f"{folder} has no weights: looked for {kinds}; --load-format dummy makes some up")


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise LoadError(f"{index} is not an index of shards: {e!r}") from e
    for name in names:
        if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
            raise LoadError(f"{index} names a shard outside of its folder: {name!r}")
    files = [index.parent / name for name in names]
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        raise LoadError(f"{index.parent} lacks {missing[0]}, one of {len(files)} shards that {index.name} names")
    return files


def _whole(file: Path) -> Path:
    """Raises LoadError for a folder, a broken link or a loop of links."""
    if not file.is_file():
        raise LoadError(f"{file} is not a readable file")
    return file


def _read(file: Path, wants: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    if file.suffix == ".safetensors":
        yield from _read_safetensors(file, wants)
    elif file.suffix == gguf_file.SUFFIX:
        yield from ((one.name, one.read()) for one in gguf_file.tensors_of(file) if wants(one.name))
    else:
        yield from _read_torch(file, wants)


def read_headers(folder: Path, load_format: str, ignore_patterns: list[str]) -> TensorHeaders:
    """Raises LoadError for files that are not usable. Errors in a torch file are raised when it is read."""
    if load_format in DUMMY_FORMATS:
        return TensorHeaders()
    files = find_files(folder, load_format, ignore_patterns)
    return TensorHeaders(header for file in files for header in headers_of(file))


def has_header(file: Path) -> bool:
    """Whether a file begins with names, shapes and dtypes. Torch files perhaps have them within."""
    return file.suffix in (".safetensors", gguf_file.SUFFIX)


def headers_of(file: Path) -> Iterator[tuple[str, TensorHeader]]:
    """Names and headers of a file's tensors. Raises LoadError for a file with a header that is not complete."""
    if file.suffix == ".safetensors":
        with parallel_load.open_safetensors(file) as opened:
            for name in opened.keys():  # noqa: SIM118, no mapping
                header = opened.get_slice(name)
                dtype = parallel_load.dtype_of(header.get_dtype(), name, file)
                yield name, TensorHeader(tuple(header.get_shape()), dtype)
        return
    if file.suffix == gguf_file.SUFFIX:
        yield from ((one.name, one.header) for one in gguf_file.tensors_of(file))
        return
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, ValueError, _NOT_PLAIN):
        return
    for name, value in state.items() if isinstance(state, dict) else ():
        if isinstance(value, Tensor):
            yield name, TensorHeader(tuple(value.shape), value.dtype)


def _read_safetensors(file: Path, wants: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    with parallel_load.open_safetensors(file) as opened:
        for name in opened.keys():  # noqa: SIM118, no mapping
            if wants(name):
                yield name, opened.get_tensor(name)


def _read_torch(file: Path, wants: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, _NOT_PLAIN) as e:
        raise LoadError(f"{file} is not a usable torch file: {str(e).splitlines()[0] if str(e) else e!r}") from e
    if not isinstance(state, dict):
        raise LoadError(f"{file} holds a {type(state).__name__}, not named weights")
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise LoadError(f"{file}: {name} is a {type(value).__name__}, not a tensor")
        if wants(name):
            yield name, value
