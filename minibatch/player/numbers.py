"""Numbers as the stepper writes them: never with an exponent where thousands separators do; a dash for NaN."""

from __future__ import annotations

import math
from collections.abc import Iterable

MOST_DECIMALS = 9  # beyond, a double is noise after some days


def decimals_of(durations: Iterable[float]) -> int:
    """Decimals of a second that leave two digits of the shortest of those that take time; 3 if none does."""
    shortest = min((duration for duration in durations if duration > 0), default=0.01)
    return min(max(1 - math.floor(math.log10(shortest)), 0), MOST_DECIMALS)


def clock(time: float, decimals: int) -> str:
    """A moment, with decimals that are the whole run's, so that iterations can be told apart: ``1,234.567 s``."""
    if 0 < abs(time) < 0.1:
        return f"{_fixed(1000 * time, max(decimals - 3, 0))} ms"
    return f"{_fixed(time, decimals)} s"


def _fixed(value: float, decimals: int) -> str:
    whole, _, rest = f"{value:,.{decimals}f}".partition(".")
    return f"{whole}.{rest}" if rest.strip("0") else whole


def seconds(time: float) -> str:
    """A duration, to three or four digits: ``0.35 ms``, ``12.5 s``, ``12,346 s``."""
    if 0 < abs(time) < 0.1:
        return f"{1000 * time:.3g} ms"
    return "–" if time != time else f"{time:,.0f} s" if abs(time) >= 999.95 else f"{time:.4g} s"


def amount(value: float) -> str:
    """To three digits: ``0.25``, ``84.3``; a whole one from 1,000 on."""
    return "–" if value != value else f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def share(value: float) -> str:
    return "–" if value != value else f"{100 * value:.0f} %"
