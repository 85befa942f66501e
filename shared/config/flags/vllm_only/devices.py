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
    _hosts("master-addr", FlagKind.TEXT, "127.0.0.1", "Address of the first host."),
    _hosts("master-port", FlagKind.INT, 29501, "Port of the first host.", ge=1, le=65535),
    _hosts("headless", FlagKind.BOOL, False, "Start no API server."),
    _hosts("data-parallel-address", FlagKind.TEXT, None, "Address of the first replica.", short_names=("dpa",)),
    _hosts("data-parallel-rpc-port", FlagKind.INT, None, "Port of replicas.", short_names=("dpp",), ge=1, le=65535),
    _hosts("data-parallel-size-local", FlagKind.INT, None, "Replicas of a host.", short_names=("dpl",), ge=0),
    _hosts("data-parallel-start-rank", FlagKind.INT, None, "First replica of a host.", short_names=("dpr",), ge=0),
    Flag(
        "data-parallel-backend",
        FlagKind.TEXT,
        "mp",
        "How replicas are started.",
        short_names=("dpb",),
        choices=("mp",),
        refused_values={"ray": "use mp; --distributed-executor-backend ray places the ranks of each replica"},
    ),
    _balance("data-parallel-rank", FlagKind.INT, None, "This replica's number.", short_names=("dpn",), ge=0),
    _balance("data-parallel-external-lb", FlagKind.BOOL, False, "Balance outside.", short_names=("dpe",)),
    _balance("data-parallel-hybrid-lb", FlagKind.BOOL, False, "Balance hosts outside.", short_names=("dph",)),
    _balance("data-parallel-multi-port-external-lb", FlagKind.BOOL, False, "Ports by replica.", short_names=("dpm",)),
    _supervisor("data-parallel-supervisor-port", FlagKind.INT, None, "Port of the supervisor.", ge=1, le=65535),
    _supervisor("dp-supervisor-probe-failure-threshold", FlagKind.INT, 3, "Failed probes of a dead replica.", ge=1),
    _supervisor("dp-supervisor-probe-interval-s", FlagKind.FLOAT, 5.0, "Seconds between two probes.", ge=0),
    _supervisor("dp-supervisor-probe-timeout-s", FlagKind.FLOAT, 5.0, "Seconds of a probe.", ge=0),
    _replicas("dp-sync-interval", FlagKind.INT, 16, "Steps between two agreements of replicas.", ge=1),
    _replicas("disable-nccl-for-dp-synchronization", FlagKind.BOOL, False, "Let replicas agree by Gloo."),
    _ranks("distributed-timeout-seconds", FlagKind.INT, None, "Seconds for a group to form.", ge=1),
    _ranks("cpu-distributed-timeout-seconds", FlagKind.INT, None, "Seconds for a group on CPU to form.", ge=1),
    _ranks("enable-shm-tensor-arena", FlagKind.BOOL, False, "Shared memory for tensors between processes."),
    _ranks("enable-batch-sharded-sampling", FlagKind.BOOL, False, "Sample a part of the batch on each GPU."),
    _ranks("enable-hc-sp", FlagKind.BOOL, False, "Divide the tokens of hyper-connections."),
    Flag(
        "decode-context-parallel-size", FlagKind.INT, 1, "GPUs that share KV.", short_names=("dcp",), refused=_CONTEXT
    ),
    Flag(
        "prefill-context-parallel-size",
        FlagKind.INT,
        1,
        "GPUs that share a prompt.",
        short_names=("pcp",),
        refused=_CONTEXT,
    ),
    _no_context("dcp-comm-backend", FlagKind.TEXT, None, "How GPUs that share KV combine results."),
    _no_context("dcp-q-replicate", FlagKind.BOOL, False, "Compute queries on each GPU that shares KV."),
    _no_context("dcp-kv-cache-interleave-size", FlagKind.INT, 1, "Tokens in a row on one GPU.", ge=1),
    _no_context("cp-kv-cache-interleave-size", FlagKind.INT, None, "Tokens in a row on one GPU.", ge=1),
    _ranks("all2all-backend", FlagKind.TEXT, None, "How tokens get to experts on other GPUs."),
    _experts("elastic-ep-max-dp-size", FlagKind.INT, None, "Most replicas.", ge=1),
    _experts("enable-elastic-ep", FlagKind.BOOL, False, "Change the number of GPUs while serving."),
    _experts("enable-ep-weight-filter", FlagKind.BOOL, False, "Read only a GPU's own experts."),
    _experts("expert-placement-strategy", FlagKind.TEXT, "linear", "Which experts a GPU has."),
    _overlap("enable-dbo", FlagKind.BOOL, False, "Divide steps in two halves."),
    _overlap("ubatch-size", FlagKind.INT, 0, "Parts of a step.", ge=0),
    _overlap("dbo-decode-token-threshold", FlagKind.INT, 32, "Fewest tokens of a divided decode step.", ge=0),
    _overlap("dbo-prefill-token-threshold", FlagKind.INT, 512, "Fewest tokens of a divided step with prompts.", ge=0),
    switch("enable-fault-tolerance", "Go on without a failed replica.", mapped=_FAULTS),
    Flag("fault-tolerance-config", FlagKind.JSON, None, "How to go on.", refused=_FAULTS, harmless=({},)),
    Flag(
        "device-ids",
        FlagKind.LIST,
        [],
        "GPUs to use.",
        refused=not_built("a choice of GPUs by a flag; set CUDA_VISIBLE_DEVICES"),
    ),
    _numa("numa-bind", FlagKind.BOOL, False, "Bind workers to the NUMA nodes of their GPUs."),
    _numa("numa-bind-cpus", FlagKind.LIST, [], "CPUs of each worker."),
    _numa("numa-bind-nodes", FlagKind.LIST, [], "NUMA node of each worker."),
)

KERNELS = (
    _own("attention-backend", FlagKind.TEXT, None, "Kernels of attention."),
    _own("attention-config", FlagKind.JSON, None, "Settings of attention.", short_names=("ac",)),
    _own("disable-cascade-attn", FlagKind.BOOL, True, "Read shared prefixes once for each sequence."),
    _products("linear-backend", FlagKind.TEXT, "auto", "Kernels of linear layers."),
    _products("moe-backend", FlagKind.TEXT, "auto", "Kernels of experts."),
    _products("enable-flashinfer-autotune", FlagKind.BOOL, False, "Measure FlashInfer's kernels at the start."),
    _products("kernel-config", FlagKind.JSON, None, "Settings of kernels."),
    _own("ir-op-priority", FlagKind.JSON, None, "Which implementations of operations come first."),
    _own("monokernel", FlagKind.BOOL, False, "Run a whole decode step as one kernel."),
    _own("sparse-indexer-topk-backend", FlagKind.TEXT, "auto", "Kernels that choose tokens of sparse attention."),
    _own("gdn-prefill-backend", FlagKind.TEXT, None, "Kernels of gated delta networks."),
    _own("kda-prefill-backend", FlagKind.TEXT, None, "Kernels of delta attention in prompts."),
    _own("kda-decode-backend", FlagKind.TEXT, None, "Kernels of delta attention in decodes."),
)
