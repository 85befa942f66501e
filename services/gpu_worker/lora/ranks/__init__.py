"""Adapters of a worker with several ranks. Each rank reads the folder, and keeps its part of the matrices.

- `LayerShare`: which part of a layer's matrices that is.
- `LeaderAdapters`, `FollowerAdapters`: loads and places travel in the leader's stream, so that all ranks place an
  adapter between the same two steps. It is loaded once all ranks have it; one that cannot read it fails them all.

Imports `lora.worker_adapters` and `parallel`. `engine` and `ranks.rank_process` call it.
"""
