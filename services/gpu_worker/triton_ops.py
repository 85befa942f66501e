"""A decoder's steps on a GPU, as Triton kernels. Loaded by name, on a GPU alone."""

from torch import Tensor

from blockyard.kernels.add_rms_norm import add_rms_norm
from blockyard.kernels.paged_decode import Sequences, paged_decode
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


class DecodeAttention:
    """For `Step.attend`, where every row is a sequence's one new token: the pool is read where it lies."""

    def __init__(self, pool: KVPool, slots: Tensor, positions: Tensor, tables: Tensor) -> None:
        """Tensors as in `Sequences`."""
        self._pool, self._shape = pool, pool.shape
        self._seqs = Sequences(slots, positions, tables)
        self._longest = tables.shape[1] * pool.block_size

    def __call__(self, layer: int, qkv: Tensor, rotation: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        memory, shape = self._pool.memory[layer], self._shape
        weight, eps = (norm.weight, norm.eps) if norm is not None else (None, 0.0)
        rope_write_kv(qkv, memory, self._seqs, rotation, weight, eps)
        q = qkv[:, : shape.num_heads]
        return paged_decode(q, memory, self._seqs, shape.scale, shape.windows[layer], self._longest)
