"""The worker alone on the CPU: its runner against a bare loop of the same layers and against `transformers`.

The bare loop keeps KV dense and in order, knows nothing of slots, plans or sampling, and takes the best of three
linear layers: `F.linear`, `torch.mm` on weights transposed once, oneDNN-packed weights. One run, interleaved,
medians. `python tests/bench/worker/bench_worker_cpu.py [float32|bfloat16] [streams ...]`; transformers is in float32.
"""

import importlib.util
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.messages import Sampling

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "shared" / "demo_model"
NUM_IN, NUM_OUT = 64, 128
ROUNDS = 5

LAYERS = ("qkv", "o", "gate_up", "down")
Linear = Callable[[Tensor, Tensor], Tensor]


def packed(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


KINDS: dict[str, tuple[Callable[[Tensor], Tensor], Linear]] = {
    "F.linear": (lambda w: w.contiguous(), F.linear),
    "mm": (lambda w: w.t().contiguous(), torch.mm),
    "packed": (torch.ops.mkldnn._reorder_linear_weight, packed),
}


class Bare:
    """Llama as short as it can be written: greedy, one batch, all sequences equally long."""

    def __init__(self, model: torch.nn.Module, kind: str) -> None:
        prepare, self.linear = KINDS[kind]
        config = model.config
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.eps, self.hidden = config.rms_norm_eps, config.hidden_size
        self.embed = model.model.embed_tokens.weight.detach()
        self.norm = model.model.norm.weight.detach()
        self.head = prepare(model.lm_head.weight.detach())
        self.blocks = []
        for layer in model.model.layers:
            a, m = layer.self_attn, layer.mlp
            qkv = torch.cat((a.q_proj.weight, a.k_proj.weight, a.v_proj.weight)).detach()
            gate_up = torch.cat((m.gate_proj.weight, m.up_proj.weight)).detach()
            weights = (qkv, a.o_proj.weight.detach(), gate_up, m.down_proj.weight.detach())
            norms = (layer.input_layernorm.weight.detach(), layer.post_attention_layernorm.weight.detach())
            self.blocks.append((*[prepare(w) for w in weights], *norms))
        inverse = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, self.dim, 2).float() / self.dim)
        angles = torch.arange(NUM_IN + NUM_OUT).float()[:, None] * inverse
        self.cos = torch.cat((angles, angles), -1).cos().to(self.norm.dtype)
        self.sin = torch.cat((angles, angles), -1).sin().to(self.norm.dtype)

    def rotate(self, x: Tensor, start: int, end: int) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * self.cos[start:end] + torch.cat((-high, low), -1) * self.sin[start:end]

    def forward(self, ids: Tensor, cache: Tensor, start: int) -> Tensor:
        rows, count = ids.shape
        end, heads, kv_heads = start + count, self.heads, self.kv_heads
        x = F.embedding(ids, self.embed).view(-1, self.hidden)
        for i, (qkv, o, gate_up, down, norm1, norm2) in enumerate(self.blocks):
            y = self.linear(F.rms_norm(x, (self.hidden,), norm1, self.eps), qkv)
            y = y.view(rows, count, heads + 2 * kv_heads, self.dim).transpose(1, 2)
            qk = self.rotate(y[:, : heads + kv_heads], start, end)
            keys, values = cache[i, 0], cache[i, 1]
            keys[:, :, start:end] = qk[:, heads:]
            values[:, :, start:end] = y[:, heads + kv_heads :]
            attended = F.scaled_dot_product_attention(
                qk[:, :heads], keys[:, :, :end], values[:, :, :end], is_causal=count > 1, enable_gqa=True
            )
            x = x + self.linear(attended.transpose(1, 2).reshape(rows * count, -1), o)
            gate, up = self.linear(F.rms_norm(x, (self.hidden,), norm2, self.eps), gate_up).chunk(2, -1)
            x = x + self.linear(F.silu(gate) * up, down)
        last = F.rms_norm(x.view(rows, count, -1)[:, -1], (self.hidden,), self.norm, self.eps)
        return self.linear(last, self.head).argmax(-1)

    def generate(self, prompts: Tensor) -> list[list[int]]:
        rows = len(prompts)
        size = (len(self.blocks), 2, rows, self.kv_heads, NUM_IN + NUM_OUT, self.dim)
        cache = torch.zeros(size, dtype=self.norm.dtype)
        token = self.forward(prompts, cache, 0)
        out = [token.tolist()]
        for i in range(NUM_OUT - 1):
            token = self.forward(token[:, None], cache, NUM_IN + i)
            out.append(token.tolist())
        return [list(column) for column in zip(*out, strict=True)]


def driver_class() -> type:
    """The tests' small scheduler; its folder is not on sys.path."""
    path = ROOT / "tests/support/models/plan_driver.py"
    spec = importlib.util.spec_from_file_location("plan_driver", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["plan_driver"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Driver


def run_worker(runner: Runner, driver: type, prompts: Tensor, **sampling: float) -> list[list[int]]:
    it = driver(runner, seed=None)
    asked = Sampling(max_tokens=NUM_OUT, ignore_eos=True, **({"temperature": 0.0} | sampling))
    streams = [it.add(p, asked) for p in prompts.tolist()]
    it.run()
    return [s.output for s in streams]


def run_transformers(model: torch.nn.Module, prompts: Tensor, threads: int) -> list[list[int]]:
    torch.set_num_threads(threads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=NUM_OUT,
            min_new_tokens=NUM_OUT,
            pad_token_id=0,
        )
    torch.set_num_threads(1)
    return out[:, NUM_IN:].tolist()


def make_worker(dtype: str) -> Runner:
    process = ProcessConfig(name="bench", bus=BusConfig(registry="ipc:///unused", bind="ipc:///unused"))
    config = WorkerConfig(process=process, model_path=str(MODEL), device="cpu", threads=1, dtype=dtype)
    return engine.start(config, lambda *report: None)


def kinds(dtype: str) -> list[str]:
    """`_reorder_linear_weight` of the bare loop packs float32 alone."""
    return [kind for kind in KINDS if kind != "packed" or dtype == "float32"]


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    dtype, numbers = "float32", sys.argv[1:]
    if numbers and not numbers[0].isdecimal():
        dtype, *numbers = numbers
    runner = make_worker(dtype)
    driver = driver_class()
    layers = AutoModelForCausalLM.from_pretrained(MODEL, dtype=getattr(torch, dtype)).eval()
    bare = {kind: Bare(layers, kind) for kind in kinds(dtype)}
    for num in [int(a) for a in numbers] or [1, 16]:
        prompts = torch.randint(100, 4000, (num, NUM_IN), generator=torch.Generator().manual_seed(0))
        runs: dict[str, Callable[[], list[list[int]]]] = {
            "worker": lambda p=prompts: run_worker(runner, driver, p),
            "worker, sampled": lambda p=prompts: run_worker(runner, driver, p, temperature=0.7, top_p=0.95),
            "worker, sampled from all": lambda p=prompts: run_worker(runner, driver, p, temperature=0.7),
            **{f"bare, {kind}": lambda p=prompts, b=b: b.generate(p) for kind, b in bare.items()},
            "transformers, 1 thread": lambda p=prompts: run_transformers(model, p, 1),
            "transformers, 2 threads": lambda p=prompts: run_transformers(model, p, 2),
        }
        times: dict[str, list[float]] = {name: [] for name in runs}
        with torch.inference_mode():
            for round_ in range(ROUNDS + 1):
                for name, run in runs.items():
                    start = time.perf_counter()
                    run()
                    if round_:  # the first warms up
                        times[name].append(time.perf_counter() - start)
        report(num, times)


def report(num: int, times: dict[str, list[float]]) -> None:
    def median(values: list[float]) -> float:
        return sorted(values)[len(values) // 2]

    def best(prefix: str) -> list[float]:
        """The quickest kind of each round."""
        return [min(t) for t in zip(*(v for k, v in times.items() if k.startswith(prefix)), strict=True)]

    for name, values in times.items():
        rate = num * NUM_OUT / median(values)
        print(f"{num:3} streams  {name:26} {1000 * median(values) / NUM_OUT:6.2f} ms/step {rate:8.0f} tokens/s")
    for name in ("bare", "transformers"):
        ratio = median([theirs / ours for theirs, ours in zip(best(name), times["worker"], strict=True)])
        print(f"{num:3} streams  worker against the best {name}: {ratio:.2f}")


if __name__ == "__main__":
    main()
