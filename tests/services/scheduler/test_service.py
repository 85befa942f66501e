"""The loop around the core: published statistics, failed sends, log lines."""

import logging
import re

import msgspec
import pytest
from fake_links import FakeLinks

from blockyard.services.scheduler.batch.worker_groups import BatchLimits
from blockyard.services.scheduler.core import Scheduler, SchedulerSettings
from blockyard.services.scheduler.report import StatsLog
from blockyard.services.scheduler.service import Service
from blockyard.shared.bus.member_list import Changed, Gone, Joined
from blockyard.shared.config.flags import FLAGS
from blockyard.shared.messages import (
    Accepted,
    Attach,
    Attached,
    Cancel,
    ChoiceState,
    Generate,
    Geometry,
    KVRole,
    Member,
    PathLost,
    Role,
    Sampling,
    SlotResult,
    Stats,
    StepPlan,
    StepResult,
    TextOptions,
    TokenBatch,
)

ME = Member("scheduler", Role.SCHEDULER, 1, "")
WORKER = Member("gpu_worker", Role.GPU_WORKER, 2, "", ready=True)
DETOKENIZER = Member("detokenizer", Role.DETOKENIZER, 3, "", ready=True)
GATEWAY = Member("api_gateway", Role.API_GATEWAY, 4, "")
GEOMETRY = Geometry(64, 16, 512, 1000, [2], 8, 64)


def service() -> tuple[Service, FakeLinks]:
    links = FakeLinks(ME, WORKER, DETOKENIZER, GATEWAY)
    settings = SchedulerSettings(
        names=["m", "alias"], root="/models/m", batch=BatchLimits(4, 32, 1), max_queue_len=10, max_queue_tokens=1000
    )
    it = Service(links, Scheduler(ME.incarnation, settings, created=5), StatsLog(10.0, True, 0.0))
    for member in (WORKER, DETOKENIZER, GATEWAY):
        it.on_event(member.incarnation, Joined(member), 0.0)
    it.step(0.0)
    return it, links


def attached() -> tuple[Service, FakeLinks]:
    it, links = service()
    it.on_event(WORKER.incarnation, Attached(ME.incarnation, GEOMETRY), 0.0)
    it.step(0.0)
    return it, links


def generate(it: Service, request_id: str = "r") -> None:
    frame = Generate(request_id, 0, "m", b"\1\0\0\0" * 4, b"", Sampling(8), TextOptions(), [ChoiceState(0)])
    it.on_event(GATEWAY.incarnation, frame, 0.0)
    it.step(0.0)


def test_ready_with_the_final_card_once_a_worker_is_attached() -> None:
    it, links = service()
    assert links.sent == [(2, Attach(1, num_slots=5))]
    assert not links.me.ready
    it.on_event(2, Attached(1, GEOMETRY), 0.0)
    it.step(0.0)
    assert links.me.ready
    assert links.me.card is not None
    assert (links.me.card.names, links.me.card.root) == (["m", "alias"], "/models/m")
    assert (links.me.card.max_model_len, links.me.card.vocab_size, links.me.card.created) == (512, 1000, 5)
    assert any("64 KV blocks of 16 tokens" in note for note in links.me.notes)


def test_notes_follow_the_roles_of_workers() -> None:
    it, links = service()
    prefill, decode = (msgspec.structs.replace(GEOMETRY, kv_role=role) for role in (KVRole.PREFILL, KVRole.DECODE))
    it.on_event(2, Attached(1, prefill), 0.0)
    it.step(0.0)
    assert not any("decode" in note for note in links.me.notes)
    links.members[8] = Member("gpu_worker 1", Role.GPU_WORKER, 8, "", model="m", ready=True)
    it.on_event(8, Joined(links.members[8]), 0.0)
    it.on_event(8, Attached(1, decode), 0.0)
    it.step(0.0)
    assert any("1 decode group" in note for note in links.me.notes)


def test_a_worker_is_asked_when_it_is_ready_and_serves_this_model() -> None:
    it, links = service()
    loading = Member("gpu_worker 1", Role.GPU_WORKER, 8, "")
    other = Member("gpu_worker 2", Role.GPU_WORKER, 9, "", model="other", ready=True)
    links.members |= {8: loading, 9: other}
    links.sent.clear()
    it.on_event(8, Joined(loading), 0.0)
    it.on_event(9, Joined(other), 0.0)
    it.step(0.0)
    assert not links.sent
    it.on_event(8, Changed(Member("gpu_worker 1", Role.GPU_WORKER, 8, "", model="m", ready=True)), 0.0)
    it.step(0.0)
    assert [to for to, _ in links.sent] == [8]


def test_one_turn_sends_the_plan_before_the_text() -> None:
    it, links = attached()
    generate(it)
    assert [type(frame) for _, frame in links.answered] == [Accepted]
    links.sent.clear()
    it.on_event(2, StepResult(1, [SlotResult(0, [7], 4)], stamp_s=9.0), 0.0)
    it.step(0.0)
    assert [type(frame) for _, frame in links.sent] == [StepPlan, TokenBatch]
    batch = links.sent[1][1]
    assert isinstance(batch, TokenBatch)
    assert (batch.stamp_s, batch.steps[0].token_ids) == (9.0, [7])


@pytest.mark.parametrize("lost", [WORKER, DETOKENIZER], ids=lambda m: m.name)
def test_a_member_with_a_full_link_is_lost_and_can_return(lost: Member) -> None:
    it, links = attached()
    links.full.add(lost.incarnation)
    generate(it)
    it.step(1.0)
    assert links.me.stats.running == (0 if lost is WORKER else 1)
    links.full.clear()
    links.sent.clear()
    it.on_event(lost.incarnation, Gone(lost), 1.0)
    it.on_event(lost.incarnation, Joined(lost), 1.0)
    it.step(1.0)
    (back,) = [frame for to, frame in links.sent if to == lost.incarnation]
    if lost is WORKER:
        assert isinstance(back, Attach)
    else:
        assert back == TokenBatch([], [], [Cancel("r", 0)]), "the stream it has will not go on"


def test_gateways_learn_of_a_full_detokenizer_link_when_it_is_back() -> None:
    it, links = attached()
    links.full.add(DETOKENIZER.incarnation)
    generate(it)
    assert links.answered[-1] == (4, Accepted("r", 0, 3, links.answered[-1][1].capacity))
    links.full.clear()
    it.on_event(3, Gone(DETOKENIZER), 0.0)
    it.step(0.0)
    assert not [frame for _, frame in links.answered if isinstance(frame, PathLost)]
    it.on_event(3, Joined(DETOKENIZER), 0.0)
    it.step(0.0)
    assert links.answered[-1] == (4, PathLost(3))


def test_the_phase_says_that_no_worker_is_attached() -> None:
    it, links = attached()
    assert links.me.phase == "serving"
    it.on_event(2, Gone(WORKER), 0.0)
    it.step(0.0)
    assert (links.me.phase, links.me.ready) == ("waiting for a worker", True)


def test_a_result_of_a_lost_worker_is_dropped() -> None:
    it, links = attached()
    generate(it)
    it.on_event(2, Gone(WORKER), 0.0)
    it.on_event(2, StepResult(1, [SlotResult(0, [7], 4)], stamp_s=9.0), 0.0)
    it.step(1.0)
    assert (links.me.stats.waiting, links.me.stats.output_tokens_total) == (1, 0)


def test_stats_are_published() -> None:
    it, links = attached()
    generate(it)
    it.step(1.0)
    stats = links.me.stats
    assert stats.rss_bytes > 2**20
    assert (stats.running, stats.requests_total, stats.blocks_used, stats.blocks_total) == (1, 1, 1, 64)


def test_the_log_has_rates_and_nothing_when_idle(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    report = StatsLog(10.0, True, 0.0)
    stats = Stats(
        running=3,
        waiting=1,
        output_tokens_total=500,
        steps_total=9,
        blocks_used=25,
        blocks_total=100,
        prefix_queries_total=80,
        prefix_hits_total=20,
    )
    assert not report.due(9.9)
    assert report.due(10.0)
    report.log(stats, 10.0)
    assert "prefix cache hits 25.0%" in caplog.text
    assert "generation 50.0 tokens/s, running 3, waiting 1, KV usage 25.0%" in caplog.text
    caplog.clear()
    idle = Stats(output_tokens_total=500, steps_total=9, prefix_queries_total=80)
    report.log(idle, 20.0)
    assert not caplog.text
    StatsLog(10.0, False, 0.0).log(stats, 10.0)
    assert not caplog.text


def test_preemptions_warn_with_the_count_and_the_flags(caplog: pytest.LogCaptureFixture) -> None:
    report = StatsLog(10.0, False, 0.0)
    for count in (0, 1, 2, 49, 50, 51, 120):
        report.warn(Stats(preemptions_total=count))
    counts = [r.getMessage().rpartition("=")[2] for r in caplog.records]
    assert counts == ["1", "50", "120"]
    assert "not enough KV cache space" in caplog.text
    assert "preempted by RECOMPUTE mode" in caplog.text
    assert "preemption_mode swap" in caplog.text
    named = {name.replace("_", "-") for name in re.findall(r"[a-z]+(?:_[a-z]+)+", caplog.records[0].getMessage())}
    helpful = {"gpu-memory-utilization", "cpu-kv-gib", "data-parallel-size", "max-num-seqs", "preemption-mode"}
    assert named == helpful | {"swap-space", "total-cumulative-preemption-cnt"}
    assert not any(FLAGS[name].refused for name in helpful)
    caplog.clear()
    report.warn(Stats(preemptions_total=200, host_blocks_total=9))
    assert "preempted by SWAP mode" in caplog.text
    assert "preemption_mode" not in caplog.text


def test_a_preemption_for_a_waiting_sequence_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    report = StatsLog(10.0, False, 0.0)
    report.warn(Stats(preemptions_total=60, displaced_total=60))
    assert not caplog.records
    report.warn(Stats(preemptions_total=63, displaced_total=60))
    assert [record.getMessage().rpartition("=")[2] for record in caplog.records] == ["3"]


def test_a_preemption_is_warned_of_though_statistics_are_not_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, _ = service()
    monkeypatch.setattr(it, "_report", StatsLog(10.0, False, 0.0))
    monkeypatch.setattr(Scheduler, "stats", lambda core: Stats(preemptions_total=3))
    it.step(1.0)
    assert [record.getMessage().rpartition("=")[2] for record in caplog.records] == ["3"]
    it.step(12.0)
    assert len(caplog.records) == 1, "it was said before"
