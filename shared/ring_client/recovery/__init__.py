"""How the journal's open requests survive the loss of a member.

`Dispatch` sends requests to schedulers, and `Recovery` sends them again with the next attempt when a member is lost or
nothing has arrived for too long. `HeldRequests` keeps new requests for some seconds while a scheduler restarts.
`RingClient` calls them; of the other parts they import only the journal, schedulers and metrics.
"""
