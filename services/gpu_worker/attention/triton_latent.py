"""The attention of latent layers in a step on a GPU, with Triton kernels. Imported only on a GPU.

Decodes absorb the up-projections: the matrix of K is moved into the query, and that of V behind the attention, which
reads each cached row once for all heads. Prefills decompress rows, which takes fewer operations where rows serve many
queries. Batch-invariant steps absorb in prefills too, so that both have the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from blockyard.kernels.attention.latent.decode_hopper import latent_decode_hopper, schedule_latent_hopper
from blockyard.kernels.attention.latent.head_products import head_products
from blockyard.kernels.attention.latent.latent_decode import latent_decode, schedule_latent_decode
from blockyard.kernels.attention.latent.latent_invariant import latent_invariant
from blockyard.kernels.attention.latent.prefill_in_pieces import AddToKeysValues, prefill_in_pieces
from blockyard.kernels.attention.latent.write_latent import write_latent
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.attention.split_kv import SplitKVSchedule
from blockyard.kernels.gpu_facts import runs_hopper_kernels
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.layers.apply_rope import apply_rope_reference
from blockyard.services.gpu_worker.attention.choice import AttentionKernel, RowKind, choose, gpu_decodes
from blockyard.services.gpu_worker.attention.metadata import AttentionMetadata
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.step import AdaptedHeads, LatentRows, LogitsIndices


class LatentDecode(NamedTuple):
    """A decode kernel of latent layers, and what builds its metadata once for each step and kind of layer."""

    schedule: Callable[[Tensor, PagedKVMetadata, ScoreRules, int], SplitKVSchedule]
    attend: Callable[..., Tensor]  # see `latent_decode`


LATENT_DECODES = {
    AttentionKernel.LATENT_DECODE: LatentDecode(schedule_latent_decode, latent_decode),
    AttentionKernel.LATENT_DECODE_HOPPER: LatentDecode(schedule_latent_hopper, latent_decode_hopper),
}


@dataclass(slots=True)
class LatentGroup:
    """The kernels of layers with the same heads in a step, and the schedule that they share."""

    decode: LatentDecode | None  # None: `latent_invariant`
    absorbs_prefills: bool
    schedule: SplitKVSchedule | None = None


class LatentLayers:
    """Computes the latent layers of one step. Arguments and result of a call are as in `step.Attend.latent`."""

    def __init__(self, pool: KVPool, metadata: AttentionMetadata) -> None:
        """metadata: with a bound of sequence lengths, and the number of decodes."""
        assert metadata.max_seq_len is not None
        self._pool, self._metadata, self._rows = pool, metadata, metadata.rows
        self._num_decodes, self._max_seq_len = metadata.num_decodes, metadata.max_seq_len
        self._decodes = metadata.rows.part(slice(metadata.num_decodes))
        # sets the split length of batch-invariant attention, so it must not depend on the step
        self._table_len = metadata.rows.tables.shape[1] * pool.block_size
        self._groups: dict[tuple[int, int], LatentGroup] = {}  # by heads and size of the latent

    def __call__(
        self, layer: int, query: Tensor, rotation: Tensor | None, latent: LatentRows,
        indices: LogitsIndices | None = None,
    ) -> Tensor:  # fmt: skip
        """indices: computes only these rows, each as a decode."""
        metadata, num_decodes = self._metadata, self._num_decodes
        (memory, rules), starts = self._pool.kv[layer], metadata.query_start_loc
        if self._pool.scales is not None and self._pool.scales_pending and starts is not None:
            self._measure_scale(layer, rotation, latent)
        norm, rows = latent.norm, latent.rows
        write_latent(query, rows, memory, self._rows, rotation, norm.weight, norm.eps, rules.kv_scales)
        if indices is not None:
            needed = PagedKVMetadata(indices.slots, indices.positions, self._rows.tables)
            return self._absorbed(layer, query.index_select(0, indices.rows), latent, needed, indices.rows)
        first, later = slice(num_decodes), slice(num_decodes, None)
        if starts is None:
            return self._absorbed(layer, query, latent, self._decodes, first)
        if self._group(layer).absorbs_prefills:
            after = self._absorbed(layer, query[later], latent, self._rows.part(later), later, is_decode=False)
            return torch.cat((self._absorbed(layer, query[first], latent, self._decodes, first), after))
        value_dim = latent.up.shape[1] - latent.plain_dim
        out = query.new_empty((len(query), query.shape[1] * value_dim))
        prefill_in_pieces(
            query, rows[later], memory, self._rows, starts, rules, latent.up, metadata.max_context_len, out[later],
            None if latent.adapted is None else _add_in_pieces(latent.adapted, starts, later, len(query)),
        )  # fmt: skip
        if num_decodes:
            self._absorbed(layer, query[first], latent, self._decodes, first, out=out[first])
        return out

    def _absorbed(
        self, layer: int, query: Tensor, latent: LatentRows, rows: PagedKVMetadata, of_step: slice | Tensor,
        is_decode: bool = True, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Computes rows whose keys are all in the cache, each on its own: -> [rows, heads * value].

        of_step: which rows of the step they are.
        """
        (memory, rules), group = self._pool.kv[layer], self._group(layer)
        decode, invariant = group.decode, group.decode is None
        q_latent = head_products(query[..., : latent.plain_dim], latent.to_keys, invariant)
        if latent.adapted is not None:
            latent.adapted.add_to_queries(q_latent, query[..., : latent.plain_dim], of_step)
        q_rotated = query[..., latent.plain_dim :]
        if decode is None:
            attended = latent_invariant(q_latent, q_rotated, memory, rows, rules, self._table_len, is_decode)
        else:
            schedule, most = None, self._max_seq_len
            if rows is self._decodes:
                schedule = group.schedule = group.schedule or decode.schedule(q_latent, rows, rules, most)
            attended = decode.attend(q_latent, q_rotated, memory, rows, rules, most, schedule=schedule)
        if out is not None:
            out = out.view(len(query), query.shape[1], -1)
        values = head_products(attended, latent.to_values, invariant, out)
        if latent.adapted is not None:
            latent.adapted.add_to_values(values, attended, of_step)
        return values.flatten(1)

    def _group(self, layer: int) -> LatentGroup:
        """The kernels of a layer, chosen once for all that are alike."""
        shape = self._pool.shape.attention[layer]
        assert shape.latent_dim is not None
        key = (shape.num_heads, shape.latent_dim)
        group = self._groups.get(key)
        if group is None:
            decodes = gpu_decodes(self._pool, shape, self._max_seq_len, runs_hopper_kernels(self._pool.device))
            prefill = choose(replace(decodes, kind=RowKind.PREFILL))
            absorbs_prefills = prefill is AttentionKernel.LATENT_BATCH_INVARIANT
            group = self._groups[key] = LatentGroup(LATENT_DECODES.get(choose(decodes)), absorbs_prefills)
        return group

    def _measure_scale(self, layer: int, rotation: Tensor | None, latent: LatentRows) -> None:
        """Sets the scale of rows in 8 bits by the first step with a prefill."""
        size, rows = latent.up.shape[2], latent.rows
        shared = rows[:, None, size:].clone()
        if rotation is not None:
            apply_rope_reference(shared, rotation)
        normed = latent.norm(rows[:, :size].contiguous())
        self._pool.measure_row_scale(layer, torch.cat((normed, shared[:, 0]), 1))


def _add_in_pieces(adapted: AdaptedHeads, starts: Tensor, rows: slice, num_rows: int) -> AddToKeysValues:
    """Adds the products of adapters to K and V as `prefill_in_pieces` makes them. starts: of sequences, in the rows."""
    of_sequences = starts[:-1].long().clamp(max=num_rows - 1)  # padding sequences have no rows

    def add(out: Tensor, latents: Tensor, tokens: int | None) -> None:
        if tokens is None:
            adapted.add_to_keys_values(out, latents, rows, 1)
        else:
            adapted.add_to_keys_values(out, latents, of_sequences, tokens)

    return add
