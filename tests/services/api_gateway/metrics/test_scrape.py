"""/metrics over real HTTP: names, labels and buckets, several gateways, members that are silent or gone."""

import asyncio
import time
from typing import Any

import msgspec
import pytest
from fake_ring import CARD, MEMBERS, SCHEDULER, TOKENIZER, WORKER, member
from prometheus_client.parser import text_string_to_metric_families

from blockyard.shared.config.services.gateway import MetricsNames
from blockyard.shared.messages import (
    AdapterUse,
    Generate,
    KVRole,
    Member,
    NamedCount,
    QueueCapacity,
    RankStats,
    RefusalCount,
    Refused,
    Role,
    Scrape,
    Scraped,
    Stats,
    StatsRequest,
    StatsResponse,
)
from blockyard.shared.ring_client.metrics.meters import Meters

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

COMPLETION = "/v1/completions"
REASONS = ("stop", "length", "abort", "error", "repetition")
ONE = frozenset({("model_name", "tiny"), ("engine", "0")})
FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200)  # the model's context is 256
BUCKETS = {  # as vLLM's loggers.py has them
    "time_to_first_token_seconds": FIRST,
    "inter_token_latency_seconds": TOKEN,
    "request_time_per_output_token_seconds": TOKEN,
    "e2e_request_latency_seconds": REQUEST,
    "request_queue_time_seconds": REQUEST,
    "request_prefill_time_seconds": REQUEST,
    "request_decode_time_seconds": REQUEST,
    "request_inference_time_seconds": REQUEST,
    "request_prompt_tokens": LENGTHS,
    "request_generation_tokens": LENGTHS,
    "request_max_num_generation_tokens": LENGTHS,
    "request_params_max_tokens": LENGTHS,
    "request_prefill_kv_computed_tokens": LENGTHS,
    "request_params_n": (1, 2, 5, 10, 20),
    "iteration_tokens_total": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
}


async def scrape(r: Any) -> Samples:
    async with r.http.get("/metrics") as response:
        assert response.status == 200
        text = await response.text()
    found = [(s.name, frozenset(s.labels.items())) for f in text_string_to_metric_families(text) for s in f.samples]
    assert len(found) == len(set(found))
    return {
        (s.name, frozenset(s.labels.items())): s.value for f in text_string_to_metric_families(text) for s in f.samples
    }


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "abc", "max_tokens": 4} | fields


def scheduler(**stats: Any) -> Member:
    return msgspec.structs.replace(MEMBERS[1], stats=Stats(**stats))


def buckets(found: Samples, name: str) -> list[str]:
    return [dict(labels)["le"] for one, labels in found if one == f"{name}_bucket"]


async def test_labels_and_buckets_are_vllms(rig) -> None:
    async with rig() as r:
        await r.post(COMPLETION, completion(n=2))
        found = await scrape(r)
    for name, bounds in BUCKETS.items():
        assert buckets(found, f"vllm:{name}") == [*(str(float(bound)) for bound in bounds), "+Inf"], name
        assert found[f"vllm:{name}_count", ONE] == found[f"blockyard:{name}_count", ONE], name
    assert set(BUCKETS["inter_token_latency_seconds"]) < {
        float(le) for le in buckets(found, "blockyard:inter_token_latency_seconds")
    }, "finer buckets between those of vLLM"
    assert all(labels >= ONE for name, labels in found if name.startswith("vllm:"))
    reasons = {dict(labels)["finished_reason"] for name, labels in found if name == "vllm:request_success_total"}
    assert reasons == {*REASONS}


def test_a_context_of_a_million_tokens() -> None:
    meters = Meters("")
    meters.serves(msgspec.structs.replace(CARD, max_model_len=1_048_576))
    assert [le for le, _ in meters.prompt_sizes.buckets(finer=False)][-3:] == ["500000.0", "1e+06", "+Inf"]


async def test_the_phases_of_a_request_are_measured(rig) -> None:
    async with rig() as r:
        r.ring.step_s = 0.06
        await r.post(COMPLETION, completion(max_tokens=6))
        found = await scrape(r)

    def seconds(name: str) -> float:
        assert found[f"vllm:{name}_seconds_count", ONE] == 1
        return found[f"vllm:{name}_seconds_sum", ONE]

    assert seconds("request_queue_time") == 0.004, "as the scheduler said"
    assert seconds("request_decode_time") >= 5 * 0.06 > seconds("request_prefill_time") > 0.03
    inference = seconds("request_prefill_time") + seconds("request_decode_time")
    assert seconds("request_inference_time") == pytest.approx(inference)
    assert seconds("request_time_per_output_token") == pytest.approx(seconds("request_decode_time") / 5)
    assert seconds("e2e_request_latency") >= inference + 0.004
    assert found["vllm:request_prefill_kv_computed_tokens_sum", ONE] == 0, "three tokens, all of them found"
    assert found["vllm:request_params_max_tokens_sum", ONE] == 6


async def test_gateways_are_summed_and_a_silent_gateway_counts_by_its_last_answer(rig) -> None:
    stats: dict[str, Any] = {"running": 3, "waiting": 2, "preemptions_total": 7, "blocks_used": 5, "blocks_total": 20}
    async with rig() as r:
        r.ring.members[SCHEDULER] = scheduler(**stats, prefix_queries_total=80, prefix_hits_total=20)
        await r.post(COMPLETION, completion())
        r.ring.join(Member("api_gateway 1", Role.API_GATEWAY, 77, "ipc:///77", ready=True))
        asked = asyncio.create_task(scrape(r))
        await r.until(lambda: bool(r.ring.frames(Scrape)))
        r.gateway.handle(77, Scraped(r.ring.frames(Scrape)[0].request_id, r.gateway.metrics.own()))
        found = await asked
        silent = await scrape(r)  # gateway 77 does not answer this time
        r.ring.lose(77)
        gone = await scrape(r)
    for one in (found, silent, gone):
        assert one["blockyard:requests_total", ONE] == 2
        assert one["vllm:prompt_tokens_total", ONE] == 6
        assert one["vllm:generation_tokens_total", ONE] == 8
        assert one["vllm:time_to_first_token_seconds_count", ONE] == 2
        assert one["blockyard:tokenize_seconds_count", ONE] == 2
        assert one["vllm:inter_token_latency_seconds_count", ONE] == 6
        assert one["vllm:e2e_request_latency_seconds_count", ONE] == 2
        assert one["vllm:request_success_total", ONE | {("finished_reason", "length")}] == 2
        assert one["vllm:num_requests_running", ONE] == 3 and one["vllm:num_requests_waiting", ONE] == 2
        assert one["vllm:num_preemptions_total", ONE] == 7
        assert one["vllm:prefix_cache_queries_total", ONE] == 80 and one["vllm:prefix_cache_hits_total", ONE] == 20
        assert one["vllm:kv_cache_usage_perc", ONE] == one["vllm:gpu_cache_usage_perc", ONE] == 0.25


async def test_a_scheduler_is_asked_and_a_hung_scheduler_counts_by_its_last_heartbeat(rig) -> None:
    async with rig() as r:
        r.ring.members[SCHEDULER] = scheduler(running=1, steps_total=5)
        r.ring.silent.add(Role.SCHEDULER)
        asked = asyncio.create_task(scrape(r))
        await r.until(lambda: bool(r.ring.frames(StatsRequest)))
        told = StatsResponse(r.ring.frames(StatsRequest)[0].request_id, Stats(running=4, steps_total=9))
        r.ring.receive(SCHEDULER, told)
        assert (await asked)["vllm:num_requests_running", ONE] == 4
        later = await scrape(r)
    steps = "blockyard:steps_total", frozenset({("model_name", "tiny"), ("member", "scheduler"), ("role", "scheduler")})
    assert later["vllm:num_requests_running", ONE] == 1 and later[steps] == 9


async def test_transfers_of_schedulers_and_workers(rig) -> None:
    counts: dict[str, Any] = {"second_token_counts": [0, 2, 1], "second_token_us_total": 9_000}
    counts |= {"transfers_open": 2, "arriving": 1, "blocks_quarantined": 4, "transfers_landed_total": 8}
    counts |= {"transfers_aborted_total": 3, "transfer_blocks_failed_total": 5, "transfer_notices_dropped_total": 6}
    counts |= {"transfer_audit_differences_total": 7}
    sent = Stats(
        steps_total=9,
        transfer_bytes=[NamedCount("shm", 700), NamedCount("tcp", 50)],
        transfer_frames_dropped=[NamedCount("doubled", 2)],
    )
    async with rig() as r:
        r.ring.members[SCHEDULER] = scheduler(**counts)
        plain = await scrape(r)
        r.ring.members[WORKER] = msgspec.structs.replace(r.ring.members[WORKER], kv_role=KVRole.PREFILL, stats=sent)
        found = await scrape(r)
        r.ring.lose(WORKER)
        gone = await scrape(r)
    of_scheduler = frozenset({("model_name", "tiny"), ("member", MEMBERS[1].name)})
    worker = next(one for one in MEMBERS if one.role is Role.GPU_WORKER)
    of_worker = frozenset({("model_name", "tiny"), ("member", worker.name), ("kv_role", "prefill")})
    with_role = of_worker | {("role", "gpu_worker")}
    assert not [one for one, labels in plain if "kv_role" in dict(labels)], "without roles there is no such label"
    for name, value in (
        ("kv_transfers_open", 2),
        ("sequences_arriving", 1),
        ("kv_blocks_quarantined", 4),
        ("kv_transfers_landed_total", 8),
        ("kv_transfers_aborted_total", 3),
        ("kv_transfer_blocks_failed_total", 5),
        ("kv_transfer_notices_dropped_total", 6),
        ("kv_transfer_audit_differences_total", 7),
    ):
        assert found[f"blockyard:{name}", of_scheduler] == value, name
    assert found["blockyard:second_token_seconds_count", ONE] == 3
    assert found["blockyard:second_token_seconds_sum", ONE] == 0.009
    assert found["blockyard:second_token_seconds_bucket", ONE | {("le", "0.002")}] == 2
    assert found["blockyard:member_ready", with_role] == 1 and ("blockyard:member_ready", with_role) not in gone
    for one in (found, gone):
        assert one["blockyard:kv_transfer_bytes_total", of_worker | {("connector", "shm")}] == 700
        assert one["blockyard:kv_transfer_bytes_total", of_worker | {("connector", "tcp")}] == 50
        assert one["blockyard:kv_transfer_frames_dropped_total", of_worker | {("reason", "doubled")}] == 2
        assert one["blockyard:steps_total", with_role] == 9


async def before_and_after_loss(rig, stats: Stats) -> tuple[Any, Any, frozenset[tuple[str, str]]]:
    """Metrics while a worker with these counters is there, and after its loss, and its labels."""
    async with rig() as r:
        worker = r.ring.members[WORKER] = msgspec.structs.replace(r.ring.members[WORKER], stats=stats)
        found = await scrape(r)
        r.ring.lose(WORKER)
        return found, await scrape(r), frozenset({("model_name", "tiny"), ("member", worker.name)})


async def test_step_times_of_workers(rig) -> None:
    stats = Stats(
        steps_total=10,
        prefill_steps_total=4,
        prefill_step_us_total=120_000,
        prefill_launch_us_total=90_000,
        decode_step_us_total=30_000,
        decode_launch_us_total=600,
    )
    found, gone, of_worker = await before_and_after_loss(rig, stats)
    for one in (found, gone):
        for kind, count, step_s, launch_s in (("prefill", 4, 0.12, 0.09), ("decode", 6, 0.03, 0.0006)):
            labels = of_worker | {("kind", kind)}
            assert one["blockyard:worker_step_seconds_count", labels] == count
            assert one["blockyard:worker_step_seconds_sum", labels] == step_s
            assert one["blockyard:worker_launch_seconds_sum", labels] == launch_s


async def test_adapters_have_vllms_labels(rig) -> None:
    name = "vllm:lora_requests_info"
    async with rig() as r:
        assert not [key for key in await scrape(r) if key[0] == name], "without adapters"
        use = AdapterUse(4, ["sql", "team/x"], ["law"])
        r.ring.members[SCHEDULER] = scheduler(adapter_use=use)
        [(labels, value)] = [(labels, value) for (one, labels), value in (await scrape(r)).items() if one == name]
    own = {("max_lora", "4"), ("running_lora_adapters", "sql,team/x"), ("waiting_lora_adapters", "law")}
    assert labels == ONE | own
    assert abs(value - time.time()) < 60


async def test_masks_of_workers(rig) -> None:
    stats = Stats(masks_total=40, mask_waits_total=3, matcher_restarts_total=1, first_mask_counts=[0, 2, 1])
    found, gone, of_worker = await before_and_after_loss(rig, stats)
    for one in (found, gone):
        assert one["blockyard:constraint_masks_total", of_worker] == 40
        assert one["blockyard:constraint_mask_waits_total", of_worker] == 3
        assert one["blockyard:matcher_restarts_total", of_worker] == 1
        assert one["blockyard:constraint_first_mask_seconds_count", of_worker] == 3
        assert one["blockyard:constraint_first_mask_seconds_bucket", of_worker | {("le", "0.002")}] == 2


async def test_experts_of_workers(rig) -> None:
    stats = Stats(
        expert_samples_total=4,
        experts_hit_total=90,
        experts_hit_if_even_total=100,
        expert_loads=[1.5, 3.25, 2.0],
        expert_rank_loads=[1.25, 1.0],
        experts_moved_total=6,
    )
    found, gone, of_worker = await before_and_after_loss(rig, stats)
    for one in (found, gone):
        assert one["blockyard:expert_samples_total", of_worker] == 4
        assert one["blockyard:experts_hit_total", of_worker] == 90
        assert one["blockyard:experts_hit_if_even_total", of_worker] == 100
        assert one["blockyard:experts_moved_total", of_worker] == 6
    assert found["blockyard:expert_rank_load_worst", of_worker] == 1.25
    assert found["blockyard:expert_rank_load", of_worker | {("layer", "1")}] == 1.0
    assert found["blockyard:expert_load_worst", of_worker] == 3.25
    assert [found["blockyard:expert_load", of_worker | {("layer", str(i))}] for i in range(3)] == [1.5, 3.25, 2.0]
    assert ("blockyard:expert_load_worst", of_worker) not in gone


async def test_ranks_of_workers(rig) -> None:
    stats = Stats(ranks=[RankStats(0, 71, 900), RankStats(1, 72, 800, 0.25)])
    found, gone, of_worker = await before_and_after_loss(rig, stats)
    second = of_worker | {("rank", "1"), ("pid", "72")}
    assert found["blockyard:rank_resident_bytes", second] == 800
    assert found["blockyard:rank_silent_seconds", second] == 0.25
    assert ("blockyard:rank_resident_bytes", second) not in gone


async def test_grammars_that_tokenizers_refused(rig) -> None:
    stats = Stats(refused=[RefusalCount("invalid", 5), RefusalCount("busy", 2)])
    async with rig() as r:
        one = r.ring.members[TOKENIZER] = msgspec.structs.replace(r.ring.members[TOKENIZER], stats=stats)
        found = await scrape(r)
    labels = {("model_name", "tiny"), ("member", one.name)}
    for reason, count in (("invalid", 5), ("busy", 2)):
        assert found["blockyard:grammars_refused_total", frozenset(labels | {("reason", reason)})] == count
        assert ("blockyard:requests_refused_total", frozenset(labels | {("reason", reason)})) not in found


async def test_counters_outlive_a_scheduler(rig) -> None:
    step_sizes = [0, 2, 1]
    async with rig() as r:
        counts: dict[str, Any] = {"preemptions_total": 7, "step_sizes": step_sizes, "step_tokens_total": 20}
        r.ring.members[SCHEDULER] = scheduler(running=3, **counts)
        before = await scrape(r)
        r.ring.lose(SCHEDULER)
        away = await scrape(r)
        r.ring.join(msgspec.structs.replace(member(Role.SCHEDULER, 22, card=CARD), stats=Stats(preemptions_total=1)))
        after = await scrape(r)
    assert before["vllm:num_requests_running", ONE] == 3 and away["vllm:num_requests_running", ONE] == 0
    assert [one["vllm:num_preemptions_total", ONE] for one in (before, away, after)] == [7, 7, 8]
    for one in (before, away, after):
        assert one["vllm:iteration_tokens_total_count", ONE] == 3 and one["vllm:iteration_tokens_total_sum", ONE] == 20
        assert one["vllm:iteration_tokens_total_bucket", ONE | {("le", "8.0")}] == 2


async def test_a_gateway_learns_the_counters_of_gateways_that_left_before_it_started(rig) -> None:
    """Two gateways share a port: a scrape reaches the restarted gateway or the other one."""
    async with rig() as old, rig() as new:
        old.ring.members[SCHEDULER] = scheduler(preemptions_total=7)
        await old.post(COMPLETION, completion())
        third = Member("api_gateway 2", Role.API_GATEWAY, 88, "ipc:///88", ready=True)
        old.ring.join(third)
        old.gateway.handle(88, Scraped("", old.gateway.metrics.own()))
        old.ring.lose(88)
        old.ring.lose(SCHEDULER)
        before = await scrape(old)
        new.ring.lose(SCHEDULER)
        new.ring.join(Member("api_gateway 1", Role.API_GATEWAY, 77, "ipc:///77", ready=True))
        for _ in range(2):  # another scrape changes nothing
            asked = asyncio.create_task(scrape(new))
            await new.until(lambda: bool(new.ring.frames(Scrape)))
            old.gateway.handle(99, new.ring.frames(Scrape)[-1])
            new.gateway.handle(77, old.ring.answered[-1][1])
            after = await asked
            assert after["vllm:num_preemptions_total", ONE] == before["vllm:num_preemptions_total", ONE] == 7
            assert after["vllm:generation_tokens_total", ONE] == before["vllm:generation_tokens_total", ONE] == 8


async def test_refused_and_failed_requests_do_not_count_as_aborts(rig) -> None:
    def refuse(frame: Generate) -> Refused:
        return Refused(frame.request_id, frame.attempt, 429, "", "full", QueueCapacity(0, 0))

    async with rig() as r:
        r.ring.fail_at = 2
        assert (await r.post(COMPLETION, completion(n=3)))[0] == 500
        r.ring.refuse = refuse
        assert (await r.post(COMPLETION, completion()))[0] == 429
        found = await scrape(r)
    ended = {reason: found["vllm:request_success_total", ONE | {("finished_reason", reason)}] for reason in REASONS}
    assert ended == {"stop": 0, "length": 0, "abort": 0, "error": 3, "repetition": 0}
    assert found["vllm:e2e_request_latency_seconds_count", ONE] == 0


@pytest.mark.parametrize("names", list(MetricsNames))
async def test_one_prefix_or_both(rig, names: MetricsNames) -> None:
    async with rig(metrics_names=names) as r:
        await r.post(COMPLETION, completion())
        shown = {name for name, _ in await scrape(r)}
    theirs, ours = ({n for n in shown if n.startswith(prefix)} for prefix in ("vllm:", "blockyard:"))
    assert theirs | ours == shown
    assert bool(theirs) is (names != "blockyard") and bool(ours) is (names != "vllm")
    if names == "both":
        former = ("vllm:gpu_cache_usage_perc", "vllm:gpu_prefix_cache", "vllm:time_per_output_token_seconds")
        same = {name.replace("vllm:", "blockyard:") for name in theirs if not name.startswith(former)}
        assert same < ours and "blockyard:member_ready" in ours


async def test_reasons_to_wait_and_older_names(rig) -> None:
    async with rig() as r:
        r.ring.members[SCHEDULER] = scheduler(waiting=7, arriving=2, prefix_queries_total=40, prefix_hits_total=30)
        found = await scrape(r)
    waiting = {dict(labels)["reason"]: n for (name, labels), n in found.items() if name.endswith("waiting_by_reason")}
    assert waiting == {"capacity": 5, "deferred": 2} and found["vllm:num_requests_waiting", ONE] == 7
    assert found["vllm:gpu_prefix_cache_queries_total", ONE] == found["vllm:prefix_cache_queries_total", ONE] == 40
    assert found["vllm:gpu_prefix_cache_hits_total", ONE] == found["vllm:prefix_cache_hits_total", ONE] == 30
