"""Prompt adapters in a whole scheduler: virtual tokens count for blocks and length, and for nothing that is told."""

import msgspec
import pytest

from blockyard.services.gpu_worker.mock.adapters import BROKEN, VIRTUAL_TOKENS
from blockyard.shared.messages import Beam, Control, Controlled, ControlVerb, FinishReason, KVRole

from ..harness.fakes import Journal, Output
from ..harness.world import Shape, World


def make(prompts: int = 2, workers: int = 1, **shape: object) -> World:
    world = World(Shape(num_prompt_adapters=prompts, max_num_batched_tokens=64, **shape))
    world.add_gateway()
    for _ in range(workers):
        world.add_worker()
    world.add_detokenizer()
    world.settle()
    return world


def submit(world: World, name: str, prompt_adapter: str, num_prompt: int = 10, **fields: object) -> Journal:
    [gateway] = world.gateways.values()
    fields = {"max_tokens": 6, "ignore_eos": True} | fields
    world.submit(gateway, name, num_prompt, prompt_adapter=prompt_adapter, **fields)  # type: ignore[arg-type]
    return gateway.journals[name]


def command(world: World, verb: ControlVerb, name: str, path: str = "", **more: bool) -> tuple[int, str, str]:
    [gateway] = world.gateways.values()
    frame = Control(name, verb, adapter=name, adapter_path=path, is_prompt=True, **more)
    world.tell(gateway.incarnation, frame)
    world.settle()
    answer: Controlled = gateway.controlled[-1]
    return answer.status, answer.field, answer.message


def check(world: World) -> None:
    world.settle()
    world.check_outputs()
    world.check_idle()


def test_cards_tell_how_many_tokens_an_adapter_has() -> None:
    card = make().core.card
    assert card is not None
    assert [(one.name, one.num_virtual_tokens) for one in card.adapters] == [("p0", 5), ("p1", 5)]
    assert card.with_adapter(card.adapters[0]).max_model_len == card.max_model_len - 5


def test_virtual_tokens_are_in_blocks_and_length_and_not_in_what_is_told() -> None:
    world = make(max_model_len=32)
    first = submit(world, "1", "p0", num_prompt_logprobs=1)
    check(world)
    again = submit(world, "2", "p0")
    other = submit(world, "3", "p1")
    check(world)
    assert sorted(first.outputs[0].prompt_logprobs) == list(range(1, 10))
    # 15 tokens with virtual ones are 3 full blocks of 4
    assert (again.outputs[0].num_cached_tokens, other.outputs[0].num_cached_tokens) == (12 - VIRTUAL_TOKENS, 0)
    longest = submit(world, "4", "p0", 32 - VIRTUAL_TOKENS - 2, max_tokens=9)
    check(world)
    assert len(longest.outputs[0].ids) == 2 and longest.outputs[0].finish is FinishReason.LENGTH
    refused = submit(world, "5", "p0", 32 - VIRTUAL_TOKENS)
    world.settle()
    assert refused.refused is not None and (refused.refused.status, refused.refused.field) == (400, "prompt")


def test_a_hit_among_virtual_tokens_is_none_of_the_client() -> None:
    world = make()
    submit(world, "1", "p0", prompt=[7, 8, 9])
    check(world)
    journal = submit(world, "2", "p0", prompt=[1, 2, 3])
    check(world)
    assert journal.outputs[0].num_cached_tokens == 0, "the block of 4 virtual tokens is no prompt token"
    [group] = world.core.groups.values()
    assert group.kv_cache.blocks.index, "it was found"


@pytest.mark.parametrize(
    "fields", [{"n": 3}, {"beam": Beam(2), "temperature": 0.0}, {"num_prompt_logprobs": 0, "n": 2}]
)
def test_choices_beams_and_preemption(fields: dict[str, object]) -> None:
    world = make(num_blocks=16, max_num_seqs=3)
    for number in range(4):
        submit(world, f"{number}", f"p{number % 2}", **fields)
    check(world)


def test_a_lora_adapter_beside_it() -> None:
    world = make(num_adapters=2, num_adapter_places=1)
    for number in range(6):
        submit(world, f"{number}", f"p{number % 2}", adapter=f"a{number % 2}" if number % 3 else "")
    check(world)


def test_a_worker_that_comes_later_has_them_before_sequences_start() -> None:
    """The fake worker ends the test at a slot whose adapter it does not have."""
    world = make()
    worker = world.add_worker()
    for number in range(8):
        submit(world, f"{number}", "p0", max_tokens=12)
    check(world)
    world.kill(next(one for one in world.workers if one != worker.incarnation))
    for number in range(8, 12):
        submit(world, f"{number}", "p1")
    check(world)


def test_prefill_and_decode_groups_both_have_them() -> None:
    world = make(workers=2, roles=(KVRole.PREFILL, KVRole.DECODE))
    for number in range(6):
        submit(world, f"{number}", f"p{number % 2}", 4 + number)
    check(world)


def test_two_adapters_of_which_each_group_holds_one() -> None:
    """Groups load the other one beside it, and others pass the sequence by."""
    world = make(1, workers=3, roles=(KVRole.BOTH, KVRole.BOTH, KVRole.DECODE), num_adapters=1, num_adapter_places=1)
    registry = world.core.adapters
    lora, prompt = (one.number for one in map(registry.named, ("a0", "p0")) if one is not None)
    first, _, third = world.core.groups.values()
    first.prompts.forget(prompt)
    third.adapters.want(lora)
    submit(world, "loads them", "")
    check(world)
    submit(world, "both", "p0", adapter="a0")
    submit(world, "plain", "")
    check(world)


@pytest.mark.parametrize("roles", [(KVRole.BOTH,), (KVRole.PREFILL, KVRole.DECODE)])
def test_two_adapters_of_which_each_group_refuses_one(roles: tuple[KVRole, ...]) -> None:
    world = make(1, workers=2, roles=roles, num_adapters=1, num_adapter_places=1)
    lora, prompt = (one.number for one in map(world.core.adapters.named, ("a0", "p0")) if one is not None)
    first, second = world.core.groups.values()
    assert second.prompts.can_start(prompt), "all groups hold it once it is served"
    first.prompts.on_loaded(prompt, is_usable=False)
    second.adapters.want(lora)
    second.adapters.take_changes()
    second.adapters.on_loaded(lora, is_usable=False)
    both = submit(world, "both", "p0", adapter="a0")
    alone = [submit(world, "1", "p0"), submit(world, "2", "", adapter="a0"), submit(world, "3", "")]
    check(world)
    assert both.refused is not None
    assert (both.refused.status, both.refused.field) == (400, "model")
    assert both.refused.message == "no worker can read both of the adapters 'p0' and 'a0'"
    assert [journal.outputs[0].finish for journal in alone] == [FinishReason.LENGTH] * 3


def test_a_prompt_adapter_that_is_waited_for_long_closes_no_place() -> None:
    world = make(1, num_adapters=1, num_adapter_places=1)
    [worker], [group] = world.workers.values(), world.core.groups.values()
    submit(world, "1", "", adapter="a0", max_tokens=20)
    lora, prompt = (one.number for one in map(world.core.adapters.named, ("a0", "p0")) if one is not None)
    group.prompts.forget(prompt)
    submit(world, "2", "p0")
    while not world.core.adapter_waits.deferred:
        world.work(worker)
    world.now += 60.0
    world.turn()
    assert group.adapters.is_placed(lora) and group.adapters.can_start(lora)
    check(world)


def test_loads_and_unloads() -> None:
    world = make(prompts=1)
    assert command(world, ControlVerb.LOAD_ADAPTER, "p", "/p") == (200, "", "")
    assert command(world, ControlVerb.LOAD_ADAPTER, "p", "/p")[:2] == (400, "prompt_adapter_name")
    refused = (400, "prompt_adapter_path", "adapter 'q': it is broken")
    assert command(world, ControlVerb.LOAD_ADAPTER, "q", BROKEN) == refused
    running = submit(world, "1", "p", max_tokens=20)
    [worker] = world.workers.values()
    for _ in range(3):
        world.work(worker)
    assert command(world, ControlVerb.LOAD_ADAPTER, "p", "/other", replace=True) == (200, "", "")
    check(world)
    assert len(running.outputs[0].ids) == 20, "it finished with the bytes that it began with"
    assert sorted(worker.mock.adapters.held.values()) == ["/other", "/p0"]
    assert command(world, ControlVerb.UNLOAD_ADAPTER, "p")[0] == 200
    assert command(world, ControlVerb.UNLOAD_ADAPTER, "p")[:2] == (404, "prompt_adapter_name")
    refused = submit(world, "2", "p")
    world.settle()
    assert refused.refused is not None and refused.refused.status == 404
    assert list(worker.mock.adapters.held.values()) == ["/p0"]


def test_no_more_are_loaded_than_the_flag_allows() -> None:
    world = make(prompts=1)
    for number in range(7):
        assert command(world, ControlVerb.LOAD_ADAPTER, f"n{number}", f"/n{number}")[0] == 200
    status, field, message = command(world, ControlVerb.LOAD_ADAPTER, "more", "/more")
    assert (status, field) == (400, "prompt_adapter_name") and "--max-prompt-adapters is 8" in message
    assert command(world, ControlVerb.LOAD_ADAPTER, "n0", "/again", replace=True)[0] == 200


def test_a_server_without_them() -> None:
    world = make(prompts=0, num_adapters=1, num_adapter_places=1)
    status, _, message = command(world, ControlVerb.LOAD_ADAPTER, "p", "/p")
    assert status == 400 and message.endswith("--enable-prompt-adapter")
    assert command(world, ControlVerb.UNLOAD_ADAPTER, "a0")[0] == 404, "it is no prompt adapter"


def test_the_kind_of_an_adapter_is_checked() -> None:
    world = make(num_adapters=1, num_adapter_places=1)
    [gateway] = world.gateways.values()
    world.submit(gateway, "1", 5, adapter="p0")
    world.submit(gateway, "2", 5, prompt_adapter="a0")
    world.settle()
    refusals = [gateway.journals[name].refused for name in ("1", "2")]
    assert [one.status for one in refusals if one is not None] == [404, 404]


def test_a_request_whose_adapter_was_replaced_before_it_came() -> None:
    world = make()
    [gateway] = world.gateways.values()
    frame = submit(world, "1", "p0").frame
    world.settle()
    assert command(world, ControlVerb.LOAD_ADAPTER, "p0", "/new", replace=True)[0] == 200
    late = msgspec.structs.replace(frame, request_id="2")
    journal = gateway.journals["2"] = Journal(late, {0: Output()})
    world.tell(gateway.incarnation, late)
    world.settle()
    assert journal.outputs[0].num_cached_tokens == 0, "blocks of other bytes are not found"
    assert journal.outputs[0].finish is FinishReason.LENGTH
