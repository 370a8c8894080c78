"""Latency and throughput, as pure functions of a :class:`~minibatch.trace.Trace`. What every word means:

``queueing_delay``  arrival to the start of the first iteration that computes any of the request's tokens
``ttft``            time to first token: arrival to the end of the iteration that emits it
``tbt``             time between tokens: the n - 1 gaps of n tokens; a stall or a preemption is inside the gap it makes
``tpot``            time per output token: the mean TBT of one request; undefined for a single token
``e2e``             arrival to finish

The arrival is the *planned* one, so time spent before the engine even saw the request counts as waiting. Only completed
requests (finish reason ``stop`` or ``length``) are averaged; aborted, rejected and unfinished ones are counted apart.
What was not measured is NaN, never 0.0, which is a possible value. All of it is in seconds on the trace's clock.
Percentiles interpolate linearly between order statistics (numpy's default, ``method="linear"``).

The words are those of Orca (OSDI 2022), Sarathi-Serve (OSDI 2024: TBT) and DistServe (OSDI 2024: TPOT, goodput). A mean
hides who pays: :func:`split` gives the same numbers a client, a priority or a length class.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from minibatch.trace import StepCounts, Timeline, Trace

COMPLETED = ("stop", "length")
LATENCIES = ("queueing_delay", "ttft", "tbt", "tpot", "e2e")
OBJECTIVES = ("queueing_delay", "ttft", "tpot", "max_tbt", "e2e")

# Column -> dtype, so that an empty table has the types of a full one. A float column can be NaN: not measured.
REQUEST_COLUMNS = {
    "request_id": str,
    "group": object,
    "client": str,
    "priority": int,
    "num_prompt": int,
    "num_generated": int,
    "max_new_tokens": int,
    "arrival": float,
    "scheduled": float,
    "first_token": float,
    "last_token": float,
    "finish": float,
    "finish_reason": object,
    "num_preemptions": int,
    "num_cached": int,
    "num_recached": int,
    "num_swapped": int,
    "queueing_delay": float,
    "ttft": float,
    "tpot": float,
    "max_tbt": float,
    "e2e": float,
}
STEP_DTYPES = {name: float if name in ("start", "end", "token_budget") else int for name in StepCounts._fields}


def gaps(timeline: Timeline) -> np.ndarray:
    """The TBTs of one request: float64 ``[tokens - 1]``, empty for fewer than two tokens."""
    return np.diff(np.asarray(timeline.token_times, dtype=np.float64))


def requests_table(trace: Trace) -> pd.DataFrame:
    """One row a request, in the order of the trace: who, how much, when, and the latencies that follow from it.

    With ``n > 1`` a row an answer; ``group`` is the request's id (else missing), and ``num_prompt`` is that of each.

    Rows of aborted, rejected and unfinished requests hold what was measured before they ended. ``max_tbt`` is the
    longest gap: the worst stall that this user saw.
    """
    return _table((_request_row(t, gaps(t)) for t in trace.timelines), REQUEST_COLUMNS)


def steps_table(trace: Trace) -> pd.DataFrame:
    """One row an iteration: when, how many tokens of which kind, who came and went, where the rows of the cache are.

    ``padding`` counts all padding, ``dead_padding`` the part of it in rows of finished requests; ``num_seqs`` is the
    number of requests that computed something. ``token_budget`` is NaN where the scheduler sets none. ``cached``,
    ``swapped_out``, ``swapped_in`` and ``copied_rows`` count tokens; ``kv_host`` is memory of the host.
    """
    counts = np.array(trace.counts, dtype=np.float64).reshape(-1, len(StepCounts._fields))  # None becomes NaN
    table = pd.DataFrame(counts, columns=list(StepCounts._fields)).astype(STEP_DTYPES)
    table.insert(3, "duration", table["end"] - table["start"])
    table["num_tokens"] = table[["prefill", "decode", "recomputed", "padding"]].sum(axis=1)
    return table


def _request_row(timeline: Timeline, between: np.ndarray) -> dict[str, Any]:
    first, last = (timeline.token_times[0], timeline.token_times[-1]) if timeline.token_times else (None, None)
    return {
        "request_id": timeline.request_id,
        "group": timeline.group,
        "client": timeline.client,
        "priority": timeline.priority,
        "num_prompt": timeline.num_prompt,
        "num_generated": len(timeline.token_times),
        "max_new_tokens": timeline.max_new_tokens,
        "arrival": timeline.arrival,
        "scheduled": timeline.scheduled,
        "first_token": first,
        "last_token": last,
        "finish": timeline.finish,
        "finish_reason": timeline.finish_reason,
        "num_preemptions": timeline.num_preemptions,
        "num_cached": timeline.num_cached,
        "num_recached": timeline.num_recached,
        "num_swapped": timeline.num_swapped,
        "queueing_delay": _since(timeline.arrival, timeline.scheduled),
        "ttft": _since(timeline.arrival, first),
        "tpot": between.mean() if between.size else None,
        "max_tbt": between.max() if between.size else None,
        "e2e": _since(timeline.arrival, timeline.finish),
    }


def _since(arrival: float, event: float | None) -> float | None:
    return None if event is None else event - arrival


def _table(rows: Iterable[dict[str, Any]], columns: dict[str, type]) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=list(columns)).astype(columns)


def makespan(trace: Trace) -> float:
    """First arrival to last finish (last token, of a request that has not finished), of the requests that ever ran.

    NaN if none did, or none of them has got as far as a token or an end.
    """
    served = [t for t in trace.timelines if t.scheduled is not None]
    ends = [t.finish for t in served if t.finish is not None]
    ends += [t.token_times[-1] for t in served if t.finish is None and t.token_times]
    return max(ends) - min(t.arrival for t in served) if ends else math.nan


def summary(trace: Trace) -> dict[str, float]:
    """The run in one flat dict: counts, rates, and mean, P50, P99 and maximum of each latency.

    ``completed``, ``aborted``, ``rejected``, ``unfinished``  requests, by how they ended (with ``n > 1``: answers)
    ``prompt_tokens``, ``generated_tokens``  of all requests that were not refused, aborted ones included
    ``preemptions``         how often a request lost its place
    ``cached_tokens``       prompt tokens that were found in a prefix cache, or shared with another answer, and so were
                            never computed; ``recached_tokens``: found after a preemption, perhaps one's own
    ``swapped_tokens``      tokens whose K/V was copied to host memory (times the header's ``kv_bytes_per_token`` is
                            the traffic, in each direction)
    ``makespan``            seconds from the first arrival to the last finish
    ``throughput``          generated tokens a second of makespan
    ``request_throughput``  completed requests a second of makespan
    ``iterations``          NaN if the trace was kept without step reports
    ``<latency>_<statistic>``  of completed requests; ``tbt`` is pooled over all their gaps, so that long outputs weigh
                            more, while ``tpot`` counts every request once
    """
    numbers = _summary(trace.timelines, makespan(trace))
    return {"iterations": trace.num_steps if steps_kept(trace) else math.nan, **numbers}


def steps_kept(trace: Trace) -> bool:
    """False if tokens were generated, and nothing is known of the iterations that made them."""
    return bool(trace.steps or trace.light) or not any(t.token_times for t in trace.timelines)


def _summary(timelines: Sequence[Timeline], duration: float) -> dict[str, float]:
    completed = [t for t in timelines if t.finish_reason in COMPLETED]
    served = [t for t in timelines if t.finish_reason != "rejected"]
    generated = sum(len(t.token_times) for t in served)
    numbers: dict[str, float] = {
        "completed": len(completed),
        "aborted": sum(t.finish_reason == "abort" for t in timelines),
        "rejected": len(timelines) - len(served),
        "unfinished": sum(t.finish_reason is None for t in timelines),
        "prompt_tokens": sum(t.num_prompt for t in served),
        "generated_tokens": generated,
        "preemptions": sum(t.num_preemptions for t in timelines),
        "cached_tokens": sum(t.num_cached for t in timelines),
        "recached_tokens": sum(t.num_recached for t in timelines),
        "swapped_tokens": sum(t.num_swapped for t in timelines),
        "makespan": duration,
        "throughput": ratio(generated, duration),
        "request_throughput": ratio(len(completed), duration),
    }
    for name, values in _latencies(completed).items():
        numbers |= {f"{name}_{statistic}": value for statistic, value in describe(values).items()}
    return numbers


def latencies(trace: Trace) -> dict[str, np.ndarray]:
    """The values behind the summary, of completed requests: one a request, but ``tbt`` one a gap and ``tpot`` one a
    request that has two tokens."""
    return _latencies([t for t in trace.timelines if t.finish_reason in COMPLETED])


def _latencies(completed: Sequence[Timeline]) -> dict[str, np.ndarray]:
    between = [gaps(t) for t in completed]
    table = _table(map(_request_row, completed, between), REQUEST_COLUMNS)
    values = {name: table[name].dropna().to_numpy() for name in LATENCIES if name != "tbt"}
    values["tbt"] = np.concatenate([np.empty(0), *between])
    return {name: values[name] for name in LATENCIES}


def describe(values: np.ndarray) -> dict[str, float]:
    """Mean, P50, P99 and maximum; NaN for all of them if there is no value."""
    if not len(values):
        return dict.fromkeys(("mean", "p50", "p99", "max"), math.nan)
    p50, p99 = np.percentile(values, [50, 99])
    return {"mean": float(np.mean(values)), "p50": float(p50), "p99": float(p99), "max": float(np.max(values))}


def ratio(part: float, whole: float) -> float:
    """``part / whole``, NaN where there is no whole."""
    return part / whole if whole else math.nan


def split(trace: Trace, by: str, edges: Sequence[int] = ()) -> pd.DataFrame:
    """The summary for each group of requests; index: the group.

    ``by``     ``client``, ``priority``, ``prompt_length`` or ``output_length`` (tokens generated)
    ``edges``  ascending lengths at which a new class begins: ``(128, 1024)`` makes ``<128``, ``128-1023``, ``>=1024``

    Counts and rates add up to those of the whole run: every group is divided by the same makespan.
    """
    if by in ("client", "priority"):
        key = {t.request_id: getattr(t, by) for t in trace.timelines}
        names: Sequence[Any] = sorted(set(key.values()))
    elif by in ("prompt_length", "output_length"):
        names = _class_names(edges)
        lengths = {t.request_id: t.num_prompt if by[0] == "p" else len(t.token_times) for t in trace.timelines}
        key = {i: names[int(np.searchsorted(edges, length, side="right"))] for i, length in lengths.items()}
    else:
        raise ValueError(f"by must be client, priority, prompt_length or output_length, got {by!r}")
    duration = makespan(trace)
    groups = [_summary([t for t in trace.timelines if key[t.request_id] == name], duration) for name in names]
    columns = list(_summary([], duration))
    return pd.DataFrame(groups, index=pd.Index(names, name=by), columns=columns)


def _class_names(edges: Sequence[int]) -> list[str]:
    if not len(edges) or any(low >= high for low, high in pairwise(edges)):
        raise ValueError(f"length classes need ascending edges such as (128, 1024), got {edges!r}")
    between = [f"{low}-{high - 1}" for low, high in pairwise(edges)]
    return [f"<{edges[0]}", *between, f">={edges[-1]}"]


def goodput(trace: Trace, **objectives: float) -> dict[str, float]:
    """How many requests met *all* objectives: ``good`` requests, ``rate`` a second of makespan, ``share`` of all.

    ``objectives``  upper bounds in seconds on a request's ``queueing_delay``, ``ttft``, ``tpot``, ``max_tbt``, ``e2e``

    Only a completed request can be good; the share is of all submitted ones, so that refusing work does not raise it.
    An undefined TPOT (one token) passes. Raises ValueError for an unknown objective and a bound that is not >= 0.
    """
    for name, bound in objectives.items():
        if name not in OBJECTIVES:
            raise ValueError(f"unknown objective {name!r}: there are {', '.join(OBJECTIVES)}")
        if not bound >= 0:
            raise ValueError(f"objective {name} must be a number of seconds >= 0, got {bound!r}")
    table = requests_table(trace)
    good = table["finish_reason"].isin(COMPLETED)
    for name, bound in objectives.items():
        good &= ~(table[name] > bound)  # written so that NaN, undefined, passes
    count = int(good.sum())
    return {"good": count, "rate": ratio(count, makespan(trace)), "share": ratio(count, len(table))}
