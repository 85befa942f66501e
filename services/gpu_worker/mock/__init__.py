"""A worker without a model: it answers plans with made-up tokens and checks that every plan is consistent.

- `runner.MockRunner`: implements `interfaces.OffloadableRunner`.
- `batch.MockBatch`: the slots and blocks. A plan that contradicts earlier plans raises `PlanError`.
- `kv.MockKV`: which tokens each block holds. `model` reads sizes from config.json.

It makes no masks: a choice with structured output fails instead of its first token, with a message that says so.

`__main__` calls `runner.start`; tests and benchmarks of the other services run against it. With KV transfers it gets a
`transfers.mock_memory.MockMemory`. It imports `interfaces`, and neither torch nor numpy.
"""
