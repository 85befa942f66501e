"""The `blockyard` command line and the supervision of a ring's processes.

`cli.main` is the `blockyard` command. `serve` runs a whole ring as child processes; `multi_host` runs
one service of a ring that spans machines. Both read their flags with `sources` and check the machine (`ports`, `gpus`)
before a process is started. `supervision/` starts, watches and restarts children; `models/` finds a model's files.

Imports: `shared` only. `offline` and `bench` import this package; `cli` imports those two inside functions, to
dispatch `tune`, `bench` and `simulate`.
"""
