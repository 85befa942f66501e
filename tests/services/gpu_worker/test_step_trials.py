"""What is quicker in a size's trials computes it from then on."""

from blockyard.services.gpu_worker.step_trials import SIZES, TRIALS, Trials


def test_the_best_of_each_way_decides() -> None:
    trials = Trials()
    for i in range(TRIALS):
        assert not trials.is_over(3)
        assert trials.prefers_compiled(3)
        trials.add(3, 2.0, 9.0 if i else 1.0)
    assert trials.is_over(3)
    assert trials.is_over(4)
    assert trials.prefers_compiled(4)
    assert trials.told(3) == "up to 4 rows in 1000.00 ms, plain 2000.00 ms"


def test_sizes_are_decided_one_by_one() -> None:
    trials = Trials()
    for _ in range(TRIALS):
        trials.add(16, 1.0, 1.25)
    assert not trials.prefers_compiled(16)
    assert not trials.prefers_compiled(9)
    assert trials.prefers_compiled(8)
    assert not trials.is_over(17)
    assert trials.prefers_compiled(1000)


def test_many_rows_stay_plain() -> None:
    assert Trials().prefers_compiled(SIZES[-1])
    assert not Trials().prefers_compiled(SIZES[-1] + 1)
