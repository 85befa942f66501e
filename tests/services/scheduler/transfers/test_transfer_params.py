"""A prompt and its continuation as two requests, as a proxy for vLLM's prefill and decode servers sends them."""

from typing import Any

import msgspec
import pytest

from blockyard.services.scheduler.sequences.transfer_params import TransferParams
from blockyard.shared.messages import FinishReason, KVRole, TokenBatch

from .pair import Pair

P, D, BOTH = KVRole.PREFILL, KVRole.DECODE, KVRole.BOTH
PREFILL_ONLY = b'{"do_remote_decode": true, "do_remote_prefill": false, "remote_host": null}'


def returned(it: Pair, request_id: str) -> list[bytes]:
    """The parameters with each final step of a request."""
    batches = [o.frame for o in it.world.sent if isinstance(o.frame, TokenBatch)]
    steps = [step for batch in batches for step in batch.steps if step.request_id == request_id]
    return [step.kv_transfer_params for step in steps if step.finish is not None]


def prefill(it: Pair, num_prompt: int = 22) -> bytes:
    """The answer to the first of two requests."""
    it.submit("first", num_prompt, max_tokens=1, kv_transfer_params=PREFILL_ONLY)
    it.finish()
    (data,) = returned(it, "first")
    return data


def test_the_second_request_is_handed_over_from_the_group_that_has_the_prompt() -> None:
    it = Pair(P, D, P)
    answered = msgspec.json.decode(data := prefill(it))
    (source,) = [worker for worker in it.workers if it.starts(worker)]
    assert source is not it.target and not it.sends(source), "the prompt stays where it was computed"
    assert answered == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": f"{source.incarnation:016x}",
        "remote_request_id": "first",
    }
    it.submit("second", 22, kv_transfer_params=data)
    it.finish()
    again = [start for start in it.starts(source) if start.num_prompt_tokens == 22][1:]
    assert [start.num_computed for start in again] == [20]
    assert [start.num_computed for start in it.starts(it.target)] == [20]
    assert it.output("second").finish is FinishReason.LENGTH and returned(it, "second") == [b""]
    assert it.world.core.stats().transfers_landed_total == 1


@pytest.mark.parametrize("is_named", [True, False])
def test_the_named_group_computes_what_the_router_would_spread_over_two(is_named: bool) -> None:
    it = Pair(P, D, P, max_num_batched_tokens=256)
    data = prefill(it)
    (source,) = [worker for worker in it.workers if it.starts(worker)]
    (other,) = [worker for worker in it.workers if worker not in (source, it.target)]
    for i in range(3):
        it.submit(f"{i}", 23 + i, kv_transfer_params=data if is_named else b"")
    it.finish()
    assert (len(it.starts(other)) == 0) == is_named
    assert it.world.core.stats().transfers_landed_total == 3


def test_a_short_prompt_is_computed_in_a_prefill_group_where_a_client_says_so() -> None:
    it = Pair(decode_prefill_tokens=16)
    it.submit("usual", 5)
    it.submit("asked", 5, max_tokens=1, kv_transfer_params=PREFILL_ONLY)
    it.finish()
    assert (len(it.starts(it.source)), len(it.starts(it.target))) == (1, 1)
    assert returned(it, "usual") == [b""] and b"remote_engine_id" in returned(it, "asked")[0]


@pytest.mark.parametrize("engine", ["00000000000000ff", "an engine of vLLM", None])
def test_a_group_that_is_not_there_any_more_costs_a_prefill(engine: str | None) -> None:
    it = Pair()
    params = {"do_remote_prefill": True, "remote_engine_id": engine, "remote_block_ids": [1, 2], "remote_port": 5}
    it.submit("a", 22, kv_transfer_params=msgspec.json.encode(params))
    it.finish()
    assert len(it.output("a").ids) == 6


def test_the_group_that_has_the_prompt_is_lost_between_both_requests() -> None:
    it = Pair(P, D, P)
    data = prefill(it)
    (source,) = [worker for worker in it.workers if it.starts(worker)]
    it.world.kill(source.incarnation)
    it.submit("second", 22, kv_transfer_params=data)
    it.finish()
    assert len(it.output("second").ids) == 6


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"do_remote_decode": 1}, "do_remote_decode"),
        ({"remote_engine_id": 5}, "remote_engine_id"),
        ({"do_remote_decode": True, "do_remote_prefill": True}, "two requests"),
    ],
)
def test_wrong_parameters_are_refused_by_name(params: dict[str, Any], text: str) -> None:
    it = Pair()
    it.submit("a", 22, kv_transfer_params=msgspec.json.encode(params))
    refused = it.gateway.journals["a"].refused
    assert refused is not None and (refused.status, refused.field) == (400, "kv_transfer_params")
    assert text in refused.message


def test_without_roles_they_are_refused_but_where_a_role_is_lost_they_wait() -> None:
    it = Pair(BOTH, BOTH)
    it.submit("a", 22, kv_transfer_params=PREFILL_ONLY)
    refused = it.gateway.journals["a"].refused
    assert refused is not None and (refused.status, refused.field) == (400, "kv_transfer_params")
    it = Pair()
    it.world.kill(it.target.incarnation)
    it.submit("a", 22, max_tokens=1, kv_transfer_params=PREFILL_ONLY)
    it.finish()
    assert it.gateway.journals["a"].refused is None


def test_nulls_are_keys_that_are_not_given() -> None:
    read = TransferParams.read(b'{"do_remote_decode": null, "do_remote_prefill": null, "remote_engine_id": null}')
    assert (read.source, read.answer(1, "a")) == (None, b"")
