"""Tuning while the worker is idle, with a fake tuner."""

from collections.abc import Iterator, Sequence

from blockyard.services.gpu_worker.linear_tuning.idle_tuning import IdleTuning


class Tuner:
    def __init__(self, *sizes: int) -> None:
        self.missing = list(sizes)

    def pieces(self) -> Iterator[int | None]:
        while self.missing:
            yield None
            yield self.missing.pop(0)

    def installed(self, sizes: Sequence[int] | None = None) -> bytes:
        return b"made up"

    def describe(self) -> str:
        return "made up"


class Compiler:
    def __init__(self) -> None:
        self.ready, self.closed = False, 0

    def wait(self, timeout_s: float | None = None) -> bool:
        assert timeout_s is not None
        return self.ready

    def close(self) -> None:
        self.closed += 1


def test_nothing_is_measured_before_its_kernels_are_compiled() -> None:
    compiler = Compiler()
    tuning = IdleTuning(Tuner(4, 8), compiler)
    assert [tuning.step() for _ in range(3)] == [None] * 3
    assert tuning.done == 0.0
    compiler.ready = True
    assert [tuning.step() for _ in range(4)] == [None, 4, None, 8]
    assert 0.0 < tuning.done < 1.0, "the tuner has still to end"
    assert tuning.step() is None
    assert (tuning.done, compiler.closed) == (1.0, 1)
    assert tuning.step() is None, "there is nothing after the end"
    assert compiler.closed == 1


def test_cached_results_need_no_compiler() -> None:
    compiler = Compiler()
    assert IdleTuning(Tuner(), compiler).done == 1.0
    assert compiler.closed == 1
