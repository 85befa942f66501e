"""A worker without a model: it answers plans with made-up tokens and checks that every plan is consistent.

`runner.start` makes it, `batch.MockBatch` checks slots and blocks, `kv.MockKV` knows which tokens each block holds, and
`model` reads sizes from config.json. Tests and benches of the other services run against it. No torch and no numpy.
"""
