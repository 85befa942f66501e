"""Processors of users: what they are called with, and that one that fails or hangs fails alone."""

import sys
import time
import types
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from blockyard.services.gpu_worker.host_link import SameMemory
from blockyard.services.gpu_worker.sampling.user_processors import ProcessorError, ProcessorThread, load_processor
from blockyard.shared.messages import LogitsProcessor

STREAM = SameMemory().stream()


def only_even(output_ids: list[int], logits: Tensor) -> Tensor:
    logits[1::2] = float("-inf")
    return logits


def add_lengths(prompt_ids: list[int], output_ids: list[int], logits: Tensor) -> Tensor:
    return logits + len(prompt_ids) * 10 + len(output_ids)


class Ban:
    def __init__(self, token: int = 0, *, also: int = 1) -> None:
        self._tokens = [token, also]

    def __call__(self, output_ids: list[int], logits: Tensor) -> Tensor:
        logits[self._tokens] = float("-inf")
        return logits


def hangs(output_ids: list[int], logits: Tensor) -> Tensor:
    while True:
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def module() -> Iterator[None]:
    made = types.ModuleType("own_processors")
    for one in (only_even, add_lengths, Ban, hangs):
        setattr(made, one.__name__, one)
    made.constant = 5  # type: ignore[attr-defined]
    made.one_argument = lambda logits: logits  # type: ignore[attr-defined]
    made.forgets = lambda output_ids, logits: None  # type: ignore[attr-defined]
    made.other_dtype = lambda output_ids, logits: logits.double() + 1  # type: ignore[attr-defined]
    made.fails = lambda output_ids, logits: 1 / 0  # type: ignore[attr-defined]
    sys.modules["own_processors"] = made
    yield
    del sys.modules["own_processors"]


def named(name: str, args: bytes = b"", kwargs: bytes = b"") -> LogitsProcessor:
    return LogitsProcessor(f"own_processors.{name}", args, kwargs)


def test_functions_and_classes_are_applied_in_order() -> None:
    processors = [load_processor(named("add_lengths")), load_processor(named("Ban", b"[2]", b'{"also":4}'))]
    logits = torch.zeros(6)
    changed = ProcessorThread(STREAM).run(processors, [7, 8], [9], logits)
    assert changed.tolist() == [21, 21, float("-inf"), 21, float("-inf"), 21]
    assert logits.tolist() == [0] * 6  # log-probabilities are read from them


def test_the_dtype_is_that_of_the_logits() -> None:
    changed = ProcessorThread(STREAM).run([load_processor(named("other_dtype"))], [7], [9], torch.zeros(3))
    assert changed.dtype is torch.float32 and changed.tolist() == [1, 1, 1]


def test_a_class_without_arguments_is_instantiated() -> None:
    assert ProcessorThread(STREAM).run([load_processor(named("Ban"))], [], [], torch.zeros(3)).tolist()[2] == 0


@pytest.mark.parametrize("name", ["missing", "constant", "one_argument"])
def test_what_cannot_be_loaded_is_named(name: str) -> None:
    with pytest.raises(ProcessorError, match=rf"own_processors\.{name}"):
        load_processor(named(name))
    with pytest.raises(ProcessorError, match="module"):
        load_processor(LogitsProcessor("nothing"))


@pytest.mark.parametrize("name", ["forgets", "fails"])
def test_one_that_fails_is_named_and_the_next_job_runs(name: str) -> None:
    thread = ProcessorThread(STREAM)
    with pytest.raises(ProcessorError, match=name):
        thread.run([load_processor(named(name))], [], [], torch.zeros(3))
    assert thread.run([load_processor(named("only_even"))], [], [], torch.zeros(3)).isinf().sum() == 1


def test_one_that_hangs_is_stopped() -> None:
    thread = ProcessorThread(STREAM, limit_s=0.05)
    with pytest.raises(ProcessorError, match=r"hangs: took longer than 0\.05 s"):
        thread.run([load_processor(named("hangs"))], [], [], torch.zeros(3))
    assert thread.run([load_processor(named("only_even"))], [], [], torch.zeros(3)).isinf().sum() == 1


def favours(output_ids: list[int], logits: Tensor, extra_args: dict[str, int]) -> Tensor:
    logits[extra_args.get("token", 0)] += 100
    return logits


class Favours:
    def __init__(self, extra_args: dict[str, int]) -> None:
        self._token = extra_args.get("token", 0)

    def __call__(self, prompt_ids: list[int], output_ids: list[int], logits: Tensor) -> Tensor:
        logits[self._token] += 100
        return logits


@pytest.mark.parametrize("processor", [favours, Favours])
@pytest.mark.parametrize(("extra", "best"), [(b'{"token":4}', 4), (b"", 0)])
def test_a_processor_that_takes_extra_arguments_gets_those_of_the_request(
    processor: type, extra: bytes, best: int
) -> None:
    setattr(sys.modules["own_processors"], processor.__name__, processor)
    loaded = load_processor(named(processor.__name__), extra)
    assert int(loaded.apply([1], [2], torch.zeros(6)).argmax()) == best


def test_other_processors_do_not_see_extra_arguments() -> None:
    loaded = load_processor(named("add_lengths"), b'{"token":4}')
    assert loaded.apply([1], [2], torch.zeros(3)).tolist() == [11, 11, 11]
