"""Records the kernels of a worker's steps with a `KernelCompiler`, before the first step runs. Imports Triton.

Each kind of step is launched once on a KV pool of one block. While the compiler records, only a few of torch's own
kernels run, on zeros.
"""

import hashlib
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import triton
from torch import Tensor

from blockyard import kernels
from blockyard.kernels.layers.linear_skinny import MAX_ROWS
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.lora.adapter_table import AdapterTiles
from blockyard.kernels.lora.adapter_tiles import FEW_ROWS, LARGE_TILE, MANY_ROWS, TILE, rows_of_tile
from blockyard.kernels.moe.map_experts import FEW_PAIRS
from blockyard.services.gpu_worker.compilation.compile_processes import CompileProcesses, num_processes
from blockyard.services.gpu_worker.compilation.kernel_claims import KernelClaims
from blockyard.services.gpu_worker.compilation.kernel_compiler import KernelCompiler
from blockyard.services.gpu_worker.execution.cuda import prefill_kernels
from blockyard.services.gpu_worker.execution.cuda.decode_graphs import (
    SAMPLE_VARIANTS,
    DecodeSettings,
    DecodeSize,
    DecodeSteps,
    num_mask_slots,
)
from blockyard.services.gpu_worker.execution.cuda.device_masks import SlotMasks
from blockyard.services.gpu_worker.execution.cuda.device_ops import make_device_ops
from blockyard.services.gpu_worker.execution.cuda.prefill_sizes import descriptors
from blockyard.services.gpu_worker.execution.cuda.prefill_steps import BatchDescriptor, PrefillStep, write_padding
from blockyard.services.gpu_worker.execution.prompt_logprobs import DevicePromptLogprobs, ScoredPrompt
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.layers.linear import OrderedProduct
from blockyard.services.gpu_worker.linear_tuning.tuner import Tuner
from blockyard.services.gpu_worker.memory import KVMemoryNeed
from blockyard.services.gpu_worker.models.interface import Model
from blockyard.services.gpu_worker.warm_up import LENGTHS
from blockyard.shared.config.services.worker import WorkerConfig

log = logging.getLogger(__name__)


def make_compiler(processes: CompileProcesses | None, cores: int, sharers: int) -> KernelCompiler:
    """processes: started before, None: new ones. sharers: see `num_processes`."""
    return KernelCompiler(processes or CompileProcesses(num_processes(cores, sharers)))


def compile_kernels(
    compiler: KernelCompiler,
    model: Model,
    tuner: Tuner | None,
    need: KVMemoryNeed,
    kv_dtype: torch.dtype,
    num_eos: int,
    config: WorkerConfig,
    claims: KernelClaims | None = None,
) -> None:
    """Returns when the kernels of steps are compiled. Candidates of the tuner are compiled in the background.

    claims: of ranks of this host, which divide the kernels of steps; None: this one compiles them alone.
    """
    key = _key(model, need, kv_dtype, num_eos, config)
    log.debug("kernels of steps: %s", key)
    if not compiler.has_compiled(key):
        with torch.inference_mode(), compiler.recording(claims):
            _launch_steps(model, need, kv_dtype, num_eos, config)
        compiler.wait()
        compiler.mark_compiled(key)
    if tuner is not None and tuner.missing:
        with compiler.recording():
            tuner.launch_candidates()


def _key(model: Model, need: KVMemoryNeed, kv_dtype: torch.dtype, num_eos: int, config: WorkerConfig) -> str:
    """A hash of everything that selects kernels of steps, except linear layers: their tuner compiles its own."""
    flags = (type(model).__name__, config.graph_sizes, config.run_ahead_penalties, config.fused_steps, config.lora)
    weights = [(name, place.shape, place.target.dtype) for name, place in model.table.places.items()]
    facts = (triton.__version__, torch.__version__, model.shape, model.table.dtype, kv_dtype, need, num_eos, flags)
    digest = hashlib.sha256(repr((facts, weights)).encode())  # weights tell which norms and gates the layers have
    for source in sorted(Path(kernels.__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _launch_steps(model: Model, need: KVMemoryNeed, kv_dtype: torch.dtype, num_eos: int, config: WorkerConfig) -> None:
    """Launches each kind of step, the slowest to compile first."""
    device, most = model.table.device, min(need.max_step_tokens, need.max_model_len)
    pool = KVPool(model.shape, 1, need.block_size, kv_dtype, device, need.batch_invariant)
    ops = make_device_ops(pool, config.fused_steps)
    settings = DecodeSettings(
        capacity=need.max_num_seqs,
        max_model_len=need.max_model_len,
        eos_token_ids=list(range(num_eos)),
        graph_sizes=config.graph_sizes,
        logits_edits=config.run_ahead_penalties,
        num_extra_tokens=0 if config.lora is None else config.lora.extra_vocab_size,
        serves_adapters=config.lora is not None,
        masks=SlotMasks.unused(num_mask_slots(need.max_num_seqs), model.shape.vocab_size, device),
    )
    steps = DecodeSteps(model, pool, settings, ops)
    if not need.batch_invariant:
        prefill_kernels.compile_prefills(pool, model.table.dtype)
    plain = DecodeSize(steps.capacity, short_context=False)
    output = steps.forward(plain)
    adapted = steps.forward(replace(plain, is_adapted=True)) if settings.serves_adapters else output
    for size in steps.sizes:
        for needs_processing in SAMPLE_VARIANTS:
            steps.sample(size, (adapted if size.is_adapted else output).first(size.rows), needs_processing)
    seen = {rows_of_tile(steps.capacity, batch_invariant=need.batch_invariant)}
    for size in steps.sizes:
        tile = rows_of_tile(size.rows, batch_invariant=need.batch_invariant)
        if not size.is_adapted or size.rows == 1 or tile not in seen or model.experts():  # others have the same kernels
            steps.forward(size)
        if size.is_adapted:
            seen.add(tile)
    if model.adapter_rows.tile_rows is not None:
        if not need.batch_invariant:
            _launch_fused(model, steps)
        _launch_ordered(model, steps, batch_invariant=need.batch_invariant)
        _launch_tiles(model, model.adapter_rows.tile_rows, adapted.hidden, most)
    for descriptor in _descriptors(steps, most, settings.serves_adapters):
        words = torch.empty(sum(descriptor.parts), dtype=torch.int64)
        write_padding(words, descriptor)
        step = PrefillStep(steps, descriptor, words.to(device))
        sampler_input = step.forward()
        for needs_processing in SAMPLE_VARIANTS:
            step.sample(sampler_input, needs_processing)
    model.adapter_rows.end()
    if not config.run_ahead_penalties:  # otherwise sampling has launched this kernel
        prompts = DevicePromptLogprobs(model, ops.gather_logprobs, device)
        prompts.compute_logits([ScoredPrompt(0, 0, 1, np.zeros(1, np.int64), 1)], output.logits)


def _launch_fused(model: Model, steps: DecodeSteps) -> None:
    """Launches few rows with adapters where all layers that ask for it are fused, and where none is: the tuner may
    install other kernels later."""
    few = [size for size in steps.sizes if size.is_adapted and size.rows <= MAX_ROWS]
    sizes = {rows_of_tile(size.rows, batch_invariant=False): size for size in few}.values()
    for is_fused in (True, False):
        with ExitStack() as stack:
            for linear in model.linears():
                product = partial(_multiply_nothing, linear.shape[1])
                stack.enter_context(linear.only_kernels({size.rows: product for size in sizes if is_fused}))
            for size in sizes:
                steps.forward(size)


def _launch_ordered(model: Model, steps: DecodeSteps, *, batch_invariant: bool) -> None:
    """Launches rows with adapters behind ordered products, which the tuner may install later, too."""
    adapted = (size for size in steps.sizes if size.is_adapted)
    tiled = (size for size in adapted if rows_of_tile(size.rows, batch_invariant=batch_invariant) == TILE)
    if (size := next(tiled, None)) is None:
        return
    with ExitStack() as stack:
        for linear in model.linears():
            product = OrderedProduct(partial(_multiply_nothing, linear.shape[1]))
            stack.enter_context(linear.only_kernels({}, {size.rows: product}))
        steps.forward(size)


def _launch_tiles(model: Model, tile_rows: Callable[[Tensor], AdapterTiles], hidden: Tensor, most: int) -> None:
    """Launches the kernels that group rows by adapter, for so many rows at most, and those of the logits of a prompt's
    rows. hidden: of any rows."""
    few = range(1, min(MANY_ROWS, most) + 1)
    for rows in (*few, *range(MANY_ROWS + 1, min(most, FEW_PAIRS) + 1, LARGE_TILE), most):
        tile_rows(torch.zeros(rows, dtype=torch.int32, device=hidden.device))
    for rows in [one for one in (1, FEW_ROWS + 1, MANY_ROWS + 1) if one <= most]:
        places = torch.zeros(rows, dtype=torch.int32, device=hidden.device)
        model.adapter_rows.begin(places)
        model.logits(hidden.new_zeros(rows, hidden.shape[1]))
        with model.adapter_rows.meanwhile(places):  # as rows of prompts: products read no tiles before they wait
            model.logits(hidden.new_zeros(rows, hidden.shape[1]))


def _multiply_nothing(
    outputs: int, x: Tensor, norm: RMSNorm | None = None, gated: bool = False, add_to: Tensor | None = None
) -> Tensor:
    """A `FusedProduct` without a kernel."""
    return x.new_empty(len(x), outputs) if add_to is None else add_to


def _descriptors(steps: DecodeSteps, most: int, serves_adapters: bool) -> list[BatchDescriptor]:
    """Sizes of graphs, and of the prompts of `warm_up`, also with adapters."""
    alone = [
        BatchDescriptor(0, num_tokens, 1, steps.padded_num_seqs(1))
        for num_tokens in (*(n for n in LENGTHS if n < most), most)
    ]
    with_adapters = [replace(one, is_adapted=True) for one in alone] if serves_adapters else []
    return [*alone, *with_adapters, *descriptors(steps.capacity, most, steps.padded_num_seqs)]
