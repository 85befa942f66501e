"""Runs random steps on a GPU and prints the kernels that Triton compiled after the worker was ready, as a JSON list.

python -m late_compiles FOLDER     (of a tiny checkpoint; TRITON_CACHE_DIR names an empty folder)
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import triton
from plan_driver import Driver
from tiny_models import VOCAB, start

from blockyard.shared.messages import Sampling

LENGTH, STREAMS = 190, 120


def compiled_late(folder: Path) -> list[str]:
    runner = start(
        folder,
        device="cuda",
        max_model_len=LENGTH + 64,
        max_num_batched_tokens=256,
        max_num_seqs=64,
        num_gpu_blocks_override=4000,
    )
    names: list[str] = []

    def on_compile(*, src: Any, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            names.append(f"{src.name} {src.constants} {src.attrs}")

    triton.knobs.compilation.listener = on_compile
    rng = np.random.default_rng(0)
    driver = Driver(runner, num_slots=60, depth=3, chunk=87)
    for i in range(STREAMS):
        prompt = rng.integers(2, VOCAB, int(rng.integers(1, LENGTH))).tolist()
        edits = {} if i % 3 else {"presence_penalty": 0.5, "num_logprobs": i % 6}
        driver.add(
            prompt, Sampling(1 + random.Random(i).randrange(60), 0.8 * (i % 2), seed=i, ignore_eos=True, **edits)
        )
    driver.run()
    return names


if __name__ == "__main__":
    print(json.dumps(compiled_late(Path(sys.argv[1]))))
