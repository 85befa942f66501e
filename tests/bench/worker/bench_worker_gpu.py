"""The worker alone on a GPU: Llama-3.1-8B's shape with dummy weights, bfloat16, at several batch sizes.

`python tests/bench/worker/bench_worker_gpu.py [streams ...]`
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from worker.bench_worker_cpu import driver_class

from blockyard.services.gpu_worker import engine
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.messages import Sampling

NUM_IN, NUM_OUT = 512, 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "eos_token_id": [128001, 128008, 128009],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        process = ProcessConfig(name="bench", bus=BusConfig(registry="ipc:///unused", bind="ipc:///unused"))
        config = WorkerConfig(process=process, model_path=folder, device="cuda", load_format="dummy")
        notes: list[str] = []
        runner = engine.start(config, lambda phase, progress, lines: notes.__setitem__(slice(None), lines))
    print("\n".join(notes))
    driver = driver_class()
    for num in [int(a) for a in sys.argv[1:]] or [1, 16, 64]:
        for name, sampling in (("greedy", {"temperature": 0.0}), ("sampled", {"temperature": 0.8, "top_p": 0.95})):
            it = driver(runner, num_slots=256, chunk=2048, seed=None)
            prompts = torch.randint(0, 128000, (num, NUM_IN), generator=torch.Generator().manual_seed(num)).tolist()
            streams = [
                it.add(p, Sampling(max_tokens=NUM_OUT, ignore_eos=True, seed=i, **sampling))
                for i, p in enumerate(prompts)
            ]
            torch.cuda.synchronize()
            start = time.perf_counter()
            while not all(s.output for s in streams):
                it.queued.append(it.plan())
                it.step()
            first = time.perf_counter() - start
            done = sum(len(s.output) for s in streams)
            it.run()
            rest = time.perf_counter() - start - first
            assert all(len(s.output) == NUM_OUT and not s.detail for s in streams)
            rate = (num * NUM_OUT - done) / rest
            print(f"{num:4} streams, {name}: prompts in {first:.3f} s, then {rate:,.0f} tokens/s")


if __name__ == "__main__":
    main()
