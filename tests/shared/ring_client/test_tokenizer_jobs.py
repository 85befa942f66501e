"""Jobs for any member: assignment, waiting, and the loss of a member."""

from hypothesis import given
from hypothesis import strategies as st

from blockyard.shared.ring_client.tokenizer_jobs import MAX_LOST, MAX_WAITING, JobKind, JobPool

KIND, CHECK = JobKind("m"), JobKind("m", is_check=True)


def test_the_least_loaded_gets_a_job_and_further_jobs_wait() -> None:
    pool: JobPool[str] = JobPool()
    assert pool.submit("a", KIND, "A") == [] and pool.num_waiting == 1
    assert pool.join(1, "") == [(1, "A")]
    assert pool.join(2, "m") == []
    assert pool.submit("b", KIND, "B") == [(2, "B")]
    assert [pool.submit(j, KIND, j.upper())[0][0] for j in "cd"] == [1, 2]
    assert pool.submit("e", KIND, "E") == [] and pool.submit("f", KIND, "F") == []
    assert pool.answered(2, "b") == [(2, "E")]
    assert pool.answered(1, "a") == [(1, "F")]
    assert pool.num_waiting == 0


def test_how_many_jobs_a_member_may_have() -> None:
    pool: JobPool[str] = JobPool(max_waiting=4)
    pool.join(1, "")
    assert [len(pool.submit(job, KIND, job)) for job in "abcde"] == [1, 1, 1, 1, 0]
    assert pool.answered(1, "c") == [(1, "e")]


def test_a_death_brings_its_jobs_back_first_and_in_order() -> None:
    pool: JobPool[str] = JobPool()
    pool.join(1, "")
    for job in "abcd":
        pool.submit(job, KIND, job)
    assert pool.gone(1) == ([], [])
    assert pool.join(2, "") == [(2, "a"), (2, "b")]
    assert pool.answered(2, "a") == [(2, "c")]


def test_a_job_that_several_members_were_lost_with_is_not_given_to_another_one() -> None:
    pool: JobPool[str] = JobPool()
    for member in range(MAX_LOST + 1):
        pool.join(member, "")
    assert pool.submit("a", KIND, "A") == [(0, "A")]
    for member in range(MAX_LOST - 1):
        assert pool.gone(member) == ([(member + 1, "A")], [])
    assert pool.submit("b", KIND, "B") == [(MAX_LOST, "B")]
    assert pool.gone(MAX_LOST - 1) == ([], ["a"])
    assert pool.num_waiting == 0
    for _ in range(2):
        for member in range(MAX_LOST + 1, 2 * MAX_LOST):
            pool.gone(member - 1)
            assert pool.join(member, "") == [(member, "B")]
        pool.answered(2 * MAX_LOST - 1, "b")  # resets the count of lost members
        pool.gone(2 * MAX_LOST - 1)
        pool.join(MAX_LOST, "")
        pool.submit("b", KIND, "B")


def test_a_job_that_waits_when_a_member_is_lost_has_lost_none() -> None:
    pool: JobPool[str] = JobPool()
    for member in range(1, MAX_LOST + 2):
        pool.join(member, "")
        for job in "abc":
            if member == 1:
                pool.submit(job, KIND, job)
        _, given_up = pool.gone(member)
        assert given_up == ([] if member != MAX_LOST else ["a", "b"])


def test_models_do_not_wait_for_each_other() -> None:
    pool: JobPool[str] = JobPool()
    pool.join(1, "m")
    for job in "abc":
        pool.submit(job, KIND, job)
    assert pool.submit("x", JobKind("other"), "x") == [] and pool.join(2, "other") == [(2, "x")]
    assert pool.serves("m") and not pool.serves("third")


def test_prompts_and_checks_of_grammars_do_not_wait_for_each_other() -> None:
    pool: JobPool[str] = JobPool()
    pool.join(1, "")
    checks = [f"c{i}" for i in range(5)]
    assert [pool.submit(job, CHECK, job) for job in checks] == [[(1, "c0")], [(1, "c1")], [], [], []]
    assert [pool.submit(job, KIND, job) for job in "abc"] == [[(1, "a")], [(1, "b")], []]
    assert pool.waits("c2") and pool.waits("c") and not pool.waits("c0") and pool.num_waiting == 4
    assert pool.answered(1, "a") == [(1, "c")]
    assert pool.answered(1, "c0") == [(1, "c2")]
    pool.forget("c1")  # it stays at the member until it is answered
    pool.forget("c3")
    assert pool.gone(1) == ([], []) and pool.num_waiting == 4
    assert sorted(pool.join(2, "")) == [(2, "b"), (2, "c"), (2, "c2"), (2, "c4")]


def test_tenants_and_long_jobs_have_their_own_places_at_a_member() -> None:
    pool: JobPool[str] = JobPool()
    pool.join(1, "")
    for i in range(5):
        pool.submit(f"a{i}", JobKind("m", "a"), f"a{i}")
    assert pool.submit("b", JobKind("m", "b"), "b") == [(1, "b")]
    assert pool.submit("quick", JobKind("m", "a", is_quick=True), "quick") == [(1, "quick")]
    assert pool.num_waiting == 3 and pool.answered(1, "a0") == [(1, "a2")]


def test_what_nobody_waits_for_is_not_sent_again() -> None:
    pool: JobPool[str] = JobPool()
    pool.join(1, "")
    for job in "abc":
        pool.submit(job, KIND, job)
    pool.forget("a")
    pool.forget("c")
    assert pool.num_waiting == 0
    pool.gone(1)
    assert pool.join(2, "") == [(2, "b")]


@given(
    st.lists(st.tuples(st.sampled_from(["submit", "answer", "gone", "join", "forget"]), st.integers(0, 7)), max_size=80)
)
def test_every_job_is_answered_once_and_nobody_is_swamped(actions: list[tuple[str, int]]) -> None:
    pool: JobPool[str] = JobPool()
    at: dict[int, list[str]] = {}
    submitted: set[str] = set()
    answered: list[str] = []
    forgotten: set[str] = set()
    failed: set[str] = set()

    def sent(out: list[tuple[int, str]]) -> None:
        for member, job in out:
            at[member].append(job)
            checks = [int(one) % 3 == 0 for one in at[member]]
            assert checks.count(True) <= MAX_WAITING and checks.count(False) <= MAX_WAITING

    def answer(member: int) -> None:
        job = at[member].pop(0)
        answered.append(job)
        sent(pool.answered(member, job))

    for i, (what, which) in enumerate(actions):
        if what == "submit":
            submitted.add(f"{i}")
            sent(pool.submit(f"{i}", CHECK if i % 3 == 0 else KIND, f"{i}"))
        elif what == "join" and which not in at:
            at[which] = []
            sent(pool.join(which, ""))
        elif what == "gone" and which in at:
            del at[which]
            out, given_up = pool.gone(which)
            sent(out)
            failed.update(given_up)
        elif what == "forget" and submitted - set(answered):
            job = sorted(submitted - set(answered))[which % len(submitted - set(answered))]
            forgotten.add(job)
            pool.forget(job)
        elif what == "answer" and at.get(which):
            answer(which)
    at.setdefault(99, [])
    sent(pool.join(99, ""))
    while any(at.values()):
        answer(next(m for m, jobs in at.items() if jobs))
    assert len(answered) == len(set(answered)) and submitted - forgotten - failed <= set(answered)
    assert not failed & set(answered)
    assert pool.num_waiting == 0
