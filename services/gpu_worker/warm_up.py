"""Steps of made-up prompts before a worker is ready: kernels are compiled and loaded by them, not by the first request.

What of it is compiled stays in Triton's cache on disk: a second start takes as long as the steps themselves.
"""

from array import array

from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import Sampling, SlotRun, SlotStart, StepPlan

LENGTHS = (16, 100, 200, 400, 800)  # tokens of prompts: their attention is shared by fewer programs the longer they are
GREEDY = Sampling(2, temperature=0.0, ignore_eos=True)


def warm_up(runner: Runner) -> int:
    """Runs prompts alone, then one beside a decode. Slots are dropped again; how many steps there were."""
    shape = runner.geometry
    room = (shape.num_blocks - 1) * shape.block_size - 1
    most = min(shape.max_num_batched_tokens, shape.max_model_len - 2, room)
    if most < 2:
        return 0
    lengths = [*(n for n in LENGTHS if n < most), most]
    runner.reset(2)
    number = 0
    for length in lengths:
        number += 1
        starts = [_start(0, length, shape.block_size)]
        runner.execute(StepPlan(0, number, [0], starts, [], [SlotRun(0, length)]))
    beside = min(lengths[0], most - 1)
    starts = [_start(0, 1, shape.block_size), _start(1, beside, shape.block_size, first_block=1)]
    runner.execute(StepPlan(0, number + 1, [0], starts, [], [SlotRun(0, 1), SlotRun(1, beside)]))
    runner.reset(0)
    return number + 1


def _start(slot: int, length: int, block_size: int, first_block: int = 0) -> SlotStart:
    blocks = list(range(first_block, first_block + -(-(length + 1) // block_size)))
    ids = array("I", [0]) * length
    return SlotStart(slot, ids.tobytes(), length, 0, blocks, GREEDY, 0)
