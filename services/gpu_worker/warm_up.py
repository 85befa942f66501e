"""Runs dummy prompts before a worker is ready, so that the first request waits for no compilation.

Triton caches compiled kernels on disk: a second start only runs the steps.
"""

import logging
from array import array

from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.errors import LoadError
from blockyard.shared.messages import FinishReason, Sampling, SlotResult, SlotRun, SlotStart, StepPlan

log = logging.getLogger(__name__)

LENGTHS = (16, 100, 200, 400, 800)  # tokens of prompts: each has its own number of KV splits
GREEDY = Sampling(2, temperature=0.0, ignore_eos=True)


def first_step(runner: Runner) -> None:
    """Runs a prompt of two tokens. Raises LoadError if its logits are not finite."""
    shape = runner.geometry
    length = min(2, shape.max_model_len - 1, (shape.num_blocks - 1) * shape.block_size - 1)
    if length < 1:
        return
    runner.reset(1)
    plan = StepPlan(0, 1, [0], [_start(0, length, shape.block_size)], [], [SlotRun(0, length)])
    _check([runner.execute(plan)])
    runner.reset(0)


def warm_up(runner: Runner) -> int:
    """Runs prompts alone, then one beside a decode, and drops the slots. Returns the number of steps.

    Raises LoadError if no step has finite logits.
    """
    shape = runner.geometry
    room = (shape.num_blocks - 1) * shape.block_size - 1
    most = min(shape.max_num_batched_tokens, shape.max_model_len - 2, room)
    if most < 2:
        return 0
    lengths = [*(n for n in LENGTHS if n < most), most]
    runner.reset(2)
    number = 0
    done: list[list[SlotResult]] = []
    for length in lengths:
        number += 1
        starts = [_start(0, length, shape.block_size)]
        done.append(runner.execute(StepPlan(0, number, [0], starts, [], [SlotRun(0, length)])))
    beside = min(lengths[0], most - 1)
    starts = [_start(0, 1, shape.block_size), _start(1, beside, shape.block_size, first_block=1)]
    done.append(runner.execute(StepPlan(0, number + 1, [0], starts, [], [SlotRun(0, 1), SlotRun(1, beside)])))
    runner.reset(0)
    _check(done)
    return number + 1


def _check(steps: list[list[SlotResult]]) -> None:
    """Raises LoadError if every step failed. Warns if some did: dummy prompts may fail with correct weights."""
    failed = [result for step in steps for result in step if result.finish is FinishReason.FAILED]
    if not failed:
        return
    text = f"{failed[0].detail} in a first step; the weights, the rope parameters in config.json or --dtype are wrong"
    if all(any(result.finish is FinishReason.FAILED for result in step) for step in steps):
        raise LoadError(text)
    log.warning("%d of %d first steps fail: %s", len(failed), len(steps), text)


def _start(slot: int, length: int, block_size: int, first_block: int = 0) -> SlotStart:
    blocks = list(range(first_block, first_block + -(-(length + 1) // block_size)))
    ids = array("I", [0]) * length
    return SlotStart(slot, ids.tobytes(), length, 0, blocks, GREEDY, 0)
