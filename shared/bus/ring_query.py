"""Reads the membership list from outside the ring, for health checks and `blockyard ring`."""

import msgspec

from blockyard.shared.bus.frames import FrameReader, Malformed
from blockyard.shared.bus.sockets import Sockets, receive_frame, send_frame
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.errors import BlockyardError
from blockyard.shared.messages import Member, Members, MembersRequest


def ask_members(bus: BusConfig, timeout_s: float) -> Members:
    """Returns the list. Raises BlockyardError if the registry does not answer: it is down or has another key."""
    sockets = Sockets(bus)
    link = sockets.connect_dealer(bus.registry, b"ask")
    try:
        send_frame(link, msgspec.msgpack.encode(MembersRequest()))
        if not link.poll(int(1000 * timeout_s)):
            raise BlockyardError(f"no answer from the message bus at {bus.registry} within {timeout_s:g} s")
        reader: FrameReader[Members] = FrameReader(Members, Malformed())
        news = reader.read(receive_frame(link), b"message_bus")
        if news is None:
            raise BlockyardError(f"the message bus at {bus.registry} answered with no membership list")
        return news
    finally:
        link.close()
        sockets.close()


def not_ready(members: list[Member], host: str) -> str:
    """Returns why this host's members are not ready, or "". Compares hosts of tcp endpoints."""
    here = [m for m in members if m.endpoint.startswith(f"tcp://{host}:")]
    if not here:
        return f"no member of {host} is on the list"
    return ", ".join(f"{m.name} is {m.phase}" for m in here if not m.ready)


def as_lines(members: list[Member]) -> list[str]:
    """Returns one line per member, sorted by role and name."""
    ordered = sorted(members, key=lambda m: (m.role, m.name))
    rows = [(m.name, _roles(m), _state(m), m.model or "-", m.endpoint or "-") for m in ordered]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _roles(member: Member) -> str:
    return member.role if member.kv_role is None else f"{member.role} {member.kv_role}"


def _state(member: Member) -> str:
    return "ready" if member.ready else f"{member.phase} {100 * member.progress:.0f} %"
