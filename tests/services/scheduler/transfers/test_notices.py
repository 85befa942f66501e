"""What workers say of transfers, and what that changes for the pairs of workers that are avoided."""

from blockyard.shared.messages import KVLanded, KVReceive, OutOfStep

from .pair import Pair


def failed_pair() -> tuple[Pair, tuple[int, int]]:
    """The only transfer between two workers has failed, and the pair is avoided."""
    it = Pair()
    it.submit("fails", 22)
    it.prefill()
    source = it.world.transfers[it.source.incarnation]
    source.end_send(next(iter(source.outgoing)), False)
    it.finish()
    pair = it.source.incarnation, it.target.incarnation
    assert pair in it.world.core.link_backoff.avoided
    return it, pair


def test_a_worker_that_attaches_again_is_not_avoided() -> None:
    """Its links are new ones."""
    it, pair = failed_pair()
    it.world.tell(it.target.incarnation, OutOfStep(1))
    links = it.world.core.link_backoff
    assert pair not in links.avoided and pair not in links.failing
    it.finish()
    it.submit("b", 17, prompt=[2, *range(16)])
    it.finish()
    assert len(it.frames(KVReceive, it.target)) == 2


def test_blocks_of_a_part_do_not_show_that_a_failing_link_works() -> None:
    it, pair = failed_pair()
    links = it.world.core.link_backoff
    it.world.now += 1.0
    it.submit("b", 22, prompt=[2, *range(21)])
    it.prefill()
    it.work(it.target)
    it.world.move(it.source.incarnation, 1)
    target = it.target.incarnation
    ((number, received),) = it.world.transfers[target].incoming.items()
    if not received.num_told:
        received.num_told = 1
        it.world.tell(target, KVLanded(number, received.landed[:1]))
    it.notify()
    assert len(received.landed) == 1 and pair in links.failing
    it.finish()
    assert not links.failing
