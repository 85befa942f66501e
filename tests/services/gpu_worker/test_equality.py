"""Greedy and seeded outputs do not depend on how they are scheduled: up to ties, and without any if batch-invariant.

tests/bench/bench_equality.py does the same with many more tokens.
"""

import pytest
from equality import CONDITIONS, Bench, Request, requests
from ties import Ties


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    return requests(8, max_tokens=20)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "batch-invariant"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, bool]:
    return Bench(tmp_path_factory.mktemp("tiny"), request.param), request.param


def test_every_condition_gives_what_each_choice_gives_alone(
    bench: tuple[Bench, bool], asked: list[Request], capsys: pytest.CaptureFixture[str]
) -> None:
    it, batch_invariant = bench
    expected, ties = it.alone(asked), Ties()
    for name, condition in CONDITIONS.items():
        it.compare(name, asked, expected, condition(it, asked), ties)
    if batch_invariant:
        assert not ties.ties
    with capsys.disabled():
        print(f"\nequality{', batch-invariant' if batch_invariant else ''}: {ties.check()}", end="")
