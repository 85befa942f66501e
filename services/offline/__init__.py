"""The offline API: `blockyard.LLM` runs a ring without HTTP as child processes of the caller.

`LLM` reads its keywords (`engine_args`), prompts (`prompts`) and `SamplingParams`. `Session` runs the ring and its
client on an event loop in a thread. Each call becomes a batch, whose requests enter the ring through `inflight` and
whose answers become `RequestOutput`s. `tune` is the command that runs a ring without requests.

Imports: `shared`, and from `launcher` its supervision, models and flag sources. `bench` imports this package.
"""
