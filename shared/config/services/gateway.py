"""Settings of an API gateway."""

import enum

import msgspec

from blockyard.shared.config.services.batch import BatchConfig
from blockyard.shared.config.services.process import ProcessConfig


def _anyone() -> list[str]:
    return ["*"]


class CorsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    allow_credentials: bool = False
    allowed_origins: list[str] = msgspec.field(default_factory=_anyone)
    allowed_methods: list[str] = msgspec.field(default_factory=_anyone)
    allowed_headers: list[str] = msgspec.field(default_factory=_anyone)


class TlsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    certfile: str
    keyfile: str = ""  # empty: the key is in the certificate's file
    ca_certs: str = ""
    cert_reqs: int = 0  # a constant of the ssl module: 0 none, 1 optional, 2 required
    ciphers: str = ""  # of TLS 1.2 and older; empty: Python's choice
    refresh: bool = False  # read the files again when they change


class ParserPlugins(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Paths of a user's files on this machine: formats that `ToolDefaults` of a model may name."""

    tools: str = ""
    reasoning: str = ""


class MetricsNames(enum.StrEnum):
    """Prefixes in /metrics."""

    BOTH = "both"
    VLLM = "vllm"  # its families alone
    BLOCKYARD = "blockyard"


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One HTTP server. Replicas differ only in `process.name` and `metrics_port`."""

    process: ProcessConfig
    host: str = ""  # empty: all addresses
    port: int = 8000
    uds: str = ""  # path of a Unix socket, in place of host and port
    reuse_port: bool = True  # replicas on one host share the port
    metrics_port: int = 0  # this replica's own /metrics; 0: none
    metrics_names: MetricsNames = MetricsNames.BOTH
    root_path: str = ""  # prefix under which a proxy shows this server
    api_keys: list[str] = []  # besides those of the file; without any no key is required
    admin_keys: list[
        str
    ] = []  # for operators' endpoints; empty: the API keys, and without keys only this machine has access
    tls: TlsConfig | None = None
    cors: CorsConfig = CorsConfig()
    served_model_names: list[str] = []  # the first is echoed; for messages before a scheduler has joined
    parser_plugins: ParserPlugins = ParserPlugins()
    return_tokens_as_token_ids: bool = False
    enable_request_id_headers: bool = False
    enable_prompt_tokens_details: bool = False
    strict_fields: bool = False  # an unknown request field is a 400
    access_log: bool = True  # a line at the end of each POST
    log_requests: bool = False  # a line when a generation request arrives
    max_body_bytes: int = 32 * 2**20
    max_total_body_bytes: int | None = None  # of all bodies being read; None: eight times the largest body
    body_timeout_s: float = 30.0  # a body that takes longer is a 408
    max_connections: int | None = None  # None: by the limit on open files
    client_timeout_s: float = 60.0  # a client that reads nothing for this long is cancelled
    max_unread_mib: int = 512  # of unread answers; above it the slowest client is cancelled
    stall_timeout_s: float = 60.0  # a request without output for this long is sent again
    shutdown_timeout_s: float = 30.0  # time for running requests to end after SIGTERM
    keepalive_s: float = 15.0  # a comment line this often while nothing is sent; 0: never
    api_key_file: str = ""  # read at the start and on SIGHUP
    admin_key_file: str = ""
    serve_docs: bool = True  # /openapi.json, /docs and /redoc
    max_headers: int = 128  # of a request
    max_header_bytes: int = 8190  # of the request line and of each header
    stream_interval: int = 1  # tokens of an event of a streamed answer
    force_include_usage: bool = False  # in every streamed answer
    unlogged_paths: list[str] = []  # without a line of access_log
    log_outputs: bool = False  # the text of answers
    log_deltas: bool = True  # with log_outputs, of each event of a stream
    max_log_len: int | None = None  # characters of a text in a log line; beside log_requests it shows prompts
    max_num_queued_reqs: int | None = None  # requests that wait or run; a further one is a 429
    max_num_queued_tokens: int | None = None  # prompt tokens of requests without output, from which on one is a 429
    batch_dir: str = ""  # of files and batches; empty: none are kept
    max_file_bytes: int = 512 * 2**20  # of an uploaded file
    batch_retention_s: float = 30 * 86400.0  # files and ended batches are removed after it
    batch_lines: int = 256  # of a batch that are answered at a time
    max_stored_responses: int = 1000  # of /v1/responses, that a gateway keeps; 0: none
    max_stored_response_bytes: int = 256 * 2**20  # of all stored responses
    response_ttl_s: float = 1800.0  # a stored response is dropped so long after its last use
    response_store: str = ""  # folder of stored responses, of all gateways of this host; empty: in memory
    middleware: list[str] = []  # importable names, the first is the outermost
    system_fingerprint: str = ""  # of answers; empty: they have none
    scale_out: bool = False  # serves requests that are rendered, and token ids in and out
    tokenizer_info: bool = False  # serves /tokenizer_info
    server_info: str = "{}"  # JSON object: the flags, without secrets
    lora_dir: str = ""  # below which operators and first requests load adapters; empty: none are
    batch: BatchConfig | None = None  # set: this gateway does not listen
