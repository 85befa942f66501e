"""Two ways to send K and V from a captured prefill step, on one GPU or two: words in pinned memory that the graph
writes after some layers, for copies on another stream, and a copy kernel in each layer that reads from a table what to
send.

`bench_prefill_sends.py FOLDER [--tokens N ...] [--rounds N]`. FOLDER needs config.json alone: weights are random. The
blocks go to the other GPU if there is one, else to other memory of the same. Forward pass alone, device time by CUDA
events, medians; the variants take turns, and the plain graph is captured twice: the second shows the noise.
"Exposed": from the end of the forward pass to the end of the last copy; for tables, what the sends add to the pass.
The table's kernel computes no checksums, so its figure is a lower bound.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
import triton
import triton.language as tl
from gpu_runner import start_runner
from torch import Tensor

from blockyard.kernels.kv_cache.block_checksum import multipliers, salts
from blockyard.kernels.kv_cache.copy_blocks import copy_blocks
from blockyard.services.gpu_worker.execution.cuda.cuda_steps import CudaSteps
from blockyard.services.gpu_worker.execution.cuda.prefill_steps import BatchDescriptor, PrefillStep, write_step
from blockyard.services.gpu_worker.execution.cuda.stored_layers import (
    AttendThen,
    LayerRecorder,
    LayerWords,
    layer_groups,
)
from blockyard.services.gpu_worker.execution.device_loop import StepRequest
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.step import Attend
from blockyard.shared.messages import Sampling, SlotRun, SlotStart, StepPlan

PROGRAMS, TILE, MOST_BLOCKS = 32, 2048, 1024
LONGEST = 8192


@triton.jit
def send_layer_kernel(own_ptr, table_ptr, layer, own_blocks, WORDS: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """table: count, address of the target, its number of blocks, pairs of source and target block."""
    count, address = tl.load(table_ptr), tl.load(table_ptr + 1)
    target_blocks = tl.load(table_ptr + 2)
    target_ptr = address.to(tl.pointer_type(tl.int64))
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        source, target = tl.load(table_ptr + 3 + 2 * i), tl.load(table_ptr + 4 + 2 * i)
        for start in range(0, WORDS, TILE):
            columns = start + tl.arange(0, TILE)
            inside = columns < WORDS
            words = tl.load(own_ptr + (layer * own_blocks + source) * WORDS + columns, mask=inside)
            tl.store(target_ptr + (layer * target_blocks + target) * WORDS + columns, words, mask=inside)


class Tables:
    """A copy kernel after each layer. on_branch: on a branch of the graph, so that the next layer need not wait."""

    def __init__(self, own: Tensor, target: Tensor, on_branch: bool) -> None:
        self.own, self.target = own, target
        self.table = torch.zeros(3 + 2 * MOST_BLOCKS, dtype=torch.int64, device=own.device)
        self.side = torch.cuda.Stream(own.device) if on_branch else None

    def fill(self, ids: Tensor | None) -> None:
        """ids [2, n]; None: nothing to send."""
        self.table.zero_()
        if ids is not None:
            head = [ids.shape[1], self.target.data_ptr(), self.target.shape[1]]
            self.table[:3] = torch.tensor(head)
            self.table[3 : 3 + ids.numel()] = ids.T.flatten()
        torch.cuda.synchronize()

    def around(self, attend: Attend) -> Attend:
        def send(layer: int) -> None:
            main = torch.cuda.current_stream()
            if self.side is not None:
                self.side.wait_stream(main)
            with torch.cuda.stream(self.side):  # None: stays on the step's stream
                self.launch(layer)
            if self.side is not None and layer == len(self.own) - 1:
                main.wait_stream(self.side)

        return AttendThen(attend, send)

    def launch(self, layer: int) -> None:
        own_blocks, words = self.own.shape[1:]
        send_layer_kernel[(PROGRAMS,)](self.own, self.table, layer, own_blocks, WORDS=words, TILE=TILE)


def prepared(runner: Runner, steps: CudaSteps, num_tokens: int) -> tuple[BatchDescriptor, Tensor]:
    """Puts a prompt of so many tokens into slot 0. Returns the sizes and the words of its only step."""
    runner.reset(2)
    ids = np.random.default_rng(0).integers(10, 200, num_tokens).astype("<u4")
    blocks = list(range(-(-(num_tokens + 1) // runner.geometry.block_size)))
    start = SlotStart(0, ids.tobytes(), num_tokens, 0, blocks, Sampling(8, temperature=0.0, ignore_eos=True), 0)
    plan = StepPlan(1, 1, [], [start], [], [SlotRun(0, num_tokens)])
    runner.batch.apply(plan)
    rows = runner.batch.slots.scheduled(plan.runs)
    assert rows.counts.tolist() == [num_tokens]
    steps.slots.apply(plan, runner.batch.slots)
    descriptor = steps.prefills.descriptor(rows)
    steps._begin(StepRequest(rows, rows.slots, False, [], [], False), 0)
    words = torch.empty(sum(descriptor.parts), dtype=torch.int64)
    write_step(words, descriptor, rows, runner.batch.slots)
    return descriptor, words.to(runner.pool.device)


def words_of(steps: CudaSteps, num_layers: int, num_groups: int) -> LayerWords:
    return LayerWords(
        layer_groups(num_layers, num_groups), steps.decodes.ops, steps.slots.state.step, steps.decodes.link
    )


def captured(
    steps: CudaSteps, descriptor: BatchDescriptor, words: Tensor, recorder: LayerRecorder | None
) -> torch.cuda.CUDAGraph:
    step = PrefillStep(steps.decodes, descriptor, words, layers=recorder)
    step.forward()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step.forward()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def exposed_ms(
    graph: torch.cuda.CUDAGraph, words: LayerWords, step: Tensor, by_layers: bool, copy: Callable[[range], None]
) -> float:
    """step: the device's count of steps. by_layers: a copy starts when its layers are stored; else all layers are
    copied at the end of the step."""
    stored = words.stored(int(step.add_(1)))
    ended, copied = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    graph.replay()
    ended.record()
    if not by_layers:
        while not ended.query():
            pass
    with torch.cuda.stream(side):
        for group in stored if by_layers else ():
            while not group.is_stored():
                pass
            copy(group.layers)
        if not by_layers:
            copy(range(stored[-1].layers.stop))
        copied.record()
    torch.cuda.synchronize()
    return ended.elapsed_time(copied)


def measure(runner: Runner, steps: CudaSteps, num_tokens: int, rounds: int) -> None:
    descriptor, words = prepared(runner, steps, num_tokens)
    layers, num_blocks = len(runner.pool.runs[0]), runner.pool.runs[0].shape[1]
    own = runner.pool.arena.bytes.view(torch.int64).view(layers, num_blocks, -1)
    there = torch.device("cuda", torch.cuda.device_count() - 1)
    target = torch.zeros_like(own, device=there)
    target[:, :1].copy_(own[:, :1])  # torch opens the access between both GPUs
    count = num_tokens // runner.geometry.block_size
    chosen = [torch.randperm(size, device="cuda")[:count] for size in (count, num_blocks)]
    ids = torch.stack(chosen).int()
    groups = {"words of 8 groups": words_of(steps, layers, 8), "words of each layer": words_of(steps, layers, layers)}
    in_stream, on_branch = Tables(own, target, False), Tables(own, target, True)
    recorders: dict[str, LayerRecorder | None] = {"plain": None, "plain again": None, **groups}
    recorders |= {"tables": in_stream, "tables on a branch": on_branch}
    graphs = {name: captured(steps, descriptor, words, recorder) for name, recorder in recorders.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(replay_ms(graph))
    plain = median(times["plain"])
    for name, all_ms in times.items():
        print(
            f"{num_tokens:6} tokens, nothing to send, {name:22} {median(all_ms):8.3f} ms, {median(all_ms) / plain:.4f}",
            flush=True,
        )

    tables = (multipliers(own.shape[2]).cuda(), salts(layers).cuda())
    sums = torch.zeros((layers, count), dtype=torch.int64).pin_memory()

    def copy(some: range) -> None:
        checksums = (*tables, sums[some.start : some.stop])
        copy_blocks(own, target, ids, len(some), some.start, some.start, checksums, PROGRAMS)

    copy(range(layers))
    torch.cuda.synchronize()
    (sources, targets), step = ids.long(), steps.slots.state.step
    for name, it in groups.items():
        for by_layers in (False, True):
            target.zero_()
            exposed = [exposed_ms(graphs[name], it, step, by_layers, copy) for _ in range(rounds)]
            assert torch.equal(target[:, targets.to(there)].to("cuda"), own[:, sources]), "other bytes arrived"
            when = "by layers" if by_layers else "at the end"
            print(f"{num_tokens:6} tokens, sent {when}, {name}: exposed {median(exposed):.3f} ms", flush=True)
    for name, sender in (("tables", in_stream), ("tables on a branch", on_branch)):
        target.zero_()
        sender.fill(ids.long())
        with_sends = [replay_ms(graphs[name]) for _ in range(rounds)]
        assert torch.equal(target[:, targets.to(there)].to("cuda"), own[:, sources]), "other bytes arrived"
        sender.fill(None)
        print(f"{num_tokens:6} tokens, sent by {name}: exposed {median(with_sends) - plain:.3f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, nargs="*", default=[32, 128, 512, 2048])
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()
    print(f"{torch.cuda.device_count()} GPUs, torch {torch.__version__}", flush=True)
    runner = start_runner(args.folder, 2, LONGEST, enforce_eager=True, max_num_batched_tokens=max(args.tokens))
    steps = runner.loop.steps
    assert isinstance(steps, CudaSteps)
    with torch.inference_mode():
        for num_tokens in args.tokens:
            measure(runner, steps, num_tokens, args.rounds)


if __name__ == "__main__":
    main()
