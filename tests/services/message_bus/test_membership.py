"""The membership: which members are alive, from heartbeats and reports."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from blockyard.services.message_bus.service import Membership
from blockyard.shared.messages import Announce, Leave, LinkLost, Member, Role, Stats


def member(name: str, incarnation: int, **fields: object) -> Member:
    return Member(name, Role.DETOKENIZER, incarnation, f"ipc:///{incarnation}", **fields)  # type: ignore[arg-type]


def membership() -> Membership:
    return Membership(0.0, dead_after_s=4.0, settle_s=4.0)


def test_a_new_member_is_pushed_at_once_and_a_repeated_heartbeat_is_not() -> None:
    r = membership()
    r.apply(Announce(member("a", 1)), 0.1)
    assert r.due(0.1)
    r.apply(Announce(member("a", 1)), 0.6)
    assert not r.due(0.6)


def test_counters_wait_half_a_second_and_a_change_of_phase_does_not() -> None:
    r = membership()
    r.apply(Announce(member("a", 1)), 0.1)
    r.due(0.1)
    busy = member("a", 1, stats=Stats(running=3))
    r.apply(Announce(busy), 0.2)
    assert not r.due(0.3)
    assert r.due(0.7)
    r.apply(Announce(msgspec.structs.replace(busy, ready=True)), 0.8)
    assert r.due(0.8)


def test_the_list_is_repeated_every_second_though_nothing_has_changed() -> None:
    """A member that hears none dials anew."""
    r = membership()
    r.apply(Announce(member("a", 1)), 0.1)
    assert [now for now in (0.1, 0.5, 1.0, 1.1, 1.5, 2.1, 3.0, 3.1) if r.due(now)] == [0.1, 1.1, 2.1, 3.1]


def test_silence_is_death_after_four_seconds() -> None:
    r = membership()
    r.apply(Announce(member("a", 1)), 0.0)
    r.due(0.0)
    r.due(3.9)
    assert r.members()
    assert r.due(4.1)
    assert not r.members()


def test_a_successor_of_the_same_name_replaces_its_predecessor_at_once() -> None:
    r = membership()
    r.apply(Announce(member("a", 1)), 0.0)
    r.apply(Announce(member("a", 2)), 0.1)
    assert [m.incarnation for m in r.members()] == [2]


def test_a_member_reported_lost_returns_with_its_next_heartbeat() -> None:
    r = membership()
    r.apply(Announce(member("a", 1)), 0.0)
    r.apply(LinkLost(1), 0.1)
    assert not r.members()
    r.apply(Announce(member("a", 1)), 0.5)
    assert [m.incarnation for m in r.members()] == [1]


def test_it_is_settled_after_its_time_and_says_so_once() -> None:
    r = membership()
    assert not r.settled(3.9)
    r.due(3.9)
    assert r.settled(4.0)
    assert r.due(4.0)
    assert not r.due(4.1)


frames = st.one_of(
    st.builds(lambda n, i: Announce(member(f"m{n}", 10 * n + i)), st.integers(0, 3), st.integers(1, 3)),
    st.builds(lambda n, i: Leave(10 * n + i), st.integers(0, 3), st.integers(1, 3)),
    st.builds(lambda n, i: LinkLost(10 * n + i), st.integers(0, 3), st.integers(1, 3)),
)


@given(st.lists(st.tuples(frames, st.floats(0, 3))))
def test_names_are_unique_and_the_last_push_is_the_list(steps: list[tuple[Announce | Leave | LinkLost, float]]) -> None:
    r, now, pushed = membership(), 0.0, []
    for frame, wait in steps:
        now += wait
        r.apply(frame, now)
        if r.due(now):
            pushed = r.members()
        assert len({m.name for m in r.members()}) == len(r.members())
        assert pushed == r.members()
