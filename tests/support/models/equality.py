"""The same requests scheduled in several ways on one real model; each choice is compared with its output alone.

Uses the scheduler's core and runners in float32, without services.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from core_loop import CoreLoop
from quantized_checkpoint import Checkpoints
from ties import Score, Ties
from tiny_models import BY_NAME, VOCAB, greedy_score, start
from torch import Tensor

from blockyard.kernels.sampling.philox_gumbel import gumbel_rows, split_seed
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import Sampling, Stats

MAX_MODEL_LEN = 256
BLOCK_BYTES = 3 * 2 * 2 * 8 * 16 * 4  # bytes of the tiny model: layers, K and V, heads, tokens, head size, float32
FEW = 36  # blocks, so that not all requests fit


@dataclass(frozen=True)
class Request:
    name: str
    prompt: list[int]
    sampling: Sampling
    n: int = 1


def requests(count: int, max_tokens: int, first: int = 0) -> list[Request]:
    """Alternately greedy and seeded, every third with three choices; some share a prefix."""
    made = []
    for i in range(first, first + count):
        rng = np.random.default_rng(i // 4)
        prompt = [*rng.integers(2, VOCAB, 20), *np.random.default_rng(1000 + i).integers(2, VOCAB, 1 + i * 7 % 45)]
        sampling = Sampling(max_tokens=max_tokens, temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
        made.append(Request(f"r{i}", [int(token) for token in prompt], sampling, 3 if i % 3 == 2 else 1))
    return made


def noisy(score: Score, sampling: Sampling, choice: int) -> Score:
    """Adds the Gumbel noise of a seeded draw to the scores, scaled by temperature."""
    if not sampling.temperature:
        return score
    key = torch.tensor(split_seed(sampling.seed))[:, None]

    def scored(ids: list[int]) -> Tensor:
        noise = gumbel_rows(key, torch.tensor([len(ids)]), torch.tensor([choice]), VOCAB)[0]
        return score(ids) / sampling.temperature + noise.double()

    return scored


class Bench:
    """Runners on one checkpoint, and the output of each request alone."""

    def __init__(
        self,
        folder: Path,
        batch_invariant: bool = False,
        device: str = "cpu",
        model: str = "llama",
        model_impl: str = "auto",
        written: Checkpoints | None = None,
    ) -> None:
        """model: is saved in `folder`, or `written` has its weights quantized."""
        if written is None:
            self.score: Score = greedy_score(BY_NAME[model].save(folder))
        else:
            folder, kind = written.packed, BY_NAME[model].model
            self.score = greedy_score(kind.from_pretrained(written.plain, attn_implementation="eager").eval())
        fields = {"max_model_len": MAX_MODEL_LEN, "batch_invariant": batch_invariant, "device": device}
        fields["model_impl"] = model_impl
        host_gib = 300 * BLOCK_BYTES / 2**30
        self.roomy, self.second = start(folder, **fields), start(folder, **fields)
        self.small = start(folder, num_gpu_blocks_override=FEW, **fields)
        self.swapping = start(folder, num_gpu_blocks_override=FEW, swap_space_gib=host_gib, **fields)

    def alone(self, asked: list[Request]) -> dict[tuple[str, int], list[int]]:
        """One choice at a time, its prompt in one step."""
        outputs = {}
        for request in asked:
            for choice in range(request.n):
                loop = CoreLoop(self.roomy, depth=0, chunk=MAX_MODEL_LEN, prefix_caching=False)
                loop.add(request.name, request.prompt, request.sampling, [choice])
                loop.run()
                outputs |= loop.outputs
        return outputs

    def compare(
        self, name: str, asked: list[Request], expected: dict[tuple[str, int], list[int]], loop: CoreLoop, ties: Ties
    ) -> None:
        """Raises AssertionError at a difference that rounding does not explain."""
        for request in asked:
            for choice in range(request.n):
                place = (request.name, choice)
                judge = noisy(self.score, request.sampling, choice)
                ties.compare(f"{name}: {place}", request.prompt, expected[place], loop.outputs[place], judge)


def run(runner: Runner, asked: list[Request], **settings: object) -> tuple[CoreLoop, Stats]:
    loop = CoreLoop(runner, **settings)
    for request in asked:
        loop.add(request.name, request.prompt, request.sampling, request.n)
    return loop, loop.run()


def chunked(bench: Bench, asked: list[Request]) -> CoreLoop:
    return run(bench.roomy, asked, chunk=7, prefix_caching=False)[0]


def at_depth(depth: int) -> Callable[[Bench, list[Request]], CoreLoop]:
    return lambda bench, asked: run(bench.roomy, asked, depth=depth)[0]


def preempted(bench: Bench, asked: list[Request]) -> CoreLoop:
    loop, stats = run(bench.small, asked, depth=1, prefix_caching=False)
    assert stats.preemptions_total
    return loop


def preempted_ahead(bench: Bench, asked: list[Request]) -> CoreLoop:
    loop, stats = run(bench.small, asked, depth=3)
    assert stats.preemptions_total
    return loop


def swapped(bench: Bench, asked: list[Request]) -> CoreLoop:
    loop, stats = run(bench.swapping, asked, depth=3)
    assert stats.blocks_fetched_total
    return loop


def prefix_hit(bench: Bench, asked: list[Request]) -> CoreLoop:
    """All requests have run before, so all full blocks of the prompts are cached."""
    run(bench.roomy, asked)
    loop, stats = run(bench.roomy, asked)
    assert stats.prefix_hits_total > sum(len(request.prompt) // 8 * 8 - 8 for request in asked)
    return loop


def two_groups(bench: Bench, asked: list[Request]) -> CoreLoop:
    loop, _ = run(bench.roomy, asked, more=[bench.second])
    assert min(loop.num_plans.values()) > 5
    return loop


CONDITIONS: dict[str, Callable[[Bench, list[Request]], CoreLoop]] = {
    "chunked": chunked,
    "run-ahead depth 0": at_depth(0),
    "run-ahead depth 1": at_depth(1),
    "run-ahead depth 3": at_depth(3),
    "preempted": preempted,
    "preempted, depth 3": preempted_ahead,
    "swapped": swapped,
    "prefix hit": prefix_hit,
    "data parallel 2": two_groups,
}  # all of them have requests with n > 1
