"""Workers: attachment, routing of waiting sequences to groups, crash quarantine, pause and sleep.

With several groups, the `Router` moves waiting sequences to the group with the least work for them, and with roles the
`RoleRouter` chooses a group for the prompt and one that decodes; `LayoutCheck` warns of groups that cannot exchange
blocks. `CrashQuarantine` runs suspects of a crash alone. `Controls`, which owns pause, and `WorkerSleep` carry out
operators' requests.

Called by the core, and by `planning` for the next sequence of a group. Imports all folders but `planning`.
"""
