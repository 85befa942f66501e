"""What carries the collectives of a `RankGroup`, and the one of ranks that share a GPU.

Such ranks are for checks on a machine with fewer GPUs (CUDA_VISIBLE_DEVICES=0,0): NCCL refuses them. Their collectives
go through host memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from blockyard.services.gpu_worker.parallel.shares import Shard


class PendingCollective(Protocol):
    def wait(self) -> object: ...


class Collectives(Protocol):
    """The methods of `ProcessGroupGloo` and `ProcessGroupNCCL` that are used."""

    def _allgather_base(self, output: Tensor, part: Tensor, options: object) -> PendingCollective | None: ...
    def _reduce_scatter_base(self, output: Tensor, parts: Tensor, options: object) -> PendingCollective | None: ...
    def alltoall_base(
        self, output: Tensor, rows: Tensor, received: list[int], sent: list[int], options: object
    ) -> PendingCollective | None: ...
    def allreduce(self, tensors: list[Tensor], options: object) -> PendingCollective | None: ...
    def broadcast(self, tensors: list[Tensor], options: object) -> PendingCollective | None: ...
    def gather(self, outputs: list[list[Tensor]], parts: list[Tensor], options: object) -> PendingCollective | None: ...
    def send(self, tensors: list[Tensor], to: int, tag: int) -> PendingCollective: ...
    def recv(self, tensors: list[Tensor], of: int, tag: int) -> PendingCollective: ...


class RankStore(Protocol):
    """The methods of torch's stores that are used."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes:
        """Waits until the key is there."""


def share_a_gpu(shard: Shard, store: RankStore, gpu: str) -> bool:
    """Whether two ranks of a group have the same GPU. Waits for all ranks. gpu: a name that no other GPU has."""
    store.set(f"gpu-{shard.rank}", gpu)
    return len({store.get(f"gpu-{rank}") for rank in range(shard.size)}) < shard.size


class HostCollectives:
    """Implements `Collectives` for tensors of a GPU, by those of host memory. The host waits for the stream of steps.

    They cannot be part of a CUDA graph.
    """

    def __init__(self, of_host: Collectives) -> None:
        self._of_host = of_host

    def _allgather_base(self, output: Tensor, part: Tensor, options: object) -> PendingCollective:
        arrived = output.cpu()
        return _Arriving(self._of_host._allgather_base(arrived, part.cpu(), options), [arrived], [output])

    def _reduce_scatter_base(self, output: Tensor, parts: Tensor, options: object) -> PendingCollective:
        raise AssertionError("these ranks add in their order")

    def alltoall_base(
        self, output: Tensor, rows: Tensor, received: list[int], sent: list[int], options: object
    ) -> PendingCollective:
        arrived = output.cpu()
        return _Arriving(self._of_host.alltoall_base(arrived, rows.cpu(), received, sent, options), [arrived], [output])

    def allreduce(self, tensors: list[Tensor], options: object) -> PendingCollective:
        hosts = [one.cpu() for one in tensors]
        return _Arriving(self._of_host.allreduce(hosts, options), hosts, tensors)

    def broadcast(self, tensors: list[Tensor], options: object) -> PendingCollective:
        hosts = [one.cpu() for one in tensors]
        return _Arriving(self._of_host.broadcast(hosts, options), hosts, tensors)

    def gather(self, outputs: list[list[Tensor]], parts: list[Tensor], options: object) -> PendingCollective:
        """outputs: of the leader, a list; of others, none."""
        hosts = [[one.cpu() for one in some] for some in outputs]
        arriving, to = [one for some in hosts for one in some], [one for some in outputs for one in some]
        return _Arriving(self._of_host.gather(hosts, [one.cpu() for one in parts], options), arriving, to)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> PendingCollective:
        hosts = [one.cpu() for one in tensors]
        return _Arriving(self._of_host.send(hosts, to, tag), hosts, ())

    def recv(self, tensors: list[Tensor], of: int, tag: int) -> PendingCollective:
        hosts = [one.cpu() for one in tensors]
        return _Arriving(self._of_host.recv(hosts, of, tag), hosts, tensors)


@dataclass(frozen=True, slots=True)
class _Arriving:
    """Copies to the GPU what has come to the host."""

    work: PendingCollective | None  # None: it has ended
    hosts: Sequence[Tensor]
    to: Sequence[Tensor]

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        for host, to in zip(self.hosts, self.to, strict=bool(self.to)):
            to.copy_(host)
