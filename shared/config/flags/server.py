"""Flags of the HTTP server."""

from blockyard.shared.config.flags.flag import Flag, FlagKind, not_built

SERVER = (
    Flag(
        "host",
        FlagKind.TEXT,
        None,
        "Host name or address that the API server binds; unset: all addresses.",
        ("gateway.host",),
    ),
    Flag(
        "uds",
        FlagKind.TEXT,
        None,
        "Path of a Unix socket for the API server, instead of --host and --port.",
        ("gateway.uds",),
    ),
    Flag("port", FlagKind.INT, 8000, "TCP port of the API server.", ("gateway.port",), ge=1, le=65535),
    Flag(
        "uvicorn-log-level",
        FlagKind.TEXT,
        None,
        "Log level of the HTTP server; unset: --log-level.",
        choices=("debug", "info", "warning", "error", "critical", "trace"),
        mapped="sets the log level of the gateway processes",
    ),
    Flag("disable-uvicorn-access-log", FlagKind.BOOL, False, "Log no line at the end of each HTTP request."),
    Flag("root-path", FlagKind.TEXT, None, "Path prefix behind a path-based routing proxy.", ("gateway.root_path",)),
    Flag(
        "middleware",
        FlagKind.LIST,
        [],
        "Extra ASGI middleware by import path.",
        refused=not_built("the gateway is no ASGI application; put a proxy in front of it"),
    ),
    Flag("chat-template", FlagKind.TEXT, None, "Chat template: a file, or the template itself."),
    Flag(
        "fim-template",
        FlagKind.TEXT,
        None,
        "Prompt of a completion with `suffix`: {prefix} and {suffix} between the model's markers. Unset: those of the "
        "family whose markers the tokenizer has.",
        ("tokenizer.fim_template",),
    ),
    Flag(
        "chat-template-content-format",
        FlagKind.TEXT,
        "auto",
        "Form of a message's content in chat templates: string, openai (a list of parts), auto: detected.",
        ("tokenizer.chat_template_content_format",),
        choices=("auto", "string", "openai"),
    ),
    Flag(
        "default-chat-template-kwargs",
        FlagKind.JSON,
        {},
        "Variables of chat templates for requests that do not set them in `chat_template_kwargs`, e.g. "
        '{"enable_thinking": false}.',
    ),
    Flag(
        "trust-request-chat-template",
        FlagKind.BOOL,
        False,
        "Use the `chat_template` of requests; off: such a request is a 400.",
        ("tokenizer.trust_request_chat_template",),
    ),
    Flag(
        "response-role",
        FlagKind.TEXT,
        "assistant",
        "Role in answers of the chat endpoint.",
        ("scheduler.model.response_role",),
    ),
    Flag("served-model-name", FlagKind.LIST, [], "Model names in the API, the first is echoed; unset: --model."),
    Flag(
        "return-tokens-as-token-ids",
        FlagKind.BOOL,
        False,
        "Show the tokens of log-probabilities as token_id:N.",
        ("gateway.return_tokens_as_token_ids",),
    ),
    Flag(
        "disable-frontend-multiprocessing",
        FlagKind.BOOL,
        False,
        "Run the API server in the engine's process.",
        refused="services are processes of their own; --api-gateways 1 is the least",
    ),
    Flag(
        "enable-request-id-headers",
        FlagKind.BOOL,
        False,
        "Add X-Request-Id to every answer.",
        ("gateway.enable_request_id_headers",),
    ),
    Flag(
        "disable-fastapi-docs",
        FlagKind.BOOL,
        False,
        "Turn off the OpenAPI pages.",
        mapped="no OpenAPI pages are served",
    ),
    Flag(
        "strict-fields",
        FlagKind.BOOL,
        False,
        "Reject requests with unknown fields with a 400; by default a header names the ignored fields.",
        ("gateway.strict_fields",),
    ),
    Flag(
        "enable-prompt-tokens-details",
        FlagKind.BOOL,
        False,
        "Include prompt_tokens_details in usage.",
        ("gateway.enable_prompt_tokens_details",),
    ),
)

SECURITY = (
    Flag("allow-credentials", FlagKind.BOOL, False, "CORS: allow credentials.", ("gateway.cors.allow_credentials",)),
    Flag("allowed-origins", FlagKind.LIST, ["*"], "CORS: allowed origins.", ("gateway.cors.allowed_origins",)),
    Flag("allowed-methods", FlagKind.LIST, ["*"], "CORS: allowed methods.", ("gateway.cors.allowed_methods",)),
    Flag("allowed-headers", FlagKind.LIST, ["*"], "CORS: allowed headers.", ("gateway.cors.allowed_headers",)),
    Flag(
        "api-key",
        FlagKind.LIST,
        [],
        "API keys: a client must send one of them. Other users of the machine can read a command line: "
        "BLOCKYARD_API_KEY or --api-key-file are safer.",
        ("gateway.api_keys",),
    ),
    Flag("api-key-file", FlagKind.TEXT, None, "File with API keys, one on each line."),
    Flag(
        "admin-key",
        FlagKind.LIST,
        [],
        "Keys of operators, needed to pause, sleep, wake up or reset the prefix cache; safer in "
        "BLOCKYARD_ADMIN_KEY or --admin-key-file. Without one an API key is needed, and without any key only this "
        "machine is answered.",
        ("gateway.admin_keys",),
    ),
    Flag("admin-key-file", FlagKind.TEXT, None, "File with admin keys, one on each line."),
    Flag(
        "ssl-keyfile",
        FlagKind.TEXT,
        None,
        "TLS private key file; unset: the key is in --ssl-certfile.",
        ("gateway.tls.keyfile",),
    ),
    Flag(
        "ssl-certfile",
        FlagKind.TEXT,
        None,
        "TLS certificate file; it may hold the private key too.",
        ("gateway.tls.certfile",),
    ),
    Flag("ssl-ca-certs", FlagKind.TEXT, None, "File of CA certificates for checking client certificates."),
    Flag("ssl-cert-reqs", FlagKind.INT, 0, "Client certificates: 0 none, 1 optional, 2 required.", ge=0, le=2),
    Flag(
        "allowed-local-media-path",
        FlagKind.TEXT,
        None,
        "Folder from which requests may read images.",
        refused=not_built("image and video input"),
    ),
    Flag(
        "trust-remote-code",
        FlagKind.BOOL,
        False,
        "Run code that comes with a model.",
        mapped="no code from model folders is ever run; the supported families are built in",
    ),
)
