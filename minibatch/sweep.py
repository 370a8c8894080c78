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
from minibatch.checks import check_float, check_int
from minibatch.metrics import LATENCIES, goodput, summary
from minibatch.parallel import run_all
from minibatch.scenario import Scenario, numbers
from minibatch.trace import Trace

FEWEST = 50  # requests of a run that is to say something about a rate
FIELDS = tuple(field.name for field in fields(Scenario))


def grid(base: Scenario, **values: Sequence[Any]) -> list[Scenario]:
    """Every combination of the values, each once, the last one changing fastest. ValueError for an unknown field."""
    if unknown := set(values) - set(FIELDS):
        raise ValueError(f"a scenario has no {', '.join(sorted(unknown))}: there are {', '.join(FIELDS)}")
    return [
        replace(base, **dict(zip(values, combination, strict=True)))
        for combination in itertools.product(*map(dict.fromkeys, values.values()))
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

    ``seeds``       each scenario runs with its own seed, and the following ones; once, if nothing in it is drawn
    ``objectives``  upper bounds in seconds, as of :func:`minibatch.metrics.goodput`: adds ``good_share``
    ``jobs``        processes; None: all cores, or what joblib's ``parallel_config`` says
    """
    calls = [(run, dict(objectives or {})) for run in seeded(scenarios, seeds)]
    return pd.DataFrame(run_all(_row, calls, jobs, progress))


def seeded(scenarios: Sequence[Scenario], seeds: int) -> list[Scenario]:
    """Each scenario with its own seed and the following ones, none twice: a repetition tells nothing new."""
    check_int("seeds", seeds, 1)
    return list(
        dict.fromkeys(
            replace(scenario, seed=scenario.seed + index)
            for scenario in scenarios
            for index in range(seeds if scenario.is_drawn else 1)
        )
    )


def _row(scenario: Scenario, objectives: dict[str, float]) -> dict[str, Any]:
    trace = scenario.run()
    good = {"good_share": goodput(trace, **objectives)["share"]} if objectives else {}
    return {**asdict(scenario), **numbers(trace), **good}


def capacity(
    scenarios: Sequence[Scenario],
    slo: Mapping[str, float],
    low: float,
    high: float,
    *,
    seconds: float = 120.0,
    tolerance: float = 0.05,
    seeds: int = 1,
    jobs: int | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """One row a scenario and seed: its fields, and between which rates it stops to sustain the load.

    ``slo``      upper bounds in seconds on latencies of a run, such as ``{"tbt_p99": 0.1}``: those of
                 :func:`minibatch.metrics.summary`
    ``seconds``  for how long requests arrive at each rate. (A recorded trace is as long as it is, and at a higher rate
                 shorter.)

    The load is sustained if the bounds hold for all requests, and for those that arrive in the last half alone: a queue
    that grows takes time to show. ``capacity`` is the highest rate that was sustained, 0 if the lowest was not;
    ``capacity_below`` the lowest that was not, infinite if the highest was (see ``capacity.py``).

    Raises ValueError for a bound that is none, or a workload of which some requests are refused at any rate.
    """
    check_slo(slo)
    check_float("seconds", seconds, 0.0, math.inf, above=True)
    calls = [(run, dict(slo), low, high, tolerance, seconds) for run in seeded(scenarios, seeds)]
    return pd.DataFrame(run_all(_capacity, calls, jobs, progress))


def check_slo(slo: Mapping[str, float]) -> None:
    """Raises ValueError unless these are upper bounds of latencies."""
    known = [f"{latency}_{statistic}" for latency in LATENCIES for statistic in ("mean", "p50", "p99", "max")]
    for name, bound in slo.items():
        if name not in known:
            raise ValueError(f"no latency {name}: there are {', '.join(known)}")
        check_float(name, bound, 0.0, math.inf)


def _capacity(
    scenario: Scenario, slo: dict[str, float], low: float, high: float, tolerance: float, seconds: float
) -> dict[str, Any]:
    def sustained(rate: float) -> bool:
        number = max(math.ceil(rate * seconds), FEWEST) if scenario.is_drawn else scenario.num_requests
        return sustains(replace(scenario, rate=rate, num_requests=number).run(), slo)

    found = highest_rate(sustained, low, high, tolerance)
    return {**asdict(scenario), "capacity": found.passed, "capacity_below": found.failed}


def sustains(trace: Trace, slo: Mapping[str, float]) -> bool:
    """Whether the bounds hold for all requests, and for those that arrived in the last half of the time alone. What is
    not defined, such as gaps between tokens of answers of one, breaks no bound. Raises ValueError if some were refused.
    """
    refused = [timeline for timeline in trace.timelines if timeline.finish_reason == "rejected"]
    if refused:
        raise ValueError(
            f"{len(refused)} of {len(trace.timelines)} requests are refused at any rate, the first: {refused[0].error}"
        )
    times = [timeline.arrival for timeline in trace.timelines]
    half = (min(times) + max(times)) / 2
    late = Trace(trace.meta, timelines=[timeline for timeline in trace.timelines if timeline.arrival >= half])
    return all(not summary(part)[name] > bound for part in (trace, late) for name, bound in slo.items())


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
    """The mean of independent values, and half of its confidence interval (Student's t); NaN for fewer than two
    values, or if one is not finite."""
    mean = float(np.mean(values)) if len(values) else math.nan
    if len(values) < 2 or not np.isfinite(values).all():
        return mean, math.nan
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, float(stdtrit(len(values) - 1, (1 + level) / 2)) * spread


def varied(table: pd.DataFrame) -> list[str]:
    """The fields of a scenario that are not the same in all rows."""
    return [name for name in FIELDS if name in table and table[name].nunique(dropna=False) > 1]
