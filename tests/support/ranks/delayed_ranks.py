"""Ranks in threads that are delayed at random, and a record of their collectives.

A rank sleeps before it reads a command, before a collective, and before the leader collects results.
"""

import itertools
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import msgspec
import torch
from rank_logits import CPU, connect, load
from reference_ops import ReferenceOps, run_ahead
from torch import Tensor

from blockyard.services.gpu_worker.execution.cpu_steps import CpuSteps
from blockyard.services.gpu_worker.execution.cuda.follower_steps import DeviceFollowerSteps
from blockyard.services.gpu_worker.execution.pipelined_steps import PipelinedCpuSteps
from blockyard.services.gpu_worker.execution.ranks.expert_balancer import ExpertBalancer
from blockyard.services.gpu_worker.execution.ranks.expert_moves import MovableExperts
from blockyard.services.gpu_worker.execution.ranks.follower import CpuFollowerSteps, Follower, FollowerSteps
from blockyard.services.gpu_worker.execution.ranks.leader import DeviceMirror, LeaderMetadata, LeaderModel, LeaderPool
from blockyard.services.gpu_worker.host_link import SameMemory
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.parallel.collectives import Collectives, PendingCollective
from blockyard.services.gpu_worker.parallel.commands import Command, Followers
from blockyard.services.gpu_worker.parallel.rank_group import RankGroup
from blockyard.services.gpu_worker.parallel.team import RankGroups
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.config.services.worker import ExpertBalance
from blockyard.shared.messages import Geometry
from blockyard.shared.messages.base import Frame

MOST_DELAY_S = 0.003
DELAYED = 0.03  # of all reads and collectives

Delay = Callable[[], None]


class Call(NamedTuple):
    """A collective of a rank, or a message to or from another one."""

    name: str
    size_bytes: int
    peer: int | None = None


def delays(seed: int) -> Delay:
    rng = random.Random(seed)

    def delay() -> None:
        if rng.random() < DELAYED:
            time.sleep(rng.random() * MOST_DELAY_S)

    return delay


class RecordedCollectives:
    """Implements `Collectives`."""

    def __init__(self, collectives: Collectives, delay: Delay) -> None:
        self._collectives, self._delay = collectives, delay
        self.calls: list[Call] = []

    def _allgather_base(self, output: Tensor, part: Tensor, options: object) -> PendingCollective | None:
        self._record("allgather", [part])
        return self._collectives._allgather_base(output, part, options)

    def _reduce_scatter_base(self, output: Tensor, parts: Tensor, options: object) -> PendingCollective | None:
        self._record("reduce_scatter", [parts])
        return self._collectives._reduce_scatter_base(output, parts, options)

    def alltoall_base(
        self, output: Tensor, rows: Tensor, received: list[int], sent: list[int], options: object
    ) -> PendingCollective | None:
        self._record("alltoall", [rows])
        return self._collectives.alltoall_base(output, rows, received, sent, options)

    def allreduce(self, tensors: list[Tensor], options: object) -> PendingCollective | None:
        self._record("allreduce", tensors)
        return self._collectives.allreduce(tensors, options)

    def gather(self, outputs: list[list[Tensor]], parts: list[Tensor], options: object) -> PendingCollective | None:
        self._record("gather", parts)
        return self._collectives.gather(outputs, parts, options)

    def broadcast(self, tensors: list[Tensor], options: object) -> PendingCollective | None:
        self._record("broadcast", tensors)
        return self._collectives.broadcast(tensors, options)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> PendingCollective:
        self._record("send", tensors, to)
        return self._collectives.send(tensors, to, tag)

    def recv(self, tensors: list[Tensor], of: int, tag: int) -> PendingCollective:
        self._record("recv", tensors, of)
        return self._collectives.recv(tensors, of, tag)

    def _record(self, name: str, tensors: list[Tensor], peer: int | None = None) -> None:
        self._delay()
        self.calls.append(Call(name, sum(one.nbytes for one in tensors), peer))


class DelayedRanks:
    """A leader's runner, and followers in threads that do what comes."""

    def __init__(
        self,
        folder: Path,
        group: Path,
        geometry: Geometry,
        size: int,
        num_stages: int,
        *,
        as_gpus: bool,
        balance: ExpertBalance | None = None,
    ) -> None:
        """size: ranks of a stage. as_gpus: steps of a GPU, with its operations in plain torch. balance: of experts that
        ranks have whole; None: they have a share of each."""
        self._balance = balance
        self._folder, self._group, self._layout, self._as_gpus = folder, group, (size, num_stages), as_gpus
        self._geometry = msgspec.structs.replace(geometry, num_stages=num_stages)
        self._commands = {rank: SimpleQueue[Command | None]() for rank in range(1, size * num_stages)}
        self._records: dict[tuple[str, int], dict[int, RecordedCollectives]] = {}  # by group, then by rank in it
        self._lock = threading.Lock()
        self._problems: list[Exception] = []
        self._threads = [threading.Thread(target=self._follow, args=(rank,), daemon=True) for rank in self._commands]
        for thread in self._threads:
            thread.start()
        model, pool, ranks, experts = self._load(0)
        balancer = None if experts is None or balance is None else ExpertBalancer(experts, balance, self._send)
        pool.mirror = LeaderPool(self._send)
        leader = LeaderModel(model, ranks, self._send)
        self.runner = Runner(
            leader, pool, self._geometry, None, lambda runner: None, send=self._send, balancer=balancer
        )
        self._give_steps(leader)
        collect, delay = self.runner.collect, delays(-1)
        self.runner.collect = lambda: (delay(), collect())[1]  # type: ignore[method-assign]

    def _give_steps(self, model: LeaderModel) -> None:
        runner, num_stages = self.runner, self._layout[1]
        if self._as_gpus:
            mirror = DeviceMirror(self._send, model.ranks, SameMemory())
            run_ahead(runner, self._geometry.max_num_seqs, records_layers=False, masks=False, mirror=mirror)
            return
        metadata = LeaderMetadata(runner.pool, self._send, num_stages)
        steps = CpuSteps(model, runner.pool, runner.batch, self._geometry, True, metadata)
        if num_stages == 1:
            runner.use(steps)
        else:
            pipelined = PipelinedCpuSteps(steps, model, num_stages)
            runner.use(pipelined, depends=pipelined.depends)

    def _load(self, rank: int) -> tuple[Model, KVPool, RankGroups, MovableExperts | None]:
        size, num_stages = self._layout
        ranks, delay = connect(rank, size, self._group, num_stages, runs_ahead=self._as_gpus), delays(rank)
        model = load(self._folder, ranks, spread=self._balance is not None, moves=self._balance is not None)
        self._record("ranks", 0, ranks.everyone, delay)
        if ranks.tensor is not None and ranks.tensor is not ranks.everyone:
            self._record("stage", ranks.place.stage, ranks.tensor, delay)
        if ranks.beside_steps is not None:
            self._record("beside steps", 0, ranks.beside_steps, delay)
        experts = None if self._balance is None else MovableExperts(model.experts(), ranks)
        geometry = self._geometry
        pool = KVPool(model.shape, geometry.num_blocks, geometry.block_size, torch.float32, CPU)
        return model, pool, ranks, experts

    def _record(self, name: str, number: int, group: RankGroup, delay: Delay) -> None:
        recorded = RecordedCollectives(group._group, delay)
        group._group = recorded
        with self._lock:
            self._records.setdefault((name, number), {})[group.rank] = recorded

    def _send(self, frame: Frame, to: Followers = Followers.ALL) -> None:
        assert isinstance(frame, Command)
        for rank, commands in self._commands.items():
            if to is Followers.ALL or (rank < self._layout[0]) == (to is Followers.LAST_STAGE):
                commands.put(frame)

    def _follow(self, rank: int) -> None:
        try:
            model, pool, ranks, experts = self._load(rank)
            steps: FollowerSteps = CpuFollowerSteps(model, pool, ranks)
            if self._as_gpus:
                steps = DeviceFollowerSteps(model, pool, ranks, self._geometry, ReferenceOps())
            follower, delay = Follower(model, pool, None, steps, experts=experts), delays(100 + rank)
            while (command := self._commands[rank].get()) is not None:
                delay()
                follower.do(command)
        except Exception as e:
            self._problems.append(e)
            raise

    def close(self) -> None:
        for commands in self._commands.values():
            commands.put(None)
        for thread in self._threads:
            thread.join(30)
        assert not self._problems and not any(thread.is_alive() for thread in self._threads)

    def check_records(self) -> int:
        """All ranks of a group have made the same calls, and have got what was sent to them. Returns their number."""
        for group in self._records.values():
            for one, other in itertools.permutations(group, 2):
                assert _collectives(group[one]) == _collectives(group[other])
                assert _messages(group[one], "send", other) == _messages(group[other], "recv", one)
        return sum(len(one.calls) for group in self._records.values() for one in group.values())


def _collectives(one: RecordedCollectives) -> list[Call]:
    return [call for call in one.calls if call.peer is None]


def _messages(one: RecordedCollectives, name: str, peer: int) -> list[int]:
    return [call.size_bytes for call in one.calls if call.name == name and call.peer == peer]
