"""The search for the highest rate, against thresholds that are known."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minibatch.capacity import Capacity, highest_rate


@settings(deadline=None)
@given(st.floats(0.5, 64.0, exclude_min=True, exclude_max=True), st.floats(0.001, 2.0))
def test_the_threshold_is_found_to_within_the_tolerance(threshold, tolerance):
    """Fault: the wrong half is kept, the search ends too early, or it reports a rate that was never tried."""
    tried = {}

    def run(rate):
        tried[rate] = rate <= threshold
        return tried[rate]

    capacity = highest_rate(run, 0.5, 64.0, tolerance)
    assert capacity.found
    assert capacity.passed <= threshold < capacity.failed <= capacity.passed * (1 + tolerance)
    assert tried[capacity.passed] and not tried[capacity.failed]


def test_a_search_says_when_even_the_lowest_fails():
    """Fault: the low end of the range is reported as a capacity."""
    capacity = highest_rate(lambda rate: False, 1.0, 8.0)
    assert capacity == Capacity(0.0, 1.0)
    assert not capacity.found
    assert str(capacity) == "below 1, the lowest tried"


def test_a_search_says_when_the_highest_passes_and_then_asks_no_more():
    """Fault: the high end of the range is reported as a capacity."""
    tried = []
    capacity = highest_rate(lambda rate: tried.append(rate) is None, 1.0, 8.0)
    assert capacity == Capacity(8.0, math.inf)
    assert not capacity.found
    assert str(capacity) == "above 8, the highest tried"
    assert tried == [8.0]


def test_only_the_lowest_passes():
    """Fault: what was not tried counts as passed, or as failed."""
    tried = []

    def run(rate):
        tried.append(rate)
        return rate == 1.0

    capacity = highest_rate(run, 1.0, 4.0, 0.5)
    assert capacity.passed == 1.0 and capacity.found
    assert tried == [4.0, 2.0, math.sqrt(2.0), 1.0]


def test_it_ends_where_there_is_no_number_in_between():
    """Fault: an endless bisection for a tolerance that floats do not have."""
    capacity = highest_rate(lambda rate: rate <= 2.0, 1.0, 3.0, 1e-300)
    assert capacity.passed <= 2.0 < capacity.failed
    assert capacity.failed - capacity.passed < 1e-14


@pytest.mark.parametrize(
    "numbers, message",
    [
        ((0.0, 1.0, 0.1), "low must lie in (0, inf), got 0.0"),
        ((2.0, 1.0, 0.1), "high must lie in (2, inf), got 1.0"),
        ((1.0, 1.0, 0.1), "high must lie in (1, inf), got 1.0"),
        ((1.0, 2.0, 0.0), "tolerance must lie in (0, inf), got 0.0"),
        ((1.0, math.nan, 0.1), "high must lie in (1, inf), got nan"),
    ],
)
def test_bad_ranges_are_refused_with_their_numbers(numbers, message):
    """Fault: a search that never ends, or ends with nonsense."""
    with pytest.raises(ValueError) as error:
        highest_rate(lambda rate: True, *numbers)
    assert str(error.value) == message
