"""Decides which layers the pipeline stages of a worker have."""

import math

import torch
from torch import Tensor

from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.models.stage_model import StageModel
from blockyard.services.gpu_worker.parallel.stages import Stage, StageSizes, divide_layers, ranges_of
from blockyard.services.gpu_worker.parallel.team import RankGroups, RankTeam
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import ConfigError


def choose_stage(
    whole: Model, team: RankTeam, config: WorkerConfig, memory: int, kv_dtype: torch.dtype
) -> Stage | None:
    """Returns the stage of a rank; None: there is one. Raises ConfigError for a model that cannot be divided so.

    whole: the declared model with all layers. memory: bytes for weights and KV blocks of each rank.
    """
    number, size = team.place.stage, team.place.num_stages
    if size == 1:
        return None
    flag = f"--pipeline-parallel-size {size}"
    if not isinstance(whole, Decoder):
        raise ConfigError(f"{flag}: this model runs by its class in transformers, whose layers are not divided")
    num = whole.shape.num_layers
    if size > num:
        raise ConfigError(f"{flag} is more than the {num} layers of the model")

    def decide() -> list[int]:
        return config.pipeline_layers or divide_layers(sizes_of(whole, config, memory, kv_dtype), size)

    counts = team.divide(decide)
    if len(counts) != size or sum(counts) != num or min(counts) < 1:
        asked = ",".join(map(str, counts))
        raise ConfigError(f"--pipeline-layers {asked}: {size} numbers of layers are needed, of {num} in all")
    return Stage(number, size, ranges_of(counts)[number])


def sizes_of(whole: Decoder, config: WorkerConfig, memory: int, kv_dtype: torch.dtype) -> StageSizes:
    return StageSizes(
        layers=whole.layer_bytes,
        block=[math.prod(layer.kept) * config.block_size * kv_dtype.itemsize for layer in whole.shape.attention],
        first=_num_bytes(whole.embeddings()),
        last=_num_bytes([one for linear in whole.head_linears() for one in linear.method.tensors().values()]),
        memory=memory,
    )


def make_stage_model(decoder: Model, stage: Stage, ranks: RankGroups) -> StageModel:
    """decoder: with the layers of the stage."""
    assert isinstance(decoder, Decoder) and ranks.stage_link is not None
    return StageModel(decoder, stage, ranks.stage_link)


def describe_stage(stage: Stage) -> str:
    """Returns a line for the start's report of the leader, which is in the last stage."""
    own = stage.layers
    return f"pipeline: {stage.size} stages; the last one has layers {own.start} to {own.stop - 1}"


def _num_bytes(tensors: list[Tensor]) -> int:
    return sum(one.nbytes for one in tensors)
