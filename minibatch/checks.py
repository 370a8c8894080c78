"""Numbers from outside, looked at once: each raises the error of its caller's kind, naming value and range."""

from __future__ import annotations

import math
from numbers import Integral, Real


def check_int(name: str, value: object, low: int, error: type[ValueError] = ValueError) -> None:
    """Raises unless ``value`` is a whole number of at least ``low``; True is not 1 here."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < low:
        raise error(f"{name} must be an integer of at least {low}, got {value!r}")


def check_float(
    name: str, value: object, low: float, high: float, error: type[ValueError] = ValueError, above: bool = False
) -> None:
    """Raises unless ``value`` is a finite number from ``low`` (or ``above`` it) to ``high``."""
    if not (is_finite(value) and low <= value <= high and not (above and value == low)):
        ends = f"{'(' if above else '['}{low:g}, {high:g}{')' if high == math.inf else ']'}"
        raise error(f"{name} must lie in {ends}, got {value!r}")


def is_finite(value: object) -> bool:
    """Whether it is a real number that fits a float: not NaN, not infinite, not a truth value."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False
