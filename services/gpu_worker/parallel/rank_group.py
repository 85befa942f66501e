"""The collectives of a group of ranks. Every rank calls the same ones in the same order, with equal sizes.

On the CPU they run over gloo, on GPUs over NCCL, and where ranks share a GPU over gloo again (`peer_collectives` has
others). Ranks of one host find each other by a file in a folder of their own, and talk on the loopback interface; those
of several hosts by a store of the leader's. Nothing is pickled.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C import _distributed_c10d

from blockyard.services.gpu_worker.parallel.collectives import (
    Collectives,
    HostCollectives,
    PendingCollective,
    RankStore,
    share_a_gpu,
)
from blockyard.services.gpu_worker.parallel.meeting import Meeting
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.shared.errors import RankLostError

_dist: Any = dist  # process groups have no types that say what their methods take
_c10d: Any = _distributed_c10d

TIMEOUT_S = 600.0  # of a collective: ranks load for different times. A rank that is gone is noticed sooner, see `ranks`
LEADER = 0


class SumKernels(Protocol):
    """Sums over ranks by kernels of the device itself, for parts for which they are quicker than the transport."""

    def sum(self, part: Tensor) -> Tensor | None:
        """See `RankGroup.sum`. None: the transport is quicker."""

    def sum_add_rms_norm(
        self, part: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor | None = None
    ) -> Tensor | None:
        """See `RankGroup.sum_add_rms_norm`."""

    def check(self) -> None:
        """Raises RankLostError if a kernel has given up waiting for another rank: its sums are wrong from then on."""


class RankGroup:
    """One rank's end of its group. All methods are collective, and raise RankLostError if another rank is gone."""

    def __init__(
        self,
        shard: Shard,
        collectives: Collectives,
        device: torch.device,
        *,
        sums_in_order: bool = True,
        host_waits: bool = True,
        shares_gpu: bool = False,
    ) -> None:
        """sums_in_order: parts are added in the order of ranks, so that the sum of a row does not depend on the number
        of rows. Otherwise the transport adds them as is quickest. host_waits: in `wait`; otherwise a stream does.
        shares_gpu: two ranks have the same GPU, see `HostCollectives`."""
        self.shard, self.device = shard, device
        self.rank, self.size = shard
        self.is_leader = shard.rank == LEADER
        self._group, self._sums_in_order = collectives, sums_in_order
        self._is_alone, self.host_waits, self.shares_gpu = False, host_waits, shares_gpu
        self.folder = Path()  # of its ranks of this host alone, on GPUs
        self.kernels: SumKernels | None = None  # the same on all ranks; None: the transport sums
        self._summed, self._from_leader = _dist.AllreduceOptions(), _dist.BroadcastOptions()
        self._from_leader.rootRank = LEADER
        self._gathered, self._exchanged = _c10d.AllgatherOptions(), _dist.AllToAllOptions()
        self._summed_parts, self._to_leader = _dist.ReduceScatterOptions(), _dist.GatherOptions()
        self._to_leader.rootRank = LEADER
        # on the stream of steps and not on one of NCCL's own: a CUDA graph then has no fork and join for each sum
        of_all = self._summed, self._from_leader, self._gathered, self._exchanged, self._summed_parts, self._to_leader
        for options in of_all:
            options.asyncOp = host_waits

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Trial steps of this rank: collectives return tensors of the right shapes, and wait for no other rank."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def sum(self, part: Tensor) -> Tensor:
        """Returns the sum of all ranks' parts, with the same bits on all ranks. May write to `part`."""
        if self._is_alone or not part.numel():  # no row: no sequence samples, and the last layer computes nothing
            return part
        if self.kernels is not None and (total := self.kernels.sum(part)) is not None:
            return total
        if not self._sums_in_order:
            part = part.contiguous()  # NCCL takes no other
            self.wait(self._group.allreduce([part], self._summed))
            return part
        return _in_order(self.collect(part))

    def sum_add_rms_norm(
        self, part: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor | None = None
    ) -> Tensor | None:
        """Adds the sum of all ranks' parts [rows, size] to residual in place, or with `total` there, and returns the
        RMSNorm. None: nothing is done, it takes several kernels."""
        if self._is_alone or self.kernels is None:
            return None
        return self.kernels.sum_add_rms_norm(part, residual, weight, eps, total)

    def check(self) -> None:
        """Raises RankLostError if sums are wrong since another rank's part has not come in time. Not collective."""
        if self.kernels is not None:
            self.kernels.check()

    def collect(self, part: Tensor) -> list[Tensor]:
        """Returns all ranks' parts, of equal shape and dtype, in the order of ranks."""
        return list(self.gather(part))

    def gather(self, part: Tensor) -> Tensor:
        """Returns all ranks' parts, of equal shape and dtype: [ranks, *shape]. Alone, those of others are zeros."""
        part = part.contiguous()
        if self._is_alone:
            parts = part.new_zeros((self.size, *part.shape))
            parts[self.rank] = part
            return parts
        parts = part.new_empty((self.size, *part.shape))
        self.wait(self._group._allgather_base(_bytes(parts).flatten(), _bytes(part).flatten(), self._gathered))
        return parts

    def sum_own(self, parts: Tensor) -> Tensor:
        """Returns the sum of what all ranks have for this one: parts [ranks, *shape] -> [*shape]."""
        parts = parts.contiguous()
        if self._is_alone:
            return parts[self.rank]
        if self._sums_in_order:
            once = [1] * self.size
            return _in_order(list(self.exchange_rows(parts, once, once)))
        total = torch.empty_like(parts[0])
        self.wait(self._group._reduce_scatter_base(total, parts, self._summed_parts))
        return total

    def exchange_rows(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Sends the first rows to the first rank, the next ones to the next rank, and so on. Returns what came.

        rows [sum(sent), *shape] -> [sum(received), *shape]. sent, received: numbers of rows, by rank.
        """
        rows = rows.contiguous()
        arrived = rows.new_empty((sum(received), *rows.shape[1:]))
        self.wait(self._group.alltoall_base(_bytes(arrived), _bytes(rows), received, sent, self._exchanged))
        return arrived

    def join_columns(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """Returns all ranks' columns side by side on the leader. On other ranks, `part` itself.

        part [rows, own width]; widths: of all ranks.
        """
        if self._is_alone:
            return part.new_zeros(len(part), sum(widths))
        sent = F.pad(part, (0, max(widths) - part.shape[1])).contiguous()  # a gather takes equal shapes
        parts = [torch.empty_like(sent) for _ in widths] if self.is_leader else []
        received = [[_bytes(one) for one in parts]] if self.is_leader else []
        self.wait(self._group.gather(received, [_bytes(sent)], self._to_leader))
        if not self.is_leader:
            return part
        return torch.cat([one[:, :width] for one, width in zip(parts, widths, strict=True)], 1)

    def copy_from_leader(self, tensor: Tensor) -> None:
        """Writes what the leader has there to `tensor`, which is contiguous, on the other ranks."""
        self.wait(self.begin_copy_from_leader(tensor))

    def begin_copy_from_leader(self, tensor: Tensor) -> PendingCollective | None:
        """As `copy_from_leader`. The tensor may be read on other ranks, and written on the leader, after `wait`."""
        return None if self._is_alone else self._group.broadcast([_bytes(tensor)], self._from_leader)

    def send(self, tensor: Tensor, to: int) -> PendingCollective:
        """Sends a contiguous tensor to another rank, which calls `receive`. It must not change before the end."""
        return self._group.send([_bytes(tensor)], to, 0)

    def receive(self, tensor: Tensor, of: int) -> None:
        """Writes what another rank has sent to a contiguous tensor."""
        if not self._is_alone:
            self.wait(self._group.recv([_bytes(tensor)], of, 0))

    def exchange(self, tensors: Sequence[Tensor], peer: int) -> list[Tensor]:
        """Sends contiguous tensors to another rank, and returns what it sends: as many, of the same shapes.

        Of two ranks alone: both call it. The lower one sends first, so that neither waits for the other's receive.
        """
        received = [torch.empty_like(one) for one in tensors]
        for is_sending in (self.rank < peer, self.rank > peer):
            for one, other in zip(tensors, received, strict=True):
                if is_sending:
                    self.wait(self.send(one, peer))
                else:
                    self.receive(other, peer)
        return received

    @property
    def is_alone(self) -> bool:
        return self._is_alone

    def least(self, value: int) -> int:
        """Returns the smallest value of all ranks."""
        return min(int(one) for one in self.collect(torch.tensor([value], device=self.device)))

    def largest(self, values: Tensor) -> Tensor:
        """Returns the largest value of all ranks, element by element."""
        return torch.stack(self.collect(values)).amax(0)

    def wait(self, work: PendingCollective | None) -> None:
        """Waits for the end of a collective: on a GPU the stream of steps does. None: it is on that stream."""
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as e:
            raise RankLostError(f"rank {self.rank} of {self.size} lost another rank: {str(e).splitlines()[0]}") from e


class GroupStores:
    """The stores by which the groups of one rank connect, each under a name of its own."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self._shared: object = None  # of ranks on several hosts

    def folder_of(self, name: str) -> Path:
        """Returns a folder for files that the ranks of this group on this host share."""
        folder = self.meeting.folder / f"{name}-files"
        folder.mkdir(exist_ok=True)
        return folder

    def make(self, name: str, size: int) -> RankStore:
        """size: ranks of the group. Raises RankLostError if the leader's store is not there."""
        meeting = self.meeting
        if not meeting.store:
            on_host: RankStore = _dist.FileStore(str(meeting.folder / name), size)
            return on_host
        if self._shared is None:
            host, _, port = meeting.store.rpartition(":")
            serves = {} if meeting.listener is None else {"is_master": True, "master_listen_fd": meeting.listener}
            timeout = timedelta(seconds=TIMEOUT_S)
            try:
                self._shared = _dist.TCPStore(host, int(port), timeout=timeout, wait_for_workers=False, **serves)
            except RuntimeError as e:
                raise RankLostError(f"no store of ranks at {meeting.store}: {str(e).splitlines()[0]}") from e
        of_group: RankStore = _dist.PrefixStore(name, self._shared)
        return of_group


def connect_cpus(shard: Shard, stores: GroupStores, name: str) -> RankGroup:
    """Waits until all ranks are there. name: of the group. Raises RankLostError."""
    return RankGroup(shard, _connect_gloo(shard, stores.meeting, stores.make(name, shard.size)), torch.device("cpu"))


def connect_gpus(shard: Shard, stores: GroupStores, name: str, device: torch.device) -> RankGroup:
    """As `connect_cpus`, of ranks with a GPU. NCCL takes the interface from the environment."""
    store = stores.make(name, shard.size)
    with _losing_ranks(shard):
        shares = share_a_gpu(shard, store, str(torch.cuda.get_device_properties(device).uuid))
    if shares:
        collectives = HostCollectives(_connect_gloo(shard, stores.meeting, store))
        return RankGroup(shard, collectives, device, shares_gpu=True)
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=TIMEOUT_S)
    of_gpus = _dist.ProcessGroupNCCL(store, shard.rank, shard.size, options)
    return RankGroup(shard, of_gpus, device, sums_in_order=False, host_waits=False)


def _connect_gloo(shard: Shard, meeting: Meeting, store: RankStore) -> Collectives:
    options = _dist.ProcessGroupGloo._Options()
    named = {"hostname" if meeting.has_address else "interface": meeting.interface}
    options._devices = [_dist.ProcessGroupGloo.create_device(**named)]
    options._timeout = timedelta(seconds=TIMEOUT_S)
    with _losing_ranks(shard):
        found: Collectives = _dist.ProcessGroupGloo(store, shard.rank, shard.size, options)
    return found


@contextmanager
def _losing_ranks(shard: Shard) -> Iterator[None]:
    """Errors of torch while ranks connect become RankLostError."""
    try:
        yield
    except RuntimeError as e:
        raise RankLostError(f"rank {shard.rank} found no group of {shard.size}: {str(e).splitlines()[0]}") from e


def _in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of parts, rounded once. Writes to the first one."""
    total = parts[0].float() if parts[0].dtype.itemsize < 4 else parts[0]
    for one in parts[1:]:
        total.add_(one)
    return total.to(parts[0].dtype)


def _bytes(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor as bytes: gloo does not take all dtypes."""
    return tensor.view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8)
