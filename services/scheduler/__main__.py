"""`python -m blockyard.services.scheduler SETTINGS`: one model's scheduler."""

import signal
import sys
import threading
import time

from blockyard.services.scheduler.core import Scheduler, SchedulerSettings
from blockyard.services.scheduler.groups import BatchLimits
from blockyard.services.scheduler.report import Report
from blockyard.services.scheduler.service import Service
from blockyard.shared import settings
from blockyard.shared.bus import Links
from blockyard.shared.config.scheduler import SchedulerConfig
from blockyard.shared.messages import Role, SchedulerIn


def serve(config: SchedulerConfig) -> None:
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    names = config.served_model_names
    with Links[SchedulerIn](config.process.name, Role.SCHEDULER, config.process.bus, SchedulerIn, names[0]) as links:
        core = Scheduler(
            links.me.incarnation,
            SchedulerSettings(
                names=names,
                root=config.root,
                batch=BatchLimits(config.max_num_seqs, config.max_num_batched_tokens, config.depth),
                max_queue_len=config.max_queue_len,
                max_queue_tokens=config.max_queue_tokens,
                whole_prompts=not config.enable_chunked_prefill,
                prefix_caching=config.enable_prefix_caching,
                block_scope=config.block_scope,
            ),
            created=int(time.time()),
        )
        Service(links, core, Report(config.stats_interval_s, config.log_stats, time.monotonic())).run(stopped)


if __name__ == "__main__":
    sys.exit(settings.run(SchedulerConfig, serve))
