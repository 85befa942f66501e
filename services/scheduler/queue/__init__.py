"""The waiting queue: requests from their arrival to the first plan that schedules them.

Owns the waiting sequences, their order, the bounds of the queue, and the answers Accepted and Refused. A request passes
`Admission` (is it valid?), `QueueBounds` (does it fit?) and `Acceptance` (when is it promised to run?), and its
sequences wait in the `WaitingQueue`, in the order of its `Policy` (fcfs, priority or fair). `WaitEstimate` computes
Retry-After.

The core calls `RequestHandler` for each frame of a gateway. The plan builder and the router take sequences from the
`WaitingQueue`. Imports go to `sequences`, `workers`, `batch` (step times) and shared code.

A new policy is a class with the methods of `Policy`, and one line in `policies.py`.
"""
