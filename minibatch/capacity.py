"""The highest rate at which a system still keeps its promises: its *capacity* under a service level objective.

Whether it does is a question to a run at that rate, with the same requests at every rate (the same lengths, the same
pattern of arrivals, only faster): then two rates differ in the rate, two systems in the system, and the answer hardly
depends on luck. The answer is taken to be yes below some rate and no above; a bisection finds the place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from minibatch.checks import check_float


@dataclass(frozen=True)
class Capacity:
    """What a search has found.

    ``passed``  the highest rate that passed; 0 if not even the lowest that was tried did
    ``failed``  the lowest rate above it that failed; infinity if the highest that was tried passed
    """

    passed: float
    failed: float

    @property
    def found(self) -> bool:
        """Whether the capacity lies in the range that was searched: not below, not above."""
        return self.passed > 0.0 and self.failed < math.inf

    def __str__(self) -> str:
        if self.passed == 0.0:
            return f"below {self.failed:.3g}, the lowest tried"
        return f"{self.passed:.3g}" if self.found else f"above {self.passed:.3g}, the highest tried"


def highest_rate(run: Callable[[float], bool], low: float, high: float, tolerance: float = 0.05) -> Capacity:
    """Bisects, on a logarithmic scale, until the two rates of a :class:`Capacity` are no more than ``tolerance`` apart,
    relative to the lower one.

    ``run(rate)`` says whether the rate is sustained. ``high`` is tried first, and if it passes the search is over;
    ``low``, often the slowest run, is tried only if nothing above it has passed. If ``run`` is not monotonous, one of
    the places where it changes is found.

    Raises ValueError unless 0 < low < high and tolerance > 0.
    """
    check_float("low", low, 0.0, math.inf, above=True)
    check_float("high", high, low, math.inf, above=True)
    check_float("tolerance", tolerance, 0.0, math.inf, above=True)
    if run(high):
        return Capacity(high, math.inf)
    bottom, passed = low, 0.0
    while high > bottom * (1 + tolerance):
        middle = math.sqrt(bottom * high)
        if not bottom < middle < high:  # nothing between two neighbouring numbers
            break
        if run(middle):
            bottom = passed = middle
        else:
            high = middle
    if passed:
        return Capacity(passed, high)
    return Capacity(low, high) if run(low) else Capacity(0.0, low)
