"""The HTTP server: OpenAI's API in front, the ring behind. Any number of gateways may run; each serves alone.

    server.py            listening sockets, TLS, the application's routes, draining
    service.py           the gateway's loop over its links
    request_pipeline.py  a checked request -> token ids -> requests to the schedulers
    endpoints/           handlers by route: generation, status, operations
    http/                what every HTTP request passes: connections, keys, CORS, bounded bodies
    requests/            bytes of a body -> `GenerateRequest`
    responses/           text deltas -> bytes of an answer, whole or as server-sent events
    metrics/             /metrics

Imports point one way: server -> endpoints -> http -> service -> request_pipeline, metrics -> responses -> requests.
Tokenizing, dispatch, and the journal of open requests are in `shared/ring_client`, which offline inference uses too.
"""
