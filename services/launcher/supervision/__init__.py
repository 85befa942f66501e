"""Starts the services of a ring as child processes, restarts those that die or hang, and stops them in order.

`Ring` is what `blockyard serve` and the offline `LLM` run: it joins the registry, owns a `Supervisor`, which owns one
`Child` for each process, and reports the start to a `Display` (`start_up` for lines, `progress` for bars). `RunDir`
owns the private folder with the ring's sockets and settings.

Imports: `shared` only.
"""
