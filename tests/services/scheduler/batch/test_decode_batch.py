"""The decode batch: which sequences are in it, the frames that it makes, and how sequences leave it."""

import itertools

import msgspec
import pytest

from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.shared.messages import NO_LOGPROBS, NO_TOKEN, Cancel, Frame, StepPlan, StepResult, TokenBatch

from ..conftest import Ring
from ..harness.fakes import ids_list


def group_of(it: Ring) -> WorkerGroup:
    (group,) = it.world.core.groups.values()
    return group


def last(it: Ring, kind: type[Frame]) -> Frame:
    return [o.frame for o in it.world.sent if isinstance(o.frame, kind)][-1]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_decoding_sequences_join_the_batch_and_send_rows(ring: type[Ring], depth: int) -> None:
    it = ring(depth=depth, num_blocks=200, max_num_seqs=8)
    for i in range(6):
        it.submit(str(i), 5 + i, max_tokens=40)
    it.steps(15)
    assert len(group_of(it).decode_batch) == 6
    batch = last(it, TokenBatch)
    assert isinstance(batch, TokenBatch)
    assert [len(ids_list(rows.token_ids)) for rows in batch.rows] == [6]
    assert not batch.steps
    assert it.detokenizer.num_rows > 6
    it.finish()


def test_a_sequence_is_not_handled_between_two_blocks(ring: type[Ring]) -> None:
    it = ring(num_blocks=200, block_size=5)
    it.submit("a", 4, max_tokens=40)
    it.steps(6)
    (running,) = group_of(it).running
    num_handled = 0
    for _ in range(20):
        it.steps(1)
        num_handled += group_of(it).decode_batch.num_due
    assert num_handled in {4, 5}
    assert running.num_scheduled_tokens > 20
    it.finish()


def test_other_sequences_stay_in_the_batch_when_one_leaves(ring: type[Ring]) -> None:
    it = ring(num_blocks=200, max_num_seqs=8)
    for i in range(4):
        it.submit(str(i), 5, max_tokens=24 + 6 * i)
    it.steps(10)
    assert len(group_of(it).decode_batch) == 4
    it.journal("2").cancelled = True
    it.world.tell(it.gateway.incarnation, Cancel("2", 0))
    assert len(group_of(it).decode_batch) == 3
    it.steps(16)
    assert 0 < len(group_of(it).decode_batch) < 3
    it.finish()


@pytest.mark.parametrize("together", [2, 3])
def test_results_of_one_step_reach_the_detokenizer_in_order(ring: type[Ring], together: int) -> None:
    """The first token of a sequence is a step, later ones are rows, and a batch has its rows first."""
    it = ring(depth=3, num_blocks=200, max_num_seqs=8)
    for i in range(4):
        it.submit(str(i), 5, max_tokens=30)
    it.steps(12)
    for i in range(4):  # these join while others decode, and end while results are in flight
        it.submit(f"late {i}", 5, max_tokens=6 + i)
    while it.worker.busy():
        for _ in range(2 * together):
            it.world.work(it.worker, turn=False)
        it.world.turn()
    batches = [o.frame for o in it.world.sent if isinstance(o.frame, TokenBatch)]
    assert any(later.rows and earlier.steps for earlier, later in itertools.pairwise(batches))
    it.finish()


def test_sequences_with_log_probabilities_are_in_the_batch(ring: type[Ring]) -> None:
    """The invariants check at the end that each token has its own."""
    it = ring(num_blocks=200, max_num_seqs=8)
    it.submit("a", 5, max_tokens=20, num_logprobs=2)
    it.submit("b", 5, max_tokens=20)
    it.steps(10)
    assert not group_of(it).decode_batch.outside
    rows = [rows for o in it.world.sent if isinstance(o.frame, TokenBatch) for rows in o.frame.rows]
    assert any(NO_LOGPROBS in one.logprobs and {*map(len, map(bytes, one.logprobs))} != {1} for one in rows)
    it.finish()


def test_the_oldest_run_if_a_step_has_too_few_tokens(ring: type[Ring]) -> None:
    """A sequence starts only if a step has room for it; plans also keep to a limit that falls later."""
    it = ring(depth=0, num_blocks=200, max_num_seqs=8)
    for i in range(5):
        it.submit(str(i), 2, max_tokens=15)
    it.steps(6)
    group = group_of(it)
    assert len(group.decode_batch) == 5
    group.max_num_batched_tokens = 3
    it.steps(1)
    plan = last(it, StepPlan)
    assert isinstance(plan, StepPlan)
    assert [run.slot for run in plan.runs] == [running.slot for running in group.running[:3]]
    assert not len(group.decode_batch)
    it.finish()


@pytest.mark.parametrize("kept", [0, 4, 8])
def test_a_result_with_another_number_of_tokens_means_attach_again(ring: type[Ring], kept: int) -> None:
    it = ring(depth=0, num_blocks=200, max_num_seqs=8)
    for i in range(3):
        it.submit(str(i), 5, max_tokens=20)
    it.steps(8)
    assert len(group_of(it).decode_batch) == 3
    plan = last(it, StepPlan)
    assert isinstance(plan, StepPlan)
    answer = StepResult(plan.number, [], 0.0, token_ids=bytes(kept))
    before = it.world.core.groups[it.worker.incarnation]
    it.worker.in_flight.clear()
    it.world.tell(it.worker.incarnation, answer)
    asked = it.worker.incarnation not in it.world.core.groups
    assert asked == (kept != 0), "no tokens at all: all were silent"
    assert before.running or asked


def test_no_token_is_an_id_outside_any_vocabulary() -> None:
    assert ids_list(NO_TOKEN.to_bytes(4, "little")) == [NO_TOKEN]


def test_rows_of_different_lengths_do_not_decode() -> None:
    frame = msgspec.msgpack.encode(["TokenBatch", [], [], [], 0.0, [[b"1234", b"1234", b""]]])
    with pytest.raises(msgspec.ValidationError, match="bytes of uint32"):
        msgspec.msgpack.decode(frame, type=TokenBatch)
