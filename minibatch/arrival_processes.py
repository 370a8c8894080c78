"""When requests arrive, in an open loop: planned, absolute times that do not depend on how the engine keeps up.

Each process is a frozen dataclass with ``times(rng, n)``. A rate only scales the gaps: at another rate the same
requests come with the same pattern, so that two points of a rate sweep differ in the rate and in nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from minibatch.checks import check_float
from minibatch.distributions import Described, parse


class ArrivalProcess(Described):
    """A pattern of arrivals, observed from time 0."""

    @property
    def mean_rate(self) -> float:
        """Arrivals a second in the long run."""
        return self.rate

    def times(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """The first ``n`` arrival times in seconds, float64, ascending."""
        raise NotImplementedError

    def at_rate(self, rate: float) -> ArrivalProcess:
        """The same pattern, faster or slower, with this mean rate."""
        _check_rate(rate)
        return replace(self, rate=rate)


@dataclass(frozen=True)
class AllAtOnce(ArrivalProcess):
    """Everything at time 0: offline batch work."""

    name: ClassVar[str] = "all"

    @property
    def mean_rate(self) -> float:
        return math.inf

    def times(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return np.zeros(n)

    def at_rate(self, rate: float) -> ArrivalProcess:
        raise ValueError(f"requests that arrive all at once have no rate that could be changed to {rate!r}")


@dataclass(frozen=True)
class Evenly(ArrivalProcess):
    """One every ``1 / rate`` seconds, the first at 0."""

    rate: float
    name: ClassVar[str] = "uniform"

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def times(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return np.arange(n) / self.rate


@dataclass(frozen=True)
class Poisson(ArrivalProcess):
    """Independent users, ``rate`` arrivals a second: exponential gaps, the first one before the first arrival."""

    rate: float
    name: ClassVar[str] = "poisson"

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def times(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return np.cumsum(rng.standard_exponential(n)) / self.rate


@dataclass(frozen=True)
class Gamma(ArrivalProcess):
    """Gamma-distributed gaps with coefficient of variation ``cv``: 1 is Poisson, above it bursty, below it regular."""

    rate: float
    cv: float
    name: ClassVar[str] = "gamma"

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        check_float("cv", self.cv, 0.0, math.inf, above=True)

    def times(self, rng: np.random.Generator, n: int) -> np.ndarray:
        shape = self.cv**-2
        return np.cumsum(rng.standard_gamma(shape, n)) / (shape * self.rate)


@dataclass(frozen=True)
class OnOff(ArrivalProcess):
    """Poisson arrivals, ``rate`` a second, for ``on`` seconds, then none for ``off`` seconds, and so on."""

    rate: float
    on: float
    off: float
    name: ClassVar[str] = "onoff"

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        check_float("on", self.on, 0.0, math.inf, above=True)
        check_float("off", self.off, 0.0, math.inf)

    @property
    def mean_rate(self) -> float:
        return self.rate * self.on / (self.on + self.off)

    def times(self, rng: np.random.Generator, n: int) -> np.ndarray:
        busy = Poisson(self.rate).times(rng, n)  # on a clock that stands still while it is off
        return busy + np.floor(busy / self.on) * self.off

    def at_rate(self, rate: float) -> OnOff:
        """``on`` and ``off`` shrink as the rate grows: a burst keeps its requests."""
        _check_rate(rate)
        factor = rate / self.mean_rate
        return OnOff(self.rate * factor, self.on / factor, self.off / factor)


ARRIVALS = {kind.name: kind for kind in (AllAtOnce, Evenly, Poisson, Gamma, OnOff)}


def parse_arrivals(text: str) -> ArrivalProcess:
    """``all``, ``uniform:RATE``, ``poisson:RATE``, ``gamma:RATE,CV`` or ``onoff:RATE,ON,OFF``; rates are a second.

    Raises ValueError that says what is wrong and which forms there are.
    """
    return parse("arrivals", text, ARRIVALS)


def _check_rate(rate: float) -> None:
    check_float("rate", rate, 0.0, math.inf, above=True)
