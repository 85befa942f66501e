"""The HTTP server: the APIs of OpenAI and Anthropic in front, the ring behind.

Any number of gateways may run; each serves alone.

    server.py            listening sockets, TLS, the application's routes, draining
    service.py           the gateway's loop over its links
    request_pipeline.py  a checked request -> token ids -> requests to the schedulers
    pooling_pipeline.py  the same for models that make vectors, scores and classes
    stored_responses/    responses that are kept for a later turn, and those that are generated without a connection
    endpoints/           handlers by route: generation, status, operations
    http/                what every HTTP request passes: connections, keys, CORS, bounded bodies
    requests/            decoded fields -> `GenerateRequest`
    apis/                the APIs that clients speak: fields in, bytes of answers and errors out
    bodies/              bytes of a body -> the request, by its API
    batches/             requests from a file in place of connections
    batch_api/           files and batches over HTTP: their records, and the loop that answers them
    responses/           text deltas -> an answer, whole or as server-sent events
    metrics/             /metrics
    page/                the playground, served as it is
    api_tables.py        the README's tables of routes and fields
    turns.py             requests begin a few at a time, with an iteration of the event loop in between
    garbage.py           when Python's cyclic garbage is collected

Imports point one way: server -> endpoints -> http -> batch_api -> batches -> service -> stored_responses ->
request_pipeline -> pooling_pipeline, metrics -> responses -> bodies -> apis -> requests. Tokenizing, dispatch, and the
journal of open requests are in `shared/ring_client`, which offline inference uses too.

To add an API: write one file in `apis/` that ends in its `Api` (paths, the Struct of its body, `parse` to a
`GenerateRequest`, `events` of a streamed answer, the `whole` answer, the body of its errors), and add it to
`apis/registry.py`. What a streamed answer has to remember (a counter, an open item) is in its `AnswerEvents`. Routes,
large bodies, keep-alives, slow clients and the errors of its paths follow from the `Api`.

Endpoints of pooling models are not streamed, and generate nothing: each is a `PoolingApi` in `apis/pooling`, with its
fields in `requests/pooling`. Its texts are one `PoolingCall`, and their results come on the link that answers the call.
"""
