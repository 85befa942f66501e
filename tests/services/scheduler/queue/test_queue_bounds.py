"""The queue is bounded: the largest tenant's requests are refused, with a Retry-After."""

import pytest

from blockyard.services.scheduler.admission.request_handler import MAX_SILENCE_S
from blockyard.services.scheduler.queue.queue_bounds import MOST_RETRY_S
from blockyard.shared.messages import Accepted, Beam, QueueCapacityChanged

from ..conftest import Ring


def refusals(it: Ring) -> dict[str, int]:
    return {name: j.refused.status for name, j in it.gateway.journals.items() if j.refused is not None}


def accepted(it: Ring) -> list[str]:
    return [o.frame.request_id for o in it.world.sent if isinstance(o.frame, Accepted)]


def reasons(it: Ring) -> dict[str, int]:
    return {count.reason: count.total for count in it.world.core.stats().refused}


def busy(ring: type[Ring], **shape: object) -> Ring:
    """One request runs for a long time, and all others wait."""
    it = ring(max_num_seqs=1, num_blocks=200, max_model_len=400, **shape)
    it.submit("running", 5, max_tokens=300)
    it.steps(2)
    return it


def test_the_newest_of_the_tenant_with_most_tokens_gives_way(ring: type[Ring]) -> None:
    it = busy(ring, max_queue_len=4)
    for i in range(3):
        it.submit(f"heavy {i}", 20, tenant="heavy")
    it.submit("other", 30, tenant="other")
    it.submit("light", 10, tenant="light")
    assert refusals(it) == {"heavy 2": 429}
    it.submit("heavy 3", 5, tenant="heavy")
    assert refusals(it) == {"heavy 2": 429, "heavy 3": 429}, "its own newest request is the one that came"
    it.submit("light again", 10, tenant="light")
    assert set(refusals(it)) == {"heavy 2", "heavy 3", "heavy 1"}
    assert reasons(it) == {"displaced": 2, "full": 1}
    it.finish()


def test_of_a_tenant_the_user_with_most_tokens_gives_way(ring: type[Ring]) -> None:
    it = busy(ring, max_queue_tokens=90)
    it.submit("quiet", 10, tenant="a", user="quiet")
    it.submit("loud 1", 40, tenant="a", user="loud")
    it.submit("loud 2", 40, tenant="a", user="loud")
    it.submit("b", 20, tenant="b")
    assert refusals(it) == {"loud 2": 429}
    it.submit("quiet 2", 25, tenant="a", user="quiet")
    assert set(refusals(it)) == {"loud 2", "loud 1"}
    it.finish()


def test_the_tenant_with_most_choices_gives_way_though_its_prompts_are_short(ring: type[Ring]) -> None:
    it = busy(ring, max_queue_len=16)
    for i in range(4):
        it.submit(f"flood {i}", 3, n=4, tenant="flood")
    assert refusals(it) == {}
    it.submit("light", 100, tenant="light")
    assert refusals(it) == {"flood 3": 429}
    assert it.world.core.waiting.usage.amount == (13, 3 * 4 * 3 + 100, 13)
    it.submit("light again", 3, n=4, tenant="light")
    assert reasons(it) == {"displaced": 2}
    it.finish()


def test_a_beam_search_counts_as_all_of_its_beams(ring: type[Ring]) -> None:
    it = busy(ring, max_queue_len=10)
    it.submit("wide", 5, n=1, beam=Beam(8), temperature=0.0)
    it.submit("wide too", 5, n=1, beam=Beam(8), temperature=0.0)
    it.submit("two", 5, n=2)
    assert set(refusals(it)) == {"wide too"}
    it.finish()


def test_requests_give_way_until_the_tokens_fit_and_none_if_that_is_not_enough(ring: type[Ring]) -> None:
    it = busy(ring, max_queue_tokens=100)
    for i in range(10):
        it.submit(f"heavy {i}", 10, tenant="heavy")
    it.submit("long", 35, tenant="light")
    assert sorted(refusals(it)) == ["heavy 6", "heavy 7", "heavy 8", "heavy 9"]
    it.submit("too long", 90, tenant="third")
    assert sorted(refusals(it)) == ["heavy 6", "heavy 7", "heavy 8", "heavy 9", "too long"]
    it.finish()


def test_an_accepted_request_is_not_refused_to_make_room(ring: type[Ring]) -> None:
    it = busy(ring, max_queue_len=2)
    it.submit("a", 20, tenant="heavy")
    it.submit("b", 20, tenant="heavy")
    assert accepted(it) == ["running"]
    it.world.now = MAX_SILENCE_S + 1
    it.world.turn()
    assert accepted(it) == ["running", "a", "b"]
    it.submit("light", 5, tenant="light")
    assert refusals(it) == {"light": 429}
    it.finish()


def test_a_refusal_tells_which_tenants_the_queue_is_full_for(ring: type[Ring]) -> None:
    it = busy(ring, max_queue_len=2)
    it.submit("a", 20, tenant="heavy", user="u")
    it.submit("b", 20, tenant="heavy", user="u")
    frame = it.gateway.capacities[-1]
    assert isinstance(frame, QueueCapacityChanged)
    assert (frame.capacity.choices, frame.capacity.tenant, frame.capacity.user) == (0, "heavy", "u")
    it.world.now = MAX_SILENCE_S + 1
    it.world.turn()
    it.submit("c", 20, tenant="light")
    refused = it.journal("c").refused
    assert refused is not None
    assert refused.capacity.tenant is None, "no request can be refused in place of another: all are accepted"
    it.finish()


@pytest.mark.parametrize(("delay_s", "refused"), [(None, {}), (2.0, {"late": 429})])
def test_a_request_that_would_wait_too_long_is_refused(
    ring: type[Ring], delay_s: float | None, refused: dict[str, int]
) -> None:
    """A token takes 0.1 s: the running request keeps its slot for 0.5 s more, each waiting request needs it for 1 s."""
    it = ring(max_num_seqs=1, max_queue_delay_s=delay_s, max_model_len=200, num_blocks=100, depth=0)
    it.submit("first", 20, max_tokens=100, ignore_eos=True)
    while len(it.output("first").ids) < 95:
        it.world.now += 0.1
        it.steps(1)
    for i in range(2):
        it.submit(f"waits {i}", 4, max_tokens=10, ignore_eos=True)
    it.submit("late", 4)
    assert refusals(it) == refused
    if refused:
        answer = it.journal("late").refused
        assert answer is not None
        assert answer.capacity.retry_after_s == pytest.approx(0.5 + 1 + 1, rel=0.3)
        assert reasons(it) == {"delay": 1}
    it.finish()


def test_a_request_that_has_waited_too_long_is_refused(ring: type[Ring]) -> None:
    it = busy(ring, max_queue_delay_s=3.0)
    it.submit("waits", 10)
    it.world.now += 2.9
    it.world.turn()
    assert refusals(it) == {}
    it.world.now += 0.2
    it.world.turn()
    assert refusals(it) == {"waits": 503}
    assert reasons(it) == {"overdue": 1}
    assert it.world.core.stats().waiting == 0
    it.finish()


def test_retry_after_is_long_while_no_request_progresses(ring: type[Ring]) -> None:
    it = busy(ring, max_queue_len=3)
    for i in range(3):
        it.submit(f"{i}", 10)
    for _ in range(400):
        it.world.now += 1.0
        it.world.turn()
    it.submit("late", 10)
    refused = it.journal("late").refused
    assert refused is not None
    assert refused.capacity.retry_after_s == MOST_RETRY_S
    it.finish()


def test_the_queue_is_visible(ring: type[Ring]) -> None:
    it = busy(ring, max_queue_len=3, policy="fair")
    for i in range(4):
        it.submit(f"{i}", 10 + i, tenant="heavy")
    it.submit("light", 7, tenant="light")
    stats = it.world.core.stats()
    assert stats.waiting_tokens == 10 + 11 + 7
    assert {(one.reason, one.total) for one in stats.refused} == {("full", 1), ("displaced", 1)}
    assert {(one.tenant, one.running, one.waiting) for one in stats.tenants} == {
        ("", 1, 0),
        ("heavy", 0, 2),
        ("light", 0, 1),
    }
    assert (stats.displaced_total, stats.preemptions_total) == (0, 0)
    it.finish()
