"""One member's view of the others."""

from blockyard.shared.bus.member_list import Changed, Gone, Joined, MemberList
from blockyard.shared.messages import Member, Members, Role

A = Member("a", Role.SCHEDULER, 1, "ipc:///a")
B = Member("b", Role.DETOKENIZER, 2, "ipc:///b", ready=True)
ME = Member("me", Role.API_GATEWAY, 9, "ipc:///me")


def news(*members: Member, settled: bool = True) -> Members:
    return Members(settled, list(members))


def test_own_entry_is_not_a_member() -> None:
    seen = MemberList(9)
    assert seen.push(news(A, ME), 0.0) == [Joined(A)]
    assert seen.members == {1: A}


def test_a_change_is_told_once() -> None:
    seen = MemberList(9)
    seen.push(news(A), 0.0)
    ready = Member("a", Role.SCHEDULER, 1, "ipc:///a", ready=True)
    assert seen.push(news(ready), 0.0) == [Changed(ready)]
    assert seen.push(news(ready), 0.0) == []


def test_only_a_settled_list_reports_missing_members() -> None:
    seen = MemberList(9)
    seen.push(news(A, B), 0.0)
    assert seen.push(news(A, settled=False), 1.0) == []
    assert seen.push(news(A), 1.0) == [Gone(B)]


def test_a_broken_link_outweighs_the_list_until_the_registry_has_dropped_the_member() -> None:
    seen = MemberList(9)
    seen.push(news(A, B), 0.0)
    assert [type(e) for e in seen.link_broke(2, 1.0)] == [Gone]
    assert seen.push(news(A, B), 1.1) == []
    assert seen.push(news(A), 1.2) == []
    assert seen.push(news(A, B), 1.3) == [Joined(B)]  # it announced itself again


def test_distrust_ends_if_the_registry_never_agrees() -> None:
    seen = MemberList(9)
    seen.push(news(B), 0.0)
    seen.link_broke(2, 1.0)
    assert seen.push(news(B), 1.9) == []
    assert seen.push(news(B), 2.1) == [Joined(B)]


def test_a_link_that_returns_joins_its_member_again() -> None:
    seen = MemberList(9)
    seen.push(news(B), 0.0)
    seen.link_broke(2, 1.0)
    assert seen.link_returned(B) == [Joined(B)]
    assert seen.push(news(B), 1.1) == []
