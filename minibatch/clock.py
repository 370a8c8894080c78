"""Time, as the engine sees it: real for execution, virtual for simulation. The engine's code is the same.

``now()``           seconds since the clock was first read
``wait_until(t)``   idle until then: a real clock sleeps, a virtual one jumps
``advance(plan)``   an iteration has just been executed: a real clock has moved by itself, a virtual one is told how
                    long that took
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

from minibatch.checks import check_float
from minibatch.plan import Plan


class Clock(Protocol):
    kind: str

    def now(self) -> float: ...
    def wait_until(self, when: float) -> None: ...
    def advance(self, plan: Plan) -> None: ...


class RealClock:
    """Wall time, starting at 0 when it is first read."""

    kind = "real"

    def __init__(self) -> None:
        self._zero: float | None = None

    def now(self) -> float:
        if self._zero is None:
            self._zero = time.perf_counter()
        return time.perf_counter() - self._zero

    def wait_until(self, when: float) -> None:
        while (left := when - self.now()) > 0:
            time.sleep(min(left, 3600.0))  # sleep() has a limit of its own

    def advance(self, plan: Plan) -> None:
        pass


class VirtualClock:
    """Time that passes only when the engine executes or waits.

    ``duration(plan)`` gives the seconds that an iteration takes, 0 or more; anything else is a ValueError. The default,
    one second each, makes time count iterations: iteration k (from 1) starts at k - 1.
    """

    kind = "virtual"

    def __init__(self, duration: Callable[[Plan], float] = lambda plan: 1.0) -> None:
        self._now, self._duration = 0.0, duration

    def now(self) -> float:
        return self._now

    def wait_until(self, when: float) -> None:
        self._now = max(self._now, when)

    def advance(self, plan: Plan) -> None:
        seconds = self._duration(plan)
        check_float("the duration of an iteration", seconds, 0.0, math.inf)
        after = self._now + seconds
        if after == math.inf or (seconds and after == self._now):
            raise ValueError(f"the clock stands at {self._now:g} s and cannot count {seconds:g} s more")
        self._now = after
