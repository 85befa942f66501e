"""A GPU: Triton kernels that are compiled and tuned, steps ahead of the host, and CUDA graphs. Imports Triton."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.cuda.nccl
import triton

from blockyard.kernels.lora.adapt_embeddings import adapt_embeddings
from blockyard.kernels.lora.adapter_tiles import tile_rows
from blockyard.kernels.lora.add_adapters import start_adapters
from blockyard.kernels.lora.add_to_heads import add_to_heads
from blockyard.kernels.lora.replace_logits import replace_logits
from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.attention.choice import check_head_sizes
from blockyard.services.gpu_worker.attention.packed_attention import PackedProduct
from blockyard.services.gpu_worker.compilation import record_kernels
from blockyard.services.gpu_worker.compilation.compile_processes import CompileProcesses
from blockyard.services.gpu_worker.compilation.kernel_claims import KernelClaims
from blockyard.services.gpu_worker.compilation.kernel_compiler import KernelCompiler
from blockyard.services.gpu_worker.execution.cuda import chunk_graphs, cuda_steps
from blockyard.services.gpu_worker.execution.cuda.device_ops import make_device_ops
from blockyard.services.gpu_worker.execution.cuda.follower_steps import DeviceFollowerSteps
from blockyard.services.gpu_worker.execution.cuda.forward_capture import CudaForwardCapture
from blockyard.services.gpu_worker.execution.cuda.pooled_attention import TritonChunkAttention, TritonPackedProduct
from blockyard.services.gpu_worker.execution.packed_graphs import PackedGraphs, text_graphs
from blockyard.services.gpu_worker.execution.pooled_steps import ChunkAttention
from blockyard.services.gpu_worker.execution.ranks.follower import FollowerNeeds, FollowerSteps
from blockyard.services.gpu_worker.execution.ranks.leader import DeviceMirror, LeaderModel
from blockyard.services.gpu_worker.host_link import HostLink, put
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.layers.cpu_offload import Declare, share_of_layers
from blockyard.services.gpu_worker.linear_tuning.idle_tuning import IdleTuning
from blockyard.services.gpu_worker.linear_tuning.kernel_configs import cache_path
from blockyard.services.gpu_worker.linear_tuning.tuner import Tuner
from blockyard.services.gpu_worker.loading.linear_spec import Split
from blockyard.services.gpu_worker.loading.weights import HostShare
from blockyard.services.gpu_worker.lora.device.device_places import DevicePlaces
from blockyard.services.gpu_worker.lora.device.device_products import AdapterKernels
from blockyard.services.gpu_worker.lora.places import AdapterPlaces
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits
from blockyard.services.gpu_worker.memory import (
    KVMemoryNeed,
    MemoryPlan,
    free_host_bytes,
    num_seqs_for,
    plan_bytes,
    plan_cuda,
)
from blockyard.services.gpu_worker.memory_profile import peak_bytes
from blockyard.services.gpu_worker.models.interface import Model, ModelShape
from blockyard.services.gpu_worker.parallel.peer_collectives import exchange_on_gpu
from blockyard.services.gpu_worker.parallel.rank_group import GroupStores, RankGroup, connect_gpus
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.parallel.sums.sum_cache import SumCache
from blockyard.services.gpu_worker.parallel.sums.sum_measurement import choose_sums
from blockyard.services.gpu_worker.parallel.team import SendCommand
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.startup.cuda_link import CudaLink
from blockyard.services.gpu_worker.startup.start_report import StartReport, Throttle
from blockyard.services.gpu_worker.warm_up import warm_up
from blockyard.services.kv_transfer.host.host_store import STAGING_BYTES, BlockStore, JoinedStore
from blockyard.services.kv_transfer.host.stream_store import StreamStore
from blockyard.services.kv_transfer.staging import planned_bytes
from blockyard.shared.config.services.worker import KVTransferConfig, WorkerConfig, capture_sizes
from blockyard.shared.errors import LoadError
from blockyard.shared.messages import Geometry
from blockyard.shared.process.cores import usable_cores

ANY_LENGTH = 1 << 30  # the tiles of long sequences, for all


def has_packed_graphs(config: WorkerConfig, shape: ModelShape) -> bool:
    """Whether a model that pools has CUDA graphs.

    A padded step multiplies other numbers of rows: with --batch-invariant all steps are eager. Latent layers read
    cached tokens in pieces, whose number a graph cannot follow.
    """
    is_eager = config.enforce_eager or config.batch_invariant or config.cpu_offload_gib
    return not (is_eager or config.num_ranks * config.expert_replicas > 1 or shape.has_latent)


class CudaBackend:
    """Implements `Backend`. Owns the compiler of kernels, and the tuning that is left for idle times."""

    auto_dtype: torch.dtype | None = None
    has_8_bit_kv = True

    def __init__(self, device: torch.device) -> None:
        """device: with its index."""
        self.device = device
        self.link: HostLink = CudaLink(device)
        self._compiler: KernelCompiler | None = None  # from `set_up` on
        self._tuner: Tuner | None = None  # has sizes to measure later
        self._tuning: IdleTuning | None = None
        self._claims: KernelClaims | None = None  # of these ranks; None: there is one
        self._follows = False

    def set_up(
        self, threads: int, processes: CompileProcesses | None, *, sharers: int = 1, follows: bool = False
    ) -> str:
        """threads: unused, the host computes little."""
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN takes 40 ms to plan each new sequence length
        note = f"device: {torch.cuda.get_device_name(self.device)}"
        self._compiler = record_kernels.make_compiler(processes, usable_cores(), sharers)
        self._follows = follows
        return note

    def connect_ranks(self, shard: Shard, stores: GroupStores, name: str) -> RankGroup:
        group = connect_gpus(shard, stores, name, self.device)
        group = exchange_on_gpu(group) if group.shares_gpu and shard.size == 2 else group
        group.folder = stores.folder_of(name)
        self._claims = KernelClaims(group.folder / "kernels")
        return group

    def check_shape(self, shape: ModelShape) -> None:
        check_head_sizes("cuda", shape.attention)

    def host_share(self, declare: Declare, dtype: torch.dtype, config: WorkerConfig) -> HostShare:
        return share_of_layers(declare, dtype, config.cpu_offload_gib, free_host_bytes() // config.replicas)

    def free_bytes(self, config: WorkerConfig) -> int:
        free: int = torch.cuda.mem_get_info(self.device)[0]
        return free

    def fit_num_seqs(self, config: WorkerConfig, kv_block_bytes: int) -> WorkerConfig:
        """What a step and CUDA graphs take is not known yet: they grow with the number of sequences."""
        if not config.fit_max_num_seqs:
            return config
        num_blocks = config.num_gpu_blocks_override
        if num_blocks is None:
            _, total = torch.cuda.mem_get_info(self.device)
            share = int(total * config.gpu_memory_utilization) - torch.cuda.memory_allocated(self.device)
            num_blocks = (config.kv_cache_memory_bytes or share) // kv_block_bytes
        most = num_seqs_for(num_blocks * config.block_size, config.max_num_seqs)
        return msgspec.structs.replace(config, max_num_seqs=most)

    def pick_products(self, model: Model, config: WorkerConfig, at_once: bool, report: StartReport) -> None:
        if config.enforce_eager and not config.batch_invariant:
            return
        if not config.fused_steps:
            for linear in model.linears():
                linear.disable_fusion()
        linears, dtype = model.linears(), model.table.dtype
        sizes = [n for n in config.graph_sizes if n <= config.max_num_seqs] or capture_sizes(config.max_num_seqs)
        if model.table.shard.size > 1 and not config.batch_invariant:
            # ranks compute whole matrices alike, to the last bit: routers choose by them
            whole = [one for one in linears if one.spec.split is Split.NONE]
            Tuner(whole, device=self.device, dtype=dtype).install_alike(sizes)
            linears = [one for one in linears if one.spec.split is not Split.NONE]
        tuner = Tuner(linears, model.experts(), device=self.device, dtype=dtype)
        if config.batch_invariant:
            report.note(tuner.make_batch_invariant())
            return
        folder = None if config.kernel_cache is None else Path(config.kernel_cache)
        if at_once:
            progress = Throttle(lambda done: report.phase("measuring linear layers", done))
            report.note(tuner.tune(sizes, progress, folder, config.max_num_batched_tokens))
            return
        tuner.begin(sizes, folder, config.max_num_batched_tokens)
        self._tuner = tuner

    def pick_sums(self, model: Model, ranks: RankGroup, config: WorkerConfig, report: StartReport) -> None:
        widths = [linear.shape[1] for linear in model.linears() if linear.is_partial]
        if not config.custom_all_reduce or not widths or not config.stages_within_hosts:
            return
        if ranks.kernels is None:  # otherwise it loads again after deep sleep
            report.phase("choosing sums of ranks")
            ranks.kernels = choose_sums(
                *(ranks, ranks.folder, widths[0], model.table.dtype, report.note),
                in_order=config.batch_invariant,
                cache=SumCache(self._sums_path(config)),
            )

    def _sums_path(self, config: WorkerConfig) -> Path:
        """The file of measured sums, beside that of linear layers."""
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        versions = f"torch{torch.__version__}", f"triton{triton.__version__}", f"nccl{nccl}"
        folder = None if config.kernel_cache is None else Path(config.kernel_cache)
        return cache_path(torch.cuda.get_device_name(self.device), versions, folder, what="sums")

    def make_places(self, model: Model, num_places: int, limits: AdapterLimits) -> AdapterPlaces:
        kernels = AdapterKernels(start_adapters, add_to_heads, adapt_embeddings, replace_logits, tile_rows)
        return DevicePlaces(model, num_places, limits, kernels, self.device, self.link)

    def offload_notes(self, config: WorkerConfig) -> list[str]:
        return []

    def compile_kernels(
        self,
        model: Model,
        need: KVMemoryNeed,
        kv_dtype: torch.dtype,
        num_eos: int,
        config: WorkerConfig,
        report: StartReport,
    ) -> None:
        """Compiles the kernels of steps in parallel, on this rank those that no other of its host has claimed. What
        the tuner measures is compiled in the background."""
        compiler, tuner = self._compiler, None if self._follows else self._tuner
        assert compiler is not None
        report.phase("compiling kernels")
        record_kernels.compile_kernels(compiler, model, tuner, need, kv_dtype, num_eos, config, self._claims)
        report.note(compiler.describe())
        if tuner is not None:
            self._tuning = IdleTuning(tuner, compiler)
        else:
            compiler.close()

    def end_compiling(self) -> None:
        assert self._compiler is not None
        self._compiler.close()

    def packed_product(self, batch_invariant: bool) -> Callable[[Ints], PackedProduct]:
        """A sequence's numbers depend on the kernel's tiles, and these on the longest sequence of a step."""

        def make(lengths: Ints) -> PackedProduct:
            starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            longest = ANY_LENGTH if batch_invariant else int(lengths.max())
            return TritonPackedProduct(put(starts, self.device, self.link), longest)

        return make

    def packed_graphs(
        self, model: Model, config: WorkerConfig, geometry: Geometry, pool: KVPool | None, *, has_types: bool = False
    ) -> PackedGraphs | None:
        if not has_packed_graphs(config, model.shape):
            return None
        if pool is not None:
            capture = CudaForwardCapture(self.device, chunk_graphs.MOST_BYTES)
            return chunk_graphs.chunk_graphs(model, pool, capture, geometry)
        capture, most_tokens = CudaForwardCapture(self.device), geometry.max_num_batched_tokens
        return text_graphs(model, capture, TritonPackedProduct, most_tokens=most_tokens, has_types=has_types)

    def text_threads(self, config: WorkerConfig) -> None:
        return None

    def chunk_attention(self, pool: KVPool, send: SendCommand | None = None) -> ChunkAttention:
        return TritonChunkAttention(pool, self.link, has_followers=send is not None)

    def follower_steps(self, loaded: FollowerNeeds, config: WorkerConfig) -> FollowerSteps:
        model, pool, ranks, geometry = loaded
        self.end_compiling()  # the leader measures kernels
        ops, install = make_device_ops(pool, config.fused_steps), None
        if self._tuner is not None:
            install = self._tuner.install_those_of
        return DeviceFollowerSteps(model, pool, ranks, geometry, ops, install)

    def moving_bytes(self, host_plan: MemoryPlan, transfers: KVTransferConfig | None) -> int:
        return (STAGING_BYTES if host_plan.num_blocks else 0) + planned_bytes(transfers)

    def plan_memory(
        self,
        model: Model,
        need: KVMemoryNeed,
        kv_dtype: torch.dtype,
        config: WorkerConfig,
        moving_bytes: int,
        *,
        generates: bool = True,
    ) -> MemoryPlan:
        override, kv_bytes = config.num_gpu_blocks_override, config.kv_cache_memory_bytes
        tokens = min(config.max_num_batched_tokens, config.max_num_seqs * need.max_model_len)
        try:
            has_adapters = config.lora is not None
            peak = peak_bytes(model, tokens, need, kv_dtype, self.device, has_adapters=has_adapters)
            graphs, penalties = 0, 0
            if generates:
                graphs, penalties = cuda_steps.graph_bytes(
                    model,
                    need,
                    kv_dtype,
                    config.run_ahead_penalties,
                    captures=not config.enforce_eager,
                    has_adapters=has_adapters,
                )
            elif has_packed_graphs(config, model.shape):
                graphs = chunk_graphs.graph_bytes(config.max_num_batched_tokens, peak)
        except torch.OutOfMemoryError as e:
            raise LoadError(
                f"not enough GPU memory for a step of {tokens} tokens beside the weights; lower "
                "--max-num-batched-tokens"
            ) from e
        _, total = torch.cuda.mem_get_info(self.device)
        weights = torch.cuda.memory_allocated(self.device)
        if override is None and kv_bytes is not None:
            return plan_bytes(need, kv_bytes, total - weights - peak - graphs - penalties - moving_bytes)
        share = config.gpu_memory_utilization
        return plan_cuda(need, total, share, weights, peak, override, graphs, moving_bytes, penalties)

    def make_store(self, plan: MemoryPlan, pool: KVPool) -> BlockStore | None:
        if not plan.num_blocks:
            return None
        parts = [StreamStore(run, plan.num_blocks, STAGING_BYTES // len(pool.runs)) for run in pool.runs]
        return parts[0] if len(parts) == 1 else JoinedStore(parts)

    def start_steps(self, runner: Runner, config: WorkerConfig, report: StartReport) -> None:
        """Moves the batch to the GPU and captures CUDA graphs. Reports the progress of graphs that are captured
        later."""
        mirror = None
        if runner.send is not None and isinstance(runner.model, LeaderModel):
            mirror = DeviceMirror(runner.send, runner.model.ranks, self.link)
        if mirror is not None and self._tuner is not None:
            mirror.install_kernels(self._tuner.installed())
        steps = cuda_steps.start(runner.batch, runner.model, runner.pool, runner.geometry, config, self._tuning, mirror)
        runner.use(steps)
        report.phase("first steps")
        with runner.pool.trial_steps():
            warm_up(runner)  # without CUDA graphs
            with torch.inference_mode():
                if not config.enforce_eager:
                    report.phase("capturing CUDA graphs")
                    if config.expert_replicas == 1:
                        steps.capture()
                    else:
                        steps.capture_decodes()
                step_s = steps.decodes.measure()
        runner.use(steps, step_s)
        runner.forget_trial_steps()
        step_note = f"a decode step of one choice: {1e3 * step_s:.2f} ms without its context"

        def report_ready() -> None:
            graphs = [] if config.enforce_eager else steps.describe()
            report.phase("ready", steps.captured, *graphs, step_note)

        report_ready()
        steps.report_captures(report_ready)

    def held_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device)
