"""The attention of latent layers in a step on a GPU, with Triton kernels. Imported only on a GPU.

Decodes absorb the up-projections: the matrix of K is moved into the query, and that of V behind the attention, which
reads each cached row once for all heads. Prefills decompress rows, which takes fewer operations where rows serve many
queries. Batch-invariant steps absorb in prefills too, so that both have the same bits.
"""

import torch
from torch import Tensor

from blockyard.kernels.attention.latent.head_products import head_products
from blockyard.kernels.attention.latent.latent_decode import latent_decode, schedule_latent_decode
from blockyard.kernels.attention.latent.latent_invariant import latent_invariant
from blockyard.kernels.attention.latent.prefill_in_pieces import prefill_in_pieces
from blockyard.kernels.attention.latent.write_latent import write_latent
from blockyard.kernels.attention.split_kv import SplitKVSchedule
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.layers.apply_rope import apply_rope_reference
from blockyard.services.gpu_worker.attention.choice import AttentionCase, AttentionKernel, RowKind, choose
from blockyard.services.gpu_worker.attention.metadata import AttentionMetadata
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.step import LatentRows, LogitsIndices


class LatentLayers:
    """Computes the latent layers of one step. Arguments and result of a call are those of `step.Attend.latent`."""

    def __init__(self, pool: KVPool, metadata: AttentionMetadata) -> None:
        """metadata: with a bound of sequence lengths, and the number of decodes."""
        assert metadata.max_seq_len is not None
        self._pool, self._metadata, self._rows = pool, metadata, metadata.rows
        self._num_decodes, self._max_seq_len = metadata.num_decodes, metadata.max_seq_len
        self._decodes = _first(metadata.rows, metadata.num_decodes)
        # sets the split length of batch-invariant attention, so it must not depend on the step
        self._table_len = metadata.rows.tables.shape[1] * pool.block_size
        case = AttentionCase(
            device="cuda",
            kind=RowKind.PREFILL,
            kv_dtype=pool.dtype,
            batch_invariant=pool.batch_invariant,
            is_latent=True,
        )
        self._absorbs_prefills = choose(case) is AttentionKernel.LATENT_BATCH_INVARIANT
        self._schedules: dict[tuple[int, int], SplitKVSchedule] = {}  # by heads and size of the latent

    def __call__(
        self,
        layer: int,
        query: Tensor,
        rotation: Tensor | None,
        latent: LatentRows,
        indices: LogitsIndices | None = None,
    ) -> Tensor:
        """indices: computes only these rows, each as a decode."""
        metadata, num_decodes = self._metadata, self._num_decodes
        scales, starts = self._scales(layer, rotation, latent), metadata.query_start_loc
        memory, scale = self._pool.layers[layer], self._pool.shape.attention[layer].scale
        norm, rows = latent.norm, latent.rows
        write_latent(query, rows, memory, self._rows, rotation, norm.weight, norm.eps, scales)
        if indices is not None:
            needed = PagedKVMetadata(indices.slots, indices.positions, self._rows.tables)
            return self._absorbed(layer, query.index_select(0, indices.rows), latent, needed, scales)
        if starts is None:
            return self._absorbed(layer, query, latent, self._decodes, scales)
        if self._absorbs_prefills:
            prefills = PagedKVMetadata(
                self._rows.slots[num_decodes:], self._rows.positions[num_decodes:], self._rows.tables
            )
            after = self._absorbed(layer, query[num_decodes:], latent, prefills, scales, is_decode=False)
            return torch.cat((self._absorbed(layer, query[:num_decodes], latent, self._decodes, scales), after))
        value_dim = latent.up.shape[1] - latent.plain_dim
        out = query.new_empty((len(query), query.shape[1] * value_dim))
        prefill_in_pieces(
            query, rows[num_decodes:], memory, self._rows, starts, scale, latent.up, metadata.max_context_len,
            out[num_decodes:], scales,
        )  # fmt: skip
        if num_decodes:
            self._absorbed(layer, query[:num_decodes], latent, self._decodes, scales, out=out[:num_decodes])
        return out

    def _absorbed(
        self,
        layer: int,
        query: Tensor,
        latent: LatentRows,
        rows: PagedKVMetadata,
        scales: Tensor | None,
        is_decode: bool = True,
        out: Tensor | None = None,
    ) -> Tensor:
        """Computes rows whose keys are all in the cache, each on its own: -> [rows, heads * value]."""
        memory, scale = self._pool.layers[layer], self._pool.shape.attention[layer].scale
        invariant = self._absorbs_prefills
        q_latent = head_products(query[..., : latent.plain_dim], latent.to_keys, invariant)
        q_rotated = query[..., latent.plain_dim :]
        if invariant:
            attended = latent_invariant(q_latent, q_rotated, memory, rows, scale, self._table_len, is_decode, scales)
        else:
            key, schedule = (query.shape[1], latent.up.shape[2]), None
            if rows is self._decodes:
                if key not in self._schedules:  # all layers with this key share one schedule
                    self._schedules[key] = schedule_latent_decode(q_latent, memory, rows, self._max_seq_len)
                schedule = self._schedules[key]
            attended = latent_decode(
                q_latent, q_rotated, memory, rows, scale, self._max_seq_len, schedule=schedule, scales=scales
            )
        if out is not None:
            out = out.view(len(query), query.shape[1], -1)
        return head_products(attended, latent.to_values, invariant, out).flatten(1)

    def _scales(self, layer: int, rotation: Tensor | None, latent: LatentRows) -> Tensor | None:
        """Returns the scales of an 8-bit cache, both that of the whole row. The first step with a prefill measures."""
        pool = self._pool
        if pool.scales is None:
            return None
        if pool.scales_pending and self._metadata.query_start_loc is not None:
            size, rows = latent.up.shape[2], latent.rows
            shared = rows[:, None, size:].clone()
            if rotation is not None:
                apply_rope_reference(shared, rotation)
            pool.measure_row_scale(layer, torch.cat((latent.norm(rows[:, :size].contiguous()), shared[:, 0]), 1))
        return pool.scales[layer]


def _first(rows: PagedKVMetadata, count: int) -> PagedKVMetadata:
    return PagedKVMetadata(rows.slots[:count], rows.positions[:count], rows.tables)
