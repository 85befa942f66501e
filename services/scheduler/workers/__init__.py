"""Worker groups: what is attached, which group runs a waiting sequence, and what operators do with workers.

Owns the groups with their blocks, slots and plans in flight, the router that assigns waiting sequences to groups, the
crash quarantine and sleep. Called by the scheduler's core. Start with `WorkerGroup`, `WorkerGroups` and `Router`.

Imports go to `kv_cache`, `batch`, `queue`, `sequences` and shared code.
"""
