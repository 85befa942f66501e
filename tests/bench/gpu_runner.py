"""A worker's runner on a GPU, for scripts that send it plans. FOLDER needs config.json alone: weights are random."""

import time
from pathlib import Path

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.worker import WorkerConfig


def start_runner(folder: Path, sequences: int, length: int, **fields: object) -> Runner:
    """With blocks for so many sequences of `length` tokens; `fields` of WorkerConfig. Prints how long it took."""
    process = ProcessConfig(name="bench", bus=BusConfig(registry="ipc:///unused", bind="ipc:///unused"))
    config = WorkerConfig(
        process=process,
        model_path=str(folder),
        device="cuda",
        load_format="dummy",
        max_model_len=length,
        num_gpu_blocks_override=sequences * -(-length // 16) + 1,
        **fields,
    )
    notes: list[str] = []
    began = time.perf_counter()
    runner = engine.start(config, lambda phase, done, lines: notes.__setitem__(slice(None), lines))
    print(f"ready after {time.perf_counter() - began:.1f} s; {'; '.join(notes[-3:])}", flush=True)
    return runner
