"""Blocks that do not hold what their hashes say, and all that was made of them."""

from blockyard.services.scheduler.batch.plan_record import PlanRecord
from blockyard.services.scheduler.sequences.requests import NEVER, RunningSequence
from blockyard.services.scheduler.workers.worker_groups import WorkerGroup


def invalidate_failed(group: WorkerGroup, failed: RunningSequence) -> list[RunningSequence]:
    """A seat failed, and its worker has scrubbed its blocks: nobody finds what it wrote, or what was made of it.

    Returns the seats that read it, as far as results of theirs are still to come.
    """
    readers = _dependents(group, set(failed.blocks[failed.num_cached_blocks :]), [])
    group.blocks.invalidate(failed.blocks)
    failed.num_hashed, failed.next_hash_at = 0, NEVER
    return [running for running in readers if running is not failed]


def invalidate_unfetched(group: WorkerGroup, record: PlanRecord, blocks: list[int]) -> list[RunningSequence]:
    """As `spoilt`, of blocks that were to be fetched by a plan whose result is in. They will be computed."""
    index = group.blocks.index
    hashes = [block_hash for block in blocks if (block_hash := index.hash_of(block)) is not None]
    readers = _dependents(group, set(blocks), record.all_sequences())
    group.blocks.invalidate(blocks)
    group.blocks.host.remove(hashes)
    return readers


def _dependents(group: WorkerGroup, bad: set[int], more: list[RunningSequence]) -> list[RunningSequence]:
    """Seats that read these blocks, or what was made of them; nobody finds what they wrote."""
    near = {id(running): running for record in group.in_flight for running in record.all_sequences()}
    near |= {id(running): running for running in [*group.running, *more]}
    readers: list[RunningSequence] = []
    while found := [s for s in near.values() if not bad.isdisjoint([s.copied_from, *s.blocks[: s.num_cached_blocks]])]:
        for running in found:
            del near[id(running)]
            bad.update(running.blocks[running.num_cached_blocks :])
            group.blocks.invalidate(running.blocks[running.num_cached_blocks :])
            running.num_hashed, running.next_hash_at = 0, NEVER
        readers += found
    return readers
