"""Flags of memory, scheduling and parallelism."""

from blockyard.shared.config.flags.flag import Flag, FlagKind, switch

PARALLEL = (
    Flag(
        "tensor-parallel-size",
        1,
        "Ranks of a worker, each with a share of every layer on its own GPU, or on the CPU.",
        ("worker.tensor_parallel_size",),
        short_names=("tp",),
        ge=1,
        le=64,
    ),
    Flag(
        "pipeline-parallel-size",
        1,
        "Stages of a worker, each with some of the layers and --tensor-parallel-size ranks.",
        ("worker.pipeline_parallel_size",),
        short_names=("pp",),
        ge=1,
        le=64,
    ),
    Flag(
        "pipeline-layers",
        None,
        "Number of layers of each stage, such as 20,12; unset: by their weights and the room for KV blocks.",
        kind=FlagKind.INTS,
    ),
    Flag(
        "nnodes",
        1,
        "Hosts of the ranks of a worker: `blockyard run gpu-worker` on each, with the same flags but for --node-rank.",
        short_names=("n",),
        ge=1,
        le=64,
    ),
    Flag(
        "node-rank",
        0,
        "Number of this host, from 0. The host of number 0 has the leader.",
        short_names=("r",),
        ge=0,
    ),
    Flag(
        "rank-timeout",
        120.0,
        "Seconds in which all ranks of a worker that are started elsewhere must have joined it.",
        ("worker.rank_timeout_s",),
        ge=1,
    ),
    Flag(
        "data-parallel-size",
        1,
        "Replicas of the model, each on its own GPU or with its share of the CPU cores.",
        short_names=("dp",),
        ge=1,
        le=1024,
    ),
    Flag(
        "data-parallel-rank",
        None,
        "`run gpu-worker`: number of this replica, from 0, among --data-parallel-size that have the "
        "experts together (--enable-expert-parallel). Each is a process of its own, on any host.",
        short_names=("dpn",),
        kind=FlagKind.INT,
        ge=0,
    ),
    switch(
        "enable-expert-parallel",
        "Give each rank of --tensor-parallel-size, and of all replicas of --data-parallel-size together, some experts "
        "whole. Otherwise each rank has a share of every expert, and each replica has all.",
        ("worker.expert_parallel",),
    ),
    switch(
        "enable-eplb",
        "With --enable-expert-parallel: move experts between ranks while serving, so that they have about equal loads.",
    ),
    Flag(
        "eplb-config",
        None,
        "When --enable-eplb moves experts: every step_interval steps (3000), by the loads of the last window_size ones "
        "(1000). log_balancedness: write a line each time.",
        kind=FlagKind.JSON,
    ),
    Flag(
        "distributed-executor-backend",
        None,
        "Who starts the ranks of a worker. mp: its first process, on this machine; uni: there is one rank; ray: a Ray "
        "cluster, on any of its machines; external_launcher: torchrun, whose process 0 makes the `LLM`. Unset: mp, or "
        "ray if this machine has too few GPUs and a cluster answers.",
        choices=("mp", "uni", "ray", "external_launcher"),
    ),
    switch("worker-use-ray", "The same as --distributed-executor-backend ray."),
    switch(
        "engine-use-ray",
        "Start the engine with Ray.",
        mapped="services are processes of their own already; for ranks: --distributed-executor-backend ray",
    ),
    switch("ray-workers-use-nsight", "Profile each rank that Ray starts with Nsight Systems."),
    switch(
        "disable-custom-all-reduce",
        "Sum over ranks by NCCL alone, and not by kernels that write to other GPUs' memory.",
        ("!worker.custom_all_reduce",),
    ),
    Flag(
        "worker-cls",
        "auto",
        "Kind of worker; mock: no model, tokens at a fixed rate.",
        ("worker.worker_cls",),
        choices=("auto", "mock"),
    ),
)

CACHE = (
    Flag(
        "block-size",
        16,
        "Tokens per KV block.",
        ("worker.block_size", "tokenizer.block_size"),
        choices=("8", "16", "32", "64", "128"),
    ),
    Flag(
        "enable-prefix-caching",
        True,
        "Reuse KV blocks of earlier requests with the same prefix.",
        ("scheduler.enable_prefix_caching",),
    ),
    Flag(
        "gpu-memory-utilization",
        0.9,
        "Fraction of the GPU's memory for weights and KV.",
        ("worker.gpu_memory_utilization",),
        other_names=("device-memory-utilization",),
        ge=0.01,
        le=1,
    ),
    Flag(
        "swap-space",
        None,
        "Host memory for KV blocks evicted from the device, in GiB per worker; unset: 4 to swap, else 0.",
        ge=0,
        kind=FlagKind.FLOAT,
    ),
    Flag(
        "cpu-offload-gb",
        0.0,
        "Weights kept in host memory, in GiB per GPU, experts first; each GiB a step reads adds about 20 ms to it.",
        ("worker.cpu_offload_gib",),
        ge=0,
    ),
    Flag(
        "num-gpu-blocks-override",
        None,
        "Number of KV blocks, instead of what memory allows.",
        ("worker.num_gpu_blocks_override",),
        ge=1,
        kind=FlagKind.INT,
    ),
    Flag("use-v2-block-manager", True, "Choose a block manager.", mapped="there is one block manager"),
    Flag(
        "cpu-kv-gib",
        None,
        "KV memory on CPU, in GiB; unset: by need.",
        ("worker.cpu_kv_gib",),
        ge=0,
        kind=FlagKind.FLOAT,
    ),
    Flag(
        "kv-cache-memory-bytes",
        None,
        "KV memory of a worker in bytes, also on CPU, instead of what --gpu-memory-utilization leaves.",
        ("worker.kv_cache_memory_bytes",),
        ge=1,
        kind=FlagKind.SIZE,
    ),
)

SCHEDULER = (
    Flag(
        "max-num-batched-tokens",
        None,
        "Most tokens per step; unset: 2048 on a GPU, 4096 if 2048 would give an expert of a mixture fewer than 256, "
        "8192 for a pooling model, 16384 for a narrow decoder; 512 on CPU, 2048 for an encoder; but at least twice "
        "--max-num-seqs.",
        ge=1,
        kind=FlagKind.SIZE,
    ),
    Flag(
        "max-num-seqs",
        None,
        "Most sequences that run at a time; unset: 256 on CPU, on a GPU one for each 512 tokens that KV memory holds, "
        "256 to 1024.",
        ge=1,
        kind=FlagKind.INT,
    ),
    Flag(
        "enable-chunked-prefill",
        True,
        "Compute prompts in chunks in the same steps as decodes, decodes first.",
        ("scheduler.enable_chunked_prefill",),
    ),
    Flag(
        "max-num-partial-prefills",
        1,
        "Prompts that may be partly computed at a time; above 1, long prompts leave tokens of a step to short ones.",
        ("scheduler.max_num_partial_prefills",),
        ge=1,
    ),
    Flag(
        "max-long-partial-prefills",
        1,
        "Long prompts among --max-num-partial-prefills.",
        ("scheduler.max_long_partial_prefills",),
        ge=1,
    ),
    Flag(
        "long-prefill-token-threshold",
        0,
        "A prompt with more tokens to compute counts as long; 0: 4 % of the context length.",
        ("scheduler.long_prefill_token_threshold",),
        ge=0,
    ),
    Flag(
        "scheduler-delay-factor",
        0.0,
        "Delay before the next prompt, in durations of the last step with a prompt, while sequences run.",
        ("scheduler.delay_factor",),
        ge=0,
    ),
    Flag(
        "num-scheduler-steps",
        1,
        "Steps per scheduler call.",
        ge=1,
        le=64,
        mapped="N above 1 is --run-ahead N-1; 1 leaves it at its default",
    ),
    Flag(
        "run-ahead",
        None,
        "Steps planned ahead of the running one; 0: synchronous; unset: enough for 2 ms of steps.",
        ge=0,
        le=63,
        kind=FlagKind.INT,
    ),
    Flag(
        "run-ahead-penalties",
        True,
        "On a GPU, apply penalties, token lists and log-probabilities there; off: the host samples these, more slowly.",
        ("worker.run_ahead_penalties",),
    ),
    Flag(
        "multi-step-stream-outputs",
        True,
        "Stream each step's tokens.",
        mapped="each step's tokens are always sent at once",
    ),
    Flag(
        "num-lookahead-slots",
        0,
        "KV slots for tokens that are not sampled yet.",
        ge=0,
        le=63,
        mapped="N is --run-ahead N, unless --run-ahead or --num-scheduler-steps gives more",
    ),
    Flag(
        "preemption-mode",
        "recompute",
        "KV of a preempted request is recomputed, or kept in host memory (--swap-space).",
        choices=("recompute", "swap"),
    ),
    Flag(
        "scheduling-policy",
        "fcfs",
        "Order of requests: by arrival, by `priority` (lower first), or fair between API keys and their `user`s.",
        ("scheduler.scheduling_policy",),
        choices=("fcfs", "priority", "fair"),
    ),
    switch(
        "disable-async-output-proc",
        "Process outputs between steps.",
        mapped="the same as --run-ahead 0",
    ),
    Flag("async-scheduling", True, "Plan a step while earlier ones run.", mapped="off is --run-ahead 0"),
    Flag(
        "max-queue-len",
        1024,
        "Most waiting sequences (a request has n; all texts of a call of a pooling model are one, and 65,536 texts may "
        "wait in all); more are a 429. An empty queue takes a request of any size.",
        ("scheduler.max_queue_len",),
        ge=1,
    ),
    Flag(
        "max-queue-tokens",
        2**22,
        "Most tokens of waiting sequences and texts (a prompt counts n times); more are a 429.",
        ("scheduler.max_queue_tokens",),
        ge=1,
    ),
    Flag(
        "max-queue-delay",
        None,
        "Seconds a request may wait for its first step: 429 if it would wait longer, 503 if it has.",
        ("scheduler.max_queue_delay_s",),
        ge=0.1,
        kind=FlagKind.FLOAT,
    ),
    Flag(
        "max-num-queued-reqs",
        None,
        "Most requests of a gateway that wait or run (one with n choices counts n, one to a pooling model counts one); "
        "more are a 429.",
        ("gateway.max_num_queued_reqs",),
        ge=1,
        kind=FlagKind.INT,
    ),
    Flag(
        "max-num-queued-tokens",
        None,
        "Prompt tokens of a gateway's requests without output yet, and of texts without a result, from which on a "
        "request is a 429.",
        ("gateway.max_num_queued_tokens",),
        ge=1,
        kind=FlagKind.SIZE,
    ),
    Flag(
        "scheduler-reserve-full-isl",
        True,
        "A prompt starts when there are KV blocks for all of its tokens; off: for those of its first step.",
        ("scheduler.reserve_whole_prompts",),
    ),
    Flag(
        "watermark",
        None,
        "Fraction of KV blocks that stay free when a sequence starts beside others; unset: 0.01.",
        ("scheduler.watermark",),
        ge=0,
        le=1,
        kind=FlagKind.FLOAT,
    ),
)
