"""The interface of --bind, by address and by name."""

import socket

import pytest

from blockyard.services.gpu_worker.ranks import network
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.errors import ConfigError


def bus(bind: str) -> BusConfig:
    return BusConfig(registry="tcp://127.0.0.1:1", bind=bind)


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1", "tcp://lo"])
def test_loopback(bind: str) -> None:
    found = network.interface_of(bus(bind))
    assert network.address_of(found) == "127.0.0.1"
    assert network.environment(bus(bind)) == {"NCCL_SOCKET_IFNAME": "=lo"}
    listener, place = network.listen(found)
    with listener, socket.create_connection(tuple(place.rsplit(":", 1)), 5) as peer:  # type: ignore[arg-type]
        assert peer.getpeername()[0] == "127.0.0.1" == listener.getsockname()[0]


@pytest.mark.parametrize("bind", ["tcp://203.0.113.9", "tcp://nosuch0"])
def test_an_interface_that_is_not_there(bind: str) -> None:
    with pytest.raises(ConfigError, match=f"--bind {bind}: no interface of this machine"):
        network.environment(bus(bind))
    with pytest.raises(ConfigError, match=f"--bind {bind}: "):
        network.listen(network.interface_of(bus(bind)))


def test_without_tcp_ranks_are_on_this_machine() -> None:
    assert network.interface_of(BusConfig(registry="ipc:///x/bus", bind="ipc:///x")) == "127.0.0.1"
