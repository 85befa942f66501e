"""Batch-invariant attention on the CPU (--batch-invariant): the result of a row does not depend on other rows.

The rounding of a matrix product depends on the number of rows. Each row therefore gets its own products, over a fresh
copy of exactly the keys and values that it attends to.
"""

import torch
from torch import Tensor

from blockyard.kernels.attention.torch_sdpa import row_index, softmax_with_sinks, split_kv, write_kv_reference
from blockyard.kernels.layers.apply_rope import apply_rope_reference
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.attention.absorbed import ChosenRows, attend_absorbed
from blockyard.services.gpu_worker.attention.cpu_attention import LayerKind
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.layers.linear import in_groups
from blockyard.services.gpu_worker.step import Attend, LatentRows, LogitsIndices


class BatchInvariantCpuAttention:
    """Computes attention row by row. Implements `step.Attend`."""

    def __init__(self, pool: KVPool, blocks: Ints, offsets: Ints, tables: Ints, counts: Ints, lengths: Ints) -> None:
        """The arguments are the same as in `CpuMetadataBuilder.attention`."""
        self._pool, self._shape = pool, pool.shape
        self._rows = {
            heads: torch.from_numpy(row_index(blocks, offsets, heads, pool.block_size))
            for heads in {LayerKind.of(shape).kept_heads for shape in pool.shape.attention}
        }
        self._seqs = list(zip(tables, counts.tolist(), lengths.tolist(), strict=True))

    def latent(self, layer: int, query: Tensor, rotation: Tensor | None, latent: LatentRows) -> Tensor:
        return attend_absorbed(self, layer, query, rotation, latent, in_groups)

    def of_rows(self, indices: LogitsIndices) -> Attend:
        return ChosenRows(self, indices.rows)

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        attention = self._shape.attention[layer]
        heads = attention.num_heads
        rotated = heads + attention.kv_heads
        qk, values = qkv[:, :rotated], qkv[:, rotated:]
        if norm is not None:
            normed = torch.cat([norm(qkv[i : i + 1, : len(norm.weight)]) for i in range(len(qkv))])
            qk = normed[:, :rotated]
            if len(norm.weight) > rotated:
                values = normed[:, rotated:]
        if rotation is not None:
            apply_rope_reference(qk, rotation)
        kind = LayerKind.of(attention)
        rows = self._rows[kind.kept_heads]
        write_kv_reference(self._pool.rows[layer], rows, torch.cat((qk[:, heads:], values), 1))
        out = qkv.new_empty((len(qkv), heads, attention.latent_dim or attention.head_dim))
        row, rules = 0, attention.rules
        of_heads = None if rules.sinks is None else rules.sinks.view(attention.kv_heads, -1, 1)
        for table, count, length in self._seqs:
            blocks = torch.from_numpy(table[: -(-length // self._pool.block_size)])
            # [planes, kv_heads, tokens, dim]
            known = self._pool.layers[layer][blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)
            for end in range(length - count + 1, length + 1):
                first = max(kind.oldest_keys(end - 1), 0)
                both = split_kv(known[None, :, :, first:end].contiguous(), attention.latent_dim)
                keys, values = both[0][0], both[1][0]
                q = qk[row, :heads].reshape(attention.kv_heads, -1, attention.head_dim)
                scores = q @ keys.mT * rules.scale
                if rules.soft_cap is not None:
                    scores = scores.div_(rules.soft_cap).tanh_().mul_(rules.soft_cap)
                out[row] = (softmax_with_sinks(scores, of_heads) @ values).view(heads, -1)
                row += 1
        return out.flatten(1)
