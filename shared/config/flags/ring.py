"""Flags of the ring: replicas, timeouts, links, the mock worker."""

from blockyard.shared.config.flags.flag import Flag, FlagKind, switch

RING = (
    Flag("config", None, "YAML file of flags; the command line and the environment override it."),
    Flag(
        "api-gateways",
        1,
        "Gateway processes; they share the port.",
        other_names=("api-server-count",),
        ge=1,
        le=256,
    ),
    Flag("detokenizers", 1, "Detokenizer processes.", ge=1, le=256),
    Flag(
        "log-level",
        "info",
        "Log level.",
        choices=("trace", "debug", "info", "warning", "error", "critical"),
    ),
    Flag("metrics-port", 0, "Gateway N serves its own metrics on this port plus N; 0: off.", ge=0, le=65535),
    Flag(
        "metrics-names",
        "both",
        "Prefix of the metrics: vllm: (the families that vLLM has, with its labels and buckets), blockyard: (those and "
        "ours), or both.",
        ("gateway.metrics_names",),
        choices=("both", "vllm", "blockyard"),
    ),
    Flag(
        "shutdown-timeout",
        30.0,
        "Seconds for running requests to end after SIGTERM.",
        ("gateway.shutdown_timeout_s",),
        ge=0,
    ),
    Flag(
        "client-timeout",
        60.0,
        "Seconds after which a client that reads nothing is cancelled.",
        ("gateway.client_timeout_s",),
        ge=0.1,
    ),
    Flag(
        "max-unread-mib",
        512,
        "MiB of unread answers of one gateway; above it the slowest client is cancelled.",
        ("gateway.max_unread_mib",),
        ge=1,
    ),
    Flag(
        "stall-timeout",
        60.0,
        "Seconds after which a request without output is sent again.",
        ("gateway.stall_timeout_s",),
        ge=0.1,
    ),
    Flag(
        "hung-timeout",
        10.0,
        "`serve`: seconds after which a process that stands still is killed and started again, six times as many while "
        "it starts, 30 times as many for a worker's step as long as its other threads run; 0: never, as under a "
        "debugger.",
        ge=0,
    ),
    Flag(
        "max-connections",
        None,
        "Most HTTP connections of one gateway; above it the longest idle are closed. Unset: the limit on open "
        "files less a reserve, at most 16384.",
        ("gateway.max_connections",),
        ge=1,
        kind=FlagKind.INT,
    ),
    Flag("max-body-bytes", 32 * 2**20, "Largest HTTP body.", ("gateway.max_body_bytes",), ge=1024),
    Flag(
        "max-total-body-bytes",
        None,
        "Sum of the HTTP bodies that one gateway reads at a time, above which a request is a 503. Unset: 8 times "
        "--max-body-bytes.",
        ("gateway.max_total_body_bytes",),
        ge=1024,
        kind=FlagKind.INT,
    ),
    Flag(
        "batch-dir",
        None,
        "Folder of /v1/files and /v1/batches, which all gateways of this host share. Unset: both are off.",
        ("gateway.batch_dir",),
    ),
    Flag(
        "max-file-bytes",
        512 * 2**20,
        "Largest file of a batch that is taken by /v1/files.",
        ("gateway.max_file_bytes",),
        ge=1,
        kind=FlagKind.SIZE,
    ),
    Flag(
        "batch-retention",
        30 * 86400.0,
        "Seconds after which files and ended batches are removed from --batch-dir.",
        ("gateway.batch_retention_s",),
        ge=60,
    ),
    Flag(
        "max-stored-responses",
        1000,
        "Responses of /v1/responses that one gateway keeps, with --response-store all gateways together; above it the "
        "least recently used are dropped. 0: none, and previous_response_id and background are refused.",
        ("gateway.max_stored_responses",),
        ge=0,
    ),
    Flag(
        "max-stored-response-bytes",
        256 * 2**20,
        "Bytes of all responses that --max-stored-responses counts; above it the least recently used are dropped.",
        ("gateway.max_stored_response_bytes",),
        ge=2**20,
        kind=FlagKind.SIZE,
    ),
    Flag(
        "response-ttl",
        1800.0,
        "Seconds after its last use after which a stored response is dropped.",
        ("gateway.response_ttl_s",),
        ge=0.1,
    ),
    Flag(
        "response-store",
        None,
        "Folder that keeps stored responses over a restart, and which all gateways of this host share. Unset: they are "
        "in the memory of the gateway that made them.",
        ("gateway.response_store",),
    ),
    Flag(
        "body-timeout",
        30.0,
        "Seconds for a body to arrive; a later one is a 408.",
        ("gateway.body_timeout_s",),
        ge=0.1,
    ),
    Flag("run-dir", None, "Private folder of the sockets; unset: a new one in the temporary folder."),
    Flag(
        "message-bus",
        None,
        "`run`: where the registry is, e.g. tcp://message-bus:5700; it binds that address, for a name --bind's.",
    ),
    Flag("bind", None, "`run`: where this process listens, e.g. tcp://0.0.0.0."),
    Flag("advertise", None, "`run`: the address that others reach this process at; unset: the host name."),
    Flag("curve-keys", None, "`run`: folder that `blockyard keys` wrote; needed on tcp."),
    Flag(
        "name",
        None,
        "`run`: this process's name in the membership list; unset: service and host name. With --nnodes "
        "also the name of the group, the same on all its hosts.",
    ),
)

MOCK = (
    Flag("mock-step-ms", 0.0, "Duration of a mock worker's step.", ("worker.mock.step_ms",), ge=0),
    Flag(
        "mock-vocab-size",
        0,
        "Vocabulary of the mock worker; 0: the model's.",
        ("worker.mock.vocab_size",),
        ge=0,
    ),
    Flag("mock-blocks", 65536, "Its KV blocks.", ("worker.mock.num_blocks",), ge=1),
    Flag(
        "mock-eos-every",
        0,
        "One in this many tokens ends a mock worker's sequence; 0: none.",
        ("worker.mock.eos_every",),
        ge=0,
    ),
    Flag(
        "mock-fatal-id",
        0,
        "The mock worker's device fails on a prompt with this id; 0: never.",
        ("worker.mock.fatal_id",),
        ge=0,
    ),
    switch("mock-echo", "The mock worker repeats the prompt.", ("worker.mock.echo",)),
)
