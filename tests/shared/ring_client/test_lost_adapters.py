"""Adapters that a scheduler has lost with its death: clients load them again, and requests wait for them."""

import msgspec

from blockyard.shared.messages import AdapterCard, Controlled, ControlVerb, Member, ModelCard, Role
from blockyard.shared.ring_client.schedulers import AWAY_S, Schedulers


def adapter(name: str) -> AdapterCard:
    return AdapterCard(name, f"/{name}", "m", name.encode())


def member(incarnation: int, *adapters: str) -> Member:
    card = ModelCard(["m"], "m", 100, 100, 0, adapters=[adapter(name) for name in adapters])
    return Member("scheduler", Role.SCHEDULER, incarnation, "e", ready=True, card=card)


def restarted() -> Schedulers:
    """A scheduler with one adapter of the start and one of an operator has been started again."""
    schedulers = Schedulers(["m"])
    schedulers.changed(member(1, "start", "loaded"))
    assert not schedulers.lost_adapters.take_commands()
    schedulers.gone(member(1), 10.0)
    schedulers.changed(msgspec.structs.replace(member(2), ready=False, card=None))
    schedulers.changed(member(2, "start"))
    return schedulers


def test_an_adapter_is_loaded_again_and_its_requests_wait() -> None:
    schedulers = restarted()
    [(to, command)] = schedulers.lost_adapters.take_commands()
    asked = (to, command.verb, command.adapter, command.adapter_path)
    assert asked == (2, ControlVerb.LOAD_ADAPTER, "loaded", "/loaded")
    assert not schedulers.lost_adapters.take_commands()
    assert schedulers.card("loaded").adapter == adapter("loaded"), "new requests are taken"
    assert (schedulers.of("m"), schedulers.of("m", "start"), schedulers.of("m", "loaded")) == ([2], [2], [])
    schedulers.changed(member(2, "start", "loaded"))
    assert schedulers.of("m", "loaded") == [2]


def test_a_prompt_adapter_is_loaded_again_as_one() -> None:
    schedulers, tuned = Schedulers(["m"]), msgspec.structs.replace(adapter("tuned"), num_virtual_tokens=9)
    before = member(1, "start")
    assert before.card is not None
    card = msgspec.structs.replace(before.card, adapters=[*before.card.adapters, tuned])
    schedulers.changed(msgspec.structs.replace(before, card=card))
    schedulers.gone(before, 10.0)
    schedulers.changed(member(2, "start"))
    assert [command.is_prompt for _, command in schedulers.lost_adapters.take_commands()] == [True]
    assert schedulers.card("tuned").prompt_adapter == tuned
    assert schedulers.of("m", "start", "tuned") == [], "a request may wait for two"


def test_an_adapter_that_cannot_be_loaded_again_is_lost() -> None:
    schedulers = restarted()
    [(_, command)] = schedulers.lost_adapters.take_commands()
    pending = Controlled(command.request_id, 409, "", 0, False, adapters=[adapter("start")])
    schedulers.lost_adapters.on_answer(2, pending)
    assert schedulers.of("m", "loaded") == [], "another client has asked first"
    schedulers.lost_adapters.on_answer(2, msgspec.structs.replace(pending, status=400))
    assert schedulers.of("m", "loaded") == [2], "the scheduler refuses its requests"


def test_waiting_ends() -> None:
    schedulers = restarted()
    schedulers.tick(10.0 + AWAY_S)
    assert schedulers.of("m", "loaded") == []
    schedulers.tick(10.1 + AWAY_S)
    assert schedulers.of("m", "loaded") == [2]
