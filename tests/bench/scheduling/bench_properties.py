"""A million steps of the scheduler through random histories, the invariants checked after each; by hand.

Every other history is one of groups with roles.

python tests/bench/scheduling/bench_properties.py [STEPS] [FIRST_SEED]
"""

import logging
import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[1]))  # for token_rows, which the fakes use
sys.path.insert(0, str(Path(__file__).parents[2] / "support"))  # for fake_links

from tests.services.scheduler.harness.program import BYTES_PER_STEP, SHAPES, Program
from tests.services.scheduler.harness.world import Shape
from tests.services.scheduler.transfers.transfer_program import TRANSFER_SHAPES, WORKERS, TransferProgram

EVENTS = 420
TELL_EVERY = 50_000  # steps


def main(num_steps: int, seed: int) -> int:
    logging.disable(logging.CRITICAL)  # deaths of workers, by the thousand
    began, counted, failed, told = time.monotonic(), Counter[str](), False, 0
    while counted["steps"] < num_steps:
        rng, has_roles = random.Random(seed), seed % 2
        shapes = TRANSFER_SHAPES if has_roles else SHAPES
        shape = Shape(**{name: rng.choice(values) for name, values in shapes.items()})
        program = TransferProgram(shape, rng.choice(WORKERS)) if has_roles else Program(shape)
        try:
            program.run(rng.randbytes(EVENTS * BYTES_PER_STEP))
        except Exception as e:  # noqa: BLE001 -- whatever it is, the seed is what helps
            failed = True
            print(f"seed {seed}: {type(e).__name__}: {e}; {shape}", flush=True)
        world = program.world
        stats = world.core.stats()
        counted["histories"] += 1
        counted["steps"] += world.num_turns
        counted["plans answered"] += world.num_steps
        counted["requests"] += program.num_requests
        counted["preemptions"] += stats.preemptions_total
        counted["blocks saved to host memory"] += stats.blocks_saved_total
        counted["blocks fetched from there"] += stats.blocks_fetched_total
        counted["blocks copied for forks"] += world.num_copies
        counted["beam searches"] += program.num_searches
        counted["KV transfers"] += stats.transfers_landed_total
        seed += 1
        counted["seconds"] = round(time.monotonic() - began)
        if counted["steps"] >= told + TELL_EVERY or counted["steps"] >= num_steps:
            told = counted["steps"]
            print(", ".join(f"{count:,} {name}" for name, count in counted.items()), flush=True)
    return failed


if __name__ == "__main__":
    numbers = [int(argument.replace("_", "")) for argument in sys.argv[1:]]
    sys.exit(main(*(numbers + [1_000_000, 0][len(numbers) :])))
