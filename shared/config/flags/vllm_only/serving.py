"""Flags of the API and of logs that only vLLM has."""

from blockyard.shared.config.flags.flag import Flag, FlagKind, not_built, switch

_GRPC = not_built("gRPC; use the HTTP API")
_SPEC_METRICS = not_built("speculative decoding; leave it at none")

SERVING = (
    switch(
        "aggregate-engine-logging",
        "Log the statistics of all engines as one.",
        mapped="the statistics of all workers of a model are always one line",
    ),
    Flag(
        "anthropic-disabled-thinking-effort",
        "auto",
        "Effort that stands for disabled thinking in /v1/messages.",
        refused=not_built("an effort for disabled thinking; set it for all requests by --default-chat-template-kwargs"),
    ),
    Flag(
        "cohere-format",
        None,
        "Prompt format of Cohere models: cmd3 or cmd4.",
        mapped="prompts are rendered by the chat template of the model or of --chat-template",
    ),
    Flag(
        "cohere-is-reasoning-model",
        True,
        "Show the thoughts of Cohere models as reasoning.",
        mapped="--reasoning-parser says what is reasoning",
    ),
    Flag(
        "custom-histogram-buckets",
        None,
        "Buckets of histograms in /metrics.",
        takes_json=True,
        refused=not_built("buckets of one's own; the histograms have vLLM's usual ones"),
    ),
    switch(
        "cudagraph-metrics",
        "Metrics of CUDA graphs.",
        refused=not_built("metrics of CUDA graphs; the start's report says which sizes have one"),
    ),
    switch(
        "enable-layerwise-nvtx-tracing",
        "Mark each layer for Nsight.",
        refused=not_built("marks of layers; profile a step with `blockyard bench latency`"),
    ),
    switch(
        "enable-logging-iteration-details",
        "Log each step.",
        refused=not_built("a log line for each step; /metrics has counts of steps and tokens"),
    ),
    switch(
        "enable-mfu-metrics",
        "Metrics of the FLOPs used.",
        refused=not_built("metrics of FLOPs; `blockyard bench` measures kernels against their ceilings"),
    ),
    switch(
        "enable-offline-docs",
        "Serve the API's pages without assets of other hosts.",
        mapped="no page of this server has assets of other hosts",
    ),
    switch(
        "enable-per-request-metrics",
        "Times in each answer.",
        refused=not_built("times in answers; use the field `return_stamps` of streamed requests, or /metrics"),
    ),
    switch(
        "enable-server-load-tracking",
        "Count requests for /load.",
        mapped="/load is always served",
    ),
    switch(
        "fail-on-environ-validation",
        "End the start if a variable of the environment is wrong.",
        mapped="a wrong BLOCKYARD_ variable always ends the start, others are not read",
    ),
    switch("grpc", "Serve gRPC.", refused=_GRPC),
    Flag("grpc-port", None, "Port of gRPC.", ge=1, le=65535, refused=_GRPC, kind=FlagKind.INT),
    Flag(
        "jit-monitor-mode",
        "warn",
        "What a kernel that is compiled while serving leads to.",
        choices=("warn", "error"),
        mapped="kernels are compiled before a worker is ready",
    ),
    switch(
        "jit-monitor-verbose",
        "Log each kernel that is compiled.",
        mapped="kernels are compiled before a worker is ready; the start's report counts them",
    ),
    switch(
        "kv-cache-metrics",
        "Metrics of the life of KV blocks.",
        refused=not_built("metrics of single KV blocks; /metrics has their use and the prefix cache's hits"),
    ),
    Flag(
        "kv-cache-metrics-sample",
        0.01,
        "Share of KV blocks with metrics.",
        refused=not_built("metrics of single KV blocks"),
    ),
    switch(
        "log-error-stack",
        "Log the stack of errors in answers.",
        mapped="the stack of a fault of this server is always logged; errors of clients have none",
    ),
    Flag(
        "per-request-spec-decode-metrics",
        "none",
        "Accepted drafts in each answer.",
        refused=_SPEC_METRICS,
    ),
    Flag(
        "profiler-config",
        None,
        "Profiles that are started over HTTP.",
        refused=not_built("profiles over HTTP; attach py-spy or Nsight to a process"),
        harmless=({},),
        kind=FlagKind.JSON,
    ),
    Flag(
        "reasoning-effort-map",
        None,
        "Other values for `reasoning_effort`.",
        refused=not_built("a map of efforts; chat templates get `reasoning_effort` as requests have it"),
        harmless=({},),
        kind=FlagKind.JSON,
    ),
    Flag(
        "show-hidden-metrics-for-version",
        None,
        "Show metrics that a version hides.",
        mapped="no metric is hidden",
    ),
    switch(
        "tokens-only",
        "Serve token ids alone.",
        refused=not_built("a server without text; prompts may be given as token ids all the same"),
    ),
    Flag(
        "tool-server",
        None,
        "Servers that run tools.",
        refused=not_built("tools that the server runs; clients run them"),
    ),
    Flag(
        "tool-strict-level",
        "auto",
        "How closely calls follow the schemas of tools.",
        choices=("auto", "function", "parameter"),
        refused=not_built("a least strictness of all calls; use `strict` of a tool, or tool_choice"),
    ),
    Flag(
        "watchdog-config",
        None,
        "Settings of a watchdog.",
        refused="processes that stand still are restarted after --hung-timeout; use that",
        harmless=({},),
        kind=FlagKind.JSON,
    ),
    Flag(
        "watermark-config",
        None,
        "Watermarks in generated text.",
        refused=not_built("watermarks in text; use a logits processor (--logits-processors)"),
        harmless=({},),
        kind=FlagKind.JSON,
    ),
)
