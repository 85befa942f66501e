"""Pipeline stages as processes with the steps of a GPU: when each of them computes which step, and the tokens.

python -m timed_stages STAGES GROUP-FOLDER CHECKPOINT GEOMETRY-FILE

The device of the leader is a thread of its process, so that its host launches steps ahead. A stage takes STAGE_S for a
step. Each rank writes a `Record` to the group's folder.
"""

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from host_streams import HostEvent, HostStream, HostStreams, QueuedGroup, QueuedModel, QueuedOps
from rank_logits import CPU, connect, load
from reference_ops import ReferenceOps, run_ahead
from slot_plans import greedy, plan, prompt_of, started
from torch import Tensor

from blockyard.services.gpu_worker.execution.cuda.follower_steps import DeviceFollowerSteps
from blockyard.services.gpu_worker.execution.pinned_ring import PinnedRing
from blockyard.services.gpu_worker.execution.ranks.follower import Follower
from blockyard.services.gpu_worker.execution.ranks.leader import DeviceMirror, LeaderModel
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.models.stage_model import StageModel
from blockyard.services.gpu_worker.parallel.commands import Command, Followers
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.step import Step
from blockyard.shared.messages import Geometry, SlotRun, StepPlan
from blockyard.shared.messages.base import Frame
from blockyard.shared.process.frame_pipe import FramePipe

STAGE_S = 0.03
NUM_ROUNDS = 6  # plans of each turn
PER_TURN = 2  # sequences
CAPACITY = 8


class Record(msgspec.Struct):
    """Of one rank."""

    begins: list[float] = []  # of steps, by the clock of the machine
    ends: list[float] = []
    tokens: dict[int, list[int]] = {}  # by slot


def plans(num_turns: int) -> list[StepPlan]:
    """The prompts of all sequences, then decodes in turn."""
    slots = range(PER_TURN * num_turns)
    prompts = {slot: prompt_of(5 + slot, slot) for slot in slots}
    starts = [started(slot, prompts[slot], greedy(), [4 * slot, 4 * slot + 1, 4 * slot + 2]) for slot in slots]
    made = [StepPlan(1, 1, [], starts, [], [SlotRun(slot, len(prompts[slot])) for slot in slots])]
    for number in range(num_turns * NUM_ROUNDS):
        first = number % num_turns * PER_TURN
        made.append(plan(number + 2, *range(first, first + PER_TURN)))
    return made


def run_plans(runner: Runner, most_in_flight: int, num_turns: int) -> dict[int, list[int]]:
    """Runs the prompts, then the other plans ahead of their results. Returns the tokens by slot."""
    runner.reset(CAPACITY)
    first, *others = plans(num_turns)
    tokens = {result.slot: list(result.token_ids) for result in runner.execute(first)}
    while others or runner.in_flight:
        while others and runner.in_flight < most_in_flight:
            runner.launch(others.pop(0))
        for done in runner.collect():
            for result in done.all_results:
                tokens[result.slot] += result.token_ids
        time.sleep(0.0005)
    return tokens


def run(num_stages: int, group: Path, folder: Path, geometry: Geometry) -> list[Record]:
    """Runs all ranks as processes. Returns the records by stage. Raises CalledProcessError if one fails."""
    group.mkdir()
    file = group / "geometry"
    file.write_bytes(msgspec.msgpack.encode(geometry))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-m", "timed_stages", str(num_stages), str(group), str(folder), str(file)]
    subprocess.run(command, env=env, check=True)
    records = [msgspec.json.decode((group / f"record-{rank}").read_bytes(), type=Record) for rank in range(num_stages)]
    return [*records[1:], records[0]]


def load_timed(folder: Path, rank: int, num_stages: int, group: Path) -> tuple[Model, Any, Record]:
    ranks, record = connect(rank, 1, group, num_stages, runs_ahead=True), Record()
    model = load(folder, ranks)
    assert isinstance(model, StageModel)
    forward = model._decoder.forward

    def timed(step: Step) -> Tensor:
        record.begins.append(time.monotonic())
        found = forward(step)
        time.sleep(STAGE_S)
        record.ends.append(time.monotonic())
        return found

    model._decoder.forward = timed  # type: ignore[method-assign]
    return model, ranks, record


def make_pool(model: Model, geometry: Geometry) -> KVPool:
    return KVPool(model.shape, geometry.num_blocks, geometry.block_size, torch.float32, CPU)


def lead(ends: Sequence[socket.socket], num_stages: int, group: Path, folder: Path, geometry: Geometry) -> Record:
    stage_model, ranks, record = load_timed(folder, 0, num_stages, group)
    pipes = [FramePipe[Command](end, Command) for end in ends]

    def send(frame: Frame, to: Followers = Followers.ALL) -> None:
        if to is not Followers.LAST_STAGE:
            for pipe in pipes:
                pipe.send(frame)

    steps = HostStream()
    link = HostStreams(steps)
    beside = cast("Any", QueuedGroup(ranks.beside_steps, link.beside))
    queued = QueuedModel(stage_model, steps, cast("StageModel", stage_model)._decoder.hidden_size)
    model = LeaderModel(cast("Model", queued), ranks, send)
    runner = Runner(model, make_pool(stage_model, geometry), geometry, None, lambda runner: None, send=send)
    mirror = DeviceMirror(send, replace(ranks, beside_steps=beside), link)
    ring = PinnedRing(8, CAPACITY, link, lambda: HostEvent(steps))
    run_ahead(runner, CAPACITY, records_layers=False, masks=False, ops=QueuedOps(steps), mirror=mirror, ring=ring)
    record.tokens = run_plans(runner, num_stages + 1, num_stages)
    link.beside.synchronize()
    return record


def follow(end: socket.socket, rank: int, num_stages: int, group: Path, folder: Path, geometry: Geometry) -> Record:
    model, ranks, record = load_timed(folder, rank, num_stages, group)
    pool, pipe = make_pool(model, geometry), FramePipe[Command](end, Command)
    follower = Follower(model, pool, None, DeviceFollowerSteps(model, pool, ranks, geometry, ReferenceOps()))
    while (command := pipe.receive()) is not None:
        follower.do(command)
    return record


def main() -> int:
    num_stages, group, folder = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    geometry = msgspec.msgpack.decode(Path(sys.argv[4]).read_bytes(), type=Geometry)
    pairs = [socket.socketpair() for _ in range(1, num_stages)]

    def run_rank(rank: int) -> None:
        torch.set_num_threads(1)
        for number, (ours, its) in enumerate(pairs, 1):
            if rank != 0:
                ours.close()
            if rank != number:
                its.close()
        if rank == 0:
            record = lead([ours for ours, _ in pairs], num_stages, group, folder, geometry)
        else:
            record = follow(pairs[rank - 1][1], rank, num_stages, group, folder, geometry)
        (group / f"record-{rank}").write_bytes(msgspec.json.encode(record))

    context = multiprocessing.get_context("fork")  # torch has not started a thread yet
    ranks = [context.Process(target=run_rank, args=(rank,)) for rank in range(num_stages)]
    for process in ranks:
        process.start()
    for pair in pairs:
        for end in pair:
            end.close()
    for process in ranks:
        process.join(60)
    failed = [process for process in ranks if process.exitcode != 0]
    for process in failed:
        process.kill()
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
