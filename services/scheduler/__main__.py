"""`python -m blockyard.services.scheduler SETTINGS`: one model's scheduler."""

import signal
import sys
import threading
import time

from blockyard.services.scheduler.core import Scheduler
from blockyard.services.scheduler.from_config import settings_of
from blockyard.services.scheduler.report import StatsLog
from blockyard.services.scheduler.service import Service
from blockyard.shared.bus.links import Links
from blockyard.shared.config.services.scheduler import SchedulerConfig
from blockyard.shared.messages import Role, SchedulerIn
from blockyard.shared.process import settings
from blockyard.shared.process.liveness import LivenessPipe


def serve(config: SchedulerConfig) -> None:
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    process, model = config.process, config.served_model_names[0]
    liveness = LivenessPipe(process.liveness_fd)
    with Links[SchedulerIn](process.name, Role.SCHEDULER, process.bus, SchedulerIn, model, liveness=liveness) as links:
        core = Scheduler(links.me.incarnation, settings_of(config), created=int(time.time()))
        Service(links, core, StatsLog(config.stats_interval_s, config.log_stats, time.monotonic())).run(stopped)


if __name__ == "__main__":
    sys.exit(settings.run(SchedulerConfig, serve))
