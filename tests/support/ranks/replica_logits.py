"""Replicas that have the experts together: each writes the logits of its own prompt's chunks to a file.

python -m replica_logits REPLICAS RANKS GROUP-FOLDER CHECKPOINT...

Replica 0 has no rows in some steps, and others have none in some of its own. A second file of each has the logits after
experts have moved.
"""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from model_logits import hidden_in_chunks
from rank_logits import CPU, connect, load, move_experts, prompt

from blockyard.services.gpu_worker.execution.ranks.expert_moves import MovableExperts
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.parallel.meeting import Meeting
from blockyard.services.gpu_worker.parallel.rank_group import GroupStores, connect_cpus
from blockyard.services.gpu_worker.parallel.replicas import ExpertExchange
from blockyard.services.gpu_worker.parallel.shares import WHOLE, Shard, over_replicas
from blockyard.services.gpu_worker.step import Step

# rows of each step, by replica; 0: it has none
STEPS = ((50, 0, 9, 1, 0), (1, 9, 50, 0, 0), (0, 0, 0, 59, 1), (1, 50, 0, 0, 9))


def output(replica: int, *, moved: bool = False) -> str:
    return f"{'moved' if moved else 'logits'}-{replica}.pt"


@torch.inference_mode()
def logits(model: Model, exchange: ExpertExchange, replica: int) -> torch.Tensor:
    """Computes all steps. Where there are no rows, only the layers of experts compute."""
    turns = list(zip(*STEPS[: exchange.group.size], strict=True))
    forward = model.forward

    def serve_others() -> None:
        """Until a step has rows here."""
        while turns:
            exchange.num_rows = max(turns[0])
            if turns.pop(0)[replica]:
                return
            exchange.serve()

    def next_forward(step: Step) -> torch.Tensor:
        serve_others()
        return forward(step)

    model.forward = next_forward  # type: ignore[method-assign]
    pool = KVPool(model.shape, 20, 8, torch.float32, CPU)
    hidden = hidden_in_chunks(model, pool, prompt(), [rows for rows in STEPS[replica] if rows])
    serve_others()
    model.forward = forward  # type: ignore[method-assign]
    return model.logits(hidden)


def run(num_replicas: int, size: int, group: Path, folders: Sequence[Path]) -> None:
    """Runs all ranks of all replicas as processes. Raises CalledProcessError if one fails."""
    group.mkdir()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-m", "replica_logits", str(num_replicas), str(size), str(group)]
    subprocess.run([*command, *map(str, folders)], env=env, check=True)


def run_rank(replica: Shard, rank: int, size: int, group: Path, folders: Sequence[Path]) -> None:
    torch.set_num_threads(1)
    own = group / str(replica.rank)
    own.mkdir(exist_ok=True)
    across = connect_cpus(replica, GroupStores(Meeting(group)), f"rank-{rank}")
    ranks, of_all = None if size == 1 else connect(rank, size, own), across
    if ranks is not None:
        of_all = connect_cpus(over_replicas(ranks.place.shard, replica), GroupStores(Meeting(group)), "all")
    for folder in folders:
        exchange = ExpertExchange(across, WHOLE if ranks is None else ranks.place.shard, of_all)
        model = load(folder, ranks, spread=True, exchange=exchange, moves=True)
        for moved in (False, True):
            if moved:
                move_experts(MovableExperts(model.experts(), ranks, exchange))
            found = logits(model, exchange, replica.rank)
            if rank == 0:
                torch.save(found, folder / output(replica.rank, moved=moved))
    for one in (of_all, None if ranks is None else ranks.everyone):
        if one is not None:
            one.least(0)  # nobody ends while another sends


def main() -> int:
    num_replicas, size, group = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    folders = [Path(folder) for folder in sys.argv[4:]]
    context = multiprocessing.get_context("fork")  # torch has not started a thread yet
    ranks = [
        context.Process(target=run_rank, args=(Shard(i, num_replicas), rank, size, group, folders))
        for i in range(num_replicas)
        for rank in range(size)
    ]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(120)
    failed = [one for one in ranks if one.exitcode != 0]
    for one in failed:
        one.kill()
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
