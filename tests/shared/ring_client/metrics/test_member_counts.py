"""Counters of members that are restarted, silent, listed late or by the thousand."""

from fake_links import FakeLinks

from blockyard.shared.messages import Member, RefusalCount, Role, Stats, StatsResponse
from blockyard.shared.ring_client.metrics.member_counts import (
    MAX_KEPT,
    REFUSED,
    MemberCounts,
    MemberTotals,
    scheduler_totals,
)

ME = Member("api_gateway", Role.API_GATEWAY, 99, "")


def scheduler(incarnation: int, **stats: object) -> Member:
    return Member("scheduler", Role.SCHEDULER, incarnation, "", ready=True, stats=Stats(**stats))  # type: ignore[arg-type]


def only(counts: MemberCounts) -> MemberTotals:
    [found] = [one for one in counts.members() if one.role is Role.SCHEDULER]
    return found


def test_a_restarted_member_goes_on_counting() -> None:
    links = FakeLinks(ME, scheduler(1, steps_total=7, running=3, refused=[RefusalCount("full", 2)]))
    counts = MemberCounts(links)
    counts.gone(links.members.pop(1))
    assert (only(counts).count("steps_total"), only(counts).ready) == (7, None)
    assert scheduler_totals(counts.members()).running == 0
    links.members[2] = scheduler(
        2, steps_total=5, running=1, refused=[RefusalCount("full", 1), RefusalCount("delay", 4)]
    )
    assert (only(counts).count("steps_total"), only(counts).stats.running, only(counts).ready) == (12, 1, True)
    assert dict(only(counts).of(REFUSED)) == {"full": 3, "delay": 4}


def test_a_link_that_breaks_and_returns_counts_once() -> None:
    links = FakeLinks(ME, scheduler(1, steps_total=7))
    counts = MemberCounts(links)
    counts.gone(links.members.pop(1))
    links.members[1] = scheduler(1, steps_total=9)
    assert only(counts).count("steps_total") == 9


def test_a_heartbeat_that_is_older_than_an_answer_takes_nothing_back() -> None:
    links = FakeLinks(ME, scheduler(1, steps_total=7, running=1))
    counts = MemberCounts(links)
    counts.on_response(1, StatsResponse("", Stats(steps_total=20, running=6)))
    assert (only(counts).count("steps_total"), only(counts).stats.running) == (20, 6)
    counts.gone(links.members.pop(1))
    assert only(counts).count("steps_total") == 20
    assert [one.stats.steps_total for one in counts.past()] == [20]


def test_heartbeats_that_come_after_the_last_answer_count() -> None:
    links = FakeLinks(ME, scheduler(1))
    counts = MemberCounts(links)
    counts.on_response(1, StatsResponse("", Stats(steps_total=20)))
    counts.gone(scheduler(1, steps_total=900))
    links.members.clear()
    assert only(counts).count("steps_total") == 900


def test_of_very_many_incarnations_the_sum_is_kept() -> None:
    links = FakeLinks(ME, scheduler(1, steps_total=3))
    counts = MemberCounts(links)
    assert only(counts).count("steps_total") == 3
    for incarnation in range(100, 100 + MAX_KEPT + 50):
        counts.gone(scheduler(incarnation, steps_total=2))
    assert only(counts).count("steps_total") == 3 + 2 * (MAX_KEPT + 50)
    counts.gone(scheduler(100 + MAX_KEPT, steps_total=2))  # one that is kept is known again
    assert only(counts).count("steps_total") == 3 + 2 * (MAX_KEPT + 50)
    counts.gone(scheduler(100, steps_total=2))  # the first is only part of a sum
    assert only(counts).count("steps_total") == 3 + 2 * (MAX_KEPT + 51)
