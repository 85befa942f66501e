"""The membership list read from outside: answered once, adds no member, shows members that are not ready."""

import time
from pathlib import Path

import msgspec
import pytest
from rig import registry
from tcp_addresses import tcp_bus

from blockyard.shared.bus.links import Links
from blockyard.shared.bus.ring_query import as_lines, ask_members, not_ready
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.errors import BlockyardError
from blockyard.shared.messages import Cancel, KVRole, Member, Role


@pytest.fixture
def bus(tmp_path: Path) -> BusConfig:
    return tcp_bus(tmp_path / "keys")


def test_a_look_shows_the_members_and_adds_none(bus: BusConfig) -> None:
    with registry(bus), Links("a", Role.DETOKENIZER, bus, Cancel) as a:
        deadline = time.monotonic() + 5
        while not (seen := ask_members(bus, 2.0).members):
            assert time.monotonic() < deadline
            a.poll(0.01)
        assert not_ready(seen, "127.0.0.1") == "a is starting"
        a.update(ready=True, phase="ready")
        while not_ready(ask_members(bus, 2.0).members, "127.0.0.1"):
            assert time.monotonic() < deadline
            a.poll(0.01)
        members = ask_members(bus, 2.0).members
        assert [m.name for m in members] == ["a"]
        assert a.members == {}
    assert as_lines(members) == [f"a  detokenizer  ready  -  {a.me.endpoint}"]


def test_an_absent_registry_and_one_with_another_key_do_not_answer(bus: BusConfig, tmp_path: Path) -> None:
    with pytest.raises(BlockyardError, match="no answer"):
        ask_members(bus, 0.2)
    others = msgspec.structs.replace(tcp_bus(tmp_path / "others"), registry=bus.registry)
    with registry(bus), pytest.raises(BlockyardError, match="no answer"):
        ask_members(others, 0.5)


def test_hosts_are_told_apart_by_their_whole_name() -> None:
    other = Member("b", Role.SCHEDULER, 1, "tcp://host-10:5", ready=True)
    assert not_ready([other], "host-1") == "no member of host-1 is on the list"
    assert not_ready([other], "host-10") == ""
    loading = Member("c", Role.GPU_WORKER, 2, "tcp://host-10:6", phase="loading weights", progress=0.25)
    assert not_ready([other, loading], "host-10") == "c is loading weights"
    assert as_lines([other, loading]) == [
        "c  gpu_worker  loading weights 25 %  -  tcp://host-10:6",
        "b  scheduler   ready                 -  tcp://host-10:5",
    ]
    prefill = Member("d", Role.GPU_WORKER, 3, "tcp://host-10:7", ready=True, kv_role=KVRole.PREFILL)
    assert as_lines([prefill]) == ["d  gpu_worker prefill  ready  -  tcp://host-10:7"]
