"""Starts the processes of a ring, on this machine or one of several, and supervises them.

`serve` runs a whole ring as child processes; `multi_host` runs one service of a ring that spans machines, with
`rank_host` around it if its ranks do, too; `batches/` runs a ring for one file of requests. All read their flags with
`sources` and check the machine (`ports`, `executors`) before a process is started. `supervision/` starts, watches and
restarts children; `models/` finds a model's files.

Imports: `shared` only. `cli`, `offline` and `bench` import this package.
"""
