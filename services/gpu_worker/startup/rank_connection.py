"""Connects the ranks of a worker when it starts, and those of replicas that have the experts together."""

from functools import partial

import msgspec

from blockyard.services.gpu_worker.parallel.rank_group import GroupStores, RankGroup
from blockyard.services.gpu_worker.parallel.replicas import Connect, ExpertExchange, ReplicaPeers
from blockyard.services.gpu_worker.parallel.stages import ONLY_RANK
from blockyard.services.gpu_worker.parallel.team import RankGroups, RankTeam, connect_groups
from blockyard.services.gpu_worker.startup.backend import Backend
from blockyard.services.gpu_worker.startup.start_report import StartReport
from blockyard.shared.config.services.worker import WorkerConfig

SHARED_GPU = "ranks share a GPU, for checks only"
BY_HOST = "ranks exchange through host memory, without CUDA graphs"


def connect_ranks(
    config: WorkerConfig,
    team: RankTeam | None,
    backend: Backend,
    report: StartReport,
    replicas: ReplicaPeers | None = None,
    exchange: ExpertExchange | None = None,
) -> tuple[RankGroups | None, WorkerConfig]:
    """Waits for the other ranks, and for those of other replicas if experts move between all of them.

    Returns the groups of this replica, None if there is one rank, and the settings that fit them.
    """
    ranks = None
    if team is not None:
        report.phase("connecting ranks")
        ranks = team.connect(partial(connect_groups, backend.connect_ranks, runs_ahead=backend.link.copies))
        config = _fitting(config, ranks.everyone, report)
    if exchange is not None and replicas is not None and config.expert_balance is not None:
        exchange.of_stage = exchange.group
        if team is not None and team.place.shard.size > 1:
            exchange.of_stage = replicas.connect_stage(_by(backend), team.place.shard, team.place.stage)
        exchange.of_stage.least(0)  # NCCL takes its memory with the first collective
    return ranks, config


def connect_replicas(
    config: WorkerConfig, replicas: ReplicaPeers | None, team: RankTeam | None, backend: Backend, report: StartReport
) -> tuple[ExpertExchange | None, WorkerConfig]:
    """Waits for the ranks of other replicas. To be called before `connect_ranks`. team: None: there is one rank.

    Returns what exchanges rows with them, None if this replica has all experts, and the settings that fit.
    """
    if replicas is None:
        return None, config
    group, place = replicas.connect(_by(backend)), ONLY_RANK if team is None else team.place
    return ExpertExchange(group, place.shard), _fitting(config, group, report)


def _by(backend: Backend) -> Connect:
    return lambda shard, meeting, name: backend.connect_ranks(shard, GroupStores(meeting), name)


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
