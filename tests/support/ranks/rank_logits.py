"""A group of ranks: the logits of tiny checkpoints at every position of a prompt, which the leader writes to files.

A checkpoint with a folder ADAPTER has its adapter in all rows. --spread: ranks have some experts whole. --moved: these
have traded their ranks and places, after a first pass. --fully-sharded: of adapters ranks divide both matrices.
--as-gpu: adapters are in the places of a GPU, in plain torch. --transformers: models run by their class there. Ranks
are forks of one process, which has loaded torch for all groups.
"""

import functools
import multiprocessing
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forks import Forks
from model_logits import hidden_in_chunks
from placed_adapters import adapt_model
from tiny_checkpoint import VOCAB

from blockyard.services.gpu_worker.execution.ranks.expert_moves import MovableExperts
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.loading import checkpoint
from blockyard.services.gpu_worker.loading.hf_config import read_config
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.models.registry import find_family
from blockyard.services.gpu_worker.parallel.commands import TradeExperts
from blockyard.services.gpu_worker.parallel.expert_balance import first_owners
from blockyard.services.gpu_worker.parallel.meeting import Meeting
from blockyard.services.gpu_worker.parallel.rank_group import connect_cpus
from blockyard.services.gpu_worker.parallel.replicas import ExpertExchange
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.parallel.stages import Stage, place_of, ranges_of
from blockyard.services.gpu_worker.parallel.team import RankGroups, connect_groups
from blockyard.services.gpu_worker.startup.stage_choice import make_stage_model

CPU = torch.device("cpu")
OUTPUT = "logits.pt"
ADAPTER, ADDED = "adapter", "added"  # a folder, and a file with the number of tokens that the adapter adds
SPREAD, MOVED, FULLY_SHARDED, TRANSFORMERS = "--spread", "--moved", "--fully-sharded", "--transformers"
AS_GPU = "--as-gpu"
CHUNKS = [50, 1, 9]


def prompt(num_added: int = 0) -> list[int]:
    """num_added: tokens that an adapter adds to the vocabulary."""
    ids: list[int] = np.random.default_rng(4).integers(2, VOCAB, sum(CHUNKS)).tolist()
    ids[3 : 3 + 2 * num_added : 2] = range(VOCAB, VOCAB + num_added)
    return ids


def connect(rank: int, size: int, group: Path, num_stages: int = 1, *, runs_ahead: bool = False) -> RankGroups:
    """size: ranks of a stage. runs_ahead: with the steps of a GPU."""
    return connect_groups(connect_cpus, place_of(rank, size, num_stages), Meeting(group), runs_ahead=runs_ahead)


def load(
    folder: Path,
    ranks: RankGroups | None,
    *,
    spread: bool = False,
    fully_sharded: bool = False,
    exchange: ExpertExchange | None = None,
    model_impl: str = "auto",
    as_gpu: bool = False,
    moves: bool = False,
) -> Model:
    """Stages have as many layers each, the last may have more. fully_sharded: of adapters."""
    settings = read_config(folder, {}, lambda note: None)
    shard = Shard() if ranks is None else ranks.place.shard
    build = partial(find_family(settings, model_impl), settings)
    table = WeightTable(torch.float32, CPU, shard=shard)
    table.ranks, table.spreads_experts = None if ranks is None else ranks.tensor, spread
    table.moves_experts = moves
    if exchange is not None:
        table.exchange, table.replica = exchange, exchange.group.shard
    if ranks is not None and ranks.place.num_stages > 1:
        whole, size = build(WeightTable(torch.float32, torch.device("meta"), shard=shard)), ranks.place.num_stages
        each = whole.shape.num_layers // size
        layers = ranges_of([*[each] * (size - 1), whole.shape.num_layers - each * (size - 1)])
        table.stage, table.whole = Stage(ranks.place.stage, size, layers[ranks.place.stage]), whole.table
    model = build(table)
    if table.stage is not None and ranks is not None:
        model = make_stage_model(model, table.stage, ranks)
    checkpoint.load(table, folder, "auto", [], 0, lambda done: None)
    model.prepare(256)
    if (folder / ADAPTER).exists():
        undivided = load_undivided(folder, model_impl)
        adapt_model(model, [folder / ADAPTER], undivided, fully_sharded=fully_sharded, as_gpu=as_gpu)
        forward, compute_logits = model.forward, model.logits

        def begin(rows: int) -> None:
            model.adapter_rows.begin(torch.zeros(rows, dtype=torch.int32))

        model.forward = lambda step: (begin(len(step.token_ids)), forward(step))[1]  # type: ignore[method-assign]
        model.logits = lambda hidden: (begin(len(hidden)), compute_logits(hidden))[1]  # type: ignore[method-assign]
    return model


def load_undivided(folder: Path, model_impl: str = "auto") -> Model:
    """The model of all ranks, which is only declared."""
    settings = read_config(folder, {}, lambda note: None)
    return find_family(settings, model_impl)(settings, WeightTable(torch.float32, torch.device("meta")))


@torch.inference_mode()
def logits(model: Model, num_added: int = 0) -> torch.Tensor:
    pool = KVPool(model.shape, 20, 8, torch.float32, CPU)
    return model.logits(hidden_in_chunks(model, pool, prompt(num_added), CHUNKS))


@torch.inference_mode()
def move_experts(movable: MovableExperts) -> None:
    """Experts of each layer take the ranks and places of others, each several times."""
    for stage, nums in enumerate(movable.num_experts):
        for layer, num in enumerate(nums):
            owners, random, pairs = first_owners(num, movable.num_ranks), np.random.default_rng(layer), []
            for _ in range(2 * num):
                one, other = random.choice(num, 2, replace=False).tolist()
                if owners[one] != owners[other]:
                    owners[one], owners[other] = owners[other], owners[one]
                    pairs.append((one, other))
            movable.do(TradeExperts(stage, layer, pairs))


@functools.cache
def _forks() -> Forks:
    return Forks("import rank_logits", {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def run(size: int, group: Path, folders: Sequence[Path], *flags: str, num_stages: int = 1) -> None:
    """Runs all ranks as processes. size: of a stage."""
    group.mkdir()
    _forks().run(
        f"rank_logits.run_ranks({size}, {num_stages}, {str(group)!r}, {[*map(str, folders)]!r}, {flags!r})", group
    )


def run_rank(rank: int, size: int, num_stages: int, group: Path, folders: Sequence[Path], flags: set[str]) -> None:
    torch.set_num_threads(1)
    ranks, models = connect(rank, size, group, num_stages), list[Model]()  # with what they send
    fields: dict[str, Any] = {"spread": SPREAD in flags, "fully_sharded": FULLY_SHARDED in flags}
    fields |= {"model_impl": "transformers" if TRANSFORMERS in flags else "auto", "as_gpu": AS_GPU in flags}
    fields["moves"] = MOVED in flags
    for folder in folders:
        models.append(load(folder, ranks, **fields))
        added = folder / ADDED
        found = logits(models[-1], int(added.read_text()) if added.exists() else 0)
        if MOVED in flags:
            move_experts(MovableExperts(models[-1].experts(), ranks))
            found = logits(models[-1])
        if rank == 0:
            torch.save(found, folder / OUTPUT)
    ranks.everyone.least(0)  # the leader ends when nobody sends any more


def run_ranks(size: int, num_stages: int, group: str, folders: Sequence[str], flags: Sequence[str]) -> None:
    """Runs in a fork."""
    if TRANSFORMERS in flags:
        find_family({"architectures": ["LlamaForCausalLM"]}, "transformers")  # loads it once for all ranks
    context = multiprocessing.get_context("fork")  # torch has not started a thread yet
    of_all = size, num_stages, Path(group), [*map(Path, folders)], set(flags)
    ranks = [context.Process(target=run_rank, args=(rank, *of_all)) for rank in range(size * num_stages)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    failed = [rank for rank in ranks if rank.exitcode != 0]
    for rank in failed:
        rank.kill()
    assert not failed, f"{len(failed)} of {len(ranks)} ranks"
