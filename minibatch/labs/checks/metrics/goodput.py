"""Goodput: requests a second that keep every bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st
from matplotlib.figure import Figure

from minibatch import metrics
from minibatch.labs.checks.metrics.makespan import from_definition
from minibatch.labs.checks.metrics.timelines import MANY, a_run, looked_at, refused, timeline, told
from minibatch.labs.counterexample import expect, in_words, raised, same
from minibatch.labs.properties import for_all
from minibatch.labs.strips import RIGHT, WRONG, Cell, strips
from minibatch.trace import Timeline, Trace

Bounds = Mapping[str, float]
Goodput = Callable[..., dict[str, float]]

NAN = math.nan
OWN = "Each request is judged by its own latency, and not by the mean of all, or of those before it."
EVERY = "A request is good only if it keeps every bound: one broken is enough."
SINGLE = "With a single token there is no time between tokens, and nothing that breaks its bound."
TPOT = "tpot is the mean gap of a request: one stall may hide in it."
MAX_TBT = "max_tbt is the longest gap of a request: no stall hides in it."
STOP = "Both ways to be completed are good: at the length, and with a stop."
ABORTED = "A request that was aborted is not good, however fast its tokens came."
RUNS = "A request that has not finished is not good yet."
REFUSED = "A refused request is not good, although it has no latency that breaks a bound."
EQUAL = "A latency that equals its bound keeps it; all of them count from the arrival."
ZERO = "A bound of 0 is a bound: only who never waited keeps it."
NO_BOUND = "Without a bound every completed request is good."
INFINITE = "A bound that is infinite is kept by all."
UNKNOWN = "A name that is no objective is an error, else a slip of the pen makes everybody good."
NUMBER = "A bound is a number of seconds, 0 or more; anything else is an error, and not a run in which nobody is good."


def check(part: Goodput) -> None:
    for idea, timelines, bounds, want in BY_HAND:
        _of(part, timelines, bounds, want, idea)
    for idea, timelines, bounds in ERRORS:
        _refused(part, timelines, bounds, idea)
    for idea, timelines, bounds, want in OF_NOTHING:
        _of(part, timelines, bounds, want, idea)
    idea = "Good are the completed requests that keep every bound."
    bound = st.integers(0, 10).map(lambda n: n / 2)
    for_all(
        lambda timelines, bounds: _of(part, timelines, bounds, _from_definition(timelines, bounds), idea),
        timelines=MANY,
        bounds=st.dictionaries(st.sampled_from(metrics.OBJECTIVES), bound, max_size=5),
    )
    _in_a_run(part)


# --- by hand ---

A, B = timeline((1, 2)), timeline((7, 8), 2, name="b")
WAITS = timeline((4, 5), 2)
STALLS = timeline((1, 2, 3, 10))
ONE = timeline((10,), 9, name="d")
MIXED = [A, timeline((2, 6), name="b"), timeline((8, 9), name="c")]
BY_HAND = (  # requests and bounds; how many are good, their rate, their share
    (OWN, [timeline((1,)), timeline((1,), name="b"), timeline((8,), name="c")], {"ttft": 5}, (2, 2 / 8, 2 / 3)),
    (OWN, [A, timeline((1, 8), name="b"), timeline((1, 2), name="c")], {"tpot": 2}, (2, 2 / 8, 2 / 3)),
    (EVERY, MIXED, {"ttft": 5, "tpot": 2}, (1, 1 / 9, 1 / 3)),
    (SINGLE, [*MIXED, ONE], {"ttft": 5, "tpot": 2}, (2, 0.2, 0.5)),
    (SINGLE, [ONE], {"max_tbt": 1}, (1, 1, 1)),
    (TPOT, [STALLS], {"tpot": 5}, (1, 0.1, 1)),
    (MAX_TBT, [STALLS], {"max_tbt": 5}, (0, 0, 0)),
    (STOP, [A, timeline((1, 4), 0, "stop", "b")], {"ttft": 5}, (2, 0.5, 1)),
    (ABORTED, [A, timeline((1, 2), 0, "abort", "b", finish=4)], {"ttft": 5}, (1, 0.25, 0.5)),
    (RUNS, [A, timeline((1, 4), 0, None, "b")], {"ttft": 5}, (1, 0.25, 0.5)),
    (REFUSED, [A, refused(0, "b"), refused(0, "c"), refused(0, "d")], {"ttft": 5}, (1, 0.5, 0.25)),
    (EQUAL, [WAITS, B], {"queueing_delay": 1}, (1, 1 / 6, 0.5)),
    (EQUAL, [WAITS, B], {"ttft": 2}, (1, 1 / 6, 0.5)),
    (EQUAL, [WAITS, timeline((4, 8), 2, name="b")], {"e2e": 3}, (1, 1 / 6, 0.5)),
    (ZERO, [timeline((3, 4), 2), B], {"queueing_delay": 0}, (1, 1 / 6, 0.5)),
    (NO_BOUND, [WAITS, B], {}, (2, 2 / 6, 1)),
    (INFINITE, [WAITS, B], {"ttft": math.inf}, (2, 2 / 6, 1)),
)
ERRORS = (
    (UNKNOWN, [A], {"tppt": 0.5}),
    (UNKNOWN, [A], {"arrival": 5}),
    (NUMBER, [A], {"ttft": -1}),
    (NUMBER, [A], {"ttft": 5, "tpot": -0.5}),
    (NUMBER, [A], {"ttft": NAN}),
    (UNKNOWN, [], {"tppt": 0.5}),
    (NUMBER, [], {"ttft": -1}),
)
OF_NOTHING = (
    ("No requests: none is good.", [], {"ttft": 1}, (0, NAN, NAN)),
    ("All were refused: none is good.", [refused(0, "a"), refused(1, "b")], {"ttft": 1}, (0, NAN, 0)),
    ("A token in no time at all is good.", [timeline((0,), 0, began=0.0)], {"ttft": 0}, (1, NAN, 1)),
)


def _of(part: Goodput, timelines: list[Timeline], bounds: Bounds, numbers: tuple[float, ...], idea: str) -> None:
    trace = Trace(timelines=timelines)
    case, want = f"{told(trace)}; {_in_words(bounds)}", dict(zip(("good", "rate", "share"), numbers, strict=True))
    got = looked_at(part, trace, case, **bounds)
    idea = _of_one_number(got, want) or idea
    expect(got, want, case=case, idea=idea, picture=lambda: _verdicts(trace, bounds, want, got))


def _of_one_number(got: Any, want: Mapping[str, float]) -> str:
    """What is wrong if the good ones were counted right."""
    if not isinstance(got, dict) or got.keys() != want.keys() or not same(got["good"], want["good"]):
        return ""
    if not same(got["share"], want["share"]):
        if math.isnan(want["share"]):
            return "Of no requests there is no share: not a number, and not 0."
        return "The share is of all that were submitted: refusing or aborting requests must not raise it."
    if math.isnan(want["rate"]):
        return "Where nothing ran, or in no time at all, there is no rate: not a number, and not 0."
    return "The rate is good requests a second of makespan: first arrival to last finish of those that ran."


def _in_words(bounds: Bounds) -> str:
    return ", ".join(f"{name} at most {bound:g} s" for name, bound in bounds.items()) or "no objectives"


def _refused(part: Goodput, timelines: list[Timeline], bounds: Bounds, idea: str) -> None:
    trace = Trace(timelines=timelines)
    case = f"{told(trace)}; {_in_words(bounds)}"
    happened = raised(lambda: looked_at(part, trace, case, **bounds))
    expect(happened, "ValueError", case=case, idea=idea)


# --- from the definition ---


def _from_definition(timelines: Sequence[Timeline], bounds: Bounds) -> tuple[int, float, float]:
    good = sum(_completed(t) and all(_kept(t, name, bound) for name, bound in bounds.items()) for t in timelines)
    seconds = from_definition(timelines)
    return good, good / seconds if seconds else NAN, good / len(timelines) if timelines else NAN


def _completed(t: Timeline) -> bool:
    return t.finish_reason in ("stop", "length")


def _kept(t: Timeline, name: str, bound: float) -> bool:
    value = _latency(t, name)
    return value is None or value <= bound


def _latency(t: Timeline, name: str) -> float | None:
    between = [later - earlier for earlier, later in pairwise(t.token_times)]
    if name in ("tpot", "max_tbt"):
        return (max(between) if name == "max_tbt" else sum(between) / len(between)) if between else None
    first = t.token_times[0] if t.token_times else None
    end = {"queueing_delay": t.scheduled, "ttft": first, "e2e": t.finish}[name]
    return None if end is None else end - t.arrival


def _in_a_run(part: Goodput) -> None:
    """The real engine: of four that were submitted two were served, one of them after waiting."""
    trace, case = a_run()
    idea = "The same of a real run: a has a TTFT of 1 s and b of 3 s, r was refused, c aborted."
    for bounds, good in (({"ttft": 1}, 1), ({"ttft": 3}, 2), ({"ttft": 3, "max_tbt": 0.5}, 0)):
        want = {"good": good, "rate": good / 6, "share": good / 4}
        expect(part(trace, **bounds), want, case=f"{case}; {_in_words(bounds)}", idea=idea, picture=trace)


# --- the picture ---


def _verdicts(trace: Trace, bounds: Bounds, want: Mapping[str, float], got: Any) -> Figure:
    """A row a request: how it ended, its latencies, and whether it is good."""
    rows = {"": [Cell(said, width=3) for said in ("ended", *(f"{n} <= {b:g}" for n, b in bounds.items()), "good")]}
    for t in trace.timelines:
        values = [(t.finish_reason or "not yet", _completed(t))]
        for name, bound in bounds.items():
            value = _latency(t, name)
            values.append(("undefined" if value is None else f"{value:g} s", _kept(t, name, bound)))
        good = all(kept for _, kept in values)
        values.append(("yes" if good else "no", good))
        rows[t.request_id] = [Cell(said, RIGHT if kept else WRONG, 3) for said, kept in values]
    return strips(rows, f"expected {in_words(want)}\nhappened {in_words(got, 120)}")
