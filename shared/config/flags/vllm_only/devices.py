"""Flags of several GPUs and hosts, and of kernels, that only vLLM has.

A worker is the GPUs of one host here, and a ring may have many workers on many hosts. Kernels are this project's own,
chosen by measurement.
"""

from functools import partial

from blockyard.shared.config.flags.flag import Flag, FlagKind, not_built, switch

_HOSTS = "use `blockyard run gpu-worker` on each host, with one --message-bus for all: ranks find each other there"
_BALANCE = "the scheduler divides requests among all workers; use --data-parallel-size or more `blockyard run` workers"
_SUPERVISOR = "`serve` restarts processes that end, and those that stand still after --hung-timeout"
_CONTEXT = not_built("context parallelism; use 1")
_EXPERTS = not_built("other choices of the experts of a rank than --enable-expert-parallel and --enable-eplb")
_RANKS = "the ranks of a worker have one way to find each other and to send, with limits of its own"
_REPLICAS = "replicas with the experts together agree on each step by messages, and others are workers of their own"
_NO_CONTEXT = "no ranks share the KV of a sequence, because there is no context parallelism"
_NUMA = not_built("binding to NUMA nodes; start `blockyard run gpu-worker` under numactl")
_OVERLAP = not_built("steps in two overlapping halves")
_FAULTS = "workers that fail are restarted and their requests go on elsewhere; leave it out"
_PRODUCTS = "kernels of linear layers and experts are measured on this GPU, and the fastest are taken"
_OWN = "there is one implementation, chosen by device and shapes"

_hosts = partial(Flag, refused=_HOSTS)
_balance = partial(Flag, refused=_BALANCE)
_supervisor = partial(Flag, mapped=_SUPERVISOR)
_experts = partial(Flag, refused=_EXPERTS)
_ranks = partial(Flag, mapped=_RANKS)
_replicas = partial(Flag, mapped=_REPLICAS)
_no_context = partial(Flag, mapped=_NO_CONTEXT)
_numa = partial(Flag, refused=_NUMA)
_overlap = partial(Flag, refused=_OVERLAP)
_products = partial(Flag, mapped=_PRODUCTS)
_own = partial(Flag, mapped=_OWN)

PARALLEL = (
    _hosts("master-addr", "127.0.0.1", "Address of the first host."),
    _hosts("master-port", 29501, "Port of the first host.", ge=1, le=65535),
    _hosts("headless", False, "Start no API server."),
    _hosts("data-parallel-address", None, "Address of the first replica.", short_names=("dpa",)),
    _hosts(
        "data-parallel-rpc-port", None, "Port of replicas.", short_names=("dpp",), ge=1, le=65535, kind=FlagKind.INT
    ),
    _hosts("data-parallel-size-local", None, "Replicas of a host.", short_names=("dpl",), ge=0, kind=FlagKind.INT),
    _hosts("data-parallel-start-rank", None, "First replica of a host.", short_names=("dpr",), ge=0, kind=FlagKind.INT),
    Flag(
        "data-parallel-backend",
        "mp",
        "How replicas are started.",
        short_names=("dpb",),
        choices=("mp",),
        refused_values={"ray": "use mp; --distributed-executor-backend ray places the ranks of each replica"},
    ),
    _balance("data-parallel-external-lb", False, "Balance outside.", short_names=("dpe",)),
    _balance("data-parallel-hybrid-lb", False, "Balance hosts outside.", short_names=("dph",)),
    _balance("data-parallel-multi-port-external-lb", False, "Ports by replica.", short_names=("dpm",)),
    _supervisor("data-parallel-supervisor-port", None, "Port of the supervisor.", ge=1, le=65535, kind=FlagKind.INT),
    _supervisor("dp-supervisor-probe-failure-threshold", 3, "Failed probes of a dead replica.", ge=1),
    _supervisor("dp-supervisor-probe-interval-s", 5.0, "Seconds between two probes.", ge=0),
    _supervisor("dp-supervisor-probe-timeout-s", 5.0, "Seconds of a probe.", ge=0),
    _replicas("dp-sync-interval", 16, "Steps between two agreements of replicas.", ge=1),
    _replicas("disable-nccl-for-dp-synchronization", False, "Let replicas agree by Gloo."),
    _ranks("distributed-timeout-seconds", None, "Seconds for a group to form.", ge=1, kind=FlagKind.INT),
    _ranks("cpu-distributed-timeout-seconds", None, "Seconds for a group on CPU to form.", ge=1, kind=FlagKind.INT),
    _ranks("enable-shm-tensor-arena", False, "Shared memory for tensors between processes."),
    _ranks("enable-batch-sharded-sampling", False, "Sample a part of the batch on each GPU."),
    _ranks("enable-hc-sp", False, "Divide the tokens of hyper-connections."),
    Flag("decode-context-parallel-size", 1, "GPUs that share KV.", short_names=("dcp",), refused=_CONTEXT),
    Flag(
        "prefill-context-parallel-size",
        1,
        "GPUs that share a prompt.",
        short_names=("pcp",),
        refused=_CONTEXT,
    ),
    _no_context("dcp-comm-backend", None, "How GPUs that share KV combine results."),
    _no_context("dcp-q-replicate", False, "Compute queries on each GPU that shares KV."),
    _no_context("dcp-kv-cache-interleave-size", 1, "Tokens in a row on one GPU.", ge=1),
    _no_context("cp-kv-cache-interleave-size", None, "Tokens in a row on one GPU.", ge=1, kind=FlagKind.INT),
    _ranks("all2all-backend", None, "How tokens get to experts on other GPUs."),
    _experts("elastic-ep-max-dp-size", None, "Most replicas.", ge=1, kind=FlagKind.INT),
    _experts("enable-elastic-ep", False, "Change the number of GPUs while serving."),
    _experts("enable-ep-weight-filter", False, "Read only a GPU's own experts."),
    _experts("expert-placement-strategy", "linear", "Which experts a GPU has."),
    _overlap("enable-dbo", False, "Divide steps in two halves."),
    _overlap("ubatch-size", 0, "Parts of a step.", ge=0),
    _overlap("dbo-decode-token-threshold", 32, "Fewest tokens of a divided decode step.", ge=0),
    _overlap("dbo-prefill-token-threshold", 512, "Fewest tokens of a divided step with prompts.", ge=0),
    switch("enable-fault-tolerance", "Go on without a failed replica.", mapped=_FAULTS),
    Flag("fault-tolerance-config", None, "How to go on.", refused=_FAULTS, harmless=({},), kind=FlagKind.JSON),
    Flag(
        "device-ids",
        [],
        "GPUs to use.",
        refused=not_built("a choice of GPUs by a flag; set CUDA_VISIBLE_DEVICES"),
    ),
    _numa("numa-bind", False, "Bind workers to the NUMA nodes of their GPUs."),
    _numa("numa-bind-cpus", [], "CPUs of each worker."),
    _numa("numa-bind-nodes", [], "NUMA node of each worker."),
)

KERNELS = (
    _own("attention-backend", None, "Kernels of attention."),
    _own("attention-config", None, "Settings of attention.", short_names=("ac",), kind=FlagKind.JSON),
    _own("disable-cascade-attn", True, "Read shared prefixes once for each sequence."),
    _products("linear-backend", "auto", "Kernels of linear layers."),
    _products("moe-backend", "auto", "Kernels of experts."),
    _products("enable-flashinfer-autotune", False, "Measure FlashInfer's kernels at the start."),
    _products("kernel-config", None, "Settings of kernels.", kind=FlagKind.JSON),
    _own("ir-op-priority", None, "Which implementations of operations come first.", kind=FlagKind.JSON),
    _own("monokernel", False, "Run a whole decode step as one kernel."),
    _own("sparse-indexer-topk-backend", "auto", "Kernels that choose tokens of sparse attention."),
    _own("gdn-prefill-backend", None, "Kernels of gated delta networks."),
    _own("kda-prefill-backend", None, "Kernels of delta attention in prompts."),
    _own("kda-decode-backend", None, "Kernels of delta attention in decodes."),
)
