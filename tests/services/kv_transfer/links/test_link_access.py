"""Who may open a link for KV transfers, and what becomes of strangers and of malformed frames."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from kv_peers import RECEIVER, SENDER, SMALL, Peer, poll_both, tcp_bus

from blockyard.services.kv_transfer.link_sockets import transfer_sockets
from blockyard.services.kv_transfer.protocol.drops import DropReason
from blockyard.services.kv_transfer.protocol.events import Received
from blockyard.services.kv_transfer.protocol.frames import (
    LINK_VERSION,
    BlockSums,
    BlocksWritten,
    LinkClosed,
    LinkHello,
    LinkReady,
    Stopped,
    ToSender,
    Transfer,
    WritesAllowed,
)
from blockyard.services.kv_transfer.receiver import TransferReceiver
from blockyard.shared.bus.frames import LINES_A_MINUTE
from blockyard.shared.bus.sockets import readable
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.errors import ConfigError

ALL = range(SMALL.num_layers)
encode = msgspec.msgpack.encode


def raw_link(sockets: Any, endpoint: str) -> "zmq.Socket[bytes]":
    return sockets.connect_dealer(endpoint, b"x")


def poll_for(receiver: TransferReceiver, condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        assert receiver.poll() == []
        time.sleep(0.001)
    return condition()


def test_a_stranger_with_a_fresh_key_is_not_let_in(tmp_path: Path) -> None:
    """The first test: without a handler of keys libzmq accepts anyone."""
    target = Peer(tcp_bus(tmp_path), SMALL, 30)
    receiver = target.receiver()
    with socket_without_keys() as plain:
        plain.connect(receiver.endpoint)
        plain.send(encode(LinkHello(LINK_VERSION, SENDER, 1, RECEIVER, SMALL)))
        other = Peer(tcp_bus(tmp_path, "other keys"), SMALL, 20)
        link = other.sender(receiver.endpoint)
        assert poll_for(receiver, lambda: bool(link.poll() or link.closed))
        time.sleep(0.1)
        receiver.poll()
        assert not plain.poll(0) and not link.connector, "nobody has answered"
        assert not receiver.drops.by_reason, "nothing of them came through"
        link.close()
        other.close()
    mine = Peer(tcp_bus(tmp_path), SMALL, 20)
    link = mine.sender(receiver.endpoint)
    poll_both(receiver, link, lambda: link.connector != "")
    link.close()
    mine.close()
    receiver.close()
    target.close()


class socket_without_keys:
    def __enter__(self) -> "zmq.Socket[bytes]":
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        return self.socket

    def __exit__(self, *args: object) -> None:
        self.socket.close(0)
        self.context.term()


def test_tcp_needs_keys_unless_it_is_told_not_to_encrypt(tmp_path: Path) -> None:
    bare = BusConfig(registry="tcp://127.0.0.1:1", bind="tcp://127.0.0.1", advertise="127.0.0.1")
    with pytest.raises(ConfigError, match="needs keys"):
        transfer_sockets(bare)
    transfer_sockets(bare, encrypt=False).close()


def test_without_encryption_a_ticket_lets_one_sender_in_once(tmp_path: Path) -> None:
    source, target = (Peer(tcp_bus(tmp_path), SMALL, 20, encrypt=False) for _ in range(2))
    source.fill_random()
    receiver = target.receiver(needs_ticket=True)
    receiver.admit(b"first ticket", SENDER)
    receiver.admit(b"of another", SENDER + 1)
    for ticket in (b"", b"guess", b"of another"):
        link = source.sender(receiver.endpoint, "tcp", ticket)
        poll_both(receiver, link, lambda link=link: bool(link.closed))
        assert "no valid ticket" in link.closed
    assert receiver.drops.by_reason == {DropReason.STRANGER: 3}
    link = source.sender(receiver.endpoint, "tcp", b"first ticket")
    poll_both(receiver, link, lambda: link.connector == "tcp")
    transfer = Transfer(1, SENDER, 1, RECEIVER, 1, [3])
    receiver.expect(transfer)
    link.begin(1, 1)
    link.write(1, [4], [3], ALL)
    poll_both(receiver, link, lambda: receiver.open_transfers() == [])
    assert (target.blocks[:, 3] == source.blocks[:, 4]).all()
    link.close()
    again = source.sender(receiver.endpoint, "tcp", b"first ticket")
    poll_both(receiver, again, lambda: bool(again.closed))
    assert "no valid ticket" in again.closed
    again.close()
    receiver.close()
    source.close()
    target.close()


def test_frames_of_strangers_and_malformed_frames_are_counted(peers: tuple[Peer, Peer]) -> None:
    source, target = peers
    receiver = target.receiver()
    receiver.expect(Transfer(1, SENDER, 1, RECEIVER, 1, [3]))
    raw = raw_link(source.sockets, receiver.endpoint)
    raw.send_multipart([encode(BlocksWritten(1, 1, 0, 1, 0, 3)), bytes(SMALL.block_bytes)])
    raw.send(encode(BlockSums(1, 1, 0, 1, bytes(8))))
    raw.send(encode(Stopped(1, "")))
    raw.send(encode(LinkReady("shm", os.getpid())))
    assert poll_for(receiver, lambda: receiver.drops.by_reason[DropReason.STRANGER] == 4)
    for malformed in (b"", b"\xc1", b"x" * 100, encode(["Nothing", 1]), b"\x91" * 5000, encode(["Stopped", "1", 2])):
        raw.send(malformed)
    assert poll_for(receiver, lambda: receiver.drops.by_reason[DropReason.MALFORMED] == 6)
    assert not target.blocks.any() and len(receiver.open_transfers()) == 1
    raw.close()
    receiver.close()


@pytest.fixture
def raw_tcp(peers: tuple[Peer, Peer]) -> "Iterator[tuple[TransferReceiver, zmq.Socket[bytes]]]":
    """A receiver that expects transfer 1 of 2 blocks, and a link of its sender that the test writes by hand."""
    source, target = peers
    receiver = target.receiver()
    receiver.expect(Transfer(1, SENDER, 1, RECEIVER, 1, [3, 4]))
    raw = raw_link(source.sockets, receiver.endpoint)
    raw.send(encode(LinkHello(LINK_VERSION, SENDER, 1, RECEIVER, SMALL)))
    raw.send(encode(LinkReady("tcp", 0)))
    decode, frames = msgspec.msgpack.Decoder(ToSender).decode, list[ToSender]()

    def is_allowed() -> bool:
        while readable(raw):
            frames.append(decode(raw.recv()))
        return any(isinstance(frame, WritesAllowed) for frame in frames)

    assert poll_for(receiver, is_allowed)
    yield receiver, raw
    raw.close()
    receiver.close()


def test_messages_of_a_wrong_size(raw_tcp: "tuple[TransferReceiver, zmq.Socket[bytes]]", peers: Any) -> None:
    receiver, raw = raw_tcp
    header = encode(BlocksWritten(1, 1, 0, 2, 0, 3))
    size = 2 * SMALL.block_bytes
    messages = [
        [header],  # its bytes are missing
        [header, bytes(size - 8)],
        [header, bytes(size + 8)],
        [header, b""],
        [header, bytes(size), b"more"],
        [encode(Stopped(1, "")), b"bytes"],
        [encode(BlocksWritten(1, 1, 1, 2, 0, 3)), bytes(size)],
        [encode(BlocksWritten(1, 1, 0, 2, 1, 3)), bytes(size)],
        [encode(BlocksWritten(1, 1, -1, 2, 0, 3)), bytes(size)],
        [encode(BlocksWritten(1, 1, 0, 2**40, 0, 2**40)), bytes(size)],
        [encode(BlocksWritten(1, 1, 0, 0, 0, 3)), b""],
    ]
    for message in messages:
        raw.send_multipart(message)
    assert poll_for(receiver, lambda: receiver.drops.by_reason[DropReason.WRONG_SIZE] == len(messages))
    assert not peers[1].blocks.any() and len(receiver.open_transfers()) == 1


def test_a_message_of_gigabytes_closes_the_connection(
    raw_tcp: "tuple[TransferReceiver, zmq.Socket[bytes]]", peers: Any
) -> None:
    receiver, raw = raw_tcp
    raw.send_multipart([encode(BlocksWritten(1, 1, 0, 2, 0, 3)), bytes(64 << 20)])
    deadline = time.monotonic() + 5
    events: list[Any] = []
    while not events and time.monotonic() < deadline:
        events = receiver.poll()
    assert events[0].outcome is Received.SENDER_LOST
    assert not peers[1].blocks.any()


@pytest.mark.parametrize("second", [SENDER, SENDER + 1])
def test_a_second_hello_on_a_link_ends_that_link_alone(peers: tuple[Peer, Peer], second: int) -> None:
    """The worker lives on, and the sender that was named is let in on a link of its own."""
    source, target = peers
    receiver = target.receiver()
    raw = raw_link(source.sockets, receiver.endpoint)
    raw.send(encode(LinkHello(LINK_VERSION, SENDER, 1, RECEIVER, SMALL)))
    raw.send(encode(LinkHello(LINK_VERSION, second, 1, RECEIVER, SMALL)))
    raw.send(encode(LinkClosed()))
    assert poll_for(receiver, lambda: receiver.drops.by_reason[DropReason.STRANGER] == 1), "the link has ended"
    assert receiver.drops.by_reason[DropReason.DOUBLED] == 1
    raw.close(0)
    assert receiver.poll() == []
    for sender in (SENDER, SENDER + 1):
        link = source.sender(receiver.endpoint, me=sender)
        poll_both(receiver, link, lambda link=link: link.connector != "")
        link.close()
    receiver.close()


def test_hellos_that_are_refused_fill_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = Peer(tcp_bus(tmp_path), SMALL, 20, encrypt=False)
    receiver = target.receiver(needs_ticket=True)
    with caplog.at_level(logging.DEBUG), socket_without_keys() as raw:
        raw.connect(receiver.endpoint)
        for i in range(2000):
            sender, version = i // 2, LINK_VERSION + i % 2
            raw.send(encode(LinkHello(version, sender, 1, RECEIVER, SMALL, b"guess")))
            receiver.poll()
        assert poll_for(receiver, lambda: receiver.drops.by_reason[DropReason.STRANGER] == 1000)
    assert 1 <= len(caplog.records) < 2 * LINES_A_MINUTE + 10
    receiver.close()
    target.close()
