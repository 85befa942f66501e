"""A group of ranks: the logits of tiny checkpoints at every position of a prompt, which the leader writes to files.

python -m rank_logits SIZE GROUP-FOLDER [--spread] CHECKPOINT...

--spread: ranks have some experts whole. Ranks are forks of one process, which has loaded torch for all of them.
"""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from model_logits import hidden_in_chunks
from tiny_checkpoint import VOCAB

from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.loading import checkpoint
from blockyard.services.gpu_worker.loading.hf_config import read_config
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.models.registry import find_family
from blockyard.services.gpu_worker.parallel.rank_group import RankGroup, connect_cpus
from blockyard.services.gpu_worker.parallel.shares import Shard

CPU = torch.device("cpu")
OUTPUT = "logits.pt"
CHUNKS = [50, 1, 9]


def prompt() -> list[int]:
    return np.random.default_rng(4).integers(2, VOCAB, sum(CHUNKS)).tolist()


def load(folder: Path, ranks: RankGroup | None, *, spread: bool = False) -> Model:
    settings = read_config(folder, {}, lambda note: None)
    table = WeightTable(torch.float32, CPU, shard=Shard() if ranks is None else ranks.shard)
    table.ranks, table.spreads_experts = ranks, spread
    model = find_family(settings)(settings, table)
    checkpoint.load(table, folder, "auto", [], 0, lambda done: None)
    model.prepare(256)
    return model


@torch.inference_mode()
def logits(model: Model) -> torch.Tensor:
    pool = KVPool(model.shape, 20, 8, torch.float32, CPU)
    return model.logits(hidden_in_chunks(model, pool, prompt(), CHUNKS))


def run(size: int, group: Path, folders: Sequence[Path], *flags: str) -> None:
    """Runs all ranks as processes. Raises CalledProcessError if one fails."""
    group.mkdir()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-m", "rank_logits", str(size), str(group), *flags, *map(str, folders)]
    subprocess.run(command, env=env, check=True)


def run_rank(shard: Shard, group: Path, folders: Sequence[Path], spread: bool) -> None:
    torch.set_num_threads(1)
    ranks = connect_cpus(shard, group)
    for folder in folders:
        found = logits(load(folder, ranks, spread=spread))
        if ranks.is_leader:
            torch.save(found, folder / OUTPUT)


def main() -> int:
    size, group = int(sys.argv[1]), Path(sys.argv[2])
    spread = sys.argv[3] == "--spread"
    folders = [Path(folder) for folder in sys.argv[3 + spread :]]
    context = multiprocessing.get_context("fork")  # torch has not started a thread yet
    ranks = [context.Process(target=run_rank, args=(Shard(rank, size), group, folders, spread)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    failed = [rank for rank in ranks if rank.exitcode != 0]
    for rank in failed:
        rank.kill()
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
