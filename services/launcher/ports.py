"""Checks and reserves the server's ports before any process is started."""

import contextlib
import errno
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.errors import ConfigError

LOCK_S = 2.0  # longest wait for the lock; other launchers hold it for milliseconds


def check(gateways: list[GatewayConfig]) -> None:
    """Raises ConfigError with the flag of a port that is taken or not allowed, or of a host that is not local."""
    if gateways and gateways[0].uds:
        check_socket(gateways[0].uds)
    elif gateways:
        check_free(gateways[0].host, gateways[0].port, "--port")
    for gateway in gateways:
        if gateway.metrics_port:
            check_free(gateway.host, gateway.metrics_port, "--metrics-port")


@contextlib.contextmanager
def reserved(gateways: list[GatewayConfig]) -> Iterator[None]:
    """Checks the ports and reserves --port for this ring until the block ends. Raises ConfigError as `check` does.

    Gateways bind it with SO_REUSEPORT seconds after the check. Without the reservation a second launcher would find
    it free in between, and the two rings would share it.
    """
    with contextlib.ExitStack() as stack:
        with _one_launcher_at_a_time():
            check(gateways)
            if gateways and gateways[0].reuse_port and not gateways[0].uds:
                _hold(stack, gateways[0].host, gateways[0].port)
        yield


def _hold(stack: contextlib.ExitStack, host: str, port: int) -> None:
    """Binds with SO_REUSEPORT without listening: it takes no connections, and gateways can still bind the port."""
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        holder = stack.enter_context(socket.socket(family, kind, protocol))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        with contextlib.suppress(OSError):  # address family missing, or another server's connections are just closing
            holder.bind(address)


@contextlib.contextmanager
def _one_launcher_at_a_time() -> Iterator[None]:
    """A lock between launchers of one user on one machine. The kernel releases the name when its process ends."""
    with socket.socket(socket.AF_UNIX) as lock:
        until = time.monotonic() + LOCK_S
        while True:
            try:
                lock.bind(f"\0blockyard-ports-{os.getuid()}")
            except OSError as e:
                if e.errno == errno.EADDRINUSE and time.monotonic() < until:
                    time.sleep(0.01)
                    continue
            break
        yield


def check_free(host: str, port: int, flag: str) -> None:
    """Binds without SO_REUSEPORT, so that a port of another ring of this user is also taken."""
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as e:
        raise ConfigError(f"--host {host}: {e.strerror}") from e
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(address)
            except OSError as e:
                if e.errno == errno.EADDRINUSE:
                    raise ConfigError(f"port {port} is in use; choose another with {flag}") from e
                if e.errno == errno.EACCES:
                    raise ConfigError(f"port {port}: not allowed; choose another with {flag}") from e
                if host or e.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # this machine has no IPv6
                    raise ConfigError(f"--host {host or address[0]}: {e.strerror}") from e


def check_socket(path: str) -> None:
    """Raises ConfigError unless the path is free or an unused socket."""
    folder = Path(path).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"--uds {path}: {folder} is not a folder that can be written to")
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise ConfigError(f"--uds {path}: exists and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return
    raise ConfigError(f"--uds {path}: another server uses it")


def url(gateway: GatewayConfig) -> str:
    """Returns the server's URL for clients on this machine."""
    root = f"/{root}" if (root := gateway.root_path.strip("/")) else ""
    if gateway.uds:
        return f"unix:{gateway.uds}{root}"
    host = "localhost" if gateway.host in ("", "0.0.0.0", "::") else gateway.host
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if gateway.tls else 'http'}://{shown}:{gateway.port}{root}"
