"""Many scenarios, one tidy table: how the numbers depend on a rate, a budget, a policy, with an interval over seeds.

    rows = sweep(grid(Scenario(), rate=[2, 4, 8], scheduler=["paged", "chunked"]), seeds=5)
    table = summarise(rows)

All scenarios of one seed see the same requests (common random numbers), so that a difference between two rows is due to
what differs between them; which is also why the difference of two means is known better than each of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from minibatch.capacity import highest_rate
from minibatch.checks import check_int
from minibatch.metrics import goodput
from minibatch.parallel import run_all
from minibatch.scenario import Scenario, numbers

FIELDS = tuple(field.name for field in fields(Scenario))


def grid(base: Scenario, **values: Sequence[Any]) -> list[Scenario]:
    """Every combination of the values, the last one changing fastest. Raises ValueError for what is no such field."""
    if unknown := set(values) - set(FIELDS):
        raise ValueError(f"a scenario has no {', '.join(sorted(unknown))}: there are {', '.join(FIELDS)}")
    return [
        replace(base, **dict(zip(values, combination, strict=True)))
        for combination in itertools.product(*values.values())
    ]


def sweep(
    scenarios: Sequence[Scenario],
    seeds: int = 1,
    *,
    objectives: Mapping[str, float] | None = None,
    jobs: int | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """One row a scenario and seed: the scenario's fields, then its numbers (see :func:`minibatch.scenario.numbers`).

    ``seeds``       each scenario runs with its own seed, and the following ones
    ``objectives``  upper bounds in seconds, as of :func:`minibatch.metrics.goodput`: adds ``good_share``
    ``jobs``        processes; None: all cores, or what joblib's ``parallel_config`` says
    """
    check_int("seeds", seeds, 1)
    runs = [replace(s, seed=s.seed + index) for s in scenarios for index in range(seeds)]
    return pd.DataFrame(run_all(_row, [(run, dict(objectives or {})) for run in runs], jobs, progress))


def capacity(
    scenarios: Sequence[Scenario],
    slo: Mapping[str, float],
    low: float,
    high: float,
    *,
    tolerance: float = 0.05,
    seeds: int = 1,
    jobs: int | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """One row a scenario and seed: its fields, and between which rates it stops to meet the service level objective.

    ``slo``  upper bounds on numbers of a run (see :func:`minibatch.scenario.numbers`), such as ``{"tbt_p99": 0.1}``;
             requests that did not complete meet none

    ``capacity`` is the highest rate that met it, ``capacity_below`` the lowest that did not (see ``capacity.py``).
    """
    check_int("seeds", seeds, 1)
    runs = [replace(s, seed=s.seed + index) for s in scenarios for index in range(seeds)]
    calls = [(run, dict(slo), low, high, tolerance) for run in runs]
    return pd.DataFrame(run_all(_capacity, calls, jobs, progress))


def _capacity(scenario: Scenario, slo: dict[str, float], low: float, high: float, tolerance: float) -> dict[str, Any]:
    found = highest_rate(lambda rate: meets(numbers(replace(scenario, rate=rate).run()), slo), low, high, tolerance)
    return {**asdict(scenario), "capacity": found.passed, "capacity_below": found.failed}


def meets(found: Mapping[str, float], slo: Mapping[str, float]) -> bool:
    """Whether all requests completed, and every number is within its bound. Raises ValueError for an unknown number."""
    if unknown := set(slo) - set(found):
        raise ValueError(f"no number {', '.join(sorted(unknown))}: there are {', '.join(found)}")
    everybody = not (found["aborted"] or found["rejected"] or found["unfinished"])
    return everybody and all(found[name] <= bound for name, bound in slo.items())


def _row(scenario: Scenario, objectives: dict[str, float]) -> dict[str, Any]:
    trace = scenario.run()
    good = {"good_share": goodput(trace, **objectives)["share"]} if objectives else {}
    return {**asdict(scenario), **numbers(trace), **good}


def summarise(rows: pd.DataFrame, level: float = 0.95) -> pd.DataFrame:
    """One row a scenario: each number's mean over the seeds, and, as ``<number>_ci``, half of its confidence interval.

    Student's t, for the mean of independent seeds; NaN for a single one. ``seeds``: how many there were.
    """
    keys = [name for name in FIELDS if name != "seed"]
    measured = [name for name in rows.columns if name not in FIELDS]
    table = []
    for key, group in rows.groupby(keys, sort=False, dropna=False):
        row = dict(zip(keys, key, strict=True)) | {"seeds": len(group)}
        for name in measured:
            row[name], row[f"{name}_ci"] = mean_and_half_width(group[name].to_numpy(dtype=float), level)
        table.append(row)
    return pd.DataFrame(table)


def mean_and_half_width(values: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """The mean of independent values, and half of its confidence interval (Student's t); NaN for fewer than two."""
    mean = float(np.mean(values)) if len(values) else math.nan
    if len(values) < 2:
        return mean, math.nan
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, float(stdtrit(len(values) - 1, (1 + level) / 2)) * spread


def varied(table: pd.DataFrame) -> list[str]:
    """The fields of a scenario that are not the same in all rows."""
    return [name for name in FIELDS if name in table and table[name].nunique(dropna=False) > 1]
