"""Open requests, and how they survive the loss of a member.

`Journal` records what each open request asked for and received. `Dispatch` sends requests to schedulers, and `Recovery`
sends them again with the next attempt when a member is lost or nothing has arrived for too long. `Hold` limits how many
requests wait for a scheduler. `RingClient` calls all four; they import nothing of the other parts but admission.
"""
