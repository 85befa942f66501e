"""Settings of a worker."""

import enum
from typing import Literal

import msgspec

from blockyard.shared.config.services.lora import LoraConfig, PromptConfig
from blockyard.shared.config.services.process import ProcessConfig
from blockyard.shared.messages import GrammarEngine, KVRole

DUMMY_FORMATS = ("dummy", "dummy-skewed")  # load formats of random weights


class LogprobsMode(enum.StrEnum):
    """What is reported as the log-probability of an output token."""

    RAW_LOGPROBS = "raw_logprobs"  # before penalties, masks and temperature
    PROCESSED_LOGPROBS = "processed_logprobs"  # behind them, top_k, top_p and min_p
    RAW_LOGITS = "raw_logits"
    PROCESSED_LOGITS = "processed_logits"


Dtype = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]

USUAL_SEQS = 256  # sequences at a time of a worker without --max-num-seqs; on a GPU the fewest


def capture_sizes(most: int) -> list[int]:
    """Batch sizes that steps are padded to: powers of two, then multiples of 16, 32 and 64, and `most`."""
    sizes = [1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, *range(320, most + 64, 64)]
    return [*(n for n in sizes if n < most), most]


class MockConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The worker without a model: `--worker-cls mock`."""

    step_ms: float = 0.0  # a step takes at least this long
    vocab_size: int = 0  # 0: the model's
    num_blocks: int = 65536
    num_host_blocks: int = 65536  # if WorkerConfig.swap_space_gib is not 0
    max_model_len: int = 32768  # if WorkerConfig.max_model_len is None
    echo: bool = False  # repeat the prompt's tokens instead of pseudo-random ones
    first_id: int = 0  # tokens come from first_id to end_id - 1; 0: the middle of the vocabulary
    end_id: int = 0
    fatal_id: int = 0  # the device fails on a prompt with this id; 0: never
    eos_every: int = 0  # about one in this many tokens ends its sequence; 0: never


class ExpertBalance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Moves of experts between ranks, by how often they were chosen: `--enable-eplb`, `--eplb-config`."""

    interval_steps: int = 3000  # after so many, experts may move
    window_steps: int = 1000  # the last ones of the interval, in which loads are counted
    logs: bool = False  # write a line after each interval

    def __post_init__(self) -> None:
        if not 1 <= self.window_steps <= self.interval_steps:
            raise ValueError(f"window_steps must be in [1, {self.interval_steps}], got {self.window_steps}")


class KVTransferFaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Faults that a worker adds to its own transfers, for tests: `--pd-faults`. Probabilities are of one copy."""

    drop: float = 0.0  # the copy fails, so its transfer is aborted
    delay_ms: float = 0.0  # longest delay of a copy; delays are uniform
    flip: float = 0.0  # one bit of the copied bytes is inverted


class KVTransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Transfers of KV blocks to and from other workers: `--role`, `--kv-transfer-config`."""

    role: KVRole = KVRole.BOTH
    connector: Literal["auto", "cuda_ipc", "shm", "tcp", "nixl"] = "auto"
    backends: list[str] = []  # of nixl; empty: its default
    encrypt: bool = True  # False: frames and blocks are not encrypted, and each link needs a one-time ticket
    checksums: bool = True
    port: int = 0  # of the socket for links of senders; 0: any
    faults: KVTransferFaults = KVTransferFaults()


class RayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The Ray cluster that finds a node for each rank and starts it: `--distributed-executor-backend ray`."""

    address: str  # host and port
    with_nsight: bool = False  # profile each rank


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    process: ProcessConfig
    model_path: str  # folder with config.json and the weights
    tokenizer_path: str = ""  # folder of the tokenizer, which structured output needs; empty: the model's
    served_model_names: list[str] = []
    worker_cls: Literal["auto", "mock"] = "auto"
    device: Literal["auto", "cuda", "cpu"] = "auto"
    dtype: Dtype = "auto"
    load_format: Literal["auto", "pt", "safetensors", "gguf", "dummy", "dummy-skewed"] = "auto"
    ignore_patterns: list[str] = []  # file names not loaded
    config_overrides: str = "{}"  # JSON object laid over config.json: --hf-overrides, --rope-scaling, --rope-theta
    max_model_len: int | None = None  # None: as in config.json
    fit_max_model_len: bool = False  # shorten the context length to what memory holds
    block_size: int = 16  # tokens
    gpu_memory_utilization: float = 0.9
    cpu_kv_gib: float | None = None  # KV memory on CPU; None: by need, within limits
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None  # instead of a share of the device's memory
    swap_space_gib: float = 0.0  # host memory for KV blocks
    cpu_offload_gib: float = 0.0  # weights of layers that stay in host memory
    max_num_seqs: int = USUAL_SEQS
    fit_max_num_seqs: bool = False  # lower it to one for each 512 tokens of KV memory, but not below USUAL_SEQS
    max_num_batched_tokens: int = 2048
    model_impl: Literal["auto", "transformers"] = "auto"
    seed: int = 0  # of dummy weights
    threads: int = 0  # compute threads on CPU; 0: cores minus one
    replicas: int = 1  # workers that share this machine's cores and memory
    gpu: int | None = None  # index among the visible GPUs, if it has its own; of the first rank
    mock: MockConfig = MockConfig()
    enforce_eager: bool = False  # no CUDA graphs
    run_ahead_penalties: bool = True  # steps apply penalties, token lists, log-probabilities
    graph_sizes: list[int] = []  # batch sizes captured in CUDA graphs; empty: a default list up to max_num_seqs
    batch_invariant: bool = False  # a sequence's logits do not depend on the rest of its batch
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    kv_scales_path: str | None = None  # JSON file
    grammar_engines: list[GrammarEngine] = []  # their processes start with the worker; others start by need
    calculate_kv_scales: bool = False  # from the first prompt
    expert_metrics: bool = True  # count how often experts are chosen
    fused_steps: bool = True  # on a GPU, fuse kernels of small steps
    kv_transfer: KVTransferConfig | None = None  # None: this worker neither sends nor receives KV blocks
    kernel_cache: str | None = None  # folder of compiled kernels and measured plans; None: in the user's cache
    config_path: str = ""  # folder of config.json, if it is not model_path
    modules_path: str = ""  # folder of modules.json, if it is not model_path
    load_strategy: Literal["lazy", "eager", "prefetch"] = "lazy"  # of weight files
    prefetch_threads: int = 8  # that read files into the page cache
    prefetch_block_bytes: int = 16 * 2**20  # that such a thread reads at a time
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
    task: Literal["generate", "embed", "classify", "score", "reward"] = "generate"
    lora: LoraConfig | None = None  # None: this worker serves no LoRA adapters
    prompts: PromptConfig | None = None  # None: this worker serves no prompt adapters
    pooler_config: str = "{}"  # JSON object: --override-pooler-config
    tensor_parallel_size: int = 1  # ranks of the worker, each with a share of every layer
    max_parallel_loading: int | None = None  # ranks of the host that load weights at a time; None: all
    expert_parallel: bool = False  # a rank has some experts whole, and not a share of each
    expert_replicas: int = 1  # workers that have the experts of the model together, and all else each
    replica: int = 0  # number of this worker among them
    replica_group: int = 0  # number of the first of them among the workers of this machine
    replicas_apart: bool = False  # they are processes of `blockyard run`, and find each other on the membership list
    expert_balance: ExpertBalance | None = None  # None: experts stay where they are loaded
    has_pair_template: bool = False  # the tokenizers render pairs of texts, with an instruction
    pipeline_parallel_size: int = 1  # stages of the model, each with some layers, of `tensor_parallel_size` ranks
    pipeline_layers: list[int] = []  # number of layers of each stage; empty: by cost and KV memory
    ray: RayConfig | None = None  # None: this process starts its other ranks
    num_nodes: int = 1  # hosts of the ranks, each with as many
    node_rank: int = 0  # number of this host; 0: the leader's
    rank_timeout_s: float = 120.0  # in which all ranks must have joined
    rank_group: str = ""  # name by which ranks of other hosts find the leader, and replicas that are apart the first
    custom_all_reduce: bool = True  # on GPUs, kernels sum over ranks where they are quicker than NCCL

    @property
    def long_factors(self) -> list[int]:
        """Of the model's context, that adapters may have."""
        return [] if self.lora is None else self.lora.long_factors

    @property
    def num_ranks(self) -> int:
        """Processes of the worker, each with its own device."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def host_ranks(self) -> range:
        """The ranks that this host's worker process starts, or is."""
        if self.ray is not None:
            return range(1)
        each = self.num_ranks // self.num_nodes
        return range(self.node_rank * each, (self.node_rank + 1) * each)

    @property
    def stages_within_hosts(self) -> bool:
        return len(self.host_ranks) % self.tensor_parallel_size == 0

    def describe_ranks(self) -> str:
        """Returns the flags that give the worker several ranks."""
        sizes = {"tensor": self.tensor_parallel_size, "pipeline": self.pipeline_parallel_size}
        return ", ".join(f"--{name}-parallel-size {size}" for name, size in sizes.items() if size > 1)

    def __post_init__(self) -> None:
        parallel = "tensor_parallel_size", "pipeline_parallel_size"
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", *parallel):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not 0 <= self.replica < self.expert_replicas:
            raise ValueError(f"replica {self.replica} is none of {self.expert_replicas}")
        if self.num_ranks % self.num_nodes or not 0 <= self.node_rank < self.num_nodes:
            raise ValueError(f"host {self.node_rank} of {self.num_nodes} cannot have a share of {self.num_ranks} ranks")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
