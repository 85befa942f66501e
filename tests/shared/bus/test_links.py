"""Links over real sockets and processes: delivery, order, death, restart, unknown peers."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq
from rig import registry
from tcp_addresses import tcp_bus

from blockyard.shared.bus import outbound
from blockyard.shared.bus.curve import write_keys
from blockyard.shared.bus.links import Links
from blockyard.shared.bus.member_list import Gone, Joined
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.messages import PROTOCOL_VERSION, Announce, Cancel, Hello, Member, Members, Role, Stop, StreamRef

Accepts = Cancel | Stop


@pytest.fixture(params=["ipc", "tcp"])
def bus(request: pytest.FixtureRequest, tmp_path: Path) -> BusConfig:
    if request.param == "ipc":
        return BusConfig(registry=f"ipc://{tmp_path}/bus", bind=f"ipc://{tmp_path}")
    return tcp_bus(tmp_path / "keys")


def until(condition: Callable[[], bool], *members: Links, seen: list | None = None, limit_s: float = 10.0) -> None:
    """Runs the members' loops until the condition holds; `seen` collects received events."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        for links in members:
            events = links.poll(0.005)
            if seen is not None:
                seen.extend((links.me.name, peer, event) for peer, event in events)


def pair(bus: BusConfig) -> tuple[Links, Links]:
    return Links("a", Role.SCHEDULER, bus, Accepts), Links("b", Role.DETOKENIZER, bus, Accepts)


def frames(seen: list, name: str) -> list:
    return [event for to, _, event in seen if to == name and isinstance(event, Accepts)]


def test_members_find_each_other_and_frames_keep_their_order(bus: BusConfig) -> None:
    with registry(bus):
        a, b = pair(bus)
        with a, b:
            b.update(ready=True)
            until(lambda: bool(a.of(Role.DETOKENIZER)) and a.me.incarnation in b.members, a, b)
            seen: list = []
            for i in range(500):
                assert a.send(b.me.incarnation, Cancel(f"r{i}", i))
            until(lambda: len(frames(seen, "b")) == 500, a, b, seen=seen)
            assert [f.attempt for f in frames(seen, "b")] == list(range(500))
            assert b.answer(a.me.incarnation, Stop([StreamRef("r", 1, 0)]))
            until(lambda: frames(seen, "a") == [Stop([StreamRef("r", 1, 0)])], a, b, seen=seen)


def test_a_member_that_was_busy_does_not_take_its_peer_for_gone(
    bus: BusConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer's Hello waits unread for longer than it may take to come."""
    monkeypatch.setattr(outbound, "HELLO_S", 0.2)
    seen: list = []
    with registry(bus):
        a, b = pair(bus)
        with a, b:
            b.update(ready=True)
            until(lambda: bool(a.of(Role.DETOKENIZER)) and a.me.incarnation in b.members, a, b)
            assert a.send(b.me.incarnation, Cancel("r", 0))
            until(lambda: frames(seen, "b") == [Cancel("r", 0)], b, seen=seen)
            time.sleep(0.3)
            assert a.send(b.me.incarnation, Cancel("r", 1))
            until(lambda: len(frames(seen, "b")) == 2, a, b, seen=seen)
            assert not [event for to, _, event in seen if to == "a" and isinstance(event, Gone)]


def test_unknown_members_and_members_without_a_link_are_told_apart_from_sent(bus: BusConfig) -> None:
    with registry(bus):
        a, b = pair(bus)
        with a, b:
            assert not a.send(12345, Cancel("r", 0))
            assert not a.answer(12345, Cancel("r", 0))


def test_one_who_leaves_is_gone(bus: BusConfig) -> None:
    with registry(bus):
        a, b = pair(bus)
        with a:
            until(lambda: b.me.incarnation in a.members, a, b)
            b.close()
            seen: list = []
            until(lambda: not a.members, a, seen=seen, limit_s=3)
            assert [type(e) for _, _, e in seen if isinstance(e, Gone)] == [Gone]


CHILD = """
import sys
from blockyard.shared.bus.links import Links
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.messages import Cancel, Role
import msgspec
bus = msgspec.json.decode(sys.argv[1], type=BusConfig)
links = Links("child", Role.GPU_WORKER, bus, Cancel)
links.update(ready=True)
while True:
    for peer, event in links.poll(1.0):
        if isinstance(event, Cancel):
            links.answer(peer, event)
"""


def spawn(bus: BusConfig) -> subprocess.Popen[bytes]:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / ".src")}
    code = textwrap.dedent(CHILD)
    return subprocess.Popen([sys.executable, "-c", code, msgspec.json.encode(bus).decode()], env=env)


def test_a_killed_peer_is_seen_at_once_and_its_successor_gets_nothing_of_it(bus: BusConfig) -> None:
    with registry(bus), Links("a", Role.SCHEDULER, bus, Accepts) as a:
        seen: list = []
        children = [spawn(bus)]
        try:
            until(lambda: bool(a.of(Role.GPU_WORKER)), a)
            first = a.of(Role.GPU_WORKER)[0].incarnation
            a.send(first, Cancel("one", 1))
            until(lambda: frames(seen, "a") == [Cancel("one", 1)], a, seen=seen)
            os.kill(children[0].pid, signal.SIGSTOP)
            a.send(first, Cancel("for the dead", 1))
            children[0].kill()
            killed = time.monotonic()
            until(lambda: any(isinstance(e, Gone) for _, _, e in seen), a, seen=seen)
            assert time.monotonic() - killed < 0.5
            assert not a.send(first, Cancel("too late", 1))
            children.append(spawn(bus))
            until(lambda: bool(a.of(Role.GPU_WORKER)), a, seen=seen)
            second = a.of(Role.GPU_WORKER)[0].incarnation
            assert second != first
            a.send(second, Cancel("two", 2))
            until(lambda: Cancel("two", 2) in frames(seen, "a"), a, seen=seen)
            assert frames(seen, "a") == [Cancel("one", 1), Cancel("two", 2)]
        finally:
            for child in children:
                child.kill()
                child.wait()


def test_a_stopped_peer_is_declared_dead_and_joins_again_when_it_wakes(bus: BusConfig) -> None:
    with registry(bus), Links("a", Role.SCHEDULER, bus, Accepts) as a:
        child = spawn(bus)
        try:
            until(lambda: bool(a.of(Role.GPU_WORKER)), a)
            child.send_signal(signal.SIGSTOP)
            until(lambda: not a.members, a, limit_s=6)
            child.send_signal(signal.SIGCONT)
            seen: list = []
            until(lambda: bool(a.of(Role.GPU_WORKER)), a, seen=seen, limit_s=8)
            assert any(isinstance(e, Joined) for _, _, e in seen)
            a.send(a.of(Role.GPU_WORKER)[0].incarnation, Cancel("again", 1))
            until(lambda: frames(seen, "a") == [Cancel("again", 1)], a, seen=seen)
        finally:
            child.kill()
            child.wait()


def test_links_outlive_the_registry(bus: BusConfig) -> None:
    a, b = pair(bus)
    with a, b:
        with registry(bus):
            until(lambda: bool(a.members) and bool(b.members), a, b)
            a.send(b.me.incarnation, Cancel("before", 1))
        seen: list = []
        a.send(b.me.incarnation, Cancel("without", 1))
        until(lambda: len(frames(seen, "b")) == 2, a, b, seen=seen)
        with registry(bus):
            time.sleep(0.1)
            c = Links("c", Role.TOKENIZER_POOL, bus, Accepts)
            with c:
                until(lambda: len(c.members) == 2 and len(a.members) == 2, a, b, c, seen=seen)
        assert not any(isinstance(e, Gone) and e.member.name in "ab" for _, _, e in seen)


def test_malformed_frames_are_counted_and_change_nothing(tmp_path: Path) -> None:
    bus = BusConfig(registry=f"ipc://{tmp_path}/bus", bind=f"ipc://{tmp_path}")
    with (
        registry(bus),
        Links("b", Role.DETOKENIZER, bus, Accepts) as b,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as raw,
    ):
        raw.connect(b.me.endpoint)
        raw.send(msgspec.msgpack.encode(Cancel("no hello", 1)))
        raw.send(b"\xc1 not msgpack")
        raw.send(msgspec.msgpack.encode(Hello(PROTOCOL_VERSION, 77, "raw", to=b.me.incarnation)))
        raw.send(msgspec.msgpack.encode(Announce(b.me)))  # a frame, but not one for this member
        raw.send(msgspec.msgpack.encode(Cancel("good", 1)))
        seen: list = []
        until(lambda: bool(frames(seen, "b")), b, seen=seen)
        assert frames(seen, "b") == [Cancel("good", 1)]
        assert b.malformed_total == 3


def test_a_hello_for_another_incarnation_is_answered_and_the_link_ignored(tmp_path: Path) -> None:
    bus = BusConfig(registry=f"ipc://{tmp_path}/bus", bind=f"ipc://{tmp_path}")
    with (
        registry(bus),
        Links("b", Role.DETOKENIZER, bus, Accepts) as b,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as raw,
    ):
        raw.connect(b.me.endpoint)
        raw.send(msgspec.msgpack.encode(Hello(PROTOCOL_VERSION, 77, "raw", to=b.me.incarnation ^ 1)))
        raw.send(msgspec.msgpack.encode(Cancel("for the predecessor", 1)))
        seen: list = []
        until(lambda: bool(raw.poll(1)), b, seen=seen)
        hello = msgspec.msgpack.decode(raw.recv(), type=Hello)
        assert hello.incarnation == b.me.incarnation
        until(lambda: b.malformed_total == 1, b, seen=seen)
        assert not frames(seen, "b")


def test_a_link_that_broke_is_a_death_and_a_return_on_both_sides(tmp_path: Path) -> None:
    """What is sent to a full link breaks it."""
    bus = BusConfig(registry=f"ipc://{tmp_path}/bus", bind=f"ipc://{tmp_path}", link_frames=10)
    with registry(bus):
        a, b = pair(bus)
        with a, b:
            until(lambda: bool(a.members) and bool(b.members), a, b)
            seen: list = []
            a.send(b.me.incarnation, Cancel("before", 1))
            until(lambda: len(frames(seen, "b")) == 1, a, b, seen=seen)
            while a.send(b.me.incarnation, Cancel("x" * 10**6, 1)):
                pass
            until(lambda: any(to == "a" and isinstance(e, Joined) for to, _, e in seen), a, b, seen=seen)
            a.send(b.me.incarnation, Cancel("after", 1))
            until(lambda: frames(seen, "b")[-1].request_id == "after", a, b, seen=seen)
            for name, peer in (("a", "b"), ("b", "a")):
                told = [type(e) for to, _, e in seen if to == name and isinstance(e, Gone | Joined)]
                assert told[-2:] == [Gone, Joined], f"{name} of {peer}"
            assert b.answer(a.me.incarnation, Cancel("answer", 1))
            until(lambda: bool(frames(seen, "a")), a, b, seen=seen)


def test_a_stranger_with_a_fresh_key_is_not_let_in(tmp_path: Path) -> None:
    """Without a ZAP handler libzmq accepts any client key."""
    write_keys(tmp_path / "keys")
    server_public = (tmp_path / "keys/blockyard.key").read_bytes().strip()
    bus = BusConfig(
        registry=f"ipc://{tmp_path}/bus",
        bind="tcp://127.0.0.1",
        advertise="127.0.0.1",
        curve_public=str(tmp_path / "keys/blockyard.key"),
        curve_secret=str(tmp_path / "keys/blockyard.key_secret"),
    )
    with Links("b", Role.DETOKENIZER, bus, Accepts) as b, zmq.Context() as context:
        for public, secret, let_in in (
            (*zmq.curve_keypair(), False),
            (server_public, (tmp_path / "keys/blockyard.key_secret").read_bytes().strip(), True),
        ):
            with context.socket(zmq.DEALER) as raw:
                raw.setsockopt(zmq.LINGER, 0)
                raw.curve_serverkey, raw.curve_publickey, raw.curve_secretkey = server_public, public, secret
                raw.connect(b.me.endpoint)
                raw.send(msgspec.msgpack.encode(Hello(PROTOCOL_VERSION, 77, "raw", to=b.me.incarnation)))
                deadline = time.monotonic() + 1.0
                while not raw.poll(10) and time.monotonic() < deadline:
                    b.poll(0.01)
                assert bool(raw.poll(0)) == let_in


def test_the_async_iterator_is_woken_by_frames_and_by_sends(tmp_path: Path) -> None:
    bus = BusConfig(registry=f"ipc://{tmp_path}/bus", bind=f"ipc://{tmp_path}")

    async def echo(links: Links) -> None:
        async for peer, event in links:
            if isinstance(event, Cancel):
                links.answer(peer, event)

    async def ask(links: Links) -> list[float]:
        waits: list[float] = []
        asked = 0.0
        async for _, event in links:
            if isinstance(event, Joined) or (isinstance(event, Cancel) and len(waits) < 200):
                if isinstance(event, Cancel):
                    waits.append(time.perf_counter() - asked)
                asked = time.perf_counter()
                links.send(next(iter(links.members)), Cancel("r", len(waits)))
            elif isinstance(event, Cancel):
                return waits
        return waits

    async def both(a: Links, b: Links) -> list[float]:
        task = asyncio.create_task(echo(b))
        waits = await asyncio.wait_for(ask(a), 20)
        task.cancel()
        return waits

    with registry(bus):
        a, b = pair(bus)
        with a, b:
            waits = sorted(asyncio.run(both(a, b)))
    assert len(waits) == 200
    assert waits[100] < 0.1  # a wake-up that is missed waits for the next heartbeat, 0.5 s


def test_a_send_does_not_hide_a_frame_that_arrived_before_it(tmp_path: Path) -> None:
    """It takes the edge of the arrival from the descriptor that the loop watches."""
    bus = BusConfig(registry=f"ipc://{tmp_path}/bus", bind=f"ipc://{tmp_path}")
    ended = threading.Event()

    def answer(links: Links) -> None:
        while not ended.is_set():
            for peer, event in links.poll(0.05):
                if isinstance(event, Cancel):
                    links.answer(peer, event)

    async def ask(links: Links) -> list[float]:
        waits: list[float] = []
        sent_s = 0.0
        async for peer, event in links:
            if isinstance(event, Cancel):
                waits.append(time.perf_counter() - sent_s)
            if isinstance(event, Joined | Cancel):
                asyncio.get_running_loop().call_soon(send_both, links, peer)
                sent_s = time.perf_counter()
            if len(waits) == 20:
                break
        return waits

    def send_both(links: Links, peer: int) -> None:
        links.send(peer, Cancel("answered", 0))
        time.sleep(0.01)  # the answer comes while this task has the loop
        links.send(peer, Stop([]))

    with registry(bus):
        a, b = pair(bus)
        with a, b:
            thread = threading.Thread(target=answer, args=(b,))
            thread.start()
            try:
                waits = sorted(asyncio.run(asyncio.wait_for(ask(a), 20)))
            finally:
                ended.set()
                thread.join()
    assert waits[10] < 0.1  # what is missed waits for the next heartbeat, 0.5 s


def test_members_list_decodes_as_sent() -> None:
    member = Member("a", Role.SCHEDULER, 1, "ipc:///x")
    data = msgspec.msgpack.encode(Members(True, [member]))
    assert msgspec.msgpack.decode(data, type=Members).members == [member]
