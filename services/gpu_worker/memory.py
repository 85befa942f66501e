"""Computes how many KV blocks fit into memory, with notes that explain the number."""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

from blockyard.shared.config.services.worker import USUAL_SEQS
from blockyard.shared.errors import LoadError

GIB = 1 << 30
CPU_SHARE = 0.5  # share of free memory, unless a flag sets the size
TOKENS_PER_SEQ = 512  # of KV memory, for each sequence above USUAL_SEQS
CPU_USUAL = 1 * GIB  # default size; larger only if one sequence needs more


@dataclass(frozen=True, slots=True, kw_only=True)
class KVMemoryNeed:
    """The settings and sizes that decide how much KV memory is needed."""

    block_size: int  # tokens
    block_bytes: int  # of all layers
    max_model_len: int
    max_num_seqs: int
    window: int | None = None  # largest sliding window of all layers; None: a layer has no window
    max_step_tokens: int = 0  # used only with a window
    batch_invariant: bool = False
    shorten: bool = False  # max_model_len may be lowered to the number of tokens that fit

    @property
    def tokens_held(self) -> int:
        """The smallest number of tokens of KV that one sequence needs: all, unless every layer has a window."""
        if self.window is None:
            return self.max_model_len
        return min(self.max_model_len, self.window + 2 * self.block_size)

    @property
    def tokens_useful(self) -> int:
        """The largest number of tokens of KV that one sequence uses: `tokens_held` plus one prefill step."""
        return min(self.max_model_len, self.tokens_held + self.max_step_tokens)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    num_blocks: int
    notes: list[str]


def length_that_fits(need: KVMemoryNeed, num_blocks: int) -> int:
    """Returns the longest sequence that fits in this number of blocks, at most max_model_len."""
    room = num_blocks * need.block_size
    return need.max_model_len if room >= need.tokens_held else room


def num_seqs_for(tokens: int, most: int) -> int:
    """Returns how many sequences may run where KV memory holds so many tokens, without --max-num-seqs: a multiple of 64
    from USUAL_SEQS to `most`."""
    return min(max(tokens // TOKENS_PER_SEQ // 64 * 64, USUAL_SEQS), most)


def blocks_of(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def plan_cpu(need: KVMemoryNeed, free_bytes: int, cpu_kv_gib: float | None, override: int | None) -> MemoryPlan:
    """Plans KV blocks on the CPU. Raises LoadError if one sequence of max_model_len does not fit."""
    if override is not None:
        return _plan(need, override, [f"{override} blocks by --num-gpu-blocks-override"], "--num-gpu-blocks-override")
    if cpu_kv_gib is not None:
        return _plan(need, int(cpu_kv_gib * GIB) // need.block_bytes, [f"{cpu_kv_gib:g} GiB as asked"], "--cpu-kv-gib")
    most = int(free_bytes * CPU_SHARE)
    budget = min(max(CPU_USUAL, _bytes_of_one(need)), most)
    useful = need.max_num_seqs * blocks_of(need.tokens_useful, need.block_size)
    fit = budget // need.block_bytes
    if useful <= fit:
        why = f"all that {need.max_num_seqs} sequences of {need.max_model_len} tokens can use"
    elif budget == most:
        why = f"{_gib(budget)}, {CPU_SHARE:.0%} of {_gib(free_bytes)} free memory"
    else:
        why = f"{_gib(budget)} by default (--cpu-kv-gib)"
    return _plan(need, min(fit, useful), [why], "--cpu-kv-gib")


def plan_cuda(
    need: KVMemoryNeed,
    total_bytes: int,
    utilization: float,
    weights_bytes: int,
    peak_bytes: int,
    override: int | None,
    graph_bytes: int = 0,
    staging_bytes: int = 0,
    penalties_bytes: int = 0,
) -> MemoryPlan:
    """Plans KV blocks on a GPU. Raises LoadError if one sequence of max_model_len does not fit.

    peak_bytes: memory of the largest forward pass, besides weights and KV. graph_bytes: memory of CUDA graphs and of
    the buffers of decode steps. staging_bytes: buffers of copies to host memory. penalties_bytes: token counts and
    logits of sequences with penalties or edits of tokens.
    """
    if override is not None:
        return _plan(need, override, [f"{override} blocks by --num-gpu-blocks-override"], "--num-gpu-blocks-override")
    others = weights_bytes + peak_bytes + graph_bytes + staging_bytes + penalties_bytes
    left = int(total_bytes * utilization) - others
    why = (
        f"{_gib(total_bytes)} x {utilization:g} (--gpu-memory-utilization) - {_gib(weights_bytes)} weights"
        f" - {_gib(peak_bytes)} for a step{f' - {_gib(graph_bytes)} for CUDA graphs' if graph_bytes else ''}"
        f"{f' - {_gib(penalties_bytes)} for penalties (--run-ahead-penalties)' if penalties_bytes else ''}"
        f"{f' - {_gib(staging_bytes)} to move blocks' if staging_bytes else ''}"
        f" = {_gib(max(left, 0))}"
    )
    num_blocks = max(left, 0) // need.block_bytes
    plan = _try(need, num_blocks, [why])
    if plan is not None:
        return plan
    enough = _bytes_of_one(need) + others
    if enough <= 0.98 * total_bytes:
        remedy = f"set --gpu-memory-utilization {_up(enough / total_bytes):.2f} or more, or "
    else:
        remedy = ""
    raise LoadError(_too_small(need, num_blocks, remedy))


def plan_bytes(need: KVMemoryNeed, kv_bytes: int, free_bytes: int) -> MemoryPlan:
    """Plans KV blocks by --kv-cache-memory-bytes. Raises LoadError if so much memory is not free, or if one sequence
    of max_model_len does not fit."""
    flag = "--kv-cache-memory-bytes"
    if kv_bytes > free_bytes:
        raise LoadError(f"{flag} {kv_bytes}: there is room for {max(free_bytes, 0)}")
    return _plan(need, kv_bytes // need.block_bytes, [f"{_gib(kv_bytes)} by {flag}"], flag)


def plan_host(need: KVMemoryNeed, free_bytes: int, swap_space_gib: float) -> MemoryPlan:
    """Plans KV blocks in host memory. Raises LoadError if the memory is not free, or too small for one block."""
    size = int(swap_space_gib * GIB)
    if size > free_bytes:
        raise LoadError(f"--swap-space {swap_space_gib:g}: {_gib(free_bytes)} of host memory are free")
    num_blocks = size // need.block_bytes
    if size and not num_blocks:
        raise LoadError(f"--swap-space {swap_space_gib:g}: one KV block has {need.block_bytes / 1024:.4g} KiB")
    note = f"host memory for KV: {num_blocks} blocks, {_gib(num_blocks * need.block_bytes)} (--swap-space)"
    return MemoryPlan(num_blocks, [note] if size else [])


def free_host_bytes() -> int:
    """Returns the free memory of the machine, or of the container if that is less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text("ascii").strip()) != "max":
        free = min(free, max(int(text) - int(used.read_text("ascii")), 0))
    return free


def _plan(need: KVMemoryNeed, num_blocks: int, why: list[str], flag: str) -> MemoryPlan:
    plan = _try(need, num_blocks, why)
    if plan is None:
        blocks = blocks_of(need.tokens_held, need.block_size)
        value = f"{_up(_bytes_of_one(need) / GIB):.2f}"
        if flag != "--cpu-kv-gib":
            value = f"{blocks if flag == '--num-gpu-blocks-override' else blocks * need.block_bytes}"
        raise LoadError(_too_small(need, num_blocks, f"set {flag} {value} or more, or "))
    return plan


def _try(need: KVMemoryNeed, num_blocks: int, why: list[str]) -> MemoryPlan | None:
    length = length_that_fits(need, num_blocks)
    if length < need.max_model_len:
        if not (need.shorten and num_blocks):
            return None
        why = [*why, f"a sequence has {length} of {need.max_model_len} tokens at most (--max-model-len auto)"]
        need = replace(need, max_model_len=length)
    per_block = f"{need.block_bytes / 1024:.4g} KiB"
    tokens = num_blocks * need.block_size
    notes = [
        f"KV memory: {'; '.join(why)}",
        f"KV blocks: {num_blocks} of {need.block_size} tokens, {per_block} each, {_gib(num_blocks * need.block_bytes)}",
        f"KV room: {tokens} tokens, {tokens / need.tokens_held:.1f} x {_held(need)}",
    ]
    return MemoryPlan(num_blocks, notes)


def _too_small(need: KVMemoryNeed, num_blocks: int, remedy: str) -> str:
    tokens = num_blocks * need.block_size
    shorter = f"--max-model-len {tokens} or less" if tokens else "a smaller --max-model-len"
    return (
        f"not enough memory for one sequence: {need.tokens_held} tokens need {_gib(_bytes_of_one(need))} of KV,"
        f" there is room for {tokens}; {remedy}set {shorter}"
    )


def _held(need: KVMemoryNeed) -> str:
    if need.tokens_held == need.max_model_len:
        return f"max_model_len {need.max_model_len}"
    return f"the {need.tokens_held} that a sequence holds (sliding window {need.window})"


def _bytes_of_one(need: KVMemoryNeed) -> int:
    return blocks_of(need.tokens_held, need.block_size) * need.block_bytes


def _up(value: float) -> float:
    """Rounds up to two decimal places."""
    return math.ceil(value * 100) / 100


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):.1f} MiB"
