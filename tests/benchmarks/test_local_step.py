"""The arithmetic of benchmarks/local_step.py."""

from benchmarks.local_step import interval


def test_the_interval_of_a_median_holds_it_and_is_narrow_where_all_turns_agree():
    assert interval([1.2] * 8) == [1.2, 1.2]
    low, high = interval([1.0, 1.1, 1.2, 1.3, 1.3, 1.4, 1.5, 9.0])
    assert 1.0 < low < 1.3 < high < 9.0, "one slow minute decides nothing"


def test_the_interval_is_the_same_each_time():
    assert interval([1.0, 2.0, 3.0, 4.0]) == interval([1.0, 2.0, 3.0, 4.0])
