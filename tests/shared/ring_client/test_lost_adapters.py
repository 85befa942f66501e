"""Adapters that a scheduler has lost with its death: clients load them again, and requests wait for them."""

import msgspec
import pytest

from blockyard.shared.errors import RequestError
from blockyard.shared.messages import AdapterCard, Controlled, ControlVerb, Member, ModelCard, Role
from blockyard.shared.ring_client.lost_adapters import MOST_ASKED, QUIET_S
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


def replaced(path: str, *, was_asked_for: bool = True) -> AdapterCard:
    """What is served under the name of an adapter of the start."""
    return msgspec.structs.replace(adapter("start"), root=path, digest=path.encode(), was_asked_for=was_asked_for)


def restarted_with(before: AdapterCard, *after: AdapterCard) -> Schedulers:
    schedulers = Schedulers(["m"])
    cards = [ModelCard(["m"], "m", 100, 100, 0, adapters=adapters) for adapters in ([before], list(after))]
    schedulers.changed(msgspec.structs.replace(member(1), card=cards[0]))
    schedulers.gone(member(1), 10.0)
    schedulers.changed(msgspec.structs.replace(member(2), card=cards[1]))
    return schedulers


def test_an_adapter_that_was_replaced_is_replaced_again() -> None:
    """The flags name other bytes, of which no request is to be answered."""
    schedulers = restarted_with(replaced("/new"), adapter("start"))
    [(_, command)] = schedulers.lost_adapters.take_commands()
    assert (command.adapter, command.adapter_path, command.replace) == ("start", "/new", True)
    assert schedulers.card("start").adapter == replaced("/new") and schedulers.of("m", "start") == []
    schedulers.changed(member(2, "start"))  # a card that was sent before
    assert schedulers.of("m", "start") == []
    schedulers.on_adapters(2, [replaced("/new")], [])
    assert schedulers.of("m", "start") == [2] and schedulers.card("start").adapter == replaced("/new")


def test_an_operator_who_replaces_it_meanwhile_is_heard() -> None:
    schedulers = restarted_with(replaced("/new"), adapter("start"))
    schedulers.on_adapters(2, [replaced("/newest")], [])
    assert not schedulers.lost_adapters.take_commands()
    assert schedulers.of("m", "start") == [2] and schedulers.card("start").adapter == replaced("/newest")


def test_flags_that_were_changed_hold() -> None:
    schedulers = restarted_with(adapter("start"), replaced("/new", was_asked_for=False))
    assert not schedulers.lost_adapters.take_commands()
    assert schedulers.card("start").adapter == replaced("/new", was_asked_for=False)


def with_unloaded(scheduler: Member, *names: str) -> Member:
    assert scheduler.card is not None
    return msgspec.structs.replace(scheduler, card=msgspec.structs.replace(scheduler.card, unloaded=list(names)))


def restarted_without(*after: str) -> Schedulers:
    """An operator has unloaded an adapter of the start, the last one, before the scheduler died."""
    schedulers = Schedulers(["m"])
    schedulers.changed(member(1, "start"))
    schedulers.on_adapters(1, [], ["start"])
    schedulers.gone(member(1), 10.0)
    schedulers.changed(member(2, *after))
    return schedulers


def is_known(schedulers: Schedulers, name: str) -> bool:
    try:
        return schedulers.card(name).adapter is not None
    except RequestError as e:
        assert e.status == 404
        return False


def test_an_adapter_that_was_unloaded_is_unloaded_again() -> None:
    schedulers = restarted_without("start")
    [(to, command)] = schedulers.lost_adapters.take_commands()
    assert (to, command.verb, command.adapter, command.is_repeated) == (2, ControlVerb.UNLOAD_ADAPTER, "start", True)
    assert not schedulers.lost_adapters.take_commands() and not is_known(schedulers, "start")
    schedulers.changed(member(2, "start"))  # a card that was sent before
    assert not is_known(schedulers, "start")
    schedulers.gone(member(2), 11.0)
    schedulers.changed(member(3, "start"))
    assert [command.adapter for _, command in schedulers.lost_adapters.take_commands()] == ["start"], "a second death"
    schedulers.changed(with_unloaded(member(3), "start"))
    schedulers.changed(with_unloaded(member(3), "start"))
    assert not is_known(schedulers, "start") and not schedulers.lost_adapters.take_commands()


def test_a_folder_that_no_flag_names_is_unloaded_again() -> None:
    """Else the next request would load it from --lora-dir."""
    [(_, command)] = restarted_without().lost_adapters.take_commands()
    assert (command.verb, command.adapter) == (ControlVerb.UNLOAD_ADAPTER, "start")


def test_an_operator_who_loads_it_meanwhile_is_heard() -> None:
    schedulers = restarted_without("start")
    schedulers.on_adapters(2, [replaced("/start")], [])
    assert is_known(schedulers, "start")


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
    """Some time after the last answer."""
    schedulers = restarted()
    [(_, command)] = schedulers.lost_adapters.take_commands()
    schedulers.tick(30.0)
    schedulers.tick(30.0 + QUIET_S)
    assert schedulers.of("m", "loaded") == []
    schedulers.lost_adapters.on_answer(2, Controlled(command.request_id, 409, "", 0, False))
    schedulers.tick(50.0)
    schedulers.tick(50.0 + QUIET_S)
    assert schedulers.of("m", "loaded") == []
    schedulers.tick(50.1 + QUIET_S)
    assert schedulers.of("m", "loaded") == [2]


def test_adapters_are_remembered_while_a_large_model_is_loaded() -> None:
    schedulers = Schedulers(["m"])
    schedulers.changed(member(1, "start", "loaded"))
    schedulers.gone(member(1), 10.0)
    schedulers.tick(11.0 + AWAY_S)
    assert not schedulers.cards()
    with pytest.raises(RequestError, match=r"No scheduler is ready to serve the model `loaded` yet") as refusal:
        schedulers.card("loaded")
    assert refusal.value.status == 503
    schedulers.changed(member(2, "start"))
    assert [command.adapter for _, command in schedulers.lost_adapters.take_commands()] == ["loaded"]


def test_many_adapters_are_loaded_some_at_a_time() -> None:
    """Of the first ones the scheduler refuses one, because other clients have asked for many."""
    schedulers, names = Schedulers(["m"]), [str(i) for i in range(50)]
    schedulers.changed(member(1, *names))
    schedulers.gone(member(1), 10.0)
    schedulers.changed(member(2))
    lost, asked = schedulers.lost_adapters, list[str]()
    while commands := [command for _, command in lost.take_commands()]:
        assert len(commands) <= MOST_ASKED
        for command in commands:
            status = 429 if command.adapter == "3" and "3" not in asked else 200
            asked.append(command.adapter)
            lost.on_answer(2, Controlled(command.request_id, status, "", 0, False))
    assert asked == names and schedulers.of("m", "3") == []
    schedulers.tick(12.0)
    assert [command.adapter for _, command in lost.take_commands()] == ["3"]
