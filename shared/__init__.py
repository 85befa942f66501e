"""Code that two or more services use. It imports no service.

messages/ defines every frame between processes, bus/ carries them, config/ has all settings and flags, process/ the
start and end of a service process, ring_client/ the open requests of gateways and the offline API.
"""
