"""The interface of a device to a worker's start, and its choice."""

from collections.abc import Callable
from typing import Protocol

import torch

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.attention.packed_attention import PackedProduct
from blockyard.services.gpu_worker.compilation.compile_processes import CompileProcesses
from blockyard.services.gpu_worker.execution.packed_graphs import PackedGraphs
from blockyard.services.gpu_worker.execution.pooled_steps import ChunkAttention
from blockyard.services.gpu_worker.execution.ranks.follower import FollowerNeeds, FollowerSteps
from blockyard.services.gpu_worker.execution.text_threads import TextThreads
from blockyard.services.gpu_worker.host_link import HostLink
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.layers.cpu_offload import Declare
from blockyard.services.gpu_worker.loading.weights import HostShare
from blockyard.services.gpu_worker.lora.places import AdapterPlaces
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits
from blockyard.services.gpu_worker.memory import KVMemoryNeed, MemoryPlan
from blockyard.services.gpu_worker.models.interface import Model, ModelShape
from blockyard.services.gpu_worker.parallel.rank_group import GroupStores, RankGroup
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.parallel.team import SendCommand
from blockyard.services.gpu_worker.runner import Runner
from blockyard.services.gpu_worker.startup.cpu import CpuBackend
from blockyard.services.gpu_worker.startup.start_report import StartReport
from blockyard.services.kv_transfer.host.host_store import BlockStore
from blockyard.shared.config.services.worker import KVTransferConfig, WorkerConfig
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import Geometry


class Backend(Protocol):
    """A device on which a worker computes, for one start. `engine.start` calls the methods in this order."""

    device: torch.device
    link: HostLink
    auto_dtype: torch.dtype | None  # of a model by --dtype auto; None: the dtype of config.json
    has_8_bit_kv: bool  # its kernels read a KV cache in 8 bits

    def set_up(
        self, threads: int, processes: CompileProcesses | None, *, sharers: int = 1, follows: bool = False
    ) -> str:
        """Sets torch's options. Returns a note about the device.

        threads: of computations on the host. processes: compile kernels; None: none are started yet. sharers: workers
        and ranks on this machine. follows: this rank has a leader, which measures kernels.
        """

    def connect_ranks(self, shard: Shard, stores: GroupStores, name: str) -> RankGroup:
        """Waits for the other ranks of a group of this name. Raises RankLostError."""

    def check_shape(self, shape: ModelShape) -> None:
        """Raises LoadError for a model that the kernels of the device do not support."""

    def host_share(self, declare: Declare, dtype: torch.dtype, config: WorkerConfig) -> HostShare:
        """Returns the share of the layers' weights that stays in host memory (--cpu-offload-gb). Raises LoadError.

        declare: places the model's weights in a table.
        """

    def free_bytes(self, config: WorkerConfig) -> int:
        """Returns the memory of the device that is free for this worker."""

    def fit_num_seqs(self, config: WorkerConfig, kv_block_bytes: int) -> WorkerConfig:
        """Returns the settings with as many sequences as KV memory is good for, after the weights are loaded."""

    def pick_products(self, model: Model, config: WorkerConfig, at_once: bool, report: StartReport) -> None:
        """Picks the kernels of the model's linear layers and experts.

        at_once: measures all batch sizes now. Otherwise some may be measured in idle times.
        """

    def pick_sums(self, model: Model, ranks: RankGroup, config: WorkerConfig, report: StartReport) -> None:
        """Picks how the ranks of a stage sum. All of them call it, once their weights are loaded."""

    def make_places(self, model: Model, num_places: int, limits: AdapterLimits) -> AdapterPlaces:
        """Adapts the linear layers of a model after their kernels are picked."""

    def offload_notes(self, config: WorkerConfig) -> list[str]:
        """Returns lines for a --cpu-offload-gb that does nothing on this device."""

    def compile_kernels(
        self,
        model: Model,
        need: KVMemoryNeed,
        kv_dtype: torch.dtype,
        num_eos: int,
        config: WorkerConfig,
        report: StartReport,
    ) -> None:
        """Compiles the kernels of steps before the first one runs."""

    def end_compiling(self) -> None:
        """Ends what `set_up` started for `compile_kernels`, of a model that needs none of its kernels in steps."""

    def packed_product(self, batch_invariant: bool) -> Callable[[Ints], PackedProduct]:
        """Returns what makes the attention of packed sequences of these lengths, of a model without KV."""

    def packed_graphs(
        self, model: Model, config: WorkerConfig, geometry: Geometry, pool: KVPool | None, *, has_types: bool = False
    ) -> PackedGraphs | None:
        """Returns the graphs of a model that pools, not captured; None: its steps are launched kernel by kernel.

        pool: None: it has no KV. has_types: the model knows token types.
        """

    def text_threads(self, config: WorkerConfig) -> TextThreads | None:
        """Returns the threads that compute the texts of a step without KV; None: a step is launched whole."""

    def chunk_attention(self, pool: KVPool, send: SendCommand | None = None) -> ChunkAttention:
        """Returns the attention of prefills of a model that pools. send: to followers; None: there is one rank."""

    def follower_steps(self, loaded: FollowerNeeds, config: WorkerConfig) -> FollowerSteps:
        """Returns the forward passes of a rank that follows a leader."""

    def moving_bytes(self, host_plan: MemoryPlan, transfers: KVTransferConfig | None) -> int:
        """Returns the memory of the device for buffers of copies of KV blocks, to host memory and other workers."""

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
        """Plans the KV blocks of the device. Raises LoadError if they do not fit. generates: False: the model pools."""

    def make_store(self, plan: MemoryPlan, pool: KVPool) -> BlockStore | None:
        """Allocates the KV blocks in host memory; None if the plan has none. Raises LoadError if they do not fit."""

    def start_steps(self, runner: Runner, config: WorkerConfig, report: StartReport) -> None:
        """Gives the runner what runs its steps, runs trial steps, and reports that it is ready.

        Called again after sleep, when memory is restored. Raises LoadError if its steps fail.
        """

    def held_bytes(self) -> int:
        """Returns the bytes of device memory that this process holds."""


def pick_backend(name: str) -> Backend:
    """name: of --device. Raises ConfigError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cuda":
        return CpuBackend()
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no usable GPU here; --device cpu runs on this machine")
    # imports Triton, which is installed only on machines with a GPU
    from blockyard.services.gpu_worker.startup.cuda import CudaBackend  # noqa: PLC0415

    return CudaBackend(torch.device(name, 0))
