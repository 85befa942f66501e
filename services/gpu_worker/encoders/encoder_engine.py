"""Starts the runner of a model without KV: weights and pooling, and nothing that belongs to blocks or sampling."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blockyard.services.gpu_worker.encoders.encoder_ranks import EncoderFollower, EncoderLeader
from blockyard.services.gpu_worker.encoders.encoder_runner import EncoderRunner
from blockyard.services.gpu_worker.encoders.packed_steps import PackedBatch, PackedSteps
from blockyard.services.gpu_worker.execution.ranks.leader import LeaderPool
from blockyard.services.gpu_worker.loading import checkpoint, checkpoint_check, page_cache
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.models.registry import Build
from blockyard.services.gpu_worker.parallel.loading_slots import loading_slot
from blockyard.services.gpu_worker.parallel.shares import WHOLE
from blockyard.services.gpu_worker.parallel.team import RankGroups, RankTeam
from blockyard.services.gpu_worker.pooling.output import DEFAULT
from blockyard.services.gpu_worker.pooling.selection import choose_output, modules_folder
from blockyard.services.gpu_worker.startup.backend import Backend
from blockyard.services.gpu_worker.startup.rank_connection import connect_ranks
from blockyard.services.gpu_worker.startup.start_report import StartReport, Throttle
from blockyard.shared.config.pooling.pooling_card import make_card
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import ConfigError, LoadError
from blockyard.shared.messages import Geometry, PoolingCard, PoolingTask

# Of texts of first steps. Without graphs a GPU's attention has other tiles for each, which its first use compiles.
FIRST_LENGTHS = (2, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class EncoderStart:
    config: WorkerConfig
    settings: dict[str, Any]  # of config.json
    build: Build
    dtype: torch.dtype
    max_model_len: int
    backend: Backend
    report: StartReport
    team: RankTeam | None  # of the leader, or that this rank is in; None: there is one rank


def start_encoder(start: EncoderStart) -> EncoderRunner:
    """Loads the model and returns its runner. Raises ConfigError or LoadError with a message of one line."""
    config, backend, report, team = start.config, start.backend, start.report, start.team
    if config.kv_transfer is not None:
        raise ConfigError("--kv-transfer-config: this model keeps no KV blocks that it could send")
    if config.pipeline_parallel_size > 1:
        raise ConfigError(f"{config.describe_ranks()}: a model without KV runs in one stage")
    report.note(f"model: {start.settings['architectures'][0]}, {str(start.dtype).removeprefix('torch.')}")
    model, ranks = load_encoder(start)
    choice, output = choose_output(config, start.settings, model)
    report.note(choice.describe())
    task = PoolingTask.EMBED if config.task == "generate" else PoolingTask(config.task)
    card = make_card(task, choice, start.settings, modules_folder(config), start.max_model_len, has_kv=False)
    geometry = geometry_of(model, config, start.max_model_len, card)
    graphs, announce, mirror = None, None, None
    if ranks is not None and team is not None and team.send is not None:
        announce, mirror = EncoderLeader(ranks, team.send).announce, LeaderPool(team.send)
    else:
        graphs = backend.packed_graphs(model, config, geometry, None, has_types=card.has_types)
    threads = None if announce is not None else backend.text_threads(config)  # ranks compute a step in one order
    if threads is not None and threads.num_threads > 1:
        report.note(f"steps: texts are divided among {threads.num_threads} threads")
    steps = PackedSteps(model, output, backend.packed_product(config.batch_invariant), graphs, threads, announce)
    runner = EncoderRunner(model, steps, geometry, mirror)
    report.phase("first step")
    is_eager = graphs is None and backend.link.copies
    first_steps(steps, start.max_model_len, FIRST_LENGTHS if is_eager else FIRST_LENGTHS[:1])
    if graphs is not None:
        report.phase("capturing CUDA graphs")
        report.note(graphs.capture())
    report.phase("ready", 1.0)
    return runner


def follow_encoder(start: EncoderStart) -> EncoderFollower:
    """Loads the share of a rank that is not the leader. Raises ConfigError or LoadError."""
    model, ranks = load_encoder(start)
    assert ranks is not None
    return EncoderFollower(model, ranks, start.backend.packed_product(start.config.batch_invariant))


def load_encoder(start: EncoderStart) -> tuple[Model, RankGroups | None]:
    """Loads this rank's weights. Returns the model and the groups of ranks, None if there is one rank."""
    config, dtype, backend, report, team = start.config, start.dtype, start.backend, start.report, start.team
    backend.end_compiling()
    folder, shard = Path(config.model_path), WHOLE if team is None else team.place.shard

    def place_in(table: WeightTable) -> Model:
        return start.build(start.settings, table)

    declared = place_in(WeightTable(dtype, torch.device("meta"), shard=shard))
    checkpoint_check.check_tensors(declared.table, folder, config.load_format, config.ignore_patterns)
    share = backend.host_share(place_in, dtype, config)
    ranks, config = connect_ranks(config, team, backend, report)
    table = WeightTable(dtype, backend.device, share, shard)
    table.link, table.ranks = backend.link, None if ranks is None else ranks.tensor
    model = place_in(table)
    progress = Throttle(lambda done: report.phase("loading weights", done))
    slot = loading_slot(None if team is None else team.folder.parent, config.max_parallel_loading)
    with torch.inference_mode(), page_cache.read_ahead(config, 0 if team is None else team.place.rank):
        with slot:  # ranks wait for each other behind it
            loaded = checkpoint.load(table, folder, config.load_format, config.ignore_patterns, config.seed, progress)
        report.note(str(loaded), *backend.offload_notes(config), *table.describe_unused())
        report.phase("preparing weights")
        report.note(*model.prepare(start.max_model_len))
        if config.batch_invariant:
            backend.pick_products(model, config, True, report)
    return model, ranks


def geometry_of(model: Model, config: WorkerConfig, max_model_len: int, card: PoolingCard) -> Geometry:
    """The sizes of a worker without blocks."""
    return Geometry(
        num_blocks=0,
        block_size=config.block_size,
        max_model_len=max_model_len,
        vocab_size=model.shape.vocab_size,
        eos_token_ids=[],
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max(config.max_num_batched_tokens, max_model_len),  # a sequence is one step's
        pooling=card,
    )


def first_steps(steps: PackedSteps, max_model_len: int, first_lengths: Sequence[int]) -> None:
    """Runs texts of these lengths, each alone. Raises LoadError if results are not finite."""
    for length in first_lengths:
        lengths = np.array([min(length, max_model_len)])
        ids, skips = np.zeros(lengths[0], np.int64), np.zeros_like(lengths)
        pooled = steps.run(PackedBatch(token_ids=ids, lengths=lengths, skips=skips, options=[(1, DEFAULT)]))
        pooled.done.synchronize()
        if pooled.not_finite().any():
            raise LoadError("a first step makes numbers that are not finite; the weights or --dtype are wrong")
