"""One link this process opened: a DEALER to one incarnation of one peer, with its monitor."""

from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from blockyard.shared.messages import Member
from blockyard.shared.sockets import Sockets, readable, send_frame

HELLO_S = 4.0  # a member may be busy with a long step when it is dialled first
RETURN_S = 0.3  # a link that broke has this long to come back

_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class OutLink:
    """Opens at construction; `greeted` once the peer's Hello came back."""

    def __init__(self, sockets: Sockets, member: Member, hello: bytes, now: float, again: bool = False) -> None:
        self.member = member
        self.again = again  # this link replaces one that broke
        self.greeted = False
        self.deadline = now + (RETURN_S if again else HELLO_S)
        self.socket = sockets.connect_dealer(member.endpoint, b"m")
        self.monitor: zmq.Socket[Any] = self.socket.get_monitor_socket(_BROKEN)
        send_frame(self.socket, hello)

    def broke(self) -> bool:
        """True once the monitor has seen the connection end."""
        seen = False
        while readable(self.monitor):
            recv_monitor_message(self.monitor)
            seen = True
        return seen

    def overdue(self, now: float) -> bool:
        return not self.greeted and now > self.deadline

    def close(self, linger_ms: int = 0) -> None:
        """With linger 0, so that nothing queued here reaches the peer's successor."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)
