"""What things cost on this machine: the numbers behind ``minibatch bench``, one part a module.

    bench_engines.py    --engines    how fast is this engine, beside others on the same work?
    bench_floor.py      --floor      and beside the time in which memory can be read at all?
    bench_planning.py   --planning   does deciding take time that the model could compute in?
    bench_swap.py       --swap       from which length on is it cheaper to copy K/V than to compute it again?
    bench_simulation.py --simulation how far is a simulated run from a measured one?
    bench_scale.py      --scale      what does a simulation of thousands of requests cost?

This module has what the parts share: how to time, how to say what was measured where.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minibatch.compare import machine
from minibatch.trace import versions


@dataclass(frozen=True)
class Times:
    """Milliseconds of one thing that was done ``count`` times."""

    count: int
    median: float
    p10: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        return cls(len(seconds), *(1000 * np.percentile(seconds, [50, 10, 90, 99])).tolist())


def timed(what: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds that passed, seconds that this thread computed, and what was returned.

    Without the garbage collector, as in ``timeit``: it would charge one call with the garbage of many.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        start, cpu = time.perf_counter(), time.thread_time()
        result = what()
        return time.perf_counter() - start, time.thread_time() - cpu, result
    finally:
        if collecting:
            gc.enable()


def load_average() -> float | None:
    """Processes that wanted a core, on average over the last minute; None where that is not known."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


class Busy:
    """Who else had the machine during a ``with`` block, on Linux: its processors' own account of their time."""

    def __enter__(self) -> Busy:
        self._started, self._before = time.perf_counter(), _processor_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds = time.perf_counter() - self._started
        after = _processor_seconds()
        self._busy, self._stolen = (b - a for a, b in zip(self._before, after, strict=True))

    def others(self, own: float) -> float:
        """Cores that other processes had on average; ``own``: seconds of CPU that were ours. NaN if not known."""
        return max((self._busy - own) / self._seconds, 0.0) if self._busy == self._busy else math.nan

    @property
    def stolen(self) -> float:
        """Cores that the hypervisor gave to somebody else while processes here wanted them; NaN if not known."""
        return self._stolen / self._seconds


def _processor_seconds() -> tuple[float, float]:
    """All processors since the machine was started: at work, and stolen by other virtual machines."""
    try:
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    except (OSError, ValueError):
        return math.nan, math.nan
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / ticks, steal / ticks


def where(load: float | None) -> dict[str, Any]:
    """The machine, its load average before anything was measured, and the versions: what the numbers are numbers of."""
    return {"machine": machine(), "cores": os.cpu_count(), "load_average": load, "versions": versions()}


def describe_where(facts: dict[str, Any]) -> str:
    load = facts["load_average"]
    shown = "load average unknown" if load is None else f"load average {load:.2f} on {facts['cores']} cores"
    if load is not None and load > 0.5:
        shown += " before it began: the machine was not quiet, so trust the ratios more than the times"
    packages = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return f"machine     {facts['machine']}; {shown}\nversions    {packages}"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns of text, the first aligned at the left, the others at the right."""
    lines = [list(titles), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
