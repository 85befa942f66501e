"""Ordered links beside the ring's: frames of any size arrive once, and a link that breaks is over on both sides."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tcp_addresses import tcp_bus

from blockyard.shared.bus.curve import new_keys
from blockyard.shared.bus.frame_links import FrameLink, FrameListener
from blockyard.shared.bus.sockets import PART_BYTES, Sockets
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.messages import Hello, Leave, LinkLost

Frames = Hello | LinkLost


@pytest.fixture(params=["ipc", "tcp"])
def bus(request: pytest.FixtureRequest, tmp_path: Path) -> BusConfig:
    if request.param == "tcp":
        return tcp_bus(tmp_path / "keys")
    return BusConfig(registry=f"ipc://{tmp_path}/message-bus", bind=f"ipc://{tmp_path}")


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def sockets(bus: BusConfig, closing: ExitStack) -> Sockets:
    made = Sockets(bus)
    closing.callback(made.close)
    return made


def listen(sockets: Sockets, strangers: "Strangers", closing: ExitStack) -> FrameListener[Leave, Frames]:
    made: FrameListener[Leave, Frames] = FrameListener(sockets, Leave, Frames, strangers)
    closing.callback(made.close)
    return made


def dial(sockets: Sockets, endpoint: str, closing: ExitStack) -> FrameLink[Frames]:
    made: FrameLink[Frames] = FrameLink(sockets, endpoint, Frames)
    closing.callback(made.close)
    return made


class Strangers:
    def __init__(self) -> None:
        self.frames = list[tuple[bytes, Leave]]()

    def __call__(self, route: bytes, frame: Leave) -> None:
        self.frames.append((route, frame))


def until(listener: FrameListener[Leave, Frames], strangers: Strangers, num: int) -> None:
    deadline = time.monotonic() + 5
    while len(strangers.frames) < num:
        assert time.monotonic() < deadline
        listener.wait(0.1)


def test_frames_arrive_in_order_until_one_end_closes(sockets: Sockets, closing: ExitStack) -> None:
    strangers = Strangers()
    listener = listen(sockets, strangers, closing)
    links = [dial(sockets, listener.endpoint, closing) for _ in range(2)]
    for i, link in enumerate(links):
        link.send(Leave(i))
    until(listener, strangers, 2)
    ends = [listener.accept(route, 0.05) for route, _ in sorted(strangers.frames, key=lambda one: one[1].incarnation)]
    with pytest.raises(TimeoutError):
        ends[0].receive()
    long = Hello(1, 2, "x" * 3 * PART_BYTES)
    frames = [LinkLost(i) for i in range(100)]
    for end, link in zip(ends, links, strict=True):
        for frame in frames:
            end.send(frame)
            link.send(frame)
        end.send(long)
        assert [link.receive() for _ in range(101)] == [*frames, long]
        assert [end.receive() for _ in range(100)] == frames
    links[0].close()
    deadline = time.monotonic() + 5
    with pytest.raises(OSError, match="closed"):
        while time.monotonic() < deadline:
            ends[0].send(long)
            time.sleep(0.01)
    ends[1].send(long)
    assert links[1].receive() == long, "the other link is as before"
    listener.close()
    assert links[1].receive() is None and links[1].is_readable
    with pytest.raises(OSError, match="closed"):
        links[1].send(Leave(0))


def test_nobody_listens(bus: BusConfig, sockets: Sockets, closing: ExitStack) -> None:
    """A link to a listener that is gone is over, and not restored when another one binds the same address."""
    strangers = Strangers()
    listener = listen(sockets, strangers, closing)
    listener.close()
    time.sleep(0.1)
    if bus.bind.startswith("tcp"):
        link = dial(sockets, listener.endpoint, closing)
        assert link.wait(5) and link.receive() is None
    with pytest.raises(ConnectionError):
        FrameLink(sockets, "tcp://no port", Frames)


def test_a_stranger_with_another_key_is_not_heard(tmp_path: Path, closing: ExitStack) -> None:
    bus = tcp_bus(tmp_path / "keys")
    ours, theirs, strangers = Sockets(bus), Sockets(bus, keys=new_keys()), Strangers()
    closing.callback(ours.close)
    closing.callback(theirs.close)
    listener = listen(ours, strangers, closing)
    link = dial(theirs, listener.endpoint, closing)
    with suppress(ConnectionError):  # the link may be closed by now
        link.send(Leave(1))
    listener.wait(0.5)
    assert not strangers.frames
    assert link.wait(5) and link.receive() is None
