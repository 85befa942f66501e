"""`blockyard bench`: measures an OpenAI-compatible server, or a model without HTTP. `blockyard simulate` is here too.

`serve` sends a workload (`datasets`, `workload`) with the load generator in `load/` and reports `metrics`.
`latency_throughput` times `blockyard.LLM`. `suite/` measures a GPU against targets.

Imports: `shared`, `offline`, and from `launcher` its models, flag sources and child commands.
"""
