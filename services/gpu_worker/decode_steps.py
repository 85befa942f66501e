"""Steps in which every sequence computes one token, on a GPU: fixed buffers, replayed as CUDA graphs.

Block tables stay on the device, a row a slot; a step sends ids, positions and slots in one copy, and the blocks that
were added since. Loaded by name, on a GPU alone.
"""

import logging
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard.services.gpu_worker.kv_pool import KVPool
from blockyard.services.gpu_worker.memory import Need, blocks_of
from blockyard.services.gpu_worker.models.decoder import Model
from blockyard.services.gpu_worker.slots import Slots
from blockyard.services.gpu_worker.step import Step
from blockyard.services.gpu_worker.triton_ops import MixedAttention
from blockyard.shared.errors import LoadError

log = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]
SLOTS = 2
GRAPH_BYTES = 8 << 20  # of one graph besides its tensors, more than was seen


@dataclass(frozen=True, slots=True)
class Output:
    """Of a step; overwritten by the next one."""

    hidden: Tensor  # [rows, hidden]
    logits: Tensor  # [rows, vocab_size]

    def first(self, rows: int) -> "Output":
        return Output(self.hidden[:rows], self.logits[:rows])


@dataclass(frozen=True, slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    output: Output


class DecodeSteps:
    """For up to `capacity` sequences, in slots below SLOTS times that: schedulers keep spare ones."""

    def __init__(self, model: Model, pool: KVPool, capacity: int, max_model_len: int) -> None:
        if pool.shape.head_dim % 2:
            raise LoadError(f"a head size of {pool.shape.head_dim} is not supported on a GPU, only even ones are")
        self._model, self._pool, self._capacity = model, pool, capacity
        width, device = blocks_of(max_model_len, pool.block_size), pool.device
        self._host = torch.zeros((3, capacity), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._inputs = torch.zeros((3, capacity), dtype=torch.int64, device=device)  # ids, positions, slots
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._tables = torch.zeros((SLOTS * capacity, width), dtype=torch.int32, device=device)
        self._owners, self._sent = np.zeros((2, SLOTS * capacity), np.int64)
        self._ladder = ladder(capacity)
        self._graphs: dict[int, Captured] = {}

    def forget(self) -> None:
        """Owners' numbers begin anew."""
        self._owners[:] = 0

    def takes(self, slots: Ints) -> bool:
        return len(slots) <= self._capacity and int(slots.max()) < len(self._owners)

    def run(self, slots: Ints, table: Slots) -> Output:
        """Computes the next token of each slot, one row each in their order."""
        rows, positions = len(slots), table.computed[slots]
        self._send_blocks(slots, table)
        self._send_inputs(np.stack((table.token_ids[slots, positions], positions, slots)))
        return self._replay(rows)

    def _replay(self, rows: int) -> Output:
        padded = next((n for n in self._ladder if n >= rows), self._capacity)
        captured = self._graphs.get(padded)
        if captured is None:
            return self.forward(rows)
        captured.graph.replay()
        return captured.output.first(rows)

    def forward(self, rows: int) -> Output:
        """Over the buffers as they are."""
        ids, positions, slots = self._inputs[:, :rows]
        attend = MixedAttention(self._pool, slots, positions, self._tables)
        hidden = self._model.forward(Step(ids, positions, attend))
        return Output(hidden, self._model.logits(hidden))

    def _send_inputs(self, values: Ints) -> None:
        rows = values.shape[1]
        if self._copied is not None:
            self._copied.synchronize()
        host = self._host.numpy()
        host[:, :rows] = values
        host[2, rows:] = -1
        host[:2, rows:] = 0
        self._inputs.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _send_blocks(self, slots: Ints, table: Slots) -> None:
        """What the device's tables lack."""
        owners, numbers = table.owners[slots], table.num_blocks[slots]
        changed = slots[self._owners[slots] != owners]
        if len(changed):
            self._owners[slots] = owners
            self._sent[changed] = 0
        behind = slots[self._sent[slots] < numbers]
        if not len(behind):
            return
        ranges = [(slot, int(self._sent[slot]), int(table.num_blocks[slot])) for slot in behind.tolist()]
        width = self._tables.shape[1]
        index = np.concatenate([np.arange(slot * width + start, slot * width + end) for slot, start, end in ranges])
        blocks = np.concatenate([table.tables[slot, start:end] for slot, start, end in ranges])
        sent = torch.from_numpy(np.stack((index, blocks))).to(self._pool.device)
        self._tables.view(-1).index_copy_(0, sent[0], sent[1].int())
        self._sent[behind] = table.num_blocks[behind]

    def capture(self) -> str:
        """All sizes, the largest first, so that the others find their memory there. Says what came of it."""
        device = self._pool.device
        start, before = time.perf_counter(), torch.cuda.memory_reserved(device)
        pool = torch.cuda.graph_pool_handle()
        self._send_inputs(np.empty((3, 0), np.int64))  # rows that pad touch no KV
        try:
            for rows in reversed(self._ladder):
                self.forward(rows)  # compiles and loads what it needs
                torch.cuda.synchronize(device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    output = self.forward(rows)
                self._graphs[rows] = Captured(graph, output)
        except RuntimeError as e:  # OutOfMemoryError and CUDA's own are among them
            self._graphs.clear()
            torch.cuda.empty_cache()
            why = str(e).splitlines()[0]
            log.warning("CUDA graphs could not be captured, decode steps are eager: %s", why)
            return f"CUDA graphs: none, decode steps are eager: {why}"
        took, size = time.perf_counter() - start, torch.cuda.memory_reserved(device) - before
        return (
            f"CUDA graphs: {len(self._ladder)} of up to {self._capacity} rows in {took:.1f} s, {size / 2**30:.2f} GiB"
        )


def ladder(most: int) -> list[int]:
    """Sizes that steps are padded to: small ones by powers of two, then every 16, every 32 and every 64."""
    sizes = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, *range(320, most + 64, 64)]
    return [*(n for n in sizes if n < most), most]


def graph_bytes(model: Model, need: Need, dtype: torch.dtype) -> int:
    """What the buffers and graphs of `DecodeSteps` will take, measured on its largest step; cuda only."""
    device, capacity = model.table.device, need.max_num_seqs
    torch.cuda.synchronize(device)
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    steps = DecodeSteps(model, KVPool(model.shape, 1, need.block_size, dtype, device), capacity, need.max_model_len)
    steps._send_inputs(np.empty((3, 0), np.int64))
    output = steps.forward(capacity)
    row_bytes = (output.hidden.nbytes + output.logits.nbytes) / capacity
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - held
    sizes = ladder(capacity)
    del steps, output
    torch.cuda.empty_cache()
    return peak + int(row_bytes * sum(sizes)) + GRAPH_BYTES * len(sizes)
