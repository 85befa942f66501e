"""Builds a ready runner from the settings: device, weights, memory. Imports torch."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from blockyard.services.gpu_worker.attention.choice import check_head_sizes
from blockyard.services.gpu_worker.compilation.compile_processes import CompileProcesses
from blockyard.services.gpu_worker.cores import default_threads, usable_cores
from blockyard.services.gpu_worker.interfaces import Report
from blockyard.services.gpu_worker.kv import scales as kv_scales
from blockyard.services.gpu_worker.kv import swap_space
from blockyard.services.gpu_worker.kv.pool import KVPool, block_bytes
from blockyard.services.gpu_worker.layers.cpu_offload import HostWeights, describe_experts, share_of_layers
from blockyard.services.gpu_worker.linear_tuning.idle_tuning import IdleTuning
from blockyard.services.gpu_worker.loading import checkpoint, checkpoint_check
from blockyard.services.gpu_worker.loading.expert_loads import ExpertLoads
from blockyard.services.gpu_worker.loading.hf_config import read_config, read_eos_ids
from blockyard.services.gpu_worker.loading.weight_offload import free_cache
from blockyard.services.gpu_worker.loading.weights import ALL_ON_DEVICE, HostShare, WeightTable
from blockyard.services.gpu_worker.memory import (
    KVMemoryNeed,
    MemoryPlan,
    length_that_fits,
    num_seqs_for,
    plan_bytes,
    plan_cpu,
    plan_cuda,
    plan_host,
)
from blockyard.services.gpu_worker.memory_profile import peak_bytes
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.models.registry import Build, find_family, is_of_transformers
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.structured_output.matcher_processes import MatcherProcesses
from blockyard.services.gpu_worker.warm_up import first_step, warm_up
from blockyard.services.kv_transfer.staging import planned_bytes
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import ConfigError, LoadError
from blockyard.shared.messages import Geometry
from blockyard.shared.process.service_main import rss_bytes

if TYPE_CHECKING:
    from blockyard.services.gpu_worker.compilation.kernel_compiler import KernelCompiler
    from blockyard.services.gpu_worker.linear_tuning.tuner import Tuner


class StartReport:
    """Reports the phases of a start, each with all notes so far."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._notes: list[str] = []

    def phase(self, name: str, progress: float = 0.0, *more_notes: str) -> None:
        """progress: fraction of the phase. more_notes: for this phase alone."""
        self._report(name, progress, [*self._notes, *more_notes])

    def note(self, *notes: str) -> None:
        """Adds lines to the following reports."""
        self._notes.extend(notes)


DTYPES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}


def start(config: WorkerConfig, report_start: Report, processes: CompileProcesses | None = None) -> Runner:
    """Loads the model and returns its runner. Raises ConfigError or LoadError with a message of one line.

    processes: compile processes that are already started, if any.
    """
    device = pick_device(config.device)
    report = StartReport(report_start)
    report.note(set_up(device, config.threads or default_threads(config.replicas)))
    compiler = make_compiler(device, processes)
    report.phase("reading the configuration")
    folder = Path(config.model_path)
    settings = read_config(folder, config.config_overrides, report.note)
    dtype = pick_dtype(config.dtype, settings.get("dtype") or settings.get("torch_dtype"), device)
    kv_dtype = kv_scales.pick_kv_dtype(config.kv_cache_dtype, dtype, device)
    build = find_family(settings, config.model_impl)
    share = check(build, settings, dtype, config, device)
    table = WeightTable(dtype, device, share)
    table.expert_loads = ExpertLoads(device) if config.expert_metrics else None
    model = build(settings, table)
    scales = kv_scales.place_scales(model.table, model.shape.num_layers, kv_scales.are_in_checkpoint(config))
    max_model_len = pick_length(config.max_model_len, model.shape.max_positions)
    by = ", by its class in transformers" if is_of_transformers(build) else ""
    report.note(f"model: {settings['architectures'][0]}, {str(dtype).removeprefix('torch.')}{by}")
    progress = Throttle(lambda done: report.phase("loading weights", done))
    with torch.inference_mode():
        loaded = checkpoint.load(model.table, folder, config.load_format, config.ignore_patterns, config.seed, progress)
        report.note(str(loaded), *model.table.describe_unused())
        kv_block_bytes = block_bytes(model.shape, config.block_size, kv_dtype)
        if config.fit_max_num_seqs and device.type == "cuda":
            config = fit_num_seqs(config, kv_block_bytes, device)
        tuner = prepare(model, config, max_model_len, report)
        eos_ids = eos_ids_of(folder, settings, model.shape.vocab_size)
        need = KVMemoryNeed(
            block_size=config.block_size,
            block_bytes=kv_block_bytes,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            window=window_of(model.shape.windows, max_model_len),
            max_step_tokens=config.max_num_batched_tokens,
            batch_invariant=config.batch_invariant,
            shorten=config.fit_max_model_len,
        )
        tuning = compile_kernels(compiler, model, tuner, need, kv_dtype, eos_ids, config, report)
        report.phase("planning memory")
        host_plan = plan_host(need, free_memory() // config.replicas, config.swap_space_gib)
        moving = swap_space.staging_bytes(device.type, host_plan) + planned_bytes(device, config.kv_transfer)
        plan = plan_memory(config, model, need, kv_dtype, device, moving)
        report.note(*plan.notes, *host_plan.notes)
        report.phase("reserving KV memory")
        pool = KVPool(model.shape, plan.num_blocks, config.block_size, kv_dtype, device, config.batch_invariant)
        report.note(*kv_scales.set_pool_scales(pool, scales, config))
        store = swap_space.make_store(host_plan, pool)
    geometry = geometry_of(model, eos_ids, config, need, plan.num_blocks, host_plan.num_blocks)
    matchers = MatcherProcesses(
        config.tokenizer_path or config.model_path,
        geometry.vocab_size,
        geometry.eos_token_ids,
        engines=config.grammar_engines,
        num_slots=config.max_num_seqs,
    )
    if device.type == "cuda":
        runner = Runner(model, pool, geometry, store, lambda again: run_ahead(again, config, tuning, report), matchers)
        run_ahead(runner, config, tuning, report)
        return runner
    runner = Runner(model, pool, geometry, store, matchers=matchers)
    report.phase("first step")
    first_step(runner)
    report.phase("ready", 1.0)
    return runner


def eos_ids_of(folder: Path, settings: dict[str, Any], vocab_size: int) -> list[int]:
    """Returns the end-of-sequence ids that are inside the vocabulary."""
    return [i for i in read_eos_ids(folder, settings) if 0 <= i < vocab_size]


def geometry_of(
    model: Model, eos_ids: list[int], config: WorkerConfig, need: KVMemoryNeed, num_blocks: int, num_host_blocks: int
) -> Geometry:
    """Returns the sizes and limits of the worker that are sent to the scheduler."""
    max_model_len = length_that_fits(need, num_blocks)
    return Geometry(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        vocab_size=model.shape.vocab_size,
        eos_token_ids=eos_ids,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_host_blocks=num_host_blocks,
        window=window_of(model.shape.windows, max_model_len),
    )


def prepare(model: Model, config: WorkerConfig, max_model_len: int, report: StartReport) -> "Tuner | None":
    """Prepares weights and picks kernels of linear layers. Returns the tuner if it has sizes to measure later."""
    report.phase("preparing weights")
    device = model.table.device
    on_host = HostWeights(model.linears(), model.table) if model.table.matrices_on_host else None
    report.note(*model.prepare(max_model_len))
    tuner = pick_products(model, config, device, on_host is not None, report)
    if on_host is not None:
        on_host.install()
        report.note(str(on_host))
    report.note(*describe_experts(model.table))
    if config.cpu_offload_gib and device.type == "cpu":
        report.note("weights in host memory: all, this is a CPU (--cpu-offload-gb)")
    return tuner


def compile_kernels(
    compiler: "KernelCompiler | None",
    model: Model,
    tuner: "Tuner | None",
    need: KVMemoryNeed,
    kv_dtype: torch.dtype,
    eos_ids: list[int],
    config: WorkerConfig,
    report: StartReport,
) -> IdleTuning | None:
    """Compiles the kernels of steps in parallel, on a GPU. Returns the tuning that is left for idle time."""
    if compiler is None:
        return None
    report.phase("compiling kernels")
    # imports Triton, which a worker on the CPU does not load
    from blockyard.services.gpu_worker.compilation import record_kernels  # noqa: PLC0415

    record_kernels.compile_kernels(compiler, model, tuner, need, kv_dtype, len(eos_ids), config)
    report.note(compiler.describe())
    if tuner is not None:
        return IdleTuning(tuner, compiler)
    compiler.close()
    return None


def make_compiler(device: torch.device, processes: CompileProcesses | None) -> "KernelCompiler | None":
    """Makes the kernel compiler. Returns None on the CPU, which uses no Triton kernels."""
    if device.type == "cuda":
        # imports Triton, which a worker on the CPU does not load
        from blockyard.services.gpu_worker.compilation import record_kernels  # noqa: PLC0415

        return record_kernels.make_compiler(processes, usable_cores())
    if processes is not None:
        processes.close()
    return None


def check(
    build: Build, settings: dict[str, Any], dtype: torch.dtype, config: WorkerConfig, device: torch.device
) -> HostShare:
    """Checks tensor names, shapes and memory before weights are allocated. Returns `host_share`."""
    model = build(settings, WeightTable(dtype, torch.device("meta")))
    own_products = getattr(model, "own_products", None)  # of a class of transformers
    if config.batch_invariant and own_products:
        raise ConfigError(
            "--batch-invariant: this model is not, because it runs by its class in transformers, whose "
            f"{', '.join(own_products)} multiply matrices in ways that depend on the number of rows"
        )
    kv_scales.place_scales(model.table, model.shape.num_layers, kv_scales.are_in_checkpoint(config))
    check_head_sizes(device.type, model.shape.attention)
    max_model_len = pick_length(config.max_model_len, model.shape.max_positions)
    folder = Path(config.model_path)
    checkpoint_check.check_tensors(model.table, folder, config.load_format, config.ignore_patterns)
    share = host_share(build, settings, dtype, config, device)
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else free_memory() // config.replicas
    host_bytes = share.bytes_of(model.table)
    checkpoint_check.check_memory(model.table, host_bytes, model.shape.head_dim, max_model_len, device, free)
    return share


def host_share(
    build: Build, settings: dict[str, Any], dtype: torch.dtype, config: WorkerConfig, device: torch.device
) -> HostShare:
    """Returns the share of the layers' weights that stays in host memory; nothing on the CPU."""
    if device.type == "cpu":
        return ALL_ON_DEVICE
    return share_of_layers(partial(build, settings), dtype, config.cpu_offload_gib, free_memory() // config.replicas)


def held_bytes(config: WorkerConfig) -> int:
    """Returns the bytes of device memory that this process holds."""
    device = pick_device(config.device)
    if device.type == "cpu":
        return rss_bytes()
    free_cache(device)
    return torch.cuda.memory_reserved(device)


def run_ahead(runner: Runner, config: WorkerConfig, tuning: IdleTuning | None, report: StartReport) -> None:
    """Moves the batch to the GPU and captures CUDA graphs. Reports the progress of graphs that are captured later."""
    # imports Triton, which a worker on the CPU does not load
    from blockyard.services.gpu_worker.execution import device_loop  # noqa: PLC0415

    loop = device_loop.start(runner.batch, runner.model, runner.pool, runner.geometry, config, tuning)
    runner.run_ahead(loop)
    report.phase("first steps")
    with runner.pool.trial_steps():
        warm_up(runner)  # without CUDA graphs
        with torch.inference_mode():
            if not config.enforce_eager:
                report.phase("capturing CUDA graphs")
                loop.capture()
            step_s = loop.steps.measure()
    runner.run_ahead(loop, step_s)
    runner.forget_trial_steps()
    step_note = f"a decode step of one choice: {1e3 * step_s:.2f} ms without its context"

    def report_ready() -> None:
        graphs = [] if config.enforce_eager else loop.describe()
        report.phase("ready", loop.captured, *graphs, step_note)

    report_ready()
    loop.report_captures(report_ready)


def pick_products(
    model: Model, config: WorkerConfig, device: torch.device, at_once: bool, report: StartReport
) -> "Tuner | None":
    """Picks the kernels of the linear layers of the model.

    at_once: measures all batch sizes now. Otherwise returns the tuner, which measures them later.
    """
    if device.type == "cuda" and (config.batch_invariant or not config.enforce_eager):
        # these import Triton, which a worker on the CPU does not load
        from blockyard.services.gpu_worker.execution.decode_graphs import capture_sizes  # noqa: PLC0415
        from blockyard.services.gpu_worker.linear_tuning.tuner import Tuner  # noqa: PLC0415

        if not config.fused_steps:
            for linear in model.linears():
                linear.disable_fusion()
        tuner = Tuner(model.linears(), model.experts(), device=device, dtype=model.table.dtype)
        if config.batch_invariant:
            report.note(tuner.make_batch_invariant())
            return None
        sizes = [n for n in config.graph_sizes if n <= config.max_num_seqs] or capture_sizes(config.max_num_seqs)
        folder = None if config.kernel_cache is None else Path(config.kernel_cache)
        if at_once:
            progress = Throttle(lambda done: report.phase("measuring linear layers", done))
            report.note(tuner.tune(sizes, progress, folder, config.max_num_batched_tokens))
            return None
        tuner.begin(sizes, folder, config.max_num_batched_tokens)
        return tuner
    if config.batch_invariant:
        for linear in model.linears():
            linear.make_batch_invariant()
    return None


class Throttle:
    """Passes a fraction on only if it has grown by 0.01, because there are thousands of weights."""

    def __init__(self, progress: Callable[[float], None]) -> None:
        self._progress, self._last = progress, -1.0

    def __call__(self, fraction: float) -> None:
        if fraction - self._last >= 0.01:
            self._last = fraction
            self._progress(fraction)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no usable GPU here; --device cpu runs on this machine")
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def set_up(device: torch.device, threads: int) -> str:
    """Sets torch options for the device. Returns a note about the device."""
    if device.type == "cpu":
        torch.set_num_threads(threads)
        return f"device: cpu, {torch.get_num_threads()} compute threads"
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN takes 40 ms to plan each new sequence length
    return f"device: {torch.cuda.get_device_name(device)}"


def pick_dtype(name: str, configured: object, device: torch.device) -> torch.dtype:
    """Returns the dtype of the model. `auto`: float32 on the CPU, the dtype of config.json on a GPU."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    known = DTYPES.get(configured) if isinstance(configured, str) else None
    if known is None and configured is not None:
        raise ConfigError(f"config.json: dtype {configured!r} is not one of {', '.join(DTYPES)}; --dtype sets one")
    return known or torch.bfloat16


def window_of(windows: Sequence[int | None], max_model_len: int) -> int | None:
    """Returns the largest sliding window of all layers, or None if a layer attends to all tokens."""
    most = [max_model_len if window is None else window for window in windows]
    return max(most) if most and max(most) < max_model_len else None


def pick_length(asked: int | None, made_for: int) -> int:
    if asked is not None and asked > made_for:
        raise ConfigError(
            f"--max-model-len {asked} is more than the {made_for} tokens config.json allows; "
            "--hf-overrides or --rope-scaling can extend that"
        )
    return asked or made_for


def _graph_bytes(config: WorkerConfig, model: Model, need: KVMemoryNeed, dtype: torch.dtype) -> tuple[int, int]:
    # imports Triton, which a worker on the CPU does not load
    from blockyard.services.gpu_worker.execution import device_loop  # noqa: PLC0415

    return device_loop.graph_bytes(model, need, dtype, config.run_ahead_penalties, captures=not config.enforce_eager)


def fit_num_seqs(config: WorkerConfig, kv_block_bytes: int, device: torch.device) -> WorkerConfig:
    """Returns the settings with as many sequences as KV memory is good for, after the weights are loaded.

    What a step and CUDA graphs take is not known yet: they grow with the number of sequences.
    """
    num_blocks = config.num_gpu_blocks_override
    if num_blocks is None:
        _, total = torch.cuda.mem_get_info(device)
        share = int(total * config.gpu_memory_utilization) - torch.cuda.memory_allocated(device)
        num_blocks = (config.kv_cache_memory_bytes or share) // kv_block_bytes
    most = num_seqs_for(num_blocks * config.block_size, config.max_num_seqs)
    return msgspec.structs.replace(config, max_num_seqs=most)


def plan_memory(
    config: WorkerConfig, model: Model, need: KVMemoryNeed, dtype: torch.dtype, device: torch.device, staging_bytes: int
) -> MemoryPlan:
    override, kv_bytes = config.num_gpu_blocks_override, config.kv_cache_memory_bytes
    if device.type == "cpu":
        if override is None and kv_bytes is not None:
            return plan_bytes(need, kv_bytes, free_memory() // config.replicas)
        return plan_cpu(need, free_memory() // config.replicas, config.cpu_kv_gib, override)
    tokens = min(config.max_num_batched_tokens, need.max_model_len)
    try:
        peak = peak_bytes(model, tokens, need, dtype, device)
        graphs, penalties = _graph_bytes(config, model, need, dtype)
    except torch.OutOfMemoryError as e:
        raise LoadError(
            f"not enough GPU memory for a step of {tokens} tokens beside the weights; lower --max-num-batched-tokens"
        ) from e
    _, total = torch.cuda.mem_get_info(device)
    weights = torch.cuda.memory_allocated(device)
    if override is None and kv_bytes is not None:
        return plan_bytes(need, kv_bytes, total - weights - peak - graphs - penalties - staging_bytes)
    share = config.gpu_memory_utilization
    return plan_cuda(need, total, share, weights, peak, override, graphs, staging_bytes, penalties)


def free_memory() -> int:
    """Returns the free memory of the machine, or of the container if that is less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text("ascii").strip()) != "max":
        free = min(free, max(int(text) - int(used.read_text("ascii")), 0))
    return free
