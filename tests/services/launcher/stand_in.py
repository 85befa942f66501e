"""A child process that joins the ring and does nothing: `python stand_in.py SERVICE SETTINGS`.

On SIGTERM it writes its name to the file `order` beside its settings, a gateway after half a second. SIGUSR1 stops its
loop, and not its other threads.
"""

import signal
import sys
import time
from pathlib import Path

from blockyard.shared.bus.links import Links
from blockyard.shared.config.services.detokenizer import DetokenizerConfig
from blockyard.shared.config.services.gateway import GatewayConfig
from blockyard.shared.config.services.scheduler import SchedulerConfig
from blockyard.shared.config.services.tokenizer import TokenizerConfig
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.messages import Hello, Role
from blockyard.shared.process import settings
from blockyard.shared.process.liveness import LivenessPipe

TYPES = {
    "api_gateway": GatewayConfig,
    "detokenizer": DetokenizerConfig,
    "scheduler": SchedulerConfig,
    "tokenizer_pool": TokenizerConfig,
    "gpu_worker": WorkerConfig,
}


def main() -> None:
    service = sys.argv.pop(1)
    config = settings.load(TYPES[service])
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(60))
    process, liveness = config.process, LivenessPipe(config.process.liveness_fd)
    links: Links[Hello] = Links(process.name, Role(service), process.bus, Hello, liveness=liveness)
    with links:
        links.update(phase="warming up", progress=0.5, notes=["one note"])
        until = time.monotonic() + 0.4  # the registry sends changes in batches
        while time.monotonic() < until:
            links.poll(0.02)
        links.update(ready=True, phase="ready")
        while not stopped:
            links.poll(0.02)
        if service == "api_gateway":
            time.sleep(0.5)
        with (Path(sys.argv[1]).parent / "order").open("a") as order:
            order.write(f"{config.process.name}\n")


if __name__ == "__main__":
    main()
