"""Lengths of requests: of the model, and of adapters for longer contexts."""

from blockyard.services.scheduler.admission.model_limits import ServedModel, capacity_of
from blockyard.shared.messages import AdapterCard, Geometry


def test_only_an_adapter_for_longer_contexts_takes_more_than_the_model() -> None:
    geometry = Geometry(64, 16, 400, 1000, [0], 4, 64, num_adapter_places=1, num_host_adapters=1, base_len=100)
    capacity = capacity_of([geometry, geometry])
    assert (capacity.model_len, capacity.max_model_len) == (100, 100)
    assert not capacity.validate(99, 1) and "this model has 100" in capacity.validate(100, 1)
    assert not capacity.validate(299, 1, 300) and "this model has 300" in capacity.validate(300, 1, 300)
    card = capacity.card(ServedModel(["m"], "/m", 0))
    long, plain = AdapterCard("long", "/l", "m", b"l", max_len=300), AdapterCard("plain", "/p", "m", b"p")
    prompt = AdapterCard("prompt", "/t", "m", b"t", num_virtual_tokens=20)
    assert [card.with_adapter(one).max_model_len for one in (long, plain, prompt)] == [300, 100, 80]
    assert card.with_adapter(long).with_adapter(prompt).max_model_len == 280


def test_without_such_adapters_the_length_is_the_workers() -> None:
    assert capacity_of([Geometry(64, 16, 400, 1000, [0], 4, 64)]).model_len == 400
