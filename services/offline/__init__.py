"""The offline API: `blockyard.LLM` runs a ring without HTTP as child processes of the caller.

`RunningModel` reads keywords (`engine_args`) and checks `SamplingParams`; `LLM`, and the engines in `engines`, read
prompts (`prompts`) and run them on it. `Session` runs the ring and its client on an event loop in a thread. Each call
becomes a `RequestBatch`; `inflight` sends its requests as the queue has room, `answers` reads calls and reasoning, and
`outputs` builds the `RequestOutput`s. In a script under torchrun, process 0 does calls for all (`external_launcher`).
`commands` has `tune` and `quantize`.

Imports: `shared`, and from `launcher` its supervision, models and flag sources. `bench` imports this package.
"""
