"""Every setting of a scheduler's config file reaches the scheduler."""

from typing import Any

import pytest

from blockyard.services.scheduler.from_config import settings_of
from blockyard.shared.config.services.lora import AdapterSettings
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.scheduler import SchedulerConfig
from blockyard.shared.messages import ModelSettings

PROCESS = ProcessConfig(name="scheduler", bus=BusConfig(registry="ipc:///r", bind="ipc:///b"))
# field of the file, a value other than its default, where the scheduler stores it
SETTINGS = [
    ("served_model_names", ["a", "b"], "names"),
    ("root", "/m", "root"),
    ("adapters", AdapterSettings(max_wait_s=3.0), "adapters"),
    ("model", ModelSettings(max_logprobs=3), "model"),
    ("max_num_seqs", 7, "batch.max_num_seqs"),
    ("max_num_batched_tokens", 70, "batch.max_num_batched_tokens"),
    ("depth", 3, "batch.depth"),
    ("scheduling_policy", "priority", "policy"),
    ("delay_factor", 0.5, "delay_factor"),
    ("max_num_partial_prefills", 4, "partial_prefills.max_partial"),
    ("max_long_partial_prefills", 2, "partial_prefills.max_long"),
    ("long_prefill_token_threshold", 50, "partial_prefills.long_tokens"),
    ("enable_prefix_caching", False, "prefix_caching"),
    ("block_scope", "m|main", "block_scope"),
    ("max_queue_len", 5, "max_queue_len"),
    ("max_queue_tokens", 99, "max_queue_tokens"),
    ("max_queue_delay_s", 9.0, "max_queue_delay_s"),
    ("enable_sleep_mode", True, "may_sleep"),
    ("decode_prefill_tokens", 9, "decode_prefill_tokens"),
    ("kv_lease_s", 9.0, "kv_lease_s"),
    ("reserve_whole_prompts", False, "reserve_whole_prompts"),
    ("watermark", 0.3, "batch.watermark"),
    ("kv_load_failure_policy", "fail", "load_failure_policy"),
]
ELSEWHERE = {"process", "enable_chunked_prefill", "log_stats", "stats_interval_s"}


def found(where: str, **fields: object) -> Any:
    named = {"served_model_names": ["m"], "max_num_partial_prefills": 4 if "partial_prefills" in where else 1}
    value: Any = settings_of(SchedulerConfig(process=PROCESS, **(named | fields)))
    for name in where.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(("name", "value", "where"), SETTINGS, ids=[name for name, _, _ in SETTINGS])
def test_a_setting_arrives(name: str, value: object, where: str) -> None:
    assert found(where, **{name: value}) == value
    assert name == "max_num_partial_prefills" or found(where) != value


@pytest.mark.parametrize("depth", [None, 0, 2])
def test_no_depth_is_not_lockstep(depth: int | None) -> None:
    assert found("batch.depth", depth=depth) == depth


def test_inverted_and_derived_settings() -> None:
    assert [
        found("partial_prefills.whole_prompts", enable_chunked_prefill=on, max_num_partial_prefills=1)
        for on in (True, False)
    ] == [
        False,
        True,
    ]
    assert [found("batch.late", scheduling_policy=policy) for policy in ("fcfs", "fair")] == [False, True]


def test_no_setting_is_left_out() -> None:
    assert {name for name, _, _ in SETTINGS} | ELSEWHERE == {*SchedulerConfig.__struct_fields__}
