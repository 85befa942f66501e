"""Starts the services of a ring as child processes, restarts a child that dies or hangs, and stops all in order.

`blockyard serve` and the offline `LLM` run a `Ring`: it joins the registry, owns a `Supervisor`, which owns one `Child`
for each process, and reports the start to a `StartupDisplay`. `RunDir` owns the private folder with the ring's sockets
and settings.

Imports: `shared` only.
"""
