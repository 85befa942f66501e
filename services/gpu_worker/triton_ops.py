"""A decoder's steps on a GPU, as Triton kernels. Loaded by name, on a GPU alone."""

from torch import Tensor

from blockyard.kernels.add_rms_norm import add_rms_norm
from blockyard.kernels.paged_decode import Sequences, paged_decode
from blockyard.kernels.paged_prefill import paged_prefill
from blockyard.kernels.rms_norm import RMSNorm
from blockyard.kernels.rope_write_kv import rope_write_kv
from blockyard.kernels.silu_mul import silu_mul
from blockyard.services.gpu_worker.kv_pool import KVPool


class TritonOps:
    """For `ops.Ops`."""

    def add_norm(self, residual: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor:
        return add_rms_norm(residual, delta, norm.weight, norm.eps)

    def gate(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)


class MixedAttention:
    """For `Step.attend` of any step: rows of decodes first, one a sequence, then those of prefills. The pool is read
    where it lies; lengths are known on the device alone."""

    def __init__(
        self,
        pool: KVPool,
        slots: Tensor,
        positions: Tensor,
        tables: Tensor,
        starts: Tensor | None = None,
        num_decodes: int = 0,
        longest: int | None = None,
    ) -> None:
        """slots and positions [rows], tables [slots, blocks] as in `Sequences`. starts [prefills + 1] int32: the row
        that each prefill begins at, `num_decodes` the first, and `rows`; None: all rows are decodes. No position is
        beyond `longest`, None: as far as the tables reach."""
        self._pool, self._shape = pool, pool.shape
        self._seqs, self._starts = Sequences(slots, positions, tables), starts
        self._num_decodes = len(slots) if starts is None else num_decodes
        self._decodes = Sequences(slots[: self._num_decodes], positions[: self._num_decodes], tables)
        self._longest = longest or tables.shape[1] * pool.block_size

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        memory, shape, num_decodes = self._pool.memory[layer], self._shape, self._num_decodes
        weight, eps = (norm.weight, norm.eps) if norm is not None else (None, 0.0)
        rope_write_kv(qkv, memory, self._seqs, rotation, weight, eps)
        q, window = qkv[:, : shape.num_heads], shape.windows[layer]
        out = qkv.new_empty((len(qkv), shape.num_heads * shape.head_dim))
        if num_decodes:
            q_decodes, out_decodes = q[:num_decodes], out[:num_decodes]
            paged_decode(q_decodes, memory, self._decodes, shape.scale, window, self._longest, out_decodes)
        if self._starts is not None:
            out_prefills = out[num_decodes:]
            paged_prefill(q, memory, self._seqs, self._starts, shape.scale, window, self._longest, out_prefills)
        return out
