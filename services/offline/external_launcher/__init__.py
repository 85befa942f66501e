"""`LLM(distributed_executor_backend="external_launcher")`: a script that torchrun starts in several processes.

Process 0 runs the ring with all ranks. The others send what they are asked for, and get its outputs.

- `environment`: what torchrun has set.
- `processes`: the sockets between the processes, and the check that all are asked for the same.
- `following_session.FollowingSession`: stands in the place of a `Session` in the other processes.

Imports: `session`, `outputs` and below. `running_model` imports this package.
"""
