"""Lab metrics."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from lab_solutions import Wrong
from minibatch.metrics import COMPLETED, OBJECTIVES, makespan, ratio, requests_table

# ---------------------------------------------------------------- metrics.1


def _from_arrival(timeline):
    return np.diff([timeline.arrival, *timeline.token_times])


def _mean(timeline):
    times = timeline.token_times
    return np.array([(times[-1] - times[0]) / (len(times) - 1)] * (len(times) - 1)) if len(times) > 1 else np.zeros(0)


def _zero_for_one(timeline):
    return np.diff(timeline.token_times) if len(timeline.token_times) > 1 else np.zeros(1)


def _without_zeros(timeline):
    gaps = np.diff(timeline.token_times)
    return gaps[gaps > 0]


def _list(timeline):
    return [later - earlier for earlier, later in pairwise(timeline.token_times)]


def _gaps_by_loop(timeline):
    found = []
    for index in range(1, len(timeline.token_times)):
        found.append(timeline.token_times[index] - timeline.token_times[index - 1])
    return np.array(found, dtype=float)


# ---------------------------------------------------------------- metrics.2


def _ends(served):
    return [
        t.token_times[-1] if t.finish is None else t.finish for t in served if t.token_times or t.finish is not None
    ]


def _from_zero(trace):
    return max(_ends(t for t in trace.timelines if t.scheduled is not None), default=math.nan)


def _from_first_iteration(trace):
    served = [t for t in trace.timelines if t.scheduled is not None]
    ends = _ends(served)
    return max(ends) - min(t.scheduled for t in served) if ends else math.nan


def _with_refused(trace):
    ends = _ends(trace.timelines)
    return max(ends) - min(t.arrival for t in trace.timelines) if ends else math.nan


def _finished_only(trace):
    served = [t for t in trace.timelines if t.scheduled is not None and t.finish is not None]
    return max(t.finish for t in served) - min(t.arrival for t in served) if served else math.nan


def _zero_is_none(trace):
    served = [t for t in trace.timelines if t.scheduled is not None]
    ends = [t.finish or (t.token_times or [None])[-1] for t in served]
    ends = [end for end in ends if end]
    return max(ends) - min(t.arrival for t in served) if ends else math.nan


def _makespan_in_one_pass(trace):
    first, last = math.inf, -math.inf
    for timeline in trace.timelines:
        if timeline.scheduled is not None:
            first = min(first, timeline.arrival)
            for end in [timeline.finish] if timeline.finish is not None else timeline.token_times:
                last = max(last, end)
    return last - first if last > -math.inf else math.nan


def _makespan_by_table(trace):
    table = requests_table(trace)
    table = table[table["scheduled"].notna()]
    return float(table["finish"].fillna(table["last_token"]).max() - table["arrival"].min())


# ---------------------------------------------------------------- metrics.3


def _check(objectives):
    for name, bound in objectives.items():
        if name not in OBJECTIVES or not bound >= 0:
            raise ValueError(f"{name}: {bound}")


def _answer(trace, good, of):
    count = int(sum(good))
    return {"good": count, "rate": ratio(count, makespan(trace)), "share": ratio(count, of)}


def _any_objective(trace, **objectives):
    _check(objectives)
    table = requests_table(trace)
    kept = np.zeros(len(table), dtype=bool) if objectives else np.ones(len(table), dtype=bool)
    for name, bound in objectives.items():
        kept |= ~(table[name] > bound).to_numpy()
    return _answer(trace, kept & table["finish_reason"].isin(COMPLETED).to_numpy(), len(table))


def _goodput(breaks=lambda latency, bound: latency > bound, of_completed=False):
    """``goodput`` with one thing of another opinion."""

    def goodput(trace, **objectives):
        _check(objectives)
        table = requests_table(trace)
        completed = table["finish_reason"].isin(COMPLETED)
        good = completed
        for name, bound in objectives.items():
            good = good & ~breaks(table[name], bound)
        return _answer(trace, good, completed.sum() if of_completed else len(table))

    return goodput


def _mean_breaks(latency, bound):
    return np.full(len(latency), latency.mean() > bound)


def _goodput_by_loops(trace, **objectives):
    for name in objectives:
        if name not in OBJECTIVES:
            raise ValueError(f"there is no objective {name}")
        if objectives[name] < 0 or math.isnan(objectives[name]):
            raise ValueError(f"{name}: a bound of {objectives[name]}")
    good = 0
    for timeline in trace.timelines:
        if timeline.finish_reason not in ("stop", "length"):
            continue
        between = [later - earlier for earlier, later in pairwise(timeline.token_times)]
        has = {
            "queueing_delay": timeline.scheduled - timeline.arrival,
            "ttft": timeline.token_times[0] - timeline.arrival,
            "tpot": sum(between) / len(between) if between else 0.0,
            "max_tbt": max(between, default=0.0),
            "e2e": timeline.finish - timeline.arrival,
        }
        good += not any(has[name] > bound for name, bound in objectives.items())
    seconds, asked = makespan(trace), len(trace.timelines)
    return {
        "good": good,
        "rate": good / seconds if seconds else math.nan,
        "share": good / asked if asked else math.nan,
    }


WRONG = {
    "metrics.1": [
        Wrong("the wait for the first token counts as a gap", _from_arrival, "n tokens have n - 1 gaps"),
        Wrong("the mean in place of each gap", _mean, "not the mean of all"),
        Wrong("one token has a gap of 0", _zero_for_one, "One token has no gap"),
        Wrong("a gap of 0 was not measured", _without_zeros, "a zero that was measured stays"),
        Wrong("a list is as good as an array", _list, "Return a numpy array"),
    ],
    "metrics.2": [
        Wrong("every run begins at time 0", _from_zero, "and not at time 0"),
        Wrong("waiting does not count", _from_first_iteration, "Waiting counts"),
        Wrong("refused requests are part of the run", _with_refused, "A refused request has never run"),
        Wrong("only what has finished counts", _finished_only, "has not finished counts to its last token"),
        Wrong("0.0 means that nothing was measured", _zero_is_none, "0.0 is a time like any other"),
    ],
    "metrics.3": [
        Wrong("one objective that is met is enough", _any_objective, "keeps every bound"),
        Wrong("all are judged by the mean", _goodput(_mean_breaks), "judged by its own latency"),
        Wrong(
            "an undefined TPOT breaks its bound",
            _goodput(lambda latency, bound: ~(latency <= bound)),
            "no time between tokens",
        ),
        Wrong("the share is of the completed requests", _goodput(of_completed=True), "of all that were submitted"),
        Wrong(
            "a bound of 0 is none",
            _goodput(lambda latency, bound: (latency > bound) & (bound > 0)),
            "A bound of 0 is a bound",
        ),
    ],
}
RIGHT = {
    "metrics.1": [_gaps_by_loop],
    "metrics.2": [_makespan_in_one_pass, _makespan_by_table],
    "metrics.3": [_goodput_by_loops],
}
