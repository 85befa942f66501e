"""The network interface of ranks on several hosts: that of --bind."""

import fcntl
import ipaddress
import socket
import struct

from blockyard.services.gpu_worker.parallel.meeting import LOOPBACK
from blockyard.shared.config.services.process import BusConfig
from blockyard.shared.errors import ConfigError

_SIOCGIFADDR = 0x8915
_BACKLOG = 128


def interface_of(bus: BusConfig) -> str:
    """Returns the address or the name of the interface. Without tcp all ranks are on this machine."""
    return bus.bind.removeprefix("tcp://").strip("[]") if bus.bind.startswith("tcp://") else LOOPBACK


def address_of(interface: str) -> str:
    """Returns the address of an interface, which may be one already. Raises ConfigError."""
    try:
        return str(ipaddress.ip_address(interface))
    except ValueError:
        found = _address(interface)
    if found is None:
        raise ConfigError(f"--bind tcp://{interface}: no interface of this name has an IPv4 address")
    return found


def name_of(interface: str) -> str:
    """Returns the name of an interface, of which this may be the address. Raises ConfigError."""
    names = [name for _, name in socket.if_nameindex()]
    if interface in names:
        return interface
    for name in names:
        if _address(name) == interface:
            return name
    raise ConfigError(f"--bind tcp://{interface}: no interface of this machine has this name or IPv4 address")


def environment(bus: BusConfig) -> dict[str, str]:
    """Returns the variables that bind NCCL to the interface. Raises ConfigError."""
    return {"NCCL_SOCKET_IFNAME": f"={name_of(interface_of(bus))}"}


def listen(interface: str) -> tuple[socket.socket, str]:
    """Returns a socket that listens there alone, and its host and port. Raises ConfigError."""
    address = address_of(interface)
    try:
        made = socket.create_server((address, 0), family=_family(address), backlog=_BACKLOG)
    except OSError as e:
        raise ConfigError(f"--bind tcp://{interface}: {e.strerror or e}") from e
    return made, f"{address}:{made.getsockname()[1]}"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _address(name: str) -> str | None:
    """Returns the IPv4 address of an interface, if it has one."""
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
