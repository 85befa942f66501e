"""One rank of a group: the logits of tiny checkpoints at every position of a prompt, which the leader writes to files.

python -m rank_logits RANK SIZE GROUP-FOLDER [--spread] CHECKPOINT...

--spread: ranks have some experts whole.
"""

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
    arguments = [str(size), str(group), *flags, *map(str, folders)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-m", "rank_logits"]
    ranks = [subprocess.Popen([*command, str(rank), *arguments], env=env) for rank in range(size)]
    try:
        for rank in ranks:
            if rank.wait(120):
                raise subprocess.CalledProcessError(rank.returncode, "rank_logits")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def main() -> None:
    torch.set_num_threads(1)
    rank, size, group = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    ranks = connect_cpus(Shard(rank, size), group)
    spread = sys.argv[4] == "--spread"
    for folder in map(Path, sys.argv[4 + spread :]):
        found = logits(load(folder, ranks, spread=spread))
        if ranks.is_leader:
            torch.save(found, folder / OUTPUT)


if __name__ == "__main__":
    main()
