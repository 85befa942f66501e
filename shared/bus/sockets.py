"""Makes the ZeroMQ sockets of a member: one bound ROUTER, one DEALER a peer, CurveZMQ on tcp.

No call blocks, and linger is 0 unless stated. A send that cannot be queued raises `zmq.Again`.
"""

import itertools
import os
import socket
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from blockyard.shared.bus.curve import KeyPair, read_keys
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.errors import ConfigError

TCP_HEARTBEAT_MS = 1000
TCP_SILENCE_MS = 4000
RECONNECT_MS = 50
HANDSHAKE_MS = 5000  # a connection that has not authenticated by then is closed
PART_BYTES = 2**16  # a larger frame is sent as several parts of one message
SEALED_BYTES = 1024  # upper bound of what encryption adds to a part

_routing_ids = itertools.count()
EVENTS, POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # arithmetic on zmq's enums costs more than the query


def readable(sock: "zmq.Socket[Any]") -> bool:
    """Returns True if a message waits. Costs a third of a `recv` that finds none."""
    return bool(int(sock.get(EVENTS)) & POLLIN)


def descriptor(sock: "zmq.Socket[Any]") -> int:
    """Returns the file descriptor an event loop may watch: edge-triggered, and for reading only."""
    return int(sock.get(zmq.FD))


def send_frame(sock: "zmq.Socket[bytes]", data: bytes, route: bytes | None = None) -> None:
    """Queues a frame without waiting; `route` names the link of a ROUTER.

    Raises zmq.Again if it cannot be queued; no part of it is sent then.
    """
    if len(data) <= PART_BYTES:
        if route is None:
            sock.send(data, zmq.NOBLOCK)
        else:
            sock.send_multipart((route, data), zmq.NOBLOCK)
        return
    view = memoryview(data)
    parts = [view[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]
    sock.send_multipart(parts if route is None else (route, *parts), zmq.NOBLOCK)


def receive_frame(dealer: "zmq.Socket[bytes]") -> bytes:
    """Returns the next frame of a link that this process opened. Raises zmq.Again if none waits."""
    parts = dealer.recv_multipart(zmq.NOBLOCK)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def receive_routed(router: "zmq.Socket[bytes]") -> tuple[bytes, bytes]:
    """Returns (route, frame) of the next frame on any link of a ROUTER. Raises zmq.Again if none waits."""
    route, *parts = router.recv_multipart(zmq.NOBLOCK)
    return route, parts[0] if len(parts) == 1 else b"".join(parts)


class _OneKey:
    """Credentials provider of the ZAP handler: accepts only the deployment's own key (Z85)."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound ROUTER and the endpoint peers dial."""

    socket: zmq.Socket[bytes]
    endpoint: str


class Sockets:
    """One ZeroMQ context with the deployment's security; makes and closes sockets."""

    def __init__(self, bus: BusConfig, part_bytes: int = PART_BYTES, keys: KeyPair | None = None) -> None:
        """part_bytes: upper bound of one part of a message. A larger one closes the connection. keys: instead of those
        in the files of `bus`."""
        self._bus, self._part_bytes = bus, part_bytes
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys = keys or (read_keys(bus.curve_public, bus.curve_secret) if bus.curve_public else None)
        self._zap: ThreadAuthenticator | None = None
        if self._keys is not None:
            self._zap = ThreadAuthenticator(self._context)
            self._zap.start()
            self._zap.configure_curve_callback(domain="blockyard", credentials_provider=_OneKey(self._keys.public))

    def bind_router(self, endpoint: str | None = None, handover: bool = False) -> Bound:
        """Binds to `endpoint`, or to a new address of the configured kind. Raises zmq.ZMQError if it is in use, and
        ConfigError if this machine has no such address as the configured one.

        handover: a new connection with the routing id of another one replaces it. Without it libzmq ignores the new
        one for as long as it takes the old one for alive, and often for good. For peers that connect again by
        themselves. Not for links whose first frame says who sends: the new connection would be taken for that sender.
        """
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, int(handover))
        self._set_common(router)
        if self._keys is not None:
            router.curve_server = True
            router.curve_publickey = self._keys.public
            router.curve_secretkey = self._keys.secret
            router.zap_domain = b"blockyard"
        try:
            router.bind(self._fresh_address() if endpoint is None else endpoint)
        except zmq.ZMQError as e:
            router.close()
            if endpoint is None:
                raise ConfigError(f"--bind {self._bus.bind}: {zmq.strerror(e.errno or 0)}") from e
            raise
        return Bound(router, self._dialled_as(router.getsockopt_string(zmq.LAST_ENDPOINT)))

    def connect_dealer(
        self,
        endpoint: str,
        prefix: bytes,
        only_when_connected: bool = False,
        reconnects: bool = True,
        monitored: int = 0,
    ) -> zmq.Socket[bytes]:
        """Returns a DEALER with a new routing id, so that no peer mistakes a reopened link for the one that broke.

        reconnects: after a connection that broke. monitored: events of its monitor, from the first attempt on; 0: it
        has none. Raises zmq.ZMQError if `endpoint` is not valid.
        """
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, b"%b-%b-%d" % (prefix, os.urandom(6).hex().encode(), next(_routing_ids)))
        dealer.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS if reconnects else -1)
        dealer.setsockopt(zmq.IMMEDIATE, int(only_when_connected))
        self._set_common(dealer)
        if self._keys is not None:
            dealer.curve_serverkey = self._keys.public
            dealer.curve_publickey = self._keys.public
            dealer.curve_secretkey = self._keys.secret
        monitor = dealer.get_monitor_socket(monitored) if monitored else None
        try:
            dealer.connect(endpoint)
        except zmq.ZMQError:
            if monitor is not None:
                dealer.disable_monitor()
                monitor.close()
            dealer.close()
            raise
        return dealer

    def close(self) -> None:
        """Waits for the linger of sockets, which must be closed already."""
        if self._zap is not None:
            self._zap.stop()
        self._context.term()

    def _set_common(self, sock: zmq.Socket[bytes]) -> None:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, self._bus.link_frames)
        sock.setsockopt(zmq.RCVHWM, self._bus.link_frames)
        # Both limits apply before a peer has authenticated: without them libzmq accepts commands of any size from
        # unauthenticated peers. MAXMSGSIZE applies to each part, so it does not bound the length of a frame.
        sock.setsockopt(zmq.MAXMSGSIZE, self._part_bytes + SEALED_BYTES)
        sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        # libzmq answers heartbeats in its own thread, so a member that is busy with a step counts as alive
        sock.setsockopt(zmq.HEARTBEAT_IVL, TCP_HEARTBEAT_MS)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, TCP_SILENCE_MS)

    def _fresh_address(self) -> str:
        if self._bus.bind.startswith("ipc://"):
            return f"{self._bus.bind}/{os.urandom(6).hex()}"
        return f"{self._bus.bind}:*"

    def _dialled_as(self, bound: str) -> str:
        if not bound.startswith("tcp://"):
            return bound
        host = self._bus.advertise or socket.gethostname()
        return f"tcp://{host}:{bound.rpartition(':')[2]}"
