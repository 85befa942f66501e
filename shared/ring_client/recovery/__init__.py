"""Open requests, and how they survive the loss of a member.

`Journal` records what each open request asked for and received. `Dispatch` sends requests to schedulers, and `Recovery`
sends them again with the next attempt when a member is lost or nothing has arrived for too long. `HeldRequests` keeps
new requests for some seconds while a scheduler restarts. `RingClient` calls them; of the other parts they import only
admission and metrics.
"""
