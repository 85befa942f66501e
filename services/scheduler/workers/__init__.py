"""Worker groups: attachment, routing of waiting sequences to groups, crash quarantine, pause and sleep.

Owns the groups with their blocks, slots and plans in flight, the router that assigns waiting sequences to groups, the
crash quarantine and sleep. Called by the scheduler's core. Start with `WorkerGroup`, `WorkerGroups` and `Router`.

Imports go to `kv_cache`, `batch`, `queue`, `sequences` and shared code.
"""
