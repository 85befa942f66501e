"""How many of the scheduler's files a plain greedy request enters."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from blockyard.services.scheduler import core

from ..conftest import Ring

HOME = str(Path(core.__file__).parent)


def files_entered(call: Callable[[], None]) -> set[str]:
    """The scheduler's files of which a function runs during the call; a property counts, a constant does not."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            files.add(frame.f_code.co_filename.removeprefix(HOME))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


def traced(it: Ring, call: Callable[[], None]) -> set[str]:
    """Returns what `files_entered` does, without the checks of the world."""
    found: set[str] = set()
    on_message, step = it.world.core.on_message, it.world.core.step

    def traced_on_message(*args: object) -> None:
        found.update(files_entered(lambda: on_message(*args)))

    def traced_step(now: float) -> object:
        out: list[object] = []
        found.update(files_entered(lambda: out.append(step(now))))
        return out[0]

    it.world.core.on_message, it.world.core.step = traced_on_message, traced_step
    try:
        call()
    finally:
        del it.world.core.on_message, it.world.core.step
    return found


def test_a_greedy_decode_step_enters_at_most_10_files(ring: type[Ring]) -> None:
    it = ring(block_size=16)
    it.submit("a", 5, max_tokens=20, temperature=0.0)
    it.steps(5)
    files = traced(it, lambda: it.steps(1))
    assert "/core.py" in files
    assert len(files) <= 10, " ".join(sorted(files))
    it.finish()


def test_admission_of_a_greedy_request_enters_at_most_20_files(ring: type[Ring]) -> None:
    """From its frame to the first plan with it, in a ring without other requests; its prompt has several blocks."""
    it = ring(block_size=16)
    it.submit("before", 5, max_tokens=2, temperature=0.0)
    it.world.settle()
    for request_id in ("hashed by the tokenizer", "hashed here"):  # every other request carries its hashes
        files = traced(it, lambda name=request_id: it.submit(name, 50 + len(name), max_tokens=20, temperature=0.0))
        assert len(files) <= 20, " ".join(sorted(files))
        it.world.settle()
    assert it.output("hashed here").num_cached_tokens == 0
    it.finish()


def test_admission_of_a_greedy_request_to_the_queue_enters_at_most_15_files(ring: type[Ring]) -> None:
    """The frame and the step after it, while a plan is in flight: the request starts with the next plan."""
    it = ring(block_size=16)
    it.submit("first", 5, max_tokens=20, temperature=0.0)
    it.steps(3)
    files = traced(it, lambda: it.submit("a", 7, max_tokens=20, temperature=0.0))
    assert len(files) <= 15, " ".join(sorted(files))
    it.finish()
