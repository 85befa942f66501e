"""Free ports, and the settings of a ring over TCP."""

import socket
from pathlib import Path

from blockyard.shared.bus.curve import write_keys
from blockyard.shared.config.services.process import BusConfig


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tcp_bus(keys: Path) -> BusConfig:
    """A registry on a free port, with keys that are written into this folder."""
    write_keys(keys)
    return BusConfig(
        registry=f"tcp://127.0.0.1:{free_port()}",
        bind="tcp://127.0.0.1",
        advertise="127.0.0.1",
        curve_public=str(keys / "blockyard.key"),
        curve_secret=str(keys / "blockyard.key_secret"),
    )
