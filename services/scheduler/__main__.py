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


def serve(config: SchedulerConfig) -> None:
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    names = config.served_model_names
    with Links[SchedulerIn](config.process.name, Role.SCHEDULER, config.process.bus, SchedulerIn, names[0]) as links:
        core = Scheduler(links.me.incarnation, settings_of(config), created=int(time.time()))
        Service(links, core, StatsLog(config.stats_interval_s, config.log_stats, time.monotonic())).run(stopped)


if __name__ == "__main__":
    sys.exit(settings.run(SchedulerConfig, serve))
