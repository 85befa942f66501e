"""The order of jobs: nobody starves, and each tenant's jobs of a kind stay in order."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from blockyard.services.tokenizer_pool.workers.job_turns import QUICK_TURNS, JobTurns

Job = tuple[str, bool, int]  # tenant, quick, number
KEYS = "abcd"
PUSH = st.tuples(st.just("push"), st.sampled_from(KEYS), st.booleans())
TAKE = st.tuples(st.sampled_from(["take", "take quick", "put back"]), st.just(""), st.just(False))


def test_tenants_take_turns() -> None:
    turns: JobTurns[str] = JobTurns()
    for name in ("a1", "a2", "a3", "b1", "c1", "c2"):
        turns.push(name[0], name, quick=False)
    assert [turns.take(may_be_long=True) for _ in range(7)] == ["a1", "b1", "c1", "a2", "c2", "a3", None]


def test_quick_jobs_go_first_and_some_long_ones_between_them() -> None:
    turns: JobTurns[str] = JobTurns()
    for i in range(3):
        turns.push("a", f"long {i}", quick=False)
    for i in range(2 * QUICK_TURNS):
        turns.push("a", f"quick {i}", quick=True)
    taken = [turns.take(may_be_long=True) for _ in range(len(turns))]
    assert [i for i, name in enumerate(taken) if name and "long" in name] == [QUICK_TURNS, 2 * QUICK_TURNS + 1, 18]
    turns.push("a", "long", quick=False)
    assert turns.take(may_be_long=False) is None and turns.take(may_be_long=True) == "long"


@given(st.lists(PUSH | TAKE, max_size=200))
def test_nobody_starves_and_jobs_of_a_tenant_stay_in_order(actions: list[tuple[str, str, bool]]) -> None:
    turns: JobTurns[Job] = JobTurns()
    waiting: dict[tuple[str, bool], list[int]] = defaultdict(list)  # what should be inside
    passed: dict[tuple[str, bool], dict[str, int]] = defaultdict(lambda: defaultdict(int))  # since its last turn
    quick_in_a_row = 0
    last: Job | None = None

    def take(may_be_long: bool) -> Job | None:
        nonlocal quick_in_a_row
        job = turns.take(may_be_long)
        has_long = may_be_long and any(jobs for (_, quick), jobs in waiting.items() if not quick)
        if job is None:
            assert not has_long and not any(jobs for (_, quick), jobs in waiting.items() if quick)
            return None
        tenant, quick, number = job
        assert quick or may_be_long
        assert waiting[tenant, quick].pop(0) == number
        quick_in_a_row = quick_in_a_row + 1 if quick and has_long else 0
        assert quick_in_a_row <= QUICK_TURNS
        passed.pop((tenant, quick), None)
        for (other, kind), jobs in waiting.items():
            if kind == quick and other != tenant and jobs:
                passed[other, kind][tenant] += 1
                assert passed[other, kind][tenant] <= 2  # twice if it took its turn, was put back and took it again
        return job

    for number, (what, tenant, quick) in enumerate(actions):
        if what == "push":
            turns.push(tenant, (tenant, quick, number), quick)
            waiting[tenant, quick].append(number)
        elif what == "put back" and last is not None:
            turns.put_back(last[0], last, last[1])
            waiting[last[0], last[1]].insert(0, last[2])
            passed.clear()
            last = None
        elif what != "put back":
            last = take(may_be_long=what == "take")
        assert len(turns) == sum(map(len, waiting.values()))
    while take(may_be_long=True) is not None:
        pass
    assert not any(waiting.values())
