"""CUDA graphs of decoders that pool: prefills over the KV pool, without decodes, sampling or state of slots.

They are `packed_graphs.PackedGraphs` with attention that reads block tables. All sequences are prefills, also those of
one token. Imports Triton.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from blockyard.kernels.attention.prefill_splits import SPLIT_MIN_LEN
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.services.gpu_worker.arrays import Integers, Ints
from blockyard.services.gpu_worker.attention.metadata import AttentionMetadata
from blockyard.services.gpu_worker.attention.triton_attention import build_attention
from blockyard.services.gpu_worker.execution.cuda.decode_graphs import GRAPH_BYTES
from blockyard.services.gpu_worker.execution.packed_graphs import FEW_TOKENS, Capture, PackedGraphs
from blockyard.services.gpu_worker.host_link import put
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.memory import blocks_of
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.shared.messages import Geometry

# Tokens. Steps are often full, and run nearly as long as their launch: from 2,048 tokens on, an eighth is padding at
# most.
SIZES = (*FEW_TOKENS, *(unit * n for unit in (64, 128, 256) for n in (36, 40, 45, 51, 57, 64)))
# A size has room for one sequence in so many tokens. Attention looks for each: in graphs with room for 512 sequences
# steps of 32 texts of 512 tokens took an H200 a tenth longer than eager ones. So large sizes have graphs of both.
TOKENS_OF_A_SEQUENCE, TOKENS_OF_A_LONG_ONE = 32, 128
LARGE = 2048  # tokens
FEWEST_SEQUENCES = 16  # the kernels look for so many at a time
MOST_BYTES = 1 << 30  # of the activations of a step that is captured: graphs share that memory
PADDING_ROWS = 128  # of a sequence of padding: attention to keys of one long sequence would take longer
# A bound of lengths below which keys are not split: the host does not know the lengths of later steps, and for short
# texts the sum of splits takes longer than it saves. It decides how work is shared, and nothing else.
UNSPLIT_LEN = SPLIT_MIN_LEN - 1


class ChunkGraphAttention:
    """Attention of prefills over the KV pool. Implements `packed_graphs.GraphAttention`."""

    def __init__(self, model: Model, pool: KVPool, positions: Tensor, tables: Tensor, num_sequences: int) -> None:
        """positions [tokens] int64: of the rows in their sequences, those of padding are 0. tables [num_sequences or
        more, blocks] int32. num_sequences: with one of padding at least."""
        self._room = num_sequences - 1
        self._link = model.table.link
        self.rows = PagedKVMetadata(torch.empty_like(positions), positions, tables)
        self.starts = torch.empty(num_sequences + 1, dtype=torch.int32, device=positions.device)
        self.fill(np.zeros(0, np.int64), None)  # of trials: they touch no KV
        metadata = AttentionMetadata(self.rows, self.starts, prefill_max_seq_len=UNSPLIT_LEN)
        self.attend = build_attention(pool, metadata)

    def fits(self, counts: Ints) -> bool:
        """Implements `packed_graphs.GraphAttention`."""
        return len(counts) <= self._room

    def fill(self, counts: Ints, tables: Integers | None) -> None:
        """Implements `packed_graphs.GraphAttention`."""
        size, num_rows, count = len(self.rows.slots), int(counts.sum()), len(counts)
        sequences = np.full(size, -1, np.int64)
        sequences[:num_rows] = np.repeat(np.arange(count), counts)
        starts = np.minimum(num_rows + PADDING_ROWS * np.arange(-count, self._room + 2 - count), size).astype(np.int32)
        starts[:count] = np.cumsum(counts) - counts
        starts[-1] = size
        self._copy(self.rows.slots, sequences)
        self._copy(self.starts, starts)
        if tables is not None:
            self._copy(self.rows.tables[:count, : tables.shape[1]], tables)

    def _copy(self, words: Tensor, values: Integers) -> None:
        words.copy_(put(values, words.device, self._link))


def sizes_of(most_tokens: int) -> list[int]:
    """The sizes of a worker with steps of up to `most_tokens`."""
    most = min(most_tokens, SIZES[-1])
    return [*(size for size in SIZES if size < most), most]


def nums_of_sequences(size: int, max_num_seqs: int) -> list[int]:
    """How many sequences the graphs of a size have, ascending, with one of padding."""
    shares = (TOKENS_OF_A_LONG_ONE, TOKENS_OF_A_SEQUENCE) if size >= LARGE else (TOKENS_OF_A_SEQUENCE,)
    return sorted({min(max(size // share, FEWEST_SEQUENCES), max_num_seqs + 1) for share in shares})


def chunk_graphs(model: Model, pool: KVPool, capture: Capture, geometry: Geometry) -> PackedGraphs:
    """Graphs of a decoder, not captured. No layer may be latent: those read cached tokens in pieces, whose number a
    graph cannot follow."""
    sizes = sizes_of(geometry.max_num_batched_tokens)
    most_rows = nums_of_sequences(sizes[-1], geometry.max_num_seqs)[-1]
    # sequences of padding read the first table, up to their rows
    width = blocks_of(max(geometry.max_model_len, sizes[-1]), pool.block_size)
    tables = torch.zeros((most_rows, width), dtype=torch.int32, device=pool.device)

    def make(positions: Tensor, num_sequences: int) -> ChunkGraphAttention:
        return ChunkGraphAttention(model, pool, positions, tables, num_sequences)

    variants = partial(nums_of_sequences, max_num_seqs=geometry.max_num_seqs)
    return PackedGraphs(model, capture, make, sizes=sizes, variants=variants)


def graph_bytes(most_tokens: int, step_bytes: int) -> int:
    """An upper bound of the memory of all graphs. step_bytes: of a step of `most_tokens`."""
    num_graphs = sum(2 if size >= LARGE else 1 for size in sizes_of(most_tokens))
    return min(step_bytes, MOST_BYTES) + GRAPH_BYTES * num_graphs
