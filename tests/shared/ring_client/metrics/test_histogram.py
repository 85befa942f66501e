"""Histograms: observations of this process and of others, and the buckets that are shown."""

from blockyard.shared.ring_client.metrics.histogram import BucketCounts


def test_observations_of_others_are_added_to_those_of_this_process() -> None:
    histogram = BucketCounts([1.0, 4.0], finer=[2.0])
    histogram.observe(2.0)
    histogram.add([(1, 3), (3, 2)], total=25.5)
    assert (histogram.count, histogram.total) == (6, 27.5)
    assert histogram.buckets(finer=True) == [("1.0", 0), ("2.0", 4), ("4.0", 4), ("+Inf", 6)]
    assert histogram.buckets(finer=False) == [("1.0", 0), ("4.0", 4), ("+Inf", 6)]


def test_an_observation_that_counts_several_times() -> None:
    once, at_once = BucketCounts([1.0, 4.0]), BucketCounts([1.0, 4.0])
    for _ in range(3):
        once.observe(2.5)
    at_once.observe_many(2.5, 3)
    assert (at_once.counts, at_once.total) == (once.counts, once.total) == ([0, 3, 0], 7.5)


def test_buckets_above_the_largest_value_are_not_shown() -> None:
    histogram = BucketCounts([1.0, 2.0, 1e6])
    histogram.observe(2.0)
    assert histogram.buckets(finer=False)[2:] == [("1e+06", 1), ("+Inf", 1)]
    histogram.set_max_value(2.0)
    assert histogram.buckets(finer=False) == [("1.0", 0), ("2.0", 1), ("+Inf", 1)]
