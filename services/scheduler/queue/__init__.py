"""The waiting queue: admission, acceptance, order and bounds of requests before they run.

Owns the sequences that wait, their order (fcfs, priority, fair), what each tenant and user has in the queue, and the
refusals. Called by the scheduler's core. Start with `WaitingQueue`, `Policy` and `RequestHandler`.

Imports go to `sequences`, `workers` and shared code.
"""
