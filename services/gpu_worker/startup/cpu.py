"""The CPU: torch's own operations on host memory, a fixed share of which is for KV blocks."""

from collections.abc import Callable
from functools import partial

import torch

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.attention.packed_attention import CpuPackedProduct, PackedProduct
from blockyard.services.gpu_worker.compilation.compile_processes import CompileProcesses
from blockyard.services.gpu_worker.execution.cpu_steps import CpuSteps
from blockyard.services.gpu_worker.execution.pipelined_steps import PipelinedCpuSteps
from blockyard.services.gpu_worker.execution.pooled_steps import ChunkAttention, CpuChunkAttention
from blockyard.services.gpu_worker.execution.ranks.follower import CpuFollowerSteps, FollowerNeeds, FollowerSteps
from blockyard.services.gpu_worker.execution.ranks.leader import LeaderMetadata, LeaderModel
from blockyard.services.gpu_worker.execution.text_threads import TextThreads
from blockyard.services.gpu_worker.host_link import HostLink, SameMemory
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.layers.cpu_offload import Declare
from blockyard.services.gpu_worker.loading.weights import ALL_ON_DEVICE, HostShare
from blockyard.services.gpu_worker.lora.cpu_products import CpuPlaces
from blockyard.services.gpu_worker.lora.places import AdapterPlaces
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits
from blockyard.services.gpu_worker.memory import KVMemoryNeed, MemoryPlan, free_host_bytes, plan_bytes, plan_cpu
from blockyard.services.gpu_worker.models.interface import Model, ModelShape
from blockyard.services.gpu_worker.parallel.rank_group import GroupStores, RankGroup, connect_cpus
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.parallel.team import SendCommand
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.startup.start_report import StartReport
from blockyard.services.gpu_worker.warm_up import first_step
from blockyard.services.kv_transfer.host.host_store import BlockStore, PlainStore
from blockyard.shared.config.services.worker import KVTransferConfig, WorkerConfig
from blockyard.shared.messages import Geometry
from blockyard.shared.process.cores import usable_cores
from blockyard.shared.process.service_main import rss_bytes


class CpuBackend:
    """Implements `Backend`. It compiles and tunes nothing, and steps run before their launch returns."""

    auto_dtype: torch.dtype | None = torch.float32  # products in 16 bits are slower on most CPUs
    has_8_bit_kv = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.link: HostLink = SameMemory()

    def set_up(
        self, threads: int, processes: CompileProcesses | None, *, sharers: int = 1, follows: bool = False
    ) -> str:
        if processes is not None:
            processes.close()
        torch.set_num_threads(threads)
        return f"device: cpu, {torch.get_num_threads()} compute threads"

    def connect_ranks(self, shard: Shard, stores: GroupStores, name: str) -> RankGroup:
        return connect_cpus(shard, stores, name)

    def check_shape(self, shape: ModelShape) -> None:
        """torch takes all shapes."""

    def host_share(self, declare: Declare, dtype: torch.dtype, config: WorkerConfig) -> HostShare:
        return ALL_ON_DEVICE

    def free_bytes(self, config: WorkerConfig) -> int:
        return free_host_bytes() // config.replicas

    def fit_num_seqs(self, config: WorkerConfig, kv_block_bytes: int) -> WorkerConfig:
        return config

    def pick_products(self, model: Model, config: WorkerConfig, at_once: bool, report: StartReport) -> None:
        if config.batch_invariant:
            for linear in model.linears():
                linear.make_batch_invariant()

    def pick_sums(self, model: Model, ranks: RankGroup, config: WorkerConfig, report: StartReport) -> None:
        """gloo sums."""

    def make_places(self, model: Model, num_places: int, limits: AdapterLimits) -> AdapterPlaces:
        return CpuPlaces(model, num_places, fully_sharded=limits.fully_sharded)

    def offload_notes(self, config: WorkerConfig) -> list[str]:
        return ["weights in host memory: all, this is a CPU (--cpu-offload-gb)"] if config.cpu_offload_gib else []

    def compile_kernels(
        self,
        model: Model,
        need: KVMemoryNeed,
        kv_dtype: torch.dtype,
        num_eos: int,
        config: WorkerConfig,
        report: StartReport,
    ) -> None:
        """torch's own operations are compiled."""

    def end_compiling(self) -> None:
        """Nothing compiles."""

    def packed_product(self, batch_invariant: bool) -> Callable[[Ints], PackedProduct]:
        return partial(CpuPackedProduct, alone=batch_invariant)

    def packed_graphs(
        self, model: Model, config: WorkerConfig, geometry: Geometry, pool: KVPool | None, *, has_types: bool = False
    ) -> None:
        return None

    def text_threads(self, config: WorkerConfig) -> TextThreads:
        """On all cores: the other services compute little meanwhile, one frame for many texts."""
        return TextThreads(config.threads or max(1, usable_cores() // config.replicas))

    def chunk_attention(self, pool: KVPool, send: SendCommand | None = None) -> ChunkAttention:
        return CpuChunkAttention(pool, None if send is None else LeaderMetadata(pool, send))

    def follower_steps(self, loaded: FollowerNeeds, config: WorkerConfig) -> FollowerSteps:
        return CpuFollowerSteps(loaded.model, loaded.pool, loaded.ranks)

    def moving_bytes(self, host_plan: MemoryPlan, transfers: KVTransferConfig | None) -> int:
        return 0

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
        override, kv_bytes, free = config.num_gpu_blocks_override, config.kv_cache_memory_bytes, self.free_bytes(config)
        if override is None and kv_bytes is not None:
            return plan_bytes(need, kv_bytes, free)
        return plan_cpu(need, free, config.cpu_kv_gib, override)

    def make_store(self, plan: MemoryPlan, pool: KVPool) -> BlockStore | None:
        return PlainStore(pool.runs, plan.num_blocks) if plan.num_blocks else None

    def start_steps(self, runner: Runner, config: WorkerConfig, report: StartReport) -> None:
        edits = config.run_ahead_penalties
        metadata = None
        if runner.send is not None:
            metadata = LeaderMetadata(runner.pool, runner.send, runner.geometry.num_stages)
        steps = CpuSteps(runner.model, runner.pool, runner.batch, runner.geometry, edits, metadata)
        num_stages = runner.geometry.num_stages if config.expert_replicas == 1 else 1  # replicas agree step by step
        if isinstance(runner.model, LeaderModel) and num_stages > 1:
            pipelined = PipelinedCpuSteps(steps, runner.model, num_stages)
            runner.use(pipelined, depends=pipelined.depends)
        else:
            runner.use(steps)
        report.phase("first step")
        first_step(runner)
        report.phase("ready", 1.0)

    def held_bytes(self) -> int:
        return rss_bytes()
