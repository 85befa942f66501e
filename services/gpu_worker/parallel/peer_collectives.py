"""Collectives of two ranks that share a GPU, by the kernels of sums: they can be part of CUDA graphs. Imports Triton.

For checks, in the place of NCCL: what comes is right, and nothing is quick.
"""

import logging

import torch
from torch import Tensor

from blockyard.kernels.all_reduce.sum_ranks import sum_ranks
from blockyard.services.gpu_worker.parallel.collectives import PendingCollective
from blockyard.services.gpu_worker.parallel.peer_memory import PeerMemory
from blockyard.services.gpu_worker.parallel.rank_group import RankGroup

log = logging.getLogger(__name__)

HALF_BYTES = 8 << 20  # of a buffer: parts fill whole tiles of the kernels


class PeerCollectives:
    """Implements `Collectives` of two ranks. Each is the sum of both ranks' bytes, of which one part is zeros."""

    def __init__(self, memory: PeerMemory) -> None:
        self._memory, self._rank = memory, memory.buffers.rank

    def _allgather_base(self, output: Tensor, part: Tensor, options: object) -> PendingCollective:
        return self._exchange(part, dict(enumerate(output.view(-1, len(part)))))

    def _reduce_scatter_base(self, output: Tensor, parts: Tensor, options: object) -> PendingCollective:
        raise AssertionError("these ranks add in their order")

    def alltoall_base(
        self, output: Tensor, rows: Tensor, received: list[int], sent: list[int], options: object
    ) -> PendingCollective:
        """Of as many rows to each rank."""
        size, each = len(sent), sent[0]
        assert received == sent == [each] * size
        arrived = rows.new_empty((size, *rows.shape))  # all ranks' rows to all
        pending = self._exchange(rows, dict(enumerate(arrived)))
        output.copy_(arrived.view(size, size, each, *rows.shape[1:])[:, self._rank].flatten(0, 1))
        return pending

    def allreduce(self, tensors: list[Tensor], options: object) -> PendingCollective:
        raise AssertionError("these ranks add in their order")

    def broadcast(self, tensors: list[Tensor], options: object) -> PendingCollective:
        """From rank 0."""
        return self._exchange(tensors[0], {0: tensors[0]} if self._rank else {})

    def gather(self, outputs: list[list[Tensor]], parts: list[Tensor], options: object) -> PendingCollective:
        """To rank 0."""
        return self._exchange(parts[0], dict(enumerate(outputs[0])) if outputs else {})

    def send(self, tensors: list[Tensor], to: int, tag: int) -> PendingCollective:
        return self._exchange(tensors[0], {})

    def recv(self, tensors: list[Tensor], of: int, tag: int) -> PendingCollective:
        return self._exchange(tensors[0], {of: tensors[0]})

    def _exchange(self, own: Tensor, to: dict[int, Tensor]) -> PendingCollective:
        """Writes a rank's bytes to a tensor. own: contiguous bytes, as many on both ranks. to: by rank."""
        self._memory.check()
        buffers, own = self._memory.buffers, own.flatten()
        most = buffers.one_step_bytes() // (4 * buffers.size)
        for first in range(0, len(own), most):
            part = own[first : first + most]
            words = torch.zeros(buffers.size, len(part), dtype=torch.float32, device=part.device)
            words[self._rank].copy_(part)  # a byte is a float: no sum of a byte and 0 is rounded
            summed = sum_ranks(words, buffers)
            for rank, target in to.items():
                target.flatten()[first : first + most].copy_(summed[rank])
        return _Enqueued()


class _Enqueued:
    """Implements `PendingCollective`: what follows on the stream of steps sees the result."""

    def wait(self) -> None:
        """The stream waits."""


def exchange_on_gpu(group: RankGroup) -> RankGroup:
    """Collective. Returns the group of two ranks, whose collectives kernels carry. group: by host memory, which stays
    if a process cannot map the memory of another."""
    try:
        memory = PeerMemory(group, group.device, HALF_BYTES)
    except OSError as e:
        log.warning("ranks exchange through host memory: %s", e)
        return group
    return RankGroup(group.shard, PeerCollectives(memory), group.device, host_waits=False, shares_gpu=True)
