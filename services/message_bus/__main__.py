"""`python -m blockyard.services.message_bus SETTINGS`: serves the membership list."""

import signal
import sys
import threading
import time

from blockyard.services.message_bus.service import Membership, Registry
from blockyard.shared.bus.registry_socket import RegistrySocket
from blockyard.shared.config.services.registry import RegistryConfig
from blockyard.shared.process import settings
from blockyard.shared.process.liveness import LivenessPipe


def serve(config: RegistryConfig) -> None:
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    socket = RegistrySocket(config.process.bus)
    membership = Membership(time.monotonic(), config.dead_after_s, config.settle_s)
    try:
        Registry(socket, membership, LivenessPipe(config.process.liveness_fd)).run(stopped)
    finally:
        socket.close()


if __name__ == "__main__":
    sys.exit(settings.run(RegistryConfig, serve))
