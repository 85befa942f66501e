"""Replicas on several hosts agree on each step through replica 0, whoever has rows first."""

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from blockyard.services.gpu_worker.parallel.replicas import StepOffer
from blockyard.services.gpu_worker.ranks.distant_replicas import (
    FirstOffers,
    Offers,
    OtherOffers,
    StepAgreed,
    StepCall,
)
from blockyard.shared.errors import RankLostError
from blockyard.shared.process.frame_pipe import FramePipe

SIZE = 3


class Pipes:
    """Three replicas, with pipes in the place of links between hosts."""

    def __init__(self) -> None:
        pairs = {replica: socket.socketpair() for replica in range(1, SIZE)}
        self.ends = {replica: FramePipe[StepOffer](pair[0], StepOffer) for replica, pair in pairs.items()}
        self.others = [FramePipe[StepCall | StepAgreed](pair[1], StepCall | StepAgreed) for pair in pairs.values()]
        self.offers: list[Offers] = [FirstOffers(self.ends), *map(OtherOffers, self.others)]

    def close(self) -> None:
        for one in (*self.ends.values(), *self.others):
            one.close()


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    with contextlib.closing(Pipes()) as made:
        yield made


def serve(own: Offers, replica: int, step: int) -> list[StepOffer]:
    """Offers nothing once another has rows."""
    deadline = time.monotonic() + 10
    while not own.is_called:
        assert time.monotonic() < deadline
    return own.agree(StepOffer(100 * step, replica == 1))


def test_all_see_the_same_offers_of_each_step(pipes: Pipes) -> None:
    """One replica begins, the others are called; or all begin."""
    offers = pipes.offers

    def run(replica: int) -> list[list[StepOffer]]:
        found = []
        for step in range(20):
            begins = step % (SIZE + 1) in (replica, SIZE)
            offer = StepOffer(10 * step + replica, False)
            found.append(offers[replica].agree(offer) if begins else serve(offers[replica], replica, step))
        return found

    with ThreadPoolExecutor(SIZE) as pool:
        first, *others = pool.map(run, range(SIZE))
    assert others == [first] * (SIZE - 1)
    assert first[5] == [StepOffer(500, False), StepOffer(51, False), StepOffer(500, False)]
    assert first[7] == [StepOffer(70 + replica, False) for replica in range(SIZE)]
    assert not any(one.is_called for one in offers)


def test_one_that_is_gone_is_noticed(pipes: Pipes) -> None:
    pipes.others[1].close()
    with pytest.raises(RankLostError, match="replica 2 takes no offers"):
        pipes.offers[0].agree(StepOffer(1, False))
    assert pipes.offers[1].is_called
    pipes.ends[1].close()
    with pytest.raises(RankLostError, match="replica 0 takes no offers"):
        pipes.offers[1].agree(StepOffer(1, False))
