"""Which slots of a plan run in a step, and how many tokens of each."""

from array import array

from blockyard.services.gpu_worker.slots import Slots
from blockyard.shared.messages import Sampling, SlotRun, SlotStart


def start(slot: int, num_tokens: int, num_blocks: int, num_computed: int = 0) -> SlotStart:
    ids, blocks = array("I", range(num_tokens)).tobytes(), list(range(10 * slot, 10 * slot + num_blocks))
    return SlotStart(slot, ids, num_tokens, num_computed, blocks, Sampling(8), 0)


def granted(table: Slots, *runs: tuple[int, int]) -> list[tuple[int, int]]:
    rows = table.scheduled([SlotRun(slot, most) for slot, most in runs])
    assert (rows.counts[: rows.num_decodes] == 1).all() and (rows.counts[rows.num_decodes :] > 1).all()
    assert len(rows) == len(rows.counts) and rows.has_prefill == (len(rows.decodes) < len(rows))
    return list(zip(rows.slots.tolist(), rows.counts.tolist(), strict=True))


def table_of(*starts: SlotStart) -> Slots:
    table = Slots(num_slots=6, max_model_len=64, block_size=4, vocab_size=100, num_blocks=100)
    assert all([table.start(one) for one in starts])
    return table


def test_tokens_are_limited_by_the_plan_the_known_tokens_and_the_blocks() -> None:
    table = table_of(start(0, 9, 3), start(1, 9, 2), start(2, 9, 3, 8))
    assert granted(table, (0, 5), (1, 20), (2, 20)) == [(2, 1), (0, 5), (1, 8)]  # decodes first


def test_ended_and_unknown_slots_are_left_out() -> None:
    table = table_of(start(0, 9, 3), start(1, 9, 3), start(2, 9, 3))
    table.end(1)
    table.fail(2)
    assert granted(table, (5, 1), (1, 1), (-1, 1), (6, 1), (2, 1), (0, 1)) == [(0, 1)]
    assert granted(table, (6, 1)) == granted(table) == []
