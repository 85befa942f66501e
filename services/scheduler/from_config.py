"""Translates SchedulerConfig to SchedulerSettings, for the scheduler and the simulator."""

import msgspec

from blockyard.services.scheduler.batch.worker_groups import BatchLimits
from blockyard.services.scheduler.core import SchedulerSettings
from blockyard.services.scheduler.planning.partial_prefill_limits import PartialPrefillLimits
from blockyard.shared.config.services.scheduler import SchedulerConfig


def settings_of(config: SchedulerConfig) -> SchedulerSettings:
    return SchedulerSettings(
        names=config.served_model_names,
        root=config.root,
        model=config.model,
        batch=BatchLimits(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.depth,
            late=config.scheduling_policy == "fair",
            watermark=config.watermark,
        ),
        max_queue_len=config.max_queue_len,
        max_queue_tokens=config.max_queue_tokens,
        max_queue_delay_s=config.max_queue_delay_s,
        delay_factor=config.delay_factor,
        partial_prefills=PartialPrefillLimits(
            max_partial=config.max_num_partial_prefills,
            max_long=config.max_long_partial_prefills,
            long_tokens=config.long_prefill_token_threshold,
            whole_prompts=not config.enable_chunked_prefill,
        ),
        policy=config.scheduling_policy,
        may_sleep=config.enable_sleep_mode,
        prefix_caching=config.enable_prefix_caching,
        decode_prefill_tokens=config.decode_prefill_tokens,
        kv_lease_s=config.kv_lease_s,
        load_failure_policy=config.kv_load_failure_policy,
        block_scope=config.block_scope,
        reserve_whole_prompts=config.reserve_whole_prompts,
        # an adapter whose files broke meanwhile is no reason to keep the whole ring away
        adapters=msgspec.structs.replace(config.adapters, leaves_out_broken=config.process.is_restart),
    )
