"""Seconds that quantized weights add to a start: GPTQ, AWQ, and 16 bits to fp8 while they load, beside plain bfloat16.

    PYTHONPATH=.src python -P tests/bench/worker/bench_quantized_start.py FOLDER [--model llama-3.1-8b] [--keep gptq]

Random checkpoints of the model's shape are written to FOLDER, which for the default takes 28 GB (/dev/shm will do):
safetensors in shards of 5 GB with an index, config.json and a tokenizer, each in a folder of its own that stays if
`--keep` names it; with `--write-only` nothing is measured. They are in the page cache, so that disks are not measured.
Each is then loaded three times in turn by the worker's own code, from config.json to prepared weights on the device, in
a process for each load. Kernels are neither compiled nor tuned.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from blockyard.services.bench.suite import shapes
from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.loading import checkpoint
from blockyard.services.gpu_worker.loading.hf_config import read_config
from blockyard.services.gpu_worker.loading.parallel_load import DTYPES
from blockyard.services.gpu_worker.loading.weights import ALL_ON_DEVICE, WeightTable
from blockyard.services.gpu_worker.models.registry import find_family
from blockyard.services.gpu_worker.parallel.shares import WHOLE
from blockyard.services.gpu_worker.startup.backend import pick_backend
from blockyard.services.gpu_worker.startup.model_tables import make_table, with_headers
from blockyard.services.gpu_worker.startup.start_report import StartReport
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.worker import WorkerConfig

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "from_16_bits": True}
PLAIN = "bf16"
CHECKPOINTS: dict[str, dict[str, Any]] = {PLAIN: {}, "gptq": GPTQ, "awq": AWQ}
# what is started -> its checkpoint, and quantization_config over the one there
STARTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    PLAIN: (PLAIN, None),
    "gptq": ("gptq", None),
    "awq": ("awq", None),
    "fp8 at load": (PLAIN, FP8),
}
WORDS = {dtype: word for word, dtype in DTYPES.items()}
SHARD_BYTES = 5 << 30
BLOCK_BYTES = 64 << 20  # of random numbers, which all tensors repeat
SYMMETRIC_ZEROS = 0x77777777  # eight zeros of 8, less one, as GPTQ stores them
STD = 0.02  # of weights
WRITERS = 16


@dataclass(frozen=True, slots=True)
class Written:
    """A tensor of a shard."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int  # in the data of its file

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class RandomBlocks:
    """The bytes of tensors: runs of one random block for each kind of numbers."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        numbers = torch.empty(BLOCK_BYTES // 2).normal_(0.0, STD, generator=generator)
        self._weights = numbers.bfloat16()
        self._scales = (numbers.abs() * 0.1 + 1e-4).half()
        self._words = torch.randint(-(1 << 31), 1 << 31, (BLOCK_BYTES // 4,), generator=generator).int()

    def of(self, one: Written, group: int) -> Tensor:
        """Returns bytes, of which the tensor is made by repetition."""
        last = one.name.rpartition(".")[2]
        if last == "g_idx":
            made = torch.arange(one.shape[0]).div(group, rounding_mode="floor").int()
        elif last == "qzeros" and group:
            made = torch.full(one.shape, SYMMETRIC_ZEROS, dtype=torch.int32)
        elif one.dtype == torch.int32:
            made = self._words
        elif last == "scales":
            made = self._scales
        else:
            made = torch.ones(one.shape, dtype=one.dtype) if "norm" in one.name else self._weights
        return made.flatten().view(torch.uint8)


def write_checkpoint(folder: Path, said: dict[str, Any], blocks: RandomBlocks) -> int:
    """Writes shards of weights beside config.json, which then says how they are quantized. Returns their bytes."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | ({"quantization_config": said} if said else {})
    path.write_text(json.dumps(config, indent=2))
    settings = read_config(folder)
    table = find_family(settings)(settings, WeightTable(torch.bfloat16, torch.device("meta"))).table
    shards: list[list[Written]] = [[]]
    for name, place in table.places.items():
        float_dtype = torch.float16 if name.endswith(".scales") else torch.bfloat16
        dtype = float_dtype if float_dtype in place.stored else torch.int32
        begin = shards[-1][-1].begin + shards[-1][-1].size_bytes if shards[-1] else 0
        if begin > SHARD_BYTES:
            shards.append([])
            begin = 0
        shards[-1].append(Written(name, place.shape, dtype, begin))
    group = said["group_size"] if said.get("sym") else 0
    index: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = folder / f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        write_shard(file, shard, blocks, group)
        index |= dict.fromkeys((one.name for one in shard), file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return sum(one.size_bytes for shard in shards for one in shard)


def write_shard(file: Path, shard: list[Written], blocks: RandomBlocks, group: int) -> None:
    header = {
        one.name: {
            "dtype": WORDS[one.dtype],
            "shape": one.shape,
            "data_offsets": [one.begin, one.begin + one.size_bytes],
        }
        for one in shard
    }
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as out, ThreadPoolExecutor(WRITERS) as pool:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        out.flush()

        def write(one: Written) -> None:
            data, start = blocks.of(one, group).numpy().data, 8 + len(encoded) + one.begin
            for done in range(0, one.size_bytes, len(data)):
                write_all(out.fileno(), data[: one.size_bytes - done], start + done)

        list(pool.map(write, shard))


def write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def load_once(folder: Path, overrides: str, device: Any, dtype: Any, threads: int) -> Iterator[str]:
    """Loads the weights in this process. Yields seconds until they are on the device and prepared, then notes."""
    process = ProcessConfig(name="bench", bus=BusConfig(registry="ipc:///unused", bind="ipc:///unused"))
    config = WorkerConfig(
        process=process, model_path=str(folder), device=device, dtype=dtype, config_overrides=overrides
    )
    notes: list[str] = []
    report = StartReport(lambda phase, done, lines: notes.__setitem__(slice(None), lines))
    backend = pick_backend(device)
    torch.set_num_threads(threads)
    torch.zeros(1, device=backend.device)  # the device's context
    backend.link.synchronize()
    began = time.perf_counter()
    settings = engine.read_settings(config, report)
    family = find_family(settings, config.model_impl)
    build = with_headers(family, folder, config) if settings.get("quantization_config") else family
    table = make_table(config, engine.DTYPES[dtype], backend, ALL_ON_DEVICE, WHOLE, None, None)
    model = build(settings, table)
    with torch.inference_mode():
        loaded = checkpoint.load(table, folder, config.load_format, config.ignore_patterns, 0, lambda done: None)
        model.prepare(config.max_model_len or 2048)
    backend.link.synchronize()
    yield f"{time.perf_counter() - began:.3f}"
    yield str(loaded)
    yield f"{table.size_bytes / 1e9:.2f} GB on the device"


def start(name: str, root: Path, given: argparse.Namespace) -> tuple[float, str]:
    """Loads in a process of its own. Returns seconds, and what it says."""
    stored, said = STARTS[name]
    overrides = json.dumps({"quantization_config": said} if said else {})
    words = [str(root / stored), "--load", overrides, "--device", given.device, "--dtype", given.dtype]
    command = [sys.executable, "-P", __file__, *words, "--threads", str(given.threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ)
    seconds, *notes = done.stdout.splitlines()
    return float(seconds), "; ".join(notes)


def read_all(folder: Path) -> None:
    """Brings files into the page cache."""
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(lambda file: shutil.copyfile(file, os.devnull), folder.glob("*.safetensors")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="llama-3.1-8b", help="one of the suite's shapes, or a folder")
    parser.add_argument("--keep", action="append", default=[], choices=CHECKPOINTS, help="a checkpoint that stays")
    parser.add_argument("--write-only", action="store_true", help="writes what --keep names, and measures nothing")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16", choices=engine.DTYPES)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--load", help=argparse.SUPPRESS)  # config overrides of one load in this process
    given = parser.parse_args()
    if given.load is not None:
        for line in load_once(given.folder, given.load, given.device, given.dtype, given.threads):
            print(line, flush=True)
        return
    blocks, written = RandomBlocks(), [name for name in CHECKPOINTS if name in given.keep or not given.write_only]
    try:
        for name in written:
            began, made = time.perf_counter(), shapes.find(given.model, given.folder / "shape")
            shutil.copytree(made, given.folder / name, dirs_exist_ok=True)
            size = write_checkpoint(given.folder / name, CHECKPOINTS[name], blocks)
            print(f"{name}: {size / 1e9:.2f} GB written in {time.perf_counter() - began:.1f} s", flush=True)
        if not given.write_only:
            measure(given)
    finally:
        for name in ("shape", *(name for name in written if name not in given.keep)):
            shutil.rmtree(given.folder / name, ignore_errors=True)


def measure(given: argparse.Namespace) -> None:
    taken: dict[str, list[float]] = {name: [] for name in STARTS}
    for name in CHECKPOINTS:
        read_all(given.folder / name)
    for _ in range(given.rounds):
        for name, seconds in taken.items():
            found, notes = start(name, given.folder, given)
            seconds.append(found)
            print(f"{name}: {found:.2f} s; {notes}", flush=True)
    print("\n| weights | seconds until they are prepared | median | added to bf16 |\n|---|---|---|---|")
    plain = statistics.median(taken[PLAIN])
    for name, seconds in taken.items():
        median = statistics.median(seconds)
        added = "" if name == PLAIN else f"{median - plain:+.2f}"
        print(f"| {name} | {', '.join(f'{one:.2f}' for one in seconds)} | {median:.2f} | {added} |")


if __name__ == "__main__":
    main()
