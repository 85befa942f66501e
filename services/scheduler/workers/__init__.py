"""Worker groups: attachment, routing of waiting sequences to groups, crash quarantine, pause and sleep.

`WorkerGroups` owns the attached groups. Each `WorkerGroup` owns its sequences, slots, KV cache and plans in flight.
With several groups, the `Router` moves waiting sequences to the group with the least work for them. `CrashQuarantine`
runs suspects of a crash alone. `Controls` and `WorkerSleep` carry out operators' requests.

Called by the core. Imports go to `kv_cache`, `batch`, `queue`, `sequences` and shared code.
"""
