"""Host memory for KV blocks on a GPU: copies of blocks of an 8B model, alone and beside
products, and the time to first token of a long prompt with blocks in host memory, compared with prefill.

`python tests/bench/worker/bench_swap_gpu.py [--prompt 16384] [--rounds 4] [--blocks 1 16 128 1024]`
"""

import argparse
import importlib.util
import json
import random
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from worker.bench_worker_gpu import CONFIG

from blockyard.services.gpu_worker import engine
from blockyard.services.kv_transfer.host.stream_store import StreamStore
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.messages import Sampling

SHAPE = (32, 3072, 2, 8, 16, 128)  # of the pool: layers, blocks, K and V, heads, tokens, head size
GB = 1e9


def core_loop() -> Any:
    folder = Path(__file__).parents[2] / "support/models"
    for name in ("plan_driver", "core_loop"):
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["core_loop"].CoreLoop


def measure_copies(sizes: list[int]) -> None:
    memory = torch.randint(0, 2**15, SHAPE, dtype=torch.int16, device="cuda").view(torch.bfloat16)
    block_bytes = memory[:, 0].numel() * 2
    start = time.perf_counter()
    store = StreamStore(memory, 2048)
    print(f"pinned {2048 * block_bytes / GB:.1f} GB in {time.perf_counter() - start:.1f} s")
    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    order = list(range(3072))
    random.Random(0).shuffle(order)

    def timed(name: str, run: Any, num: int) -> None:
        total, issue, free = [], [], []
        for _ in range(4):
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start = time.perf_counter()
            begin.record()
            run()
            issue.append(time.perf_counter() - start)
            end.record()
            store.drain()
            total.append(time.perf_counter() - start)
            free.append(begin.elapsed_time(end))
        best, waits, host = (statistics.median(values[1:]) for values in (total, free, issue))
        print(
            f"{name:44} {num:5} blocks {1000 * best:7.2f} ms {num * block_bytes / best / GB:6.1f} GB/s; "
            f"compute waits {waits:7.2f} ms, the host {1000 * host:6.2f} ms"
        )

    for num in sizes:
        near = list(range(num))
        far = random.Random(1).sample(range(2048), num)
        timed("save, adjacent on the host", partial(store.save, order[:num], near), num)
        timed("save, scattered on the host", partial(store.save, order[:num], far), num)
        timed("fetch, adjacent on the host", partial(store.fetch, near, order[:num]), num)
        timed("fetch, scattered on the host", partial(store.fetch, far, order[:num]), num)

    def both() -> None:
        store.save(order[:512], list(range(512)))
        store.fetch(list(range(1024, 1536)), order[:512])

    timed("save, and fetch into the same blocks", both, 1024)

    def products(*copies: Any) -> float:
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(60):
            torch.mm(x, x)
            for copy in copies:
                copy()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    products()
    alone = products()
    saving = products(lambda: store.save(order[:16], list(range(16))))
    fetching = products(lambda: store.fetch(list(range(100, 116)), order[100:116]))
    print(f"60 products {alone:.1f} ms; with a save of 16 blocks before each {saving:.1f}, a fetch {fetching:.1f} ms")


def measure_first_token(num_tokens: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        process = ProcessConfig(name="bench", bus=BusConfig(registry="ipc:///unused", bind="ipc:///unused"))
        config = WorkerConfig(
            process=process,
            model_path=folder,
            device="cuda",
            load_format="dummy",
            max_model_len=num_tokens + 1024,
            num_gpu_blocks_override=(num_tokens + 1024) // 16,
            swap_space_gib=6.0,
            graph_sizes=[1],
        )
        notes: list[str] = []
        runner = engine.start(config, lambda phase, progress, lines: notes.__setitem__(slice(None), lines))
    print("\n".join(notes))
    ids = random.Random(0)
    loop = core_loop()(runner, depth=1, chunk=2048)

    def first_token_s(name: str, prompt: list[int]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        loop.add(name, prompt, Sampling(max_tokens=1, temperature=0.0))
        loop.run()
        return time.perf_counter() - start

    prompts = [ids.choices(range(1000, 100000), k=num_tokens) for _ in range(2)]
    for i in range(rounds):
        new = [first_token_s(f"new {i} {j}", [i, *p[1:]]) for j, p in enumerate(prompts)]
        again = first_token_s(f"again {i}", [i, *prompts[0][1:], 7, 8, 9])  # the other prompt has taken the device
        here = first_token_s(f"here {i}", [i, *prompts[0][1:], 7, 8, 10])
        stats = loop.core.stats()
        print(
            f"round {i}: first token of {num_tokens} tokens, new {1000 * new[0]:.1f} and {1000 * new[1]:.1f} ms, "
            f"fetched {1000 * again:.1f} ms ({again / new[0]:.3f}), found on the device {1000 * here:.1f} ms "
            f"({here / new[0]:.3f}); "
            f"{stats.blocks_saved_total} blocks saved, {stats.blocks_fetched_total} fetched so far"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--blocks", type=int, nargs="*", default=[1, 16, 128, 1024])
    args = parser.parse_args()
    measure_copies(args.blocks)
    torch.cuda.empty_cache()
    measure_first_token(args.prompt, args.rounds)


if __name__ == "__main__":
    main()
