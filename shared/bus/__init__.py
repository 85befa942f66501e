"""The ring's network: each member's entry in the membership list and its direct ZeroMQ links.

Every service process owns one `Links` (links.py) and calls `send`, `answer` and `poll` or `async for`. Each member
binds one ROUTER (inbound.py) and opens one DEALER to each member it sends to (outbound.py). registry_link.py announces
the member to the message bus, which owns registry_socket.py and sends back the list (`MemberList`). frames.py decodes
frames and counts malformed ones; sockets.py makes sockets with their limits and CURVE keys (curve.py). frame_links.py
has links of their own for ordered streams: between the ranks of a worker. Apart from `services/kv_transfer` no other
module imports zmq. Imports go from links to the parts, and on to `shared/messages`.
"""
