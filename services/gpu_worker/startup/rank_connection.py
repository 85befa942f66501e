"""Connects the ranks of a worker when it starts."""

from functools import partial

import msgspec

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
    ranks = team.connect(partial(connect_groups, backend.connect_ranks))
    if ranks.everyone.shares_gpu:
        report.note(SHARED_GPU)
        if ranks.everyone.host_waits:
            report.note(BY_HOST)
            config = msgspec.structs.replace(config, enforce_eager=True)
    return ranks, config
