"""Counts steps and tokens of a worker and publishes the counters in the member list."""

import gc
import time

from blockyard.services.gpu_worker.interfaces import CompletedPlan, KVTransfers, StepRunner, WorkerLinks, WorkerRanks
from blockyard.shared.messages import Stats
from blockyard.shared.process.service_main import rss_bytes

PUBLISH_S = 0.5
COLLECT_S = 10.0  # between garbage collections, which run only while the worker is idle


class Counters:
    def __init__(
        self,
        links: WorkerLinks,
        runner: StepRunner,
        transfers: KVTransfers | None = None,
        ranks: WorkerRanks | None = None,
    ) -> None:
        self._links, self._runner, self._transfers, self._ranks = links, runner, transfers, ranks
        self._published_at = 0.0
        self._collected_at = time.monotonic()
        self.steps = 0
        self._running = self._tokens = self._prefill_steps = 0
        self._step_s, self._launch_s = [0.0, 0.0], [0.0, 0.0]  # of steps without prefill and with it

    def stepped(self, done: CompletedPlan) -> None:
        num_rows = len(done.decode_outputs or ())
        self._running = num_rows + len(done.slot_results)
        self.steps += 1
        self._prefill_steps += done.has_prefill
        self._step_s[done.has_prefill] += done.step_s
        self._launch_s[done.has_prefill] += done.launch_s
        self._tokens += num_rows + sum(len(r.token_ids) for r in done.slot_results)

    def idle(self) -> None:
        """Runs garbage collection if it is due. Call it only without waiting plans, so that it delays no step."""
        self._running = 0
        now = time.monotonic()
        if now - self._collected_at >= COLLECT_S:
            self._collected_at = now
            gc.collect()

    def publish(self) -> None:
        """Publishes the counters, at most twice a second."""
        now = time.monotonic()
        if now - self._published_at < PUBLISH_S:
            return
        self._published_at = now
        stats = Stats(
            running=self._running,
            output_tokens_total=self._tokens,
            blocks_total=self._runner.geometry.num_blocks,
            steps_total=self.steps,
            prefill_steps_total=self._prefill_steps,
            decode_step_us_total=round(1e6 * self._step_s[False]),
            decode_launch_us_total=round(1e6 * self._launch_s[False]),
            prefill_step_us_total=round(1e6 * self._step_s[True]),
            prefill_launch_us_total=round(1e6 * self._launch_s[True]),
            rss_bytes=rss_bytes(),
            ranks=[] if self._ranks is None else self._ranks.stats(),
        )
        stats = self._runner.count(stats)
        self._links.count(stats if self._transfers is None else self._transfers.count(stats))
