"""The registry's one socket: receives all members' heartbeats and sends the list."""

import contextlib
import ipaddress

import msgspec
import zmq

from blockyard.shared.bus.frames import FrameReader, Malformed
from blockyard.shared.bus.sockets import Sockets, readable, receive_routed, send_frame
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.errors import ConfigError
from blockyard.shared.messages import Announce, Frame, Members, MembersRequest, RegistryIn


class RegistrySocket:
    """Binds the registry's endpoint. Raises ConfigError if it is in use."""

    def __init__(self, bus: BusConfig) -> None:
        self._sockets = Sockets(bus)
        endpoint = registry_address(bus)
        try:
            self._socket = self._sockets.bind_router(endpoint, handover=True).socket
        except zmq.ZMQError as e:
            raise ConfigError(f"cannot bind the message bus to {endpoint}: {e}") from e
        self._malformed = Malformed()
        self._reader: FrameReader[Frame] = FrameReader(RegistryIn, self._malformed)
        self._listeners: dict[bytes, int] = {}  # routing id -> incarnation
        self._requesters: list[bytes] = []

    def poll(self, timeout_s: float) -> list[Frame]:
        """Returns all arrived frames, and waits up to `timeout_s` for the first."""
        self._socket.poll(int(1000 * timeout_s))
        frames: list[Frame] = []
        while readable(self._socket):
            route, data = receive_routed(self._socket)
            frame = self._reader.read(data, route)
            if frame is None:
                continue
            if isinstance(frame, Announce) and route.startswith(b"m"):  # "h" sockets only repeat heartbeats
                self._listeners[route] = frame.member.incarnation
            elif isinstance(frame, MembersRequest):
                self._requesters.append(route)
            frames.append(frame)
        return frames

    @property
    def malformed_total(self) -> int:
        return self._malformed.total

    def push(self, news: Members) -> None:
        """Sends the list to every listener. A listener that is gone or full is removed until its next announcement."""
        data = msgspec.msgpack.encode(news)
        for route in list(self._listeners):
            try:
                send_frame(self._socket, data, route)
            except zmq.ZMQError:
                del self._listeners[route]

    @property
    def has_requests(self) -> bool:
        """True if a process that is not a listener asked for the list."""
        return bool(self._requesters)

    def answer(self, news: Members) -> None:
        """Sends the list to each process that asked for it."""
        requesters, self._requesters = self._requesters, []
        for route in requesters:
            with contextlib.suppress(zmq.ZMQError):  # gone meanwhile
                send_frame(self._socket, msgspec.msgpack.encode(news), route)

    def close(self) -> None:
        self._socket.close(0)
        self._sockets.close()


def registry_address(bus: BusConfig) -> str:
    """Returns the endpoint that the registry binds: the address that members dial.

    A host name cannot be bound, since it may resolve differently in other networks. For a name the registry binds the
    address of `bus.bind`, as every member does.
    """
    if not bus.registry.startswith("tcp://"):
        return bus.registry
    host, _, port = bus.registry.removeprefix("tcp://").rpartition(":")
    if host == "localhost":
        return f"tcp://127.0.0.1:{port}"
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.strip("[]"))
        return bus.registry
    return f"{bus.bind}:{port}" if bus.bind.startswith("tcp://") else f"tcp://0.0.0.0:{port}"
