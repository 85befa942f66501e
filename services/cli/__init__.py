"""The `blockyard` command line.

`entry.main` is the program, which loads `main`. `main.main` takes the arguments of `blockyard COMMAND`, runs the
command and returns its exit code. `serve`, `run-batch`, `run`, `ring` and `keys` are in `launcher`, `bench` and
`simulate` in `bench`, `tune` and `quantize` in `offline`; `flags`, `parsers` and `models` print tables of
`shared/config` from here. `client_commands` has the commands that load more than the launcher. It imports these
packages, and nothing imports it.
"""
