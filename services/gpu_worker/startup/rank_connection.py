"""Connects the ranks of a worker when it starts, and those of replicas that have the experts together."""

from functools import partial

import msgspec

from blockyard.services.gpu_worker.parallel.meeting import Meeting
from blockyard.services.gpu_worker.parallel.rank_group import GroupStores, RankGroup
from blockyard.services.gpu_worker.parallel.replicas import ExpertExchange, ReplicaPeers
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.parallel.team import RankGroups, RankTeam, connect_groups
from blockyard.services.gpu_worker.startup.backend import Backend
from blockyard.services.gpu_worker.startup.start_report import StartReport
from blockyard.shared.config.services.worker import WorkerConfig

SHARED_GPU = "ranks share a GPU, for checks only"
BY_HOST = "ranks exchange through host memory, without CUDA graphs"


def connect_ranks(
    config: WorkerConfig, team: RankTeam | None, backend: Backend, report: StartReport
) -> tuple[RankGroups | None, WorkerConfig]:
    """Waits for the other ranks. Returns their groups, None if there is one rank, and the settings that fit them."""
    if team is None:
        return None, config
    report.phase("connecting ranks")
    ranks = team.connect(partial(connect_groups, backend.connect_ranks, runs_ahead=backend.link.copies))
    return ranks, _fitting(config, ranks.everyone, report)


def connect_replicas(
    config: WorkerConfig, replicas: ReplicaPeers | None, shard: Shard, backend: Backend, report: StartReport
) -> tuple[ExpertExchange | None, WorkerConfig]:
    """Waits for the ranks of other replicas. To be called before `connect_ranks`. shard: of this rank in its replica.

    Returns what exchanges rows with them, None if this replica has all experts, and the settings that fit.
    """
    if replicas is None:
        return None, config

    def connect(replica: Shard, meeting: Meeting, name: str) -> RankGroup:
        return backend.connect_ranks(replica, GroupStores(meeting), name)

    group = replicas.connect(connect)
    return ExpertExchange(group, shard), _fitting(config, group, report)


def free_of_all(config: WorkerConfig, backend: Backend, exchange: ExpertExchange | None) -> int:
    """Returns the free memory of a device in bytes, and of several replicas the least: stages have the same layers in
    all of them."""
    free = backend.free_bytes(config)
    return free if exchange is None else exchange.group.least(free)


def _fitting(config: WorkerConfig, group: RankGroup, report: StartReport) -> WorkerConfig:
    """Returns the settings that fit a group."""
    if not group.shares_gpu:
        return config
    report.note(SHARED_GPU)
    if not group.host_waits:
        return config
    report.note(BY_HOST)
    return msgspec.structs.replace(config, enforce_eager=True)
