"""The tables that a rank's model is built on: one with memory for its weights, and one that only declares them."""

from pathlib import Path
from typing import Any

import torch

from blockyard.services.gpu_worker.kv import scales as kv_scales
from blockyard.services.gpu_worker.loading import checkpoint
from blockyard.services.gpu_worker.loading.expert_loads import ExpertLoads
from blockyard.services.gpu_worker.loading.weights import HostShare, WeightTable
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.models.registry import Build
from blockyard.services.gpu_worker.parallel.replicas import ExpertExchange
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.parallel.stages import Stage
from blockyard.services.gpu_worker.parallel.team import RankGroups
from blockyard.services.gpu_worker.startup.backend import Backend
from blockyard.shared.config.services.worker import WorkerConfig


def make_table(
    config: WorkerConfig,
    dtype: torch.dtype,
    backend: Backend,
    share: HostShare,
    shard: Shard,
    ranks: RankGroups | None,
    exchange: ExpertExchange | None,
) -> WeightTable:
    """Returns the table that a model's layers place this rank's weights in. share: of weights in host memory."""
    table = WeightTable(dtype, backend.device, share, shard)
    table.link, table.spreads_experts, table.replica = backend.link, config.expert_parallel, replica_of(config)
    table.moves_experts = config.expert_balance is not None
    table.ranks = None if ranks is None else ranks.tensor
    table.exchange = exchange
    table.expert_loads = ExpertLoads(backend.device, backend.link) if config.expert_metrics else None
    return table


def declare(
    build: Build,
    settings: dict[str, Any],
    dtype: torch.dtype,
    config: WorkerConfig,
    shard: Shard,
    stage: Stage | None = None,
) -> Model:
    """Builds a rank's model without memory. stage: None for all layers."""
    table = WeightTable(dtype, torch.device("meta"), shard=shard)
    table.spreads_experts, table.replica, table.stage = config.expert_parallel, replica_of(config), stage
    model = build(settings, table)
    kv_scales.place_scales(table, model.shape.num_layers, kv_scales.are_in_checkpoint(config))
    return model


def replica_of(config: WorkerConfig) -> Shard:
    """Returns this worker's place among those that have the experts together."""
    return Shard(config.replica, config.expert_replicas)


def with_headers(family: Build, folder: Path, config: WorkerConfig) -> Build:
    """Makes a family's model know what its checkpoint has, whatever the table."""
    headers = checkpoint.read_headers(folder, config.load_format, config.ignore_patterns)

    def build(settings: dict[str, Any], table: WeightTable) -> Model:
        table.headers = headers
        return family(settings, table)

    return build
