"""A model names all of its tensors: sleep moves those, and what it does not name would stay on the GPU."""

from collections.abc import Iterator

import pytest
import torch
from tiny_models import BY_NAME, Tiny
from torch import Tensor

from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.interface import Model, tensors_of
from blockyard.services.gpu_worker.models.registry import find_family

META = torch.device("meta")
NAMES = ["llama", "opt", "gpt2", "gemma3", "gemma4-moe", "deepseek-v3", "gpt-oss", "llama4", "qwen2-moe"]


def reachable(owner: object) -> Iterator[object]:
    """What the fields and collections of an object of this project hold, and so on; each object once."""
    seen: set[int] = set()
    rest = [owner]
    while rest:
        thing = rest.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        yield thing
        if isinstance(thing, dict):
            rest.extend(thing.values())
        elif isinstance(thing, list | tuple | set | frozenset):
            rest.extend(thing)
        elif type(thing).__module__.startswith("blockyard."):
            rest.extend(getattr(thing, "__dict__", {}).values())
            slots = [slot for kind in type(thing).__mro__ for slot in getattr(kind, "__slots__", ())]
            rest.extend(getattr(thing, slot, None) for slot in slots)


def prepared(tiny: Tiny, model_impl: str) -> Model:
    config = tiny.config_json()
    model = find_family(config, model_impl)(config, WeightTable(torch.float32, META))
    model.prepare(32)
    return model


@pytest.mark.parametrize(
    ("name", "model_impl"), [*((name, "auto") for name in NAMES), ("mistral-window", "transformers")]
)
def test_no_tensor_of_a_model_is_left_out(name: str, model_impl: str) -> None:
    model = prepared(BY_NAME[name], model_impl)
    found = [thing for thing in reachable(model) if isinstance(thing, Tensor) and thing.device == META]
    named = {tensor.untyped_storage()._cdata for tensor in tensors_of(model)}
    assert found and {tensor.untyped_storage()._cdata for tensor in found} <= named


@pytest.mark.parametrize(("name", "experts"), [("qwen2-moe", 2), ("deepseek-v3", 2), ("llama", 0)])
def test_a_model_names_its_experts_and_embeddings(name: str, experts: int) -> None:
    model = prepared(BY_NAME[name], "auto")
    assert len(model.experts()) == experts
    assert [len(table) for table in model.embeddings()] == [model.shape.vocab_size]


def test_learned_positions_are_an_embedding() -> None:
    model = prepared(BY_NAME["gpt2"], "auto")
    assert [len(table) for table in model.embeddings()] == [model.shape.vocab_size, 32]
