"""Sockets of links between workers. They take larger message parts than the ring's, and have shorter queues."""

from typing import Any, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from blockyard.services.kv_transfer.protocol.drops import DropReason, Drops
from blockyard.shared.bus.sockets import Sockets, readable
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.errors import ConfigError

F = TypeVar("F")

PART_BYTES = 8 << 20  # upper bound of a message part; bounds the memory that a peer can make this process allocate
QUEUED_MESSAGES = 64  # on each side of a link
MAX_MESSAGES_A_TURN = 64  # of one poll, so that a busy link does not delay the worker's steps
HELLO_S = 4.0  # to wait for an answer; the peer may be in a long step


def transfer_sockets(bus: BusConfig, encrypt: bool = True) -> Sockets:
    """bus: the worker's own. Raises ConfigError for encrypted tcp:// without keys."""
    if bus.bind.startswith("tcp://") and encrypt and not bus.curve_public:
        raise ConfigError('KV transfer over tcp:// needs keys, or "encrypt": false; `blockyard keys DIR` makes a pair')
    public, secret = (bus.curve_public, bus.curve_secret) if encrypt else ("", "")
    settings = msgspec.structs.replace(bus, link_frames=QUEUED_MESSAGES, curve_public=public, curve_secret=secret)
    return Sockets(settings, PART_BYTES)


def bind_address(bus: BusConfig, port: int) -> str | None:
    """Where a receiver binds; None: a new address. port: 0 for any."""
    return f"{bus.bind}:{port}" if port and bus.bind.startswith("tcp://") else None


def drain_monitor(monitor: "zmq.Socket[Any]") -> bool:
    """Reads all events. Returns True if there was one."""
    seen = False
    while readable(monitor):
        recv_monitor_message(monitor)
        seen = True
    return seen


def decode_frame(decoder: msgspec.msgpack.Decoder[F], data: bytes, drops: Drops) -> F | None:
    """Returns None for a malformed frame, and counts it."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        drops.count(DropReason.MALFORMED, str(e))
        return None
