"""Processes that run jobs of clients under limits of CPU time and memory: a fork server, its workers, their queue.

`JobWorkers` is what a service uses: it sends jobs and reports each answer once, whichever process ends meanwhile.
`fork_server.run` is the other side, with the workload that a worker module gives it (`ProcessLimits` around each job).
Nothing here knows what a job does.
"""
