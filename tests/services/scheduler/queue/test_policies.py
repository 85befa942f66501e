"""The order of waiting sequences, and which running sequence is preempted."""

import itertools
from collections import Counter

import pytest

from blockyard.services.scheduler.queue.fair_policy import MIN_KEPT, FairPolicy
from blockyard.services.scheduler.sequences.requests import Request, Sequence, make_sequence
from blockyard.shared import messages
from blockyard.shared.messages import Generate, Sampling, StepPlan, TextOptions

from ..conftest import Ring


def order(it: Ring) -> list[str]:
    """Requests in the order in which they first ran; each prompt has its own length."""
    by_length = {len(j.frame.prompt_ids) // 4: name for name, j in it.gateway.journals.items()}
    plans = [o.frame for o in it.world.sent if isinstance(o.frame, StepPlan)]
    return list(dict.fromkeys(by_length[start.num_prompt_tokens] for plan in plans for start in plan.starts))


def running_ids(it: Ring) -> list[str]:
    group = it.world.core.groups[it.worker.incarnation]
    return [running.sequence.request.id for running in group.running]


@pytest.mark.parametrize(
    ("policy", "expected"), [("fcfs", "first low high other"), ("priority", "first high other low")]
)
def test_the_lower_priority_number_is_served_first(ring: type[Ring], policy: str, expected: str) -> None:
    it = ring(policy=policy, max_num_seqs=1)
    it.submit("first", 5, priority=-9)
    it.submit("low", 6, priority=5)
    it.submit("high", 7, priority=-1)
    it.submit("other", 8, priority=-1)
    it.finish()
    assert order(it) == expected.split()


@pytest.mark.parametrize(("policy", "displaced"), [("fcfs", 0), ("priority", 1)])
def test_a_lower_number_preempts_for_a_slot(ring: type[Ring], policy: str, displaced: int) -> None:
    it = ring(policy=policy, max_num_seqs=2)
    it.submit("a", 5, max_tokens=30, priority=1)
    it.submit("b", 6, max_tokens=30, priority=2)
    it.steps(3)
    it.submit("urgent", 7, max_tokens=3, priority=0)
    it.steps(2)
    assert (running_ids(it) == ["urgent", "a"]) == bool(displaced)
    assert it.world.core.stats().preemptions_total == displaced
    it.finish()


def test_an_equal_number_does_not_preempt(ring: type[Ring]) -> None:
    it = ring(policy="priority", max_num_seqs=1)
    it.submit("a", 5, max_tokens=20, priority=3)
    it.submit("b", 6, priority=3)
    it.finish()
    assert it.world.core.stats().preemptions_total == 0


def test_a_lower_number_preempts_for_blocks(ring: type[Ring]) -> None:
    it = ring(policy="priority", num_blocks=12, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    it.submit("a", 20, max_tokens=8, priority=1, salt="a")
    it.submit("b", 20, max_tokens=8, priority=2, salt="b")
    it.steps(2)
    it.submit("urgent", 19, max_tokens=4, priority=0, salt="c")
    it.steps(3)
    assert "urgent" in running_ids(it)
    assert "b" not in running_ids(it)
    it.finish()


def test_no_sequence_is_preempted_for_one_that_still_would_not_fit(ring: type[Ring]) -> None:
    it = ring(policy="priority", num_blocks=12, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    it.submit("a", 20, max_tokens=8, priority=0, salt="a")
    it.submit("b", 6, max_tokens=8, priority=2, salt="b")
    it.steps(2)
    it.submit("urgent", 36, max_tokens=4, priority=1, salt="c")
    it.steps(1)
    assert running_ids(it) == ["a", "b"]
    it.finish()


@pytest.mark.parametrize(("policy", "place"), [("fcfs", 9), ("fair", 1)])
def test_a_tenant_with_one_request_passes_another_ones_queue(ring: type[Ring], policy: str, place: int) -> None:
    it = ring(policy=policy, max_num_seqs=1)
    for i in range(9):
        it.submit(f"flood {i}", 5 + i, tenant="heavy", max_tokens=3)
    it.submit("light", 20, tenant="light", max_tokens=3)
    it.finish()
    assert order(it).index("light") == place


def test_users_divide_the_share_of_their_key(ring: type[Ring]) -> None:
    """A key with two users and a key with one: the second key gets as much as the first one's users together."""
    it = ring(policy="fair", max_num_seqs=1, max_model_len=200)
    for i in range(12):
        for j, (tenant, user) in enumerate((("a", "x"), ("a", "y"), ("b", "z"))):
            it.submit(f"{tenant}{user} {i}", 100 + 3 * i + j, tenant=tenant, user=user, max_tokens=2)
    it.finish()
    got = Counter(name.split()[0] for name in order(it)[1:13])
    assert got["bz"] == 6
    assert got["ax"] == got["ay"] == 3


def test_long_outputs_count(ring: type[Ring]) -> None:
    """Two tenants send equally many requests: the one with long outputs gets fewer of them served."""
    it = ring(policy="fair", max_num_seqs=1)
    for i in range(12):
        it.submit(f"long {i}", 5 + i, tenant="long", max_tokens=30)
        it.submit(f"short {i}", 25 + i, tenant="short", max_tokens=2)
    it.finish()
    assert sum(name.startswith("long") for name in order(it)[:12]) <= 5


def test_long_prompts_count(ring: type[Ring]) -> None:
    """Cached prompt tokens do not count."""
    it = ring(policy="fair", max_num_seqs=1, max_model_len=200, max_num_batched_tokens=200)
    for i in range(12):
        it.submit(f"long {i}", 100 + i, tenant="long", max_tokens=2, salt=f"long {i}")
        it.submit(f"short {i}", 5 + i, tenant="short", max_tokens=2, salt=f"short {i}")
    it.finish()
    assert sum(name.startswith("long") for name in order(it)[:12]) <= 3
    again = ring(policy="fair", max_num_seqs=1, max_model_len=200, max_num_batched_tokens=200)
    for i in range(12):
        again.submit(f"long {i}", 100 + i, prompt=[7] * (100 + i), tenant="long", max_tokens=2)
        again.submit(f"short {i}", 5 + i, tenant="short", max_tokens=2, salt=f"short {i}")
    again.finish()
    assert sum(name.startswith("long") for name in order(again)[:12]) >= 5


def test_slots_are_shared_between_tenants(ring: type[Ring]) -> None:
    it = ring(policy="fair", max_num_seqs=4, max_num_batched_tokens=32)
    for i in range(8):
        it.submit(f"heavy {i}", 3 + i, tenant="heavy", max_tokens=40)
    it.steps(2)
    for i in range(8):
        it.submit(f"light {i}", 13 + i, tenant="light", max_tokens=40)
    it.steps(4)
    assert Counter(name.split()[0] for name in running_ids(it)) == {"heavy": 2, "light": 2}
    assert it.world.core.stats().preemptions_total == 2, "taken as often as it needs to be, and not to and fro"
    it.finish()


tickets = itertools.count(1)


def ask(tenant: str, user: str = "", arrival: int = 0) -> Sequence:
    ids = b"\0\0\0\0" * 100
    frame = Generate(
        "r", 0, "m", ids, b"", Sampling(9), TextOptions(), [messages.ChoiceState(0)], tenant=tenant, user=user
    )
    request = Request("r", 0, frame, 0, arrival, 100, owner=(tenant, user))
    choice = make_sequence(request, 0, b"")
    choice.ticket = next(tickets)
    return choice


def serve(policy: FairPolicy, choice: Sequence, num_outputs: int) -> None:
    choice.ticket = 0
    policy.remove(choice)
    policy.on_scheduled(choice, 100)
    assert choice.request.account is not None
    choice.request.account.charge(num_outputs)
    policy.on_freed(choice)


def test_an_idle_tenant_accumulates_no_credit() -> None:
    policy = FairPolicy()
    for _ in range(50):
        choice = ask("busy")
        policy.push(choice)
        serve(policy, choice, 1000)
    for i in range(20):
        policy.push(ask("busy", arrival=100 + i))
        policy.push(ask("was away", arrival=100 + i))
    got = []
    for _ in range(10):
        choice = policy.peek()
        assert choice is not None
        got.append(choice.request.frame.tenant)
        serve(policy, choice, 100)
    assert got.count("was away") == 5


def test_inactive_tenants_are_dropped() -> None:
    policy = FairPolicy()
    for i in range(20 * MIN_KEPT):
        choice = ask(f"key {i % 2}", f"user {i}")
        policy.push(choice)
        serve(policy, choice, 1)
    assert len(policy.tenants.shares) == 2
    assert max(len(tenant.users.shares) for tenant in policy.tenants.shares.values()) <= 2 * MIN_KEPT


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_no_tenant_starves(ring: type[Ring], policy: str) -> None:
    """Requests always arrive faster than they are served: each tenant's requests still run within a bound."""
    it = ring(policy=policy, max_num_seqs=4, num_blocks=120, max_queue_len=40, max_queue_tokens=10**6)
    waits: dict[str, int] = {}
    served: dict[str, int] = {}
    for step in range(300):
        for i in range(2):
            it.submit(f"heavy {step}.{i}", 6 + step % 5, tenant="heavy", user=f"{i}", max_tokens=6)
        if step % 15 == 0:
            it.submit(f"light {step}", 9, tenant="light", max_tokens=6)
        it.steps(1)
        for name, journal in it.gateway.journals.items():
            if journal.outputs[0].ids and name not in served:
                served[name] = step - int(name.split()[1].split(".")[0])
            elif journal.refused is None and name not in served:
                waits[name] = step - int(name.split()[1].split(".")[0])
    longest = {tenant: max(n for name, n in served.items() if name.startswith(tenant)) for tenant in ("heavy", "light")}
    assert max(waits[name] for name in waits if name not in served) <= 90, "those that were taken on do not wait long"
    assert longest["heavy"] <= 110, "of 300 steps 20 begin with the light one alone"
    assert sum(name.startswith("heavy") for name in served) > 100
    if policy == "fair":
        lights = [journal for name, journal in it.gateway.journals.items() if name.startswith("light")]
        assert all(journal.refused is None for journal in lights)
        assert longest["light"] <= 6
    it.finish()
