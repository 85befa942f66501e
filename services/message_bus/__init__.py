"""The message bus: one process that keeps the membership list of the ring. No request passes through it.

`Membership` decides from heartbeats, farewells and broken links which members are alive; `Registry` is the loop around
it and the `RegistrySocket` of `shared/bus`.
"""
