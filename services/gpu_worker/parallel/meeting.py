"""Where the ranks of a group find each other's addresses, and the network interface of their collectives. No torch."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Of one rank. Ranks of one host meet in a file, those of several hosts at a TCP store that the leader serves."""

    folder: Path  # private to the ranks of this host, empty at the start
    interface: str = LOOPBACK  # address or name
    store: str = ""  # host and port of the TCP store; empty: the ranks are on one host
    listener: int | None = None  # of the leader: the descriptor of the store's socket, which listens already

    @property
    def has_address(self) -> bool:
        """Whether `interface` is an address."""
        try:
            ipaddress.ip_address(self.interface)
        except ValueError:
            return False
        return True
