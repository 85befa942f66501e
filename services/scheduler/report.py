"""Log lines of a scheduler: statistics every few seconds, and warnings of preemptions."""

import logging

from blockyard.shared.messages import Stats

log = logging.getLogger(__name__)

WARN_EVERY = 50  # preemptions


class StatsLog:
    """Logs the difference between two readings of the counters."""

    def __init__(self, interval_s: float, enabled: bool, now: float) -> None:
        self._interval_s, self._enabled = interval_s, enabled
        self._since = now
        self._last = Stats()
        self._warn_at = 1

    def due(self, now: float) -> bool:
        return now - self._since >= self._interval_s

    def log(self, stats: Stats, now: float) -> None:
        """Logs rates since the last call; nothing if the scheduler was idle."""
        self.warn(stats)
        elapsed_s = now - self._since
        last, self._last, self._since = self._last, stats, now
        busy = stats.running or stats.waiting or stats.steps_total != last.steps_total
        num_queries = stats.prefix_queries_total - last.prefix_queries_total
        if self._enabled and busy:
            log.info(
                "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, KV usage %.1f%%, "
                "preemptions %d, prefix cache hits %.1f%%, wait %.1f s, refused %d",
                (stats.prompt_tokens_total - last.prompt_tokens_total) / elapsed_s,
                (stats.output_tokens_total - last.output_tokens_total) / elapsed_s,
                stats.running,
                stats.waiting,
                100 * stats.blocks_used / (stats.blocks_total or 1),
                stats.preemptions_total,
                100 * (stats.prefix_hits_total - last.prefix_hits_total) / (num_queries or 1),
                stats.wait_s,
                sum(one.total for one in stats.refused),
            )
        if self._enabled and stats.transfers_open:
            _log_transfers(stats)

    def warn(self, stats: Stats) -> None:
        """Warns of the first preemption and of every fiftieth after it."""
        num_preemptions = stats.preemptions_total - stats.displaced_total
        if num_preemptions >= self._warn_at:
            self._warn_at = num_preemptions - num_preemptions % WARN_EVERY + WARN_EVERY
            swaps = stats.host_blocks_total > 0
            log.warning(
                "a sequence was preempted by %s mode because there is not enough KV cache space. This can "
                "affect the end-to-end performance. Increase gpu_memory_utilization (cpu_kv_gib on CPU) to provide "
                "more KV cache memory or data_parallel_size to have more workers, or lower max_num_seqs%s. "
                "total_cumulative_preemption_cnt=%d",
                "SWAP" if swaps else "RECOMPUTE",
                ""
                if swaps
                else "; preemption_mode swap keeps it in host memory (swap_space) in place of computing it again",
                num_preemptions,
            )


def _log_transfers(stats: Stats) -> None:
    log.info(
        "KV transfers: %d open, %d sequences arriving, %d landed and %d aborted in all, %d blocks in quarantine",
        stats.transfers_open,
        stats.arriving,
        stats.transfers_landed_total,
        stats.transfers_aborted_total,
        stats.blocks_quarantined,
    )
