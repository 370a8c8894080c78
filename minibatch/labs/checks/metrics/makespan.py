"""From first arrival to last finish."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure

from minibatch import metrics
from minibatch.labs import pictures
from minibatch.labs.checks.metrics.timelines import MANY, a_run, brackets, looked_at, refused, timeline, told
from minibatch.labs.counterexample import expect, in_words, plain
from minibatch.labs.properties import for_all
from minibatch.trace import Timeline, Trace

Makespan = Callable[[Trace], float]

LONGEST = "It lasts from the first arrival to the last finish, whoever these belong to."
LISTED = "Neither has the first in the list to arrive first, nor the last in it to end last."
ARRIVAL = "The run begins when the first request arrives, and not at time 0."
WAITS = "Waiting counts: the run begins with the arrival, and not with the first iteration."
REFUSED = "A refused request has never run: neither its arrival nor its end counts."
LEFT = "A request that was aborted while it waited has never run, and does not count."
CUT = "A request that was aborted while it ran counts to its finish, which may be after its last token."
EARLY = "It ran, so it counts to its finish, although it never got a token."
RUNS = "A request that has not finished counts to its last token."
BEGUN = "A request that runs, and has no token yet, counts with its arrival."
ZERO = "0.0 is a time like any other; only None means that there is none."
NOTHING = "Nothing was measured, so the answer is not a number; 0 s would be a run that took no time."

FIRST, SECOND = timeline((3,), began=0.0), timeline((6, 7, 8, 10), name="b")
LATE, AT_ZERO = timeline((5, 6), 4), timeline((), reason="abort", began=0, finish=0)
BY_HAND: tuple[tuple[str, float, list[Timeline]], ...] = (
    (LONGEST, 10, [FIRST, SECOND]),
    (LISTED, 10, [SECOND, FIRST]),
    (ARRIVAL, 4, [LATE, timeline((7, 8), 4, name="b")]),
    (WAITS, 8.5, [timeline((9, 10.5), 2)]),
    (REFUSED, 2, [refused(0), LATE, refused(20, "s")]),
    (LEFT, 2, [LATE, timeline((), 1, "abort", "b", finish=30)]),
    (CUT, 6, [LATE, timeline((5,), 3, "abort", "b", finish=9)]),
    (EARLY, 6, [LATE, timeline((), 3, "abort", "b", began=4, finish=9)]),
    (RUNS, 8, [LATE, timeline((5, 12), 4, None, "b")]),
    (BEGUN, 5, [LATE, timeline((), 1, None, "b", began=5)]),
    (ZERO, 0, [AT_ZERO]),
    (ZERO, 3, [AT_ZERO, timeline((2, 3), 1, name="b")]),
    (NOTHING, math.nan, []),
    (NOTHING, math.nan, [refused(0), refused(3, "s")]),
    (NOTHING, math.nan, [timeline((), 1, None, began=5)]),
)


def check(part: Makespan) -> None:
    for idea, want, timelines in BY_HAND:
        _of(part, timelines, want, idea)
    idea = "First arrival to last end, of the requests that ever ran."
    for_all(lambda timelines: _of(part, timelines, from_definition(timelines), idea), timelines=MANY)
    _in_a_run()


def _of(part: Makespan, timelines: list[Timeline], want: float, idea: str) -> None:
    trace = Trace(timelines=timelines)
    case = told(trace)
    got = plain(looked_at(part, trace, case))
    shown = {"picture": lambda: _picture(trace, want, got)}
    expect(got, want, what="makespan in seconds", case=case, idea=idea, **shown)


def from_definition(timelines: Sequence[Timeline]) -> float:
    """All the moments that count, sorted."""
    ran = [t for t in timelines if t.scheduled is not None]
    ends = sorted(end for t in ran for end in (t.token_times if t.finish is None else [t.finish]))
    return ends[-1] - sorted(t.arrival for t in ran)[0] if ends else math.nan


def _in_a_run() -> None:
    """The real engine, as its summary says it."""
    trace, case = a_run()
    got = {key: metrics.summary(trace)[key] for key in ("makespan", "throughput")}
    idea = "In the summary of a real run, throughput is tokens over makespan: from the arrival of a to the end of b."
    expect(got, {"makespan": 6, "throughput": 1}, case=case, idea=idea, picture=trace)


def _picture(trace: Trace, want: float, got: Any) -> Figure:
    """The requests: thin while they wait, thick while they run."""
    says = f"makespan in seconds: expected {in_words(want)}, happened {in_words(got, 24)}"
    if not trace.timelines:
        return pictures.text(f"no requests; {says}")
    requests = {t.request_id: (t.arrival, t.token_times) for t in trace.timelines}
    figure = pictures.events(requests, f"{says} (thick: it runs)")
    ax = figure.axes[0]
    for y, t in enumerate(trace.timelines):
        if t.scheduled is None:
            ax.text(t.arrival, y - 0.3, "never ran", ha="center", va="center", fontsize=9)
        else:
            last = max(time for time in (t.scheduled, *t.token_times, t.finish) if time is not None)
            ax.plot([t.scheduled, last], [y, y], color="#BBBBBB", linewidth=7, zorder=0, solid_capstyle="butt")
    below = len(trace.timelines)
    for name, length, y, color in (
        ("expected", want, below - 0.2, pictures.EXPECTED),
        ("happened", got, below + 0.5, pictures.HAPPENED),
    ):
        if isinstance(length, (int, float)) and math.isfinite(length):
            start = _start(trace.timelines, length)
            brackets(ax, [(start, start + length)], y, name, color)
        else:
            ax.text(
                0.02, y, f"{name}: {in_words(length, 24)}", transform=ax.get_yaxis_transform(), va="center", color=color
            )
    ax.set_ylim(below + 0.9, -0.6)
    ax.margins(x=0.1)
    return figure


def _start(timelines: Sequence[Timeline], length: float) -> float:
    """From when on so long a time leads to some end; else the first arrival."""
    ran = [t for t in timelines if t.scheduled is not None]
    ends = {end for t in timelines for end in (t.finish, *t.token_times)}
    first = min((t.arrival for t in ran), default=timelines[0].arrival)
    starts = [first, 0.0, *(t.scheduled for t in ran), *(t.arrival for t in timelines)]
    return next((start for start in starts if start + length in ends), first)
