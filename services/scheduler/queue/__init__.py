"""The waiting queue: which sequences wait, in which order, how many may, and for how long.

`WaitingQueue` owns the waiting sequences, in the order of its `Policy` (fcfs, priority or fair; `BatchLinesLast` puts
lines of batch files behind each of them). `QueueBounds` says
what fits and which request is refused to make room, by what each user has in the queue (`QueueUsage`). `WaitEstimate`
computes Retry-After, from the lengths of earlier outputs (`OutputLengths`).

`lifecycle` queues sequences, `planning` and the router take them. Imports `sequences` and `batch` (what runs decides
how long others wait). A new policy is a class with the methods of `Policy`, and one line in `policies.py`.
"""
