"""What a client may send, by the queue capacities of the schedulers."""

import msgspec
from fake_ring import CARD, SCHEDULER, member

from blockyard.shared.messages import QueueCapacity, Role
from blockyard.shared.ring_client.schedulers import AWAY_S, UNHEARD, Schedulers


def known(*schedulers: int) -> Schedulers:
    out = Schedulers([])
    for incarnation in schedulers:
        out.changed(member(Role.SCHEDULER, incarnation, card=CARD))
    return out


def test_without_a_scheduler_there_is_no_room() -> None:
    assert not known().takes("tiny", 1, 1, 0.0)
    assert not known(SCHEDULER).takes("another model", 1, 1, 0.0)


def test_a_scheduler_that_said_nothing_takes_a_little() -> None:
    one = known(SCHEDULER)
    assert one.takes("tiny", UNHEARD.choices, UNHEARD.tokens, 0.0)
    assert not one.takes("tiny", UNHEARD.choices + 1, 1, 0.0)
    assert not one.takes("tiny", 2, UNHEARD.tokens + 1, 0.0)


def test_room_bounds_choices_and_tokens_and_a_large_request_may_go_alone() -> None:
    one = known(SCHEDULER)
    one.heard(SCHEDULER, QueueCapacity(3, 100), 0.0)
    assert one.takes("tiny", 3, 100, 0.0)
    assert not one.takes("tiny", 4, 4, 0.0)
    assert not one.takes("tiny", 2, 101, 0.0)
    assert one.takes("tiny", 1, 5000, 0.0, alone=True)
    assert one.takes("tiny", 128, 128, 0.0, alone=True)


def test_old_news_are_worth_one_try() -> None:
    one = known(SCHEDULER)
    one.heard(SCHEDULER, QueueCapacity(0, 0, retry_after_s=2.0), 10.0)
    assert not one.takes("tiny", 1, 1, 11.9, alone=True)
    assert one.takes("tiny", 1, 1, 12.0, alone=True)
    assert not one.takes("tiny", 2, 2, 12.0)


def test_any_scheduler_with_room_will_do() -> None:
    two = known(2, 22)
    two.heard(2, QueueCapacity(0, 0), 0.0)
    two.heard(22, QueueCapacity(9, 900), 0.0)
    assert two.takes("tiny", 9, 900, 0.0)
    two.gone(member(Role.SCHEDULER, 22), 0.0)
    assert not two.takes("tiny", 1, 1, 0.0)


def test_a_model_is_served_for_a_while_after_its_last_scheduler_was_lost() -> None:
    two = known(2, 22)
    two.gone(member(Role.SCHEDULER, 2), 10.0)
    two.gone(member(Role.SCHEDULER, 22), 20.0)
    two.tick(20.0 + AWAY_S - 0.1)
    assert two.card("tiny-alias") is CARD and two.of("tiny") == []
    two.tick(20.0 + AWAY_S)
    assert two.cards() == []
    two.changed(member(Role.SCHEDULER, 23, card=CARD))
    two.gone(member(Role.SCHEDULER, 23), 40.0)
    changed = msgspec.structs.replace(CARD, max_model_len=512)
    two.changed(member(Role.SCHEDULER, 24, card=changed))
    assert two.cards() == [changed]
