"""Pairs of workers whose transfers fail are avoided for a growing time; blocks that fail twice are dropped."""

from blockyard.services.scheduler.transfers.failures import FIRST_S, MAX_BLOCKS, MOST_S, FailedBlocks, LinkBackoff

PAIR, OTHER = (1, 2), (1, 3)


def avoids(links: LinkBackoff, now: float, pair: tuple[int, int] = PAIR) -> bool:
    links.update(now)
    return pair in links.avoided


def test_the_time_doubles_with_each_failure_up_to_a_minute() -> None:
    links, now, delay_s = LinkBackoff(), 100.0, FIRST_S
    for number in range(1, 10):
        links.on_failed(PAIR, number, number, now)
        assert avoids(links, now + delay_s - 0.01)
        assert not avoids(links, now + delay_s)
        assert not avoids(links, now, OTHER)
        now, delay_s = now + delay_s, min(2 * delay_s, MOST_S)
    assert delay_s == MOST_S


def test_transfers_that_fail_together_count_once() -> None:
    links = LinkBackoff()
    for number in (5, 6, 4, 6):
        links.on_failed(PAIR, number, 6, 0.0)
    assert not avoids(links, FIRST_S)


def test_after_the_delay_one_transfer_is_tried() -> None:
    links = LinkBackoff()
    links.on_failed(PAIR, 1, 1, 0.0)
    assert not avoids(links, FIRST_S)
    links.on_chosen(PAIR, FIRST_S)
    assert PAIR in links.avoided
    links.on_landed(PAIR, FIRST_S + 0.1)
    assert not links.avoided
    assert not links.failing


def test_a_try_without_an_outcome_is_repeated() -> None:
    links = LinkBackoff()
    links.on_failed(PAIR, 1, 1, 0.0)
    links.on_chosen(PAIR, 5.0)
    assert avoids(links, 5.5)
    assert not avoids(links, 6.0)


def test_a_worker_that_begins_anew_is_not_avoided() -> None:
    links = LinkBackoff()
    links.on_failed(PAIR, 1, 1, 0.0)
    links.on_failed(OTHER, 1, 1, 0.0)
    links.on_detached(3, 0.1)
    assert (PAIR in links.avoided, OTHER in links.avoided) == (True, False)


def test_without_failures_nothing_is_kept() -> None:
    links = LinkBackoff()
    links.on_chosen(PAIR, 0.0)
    links.on_landed(PAIR, 0.0)
    assert not links.failing


def test_a_block_is_dropped_when_it_fails_for_the_second_time() -> None:
    failed = FailedBlocks()
    assert [failed.on_failed(1, b"a") for _ in range(4)] == [False, True, False, True]
    assert not failed.on_failed(2, b"b")
    assert not failed.on_failed(1, b"b"), "of another worker"
    for i in range(MAX_BLOCKS):
        assert not failed.on_failed(1, b"%d" % i)
    assert not failed.on_failed(2, b"b"), "long ago"
