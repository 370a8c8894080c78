"""Means over seeds, with the confidence interval that a handful of them allows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from minibatch.sweep import mean_and_half_width


class Spread(NamedTuple):
    """``half``: half the width of the two-sided 95 % confidence interval of the mean (Student's t); infinite with one
    value, or if one is."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:.3g} ± {self.half:.2g}"


def spread(values: Iterable[float]) -> Spread:
    """Of independent values, one a seed. Raises ValueError if there is none."""
    values = np.asarray(list(values), dtype=float)
    if not len(values):
        raise ValueError("no values, and so no mean")
    if len(values) == 1 or not np.isfinite(values).all():
        return Spread(float(values.mean()), float("inf"))
    return Spread(*mean_and_half_width(values))
