"""The tasks of every service process besides its work: settings file, process title, logs, limits, signals, counters.

`settings.run` is the whole life of a service process; `service_main.run_until_stopped` is that of its asyncio tasks.
`signals` tells kills from outside from crashes. `home` gives users without a home folder one for caches.
`cores` counts those that a process may use.
`frame_pipe` carries frames between processes of one start: ranks of a worker, and of a script under torchrun.
"""
