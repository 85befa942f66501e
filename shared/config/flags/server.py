"""Flags of the HTTP server."""

from blockyard.shared.config.flags.flag import Flag, FlagKind, not_built, switch

SERVER = (
    Flag(
        "host",
        None,
        "Host name or address that the API server binds; unset: all addresses.",
        ("gateway.host",),
    ),
    Flag(
        "uds",
        None,
        "Path of a Unix socket for the API server, instead of --host and --port.",
        ("gateway.uds",),
    ),
    Flag("port", 8000, "TCP port of the API server.", ("gateway.port",), ge=1, le=65535),
    Flag(
        "uvicorn-log-level",
        None,
        "Log level of the HTTP server; unset: --log-level.",
        choices=("debug", "info", "warning", "error", "critical", "trace"),
        mapped="sets the log level of the gateway processes",
    ),
    switch("disable-uvicorn-access-log", "Log no line at the end of each HTTP request."),
    Flag(
        "disable-access-log-for-endpoints",
        None,
        "Paths whose requests have no line in the log, separated by commas, such as /tokenize,/ping.",
    ),
    Flag("root-path", None, "Path prefix behind a path-based routing proxy.", ("gateway.root_path",)),
    Flag(
        "sse-keep-alive-interval",
        15.0,
        "Seconds without output after which a stream sends a line that clients ignore; 0: never.",
        ("gateway.keepalive_s",),
        ge=0,
    ),
    Flag(
        "stream-interval",
        1,
        "Tokens of an event of a streamed answer. The first token and the end are sent at once.",
        ("gateway.stream_interval",),
        ge=1,
    ),
    Flag(
        "h11-max-header-count",
        128,
        "Most headers of an HTTP request; one with more is a 400.",
        ("gateway.max_headers",),
        ge=8,
        le=65536,
    ),
    Flag(
        "h11-max-incomplete-event-size",
        8190,
        "Longest request line and header, in bytes; a longer one is a 400.",
        ("gateway.max_header_bytes",),
        ge=1024,
        le=2**24,
    ),
    Flag(
        "middleware",
        [],
        "Importable name of middleware around every route, before keys and CORS: an ASGI class, an async function "
        "(request, call_next) if the package starlette is installed, or an aiohttp middleware. Repeated: the first is "
        "the outermost.",
        ("gateway.middleware",),
    ),
    Flag("chat-template", None, "Chat template: a file, or the template itself."),
    Flag(
        "fim-template",
        None,
        "Prompt of a completion with `suffix`: {prefix} and {suffix} between the model's markers. Unset: those of the "
        "family whose markers the tokenizer has.",
        ("tokenizer.fim_template",),
    ),
    Flag(
        "chat-template-content-format",
        "auto",
        "Form of a message's content in chat templates: string, openai (a list of parts), auto: detected.",
        ("tokenizer.chat_template_content_format",),
        choices=("auto", "string", "openai"),
    ),
    Flag(
        "default-chat-template-kwargs",
        {},
        "Variables of chat templates for requests that do not set them in `chat_template_kwargs`, e.g. "
        '{"enable_thinking": false}.',
        kind=FlagKind.JSON,
    ),
    switch(
        "trust-request-chat-template",
        "Use the `chat_template` of requests; off: such a request is a 400.",
        ("tokenizer.trust_request_chat_template",),
    ),
    Flag(
        "response-role",
        "assistant",
        "Role in answers of the chat endpoint.",
        ("scheduler.model.response_role",),
    ),
    Flag("served-model-name", [], "Model names in the API, the first is echoed; unset: --model."),
    Flag(
        "fingerprint-mode",
        "full",
        "The `system_fingerprint` of answers: full: the version, the number of GPUs of a model if it is more than one, "
        "and a hash of the flags that may change answers; hash: without that number; custom: --fingerprint-value; "
        "none: no fingerprint.",
        choices=("full", "hash", "custom", "none"),
    ),
    Flag("fingerprint-value", None, "The `system_fingerprint` of --fingerprint-mode custom."),
    switch(
        "enable-scale-out",
        "Serve /inference/v1/generate, token ids in and out, and what it takes: /v1/completions/render, "
        "/v1/chat/completions/render and /v1/responses/render.",
        ("gateway.scale_out",),
    ),
    switch(
        "enable-tokenizer-info-endpoint",
        "Serve /tokenizer_info: the tokenizer's settings and its chat template.",
        ("gateway.tokenizer_info",),
    ),
    switch(
        "return-tokens-as-token-ids",
        "Show the tokens of log-probabilities as token_id:N.",
        ("gateway.return_tokens_as_token_ids",),
    ),
    switch(
        "disable-frontend-multiprocessing",
        "Run the API server in the engine's process.",
        mapped="the same as --api-gateways 1: services are processes of their own, and one gateway is the least",
    ),
    switch(
        "enable-request-id-headers",
        "Add X-Request-Id to every answer.",
        ("gateway.enable_request_id_headers",),
    ),
    switch(
        "disable-fastapi-docs",
        "Turn off /openapi.json, /docs and /redoc.",
        ("!gateway.serve_docs",),
    ),
    switch(
        "strict-fields",
        "Reject requests with unknown fields with a 400; by default a header names the ignored fields.",
        ("gateway.strict_fields",),
    ),
    switch(
        "enable-force-include-usage",
        "Include usage in every streamed answer, also without `stream_options`.",
        ("gateway.force_include_usage",),
    ),
    switch(
        "enable-prompt-tokens-details",
        "Include prompt_tokens_details in usage.",
        ("gateway.enable_prompt_tokens_details",),
    ),
)

SECURITY = (
    switch("allow-credentials", "CORS: allow credentials.", ("gateway.cors.allow_credentials",)),
    Flag("allowed-origins", ["*"], "CORS: allowed origins.", ("gateway.cors.allowed_origins",)),
    Flag("allowed-methods", ["*"], "CORS: allowed methods.", ("gateway.cors.allowed_methods",)),
    Flag("allowed-headers", ["*"], "CORS: allowed headers.", ("gateway.cors.allowed_headers",)),
    Flag(
        "api-key",
        [],
        "API keys: a client must send one of them. Other users of the machine can read a command line: "
        "BLOCKYARD_API_KEY or --api-key-file are safer.",
        ("gateway.api_keys",),
    ),
    Flag(
        "api-key-file",
        None,
        "File with API keys, one on each line, as KEY or NAME KEY. The name is the client's tenant in metrics and "
        "the fair policy; without one the tenant is key-N by its place. SIGHUP reads the file again.",
    ),
    Flag(
        "admin-key",
        [],
        "Keys of operators, needed to pause, sleep, wake up or reset the prefix cache; safer in "
        "BLOCKYARD_ADMIN_KEY or --admin-key-file. Without one an API key is needed, and without any key only this "
        "machine is answered.",
        ("gateway.admin_keys",),
    ),
    Flag(
        "admin-key-file",
        None,
        "File with admin keys, as --api-key-file.",
    ),
    Flag(
        "ssl-keyfile",
        None,
        "TLS private key file; unset: the key is in --ssl-certfile.",
        ("gateway.tls.keyfile",),
    ),
    Flag(
        "ssl-certfile",
        None,
        "TLS certificate file; it may hold the private key too.",
        ("gateway.tls.certfile",),
    ),
    Flag("ssl-ca-certs", None, "File of CA certificates for checking client certificates."),
    Flag("ssl-cert-reqs", 0, "Client certificates: 0 none, 1 optional, 2 required.", ge=0, le=2),
    switch(
        "enable-ssl-refresh",
        "Read the TLS files again when they change. New connections have the new certificate.",
    ),
    Flag(
        "ssl-ciphers",
        None,
        "Ciphers of TLS 1.2 and older, in the words of OpenSSL; unset: Python's choice.",
    ),
    Flag(
        "allowed-local-media-path",
        None,
        "Folder from which requests may read images.",
        refused=not_built("image and video input"),
    ),
    switch(
        "trust-remote-code",
        "Run code that comes with a model.",
        mapped="no code from model folders is ever run; the supported families are built in",
    ),
)
