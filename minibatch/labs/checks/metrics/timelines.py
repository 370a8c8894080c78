"""Requests to which something has happened: by hand, drawn, of a run; and in words."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from hypothesis import strategies as st
from matplotlib.axes import Axes

from minibatch import metrics
from minibatch.continuous_batching import ContinuousBatching
from minibatch.engine import Engine
from minibatch.labs import pictures
from minibatch.labs.counterexample import CounterExample
from minibatch.labs.trial import request
from minibatch.models.toy_model import ToyModel
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.request import Request, RequestRefused
from minibatch.trace import Timeline, Trace


def timeline(
    tokens: Sequence[float] = (),
    arrival: float = 0.0,
    reason: str | None = "length",
    name: str = "a",
    *,
    began: float | None = None,
    finish: float | None = None,
) -> Timeline:
    """A request that got its tokens at these times. ``began``: start of its first iteration (usually a second before
    the first token); ``finish``: when it ended (usually with the last token). ``reason`` None: it still runs."""
    scheduled = float(tokens[0]) - 1 if began is None and tokens else began
    made = Timeline(name, "default", 0, 4, 16, float(arrival), scheduled, [float(t) for t in tokens])
    if reason is not None:
        made.finish_reason = reason
        made.finish = float((tokens[-1] if tokens else arrival) if finish is None else finish)
    return made


def refused(arrival: float, name: str = "r") -> Timeline:
    return timeline((), arrival, "rejected", name)


# --- drawn ---


def _drawn(kind: str, arrival: int, waits: int, between: Sequence[int], after: int) -> Timeline:
    """A request that was completed, aborted while it ran (perhaps before its first token), or still runs; that was
    aborted while it waited, or refused."""
    if kind == "rejected":
        return refused(arrival)
    if kind == "left":
        return timeline((), arrival, "abort", finish=float(arrival + after))
    began = float(arrival + waits)
    times = list(accumulate([began + 1, *between]))
    if kind in metrics.COMPLETED:
        return timeline(times, arrival, kind, began=began)
    times = times[: len(between)]
    finish = (times[-1] if times else began) + after
    return timeline(times, arrival, None if kind == "running" else kind, began=began, finish=finish)


def _named(timelines: Sequence[Timeline]) -> list[Timeline]:
    for name, each in zip("abcdef", timelines, strict=False):
        each.request_id = name
    return list(timelines)


KINDS = ("length", "stop", "abort", "running", "left", "rejected")
SMALL = st.integers(0, 4)
ANY = st.builds(
    _drawn, st.sampled_from(KINDS), st.integers(0, 8), SMALL, st.lists(SMALL, max_size=3), st.integers(0, 3)
)
MANY = st.lists(ANY, max_size=5).map(_named)


def a_run() -> tuple[Trace, str]:
    """Of the real engine with one place and iterations of a second: a from 2 to 5 s, b from 5 to 8 s, c never."""
    engine = Engine(ToyModel(), ContinuousBatching(max_num_seqs=1), PagedKVCache(4, 4))
    for name, prompt, new, at in (("r", 17, 1, 0), ("a", 2, 3, 2), ("b", 2, 3, 3), ("c", 2, 3, 4)):
        asked = request(prompt, new, float(at), first=ord(name))
        with contextlib.suppress(RequestRefused):
            engine.submit(Request(asked.prompt, asked.params, name, asked.arrival_time))
    for _ in range(3):
        engine.step()
    engine.abort("c")
    while engine.step() is not None:
        pass
    return engine.trace, f"a run with one place, a second an iteration: {told(engine.trace)}"


# --- drawn on a time axis, and in words ---


def brackets(ax: Axes, spans: Sequence[tuple[float, float]], y: float, name: str, color: str) -> None:
    """Lines with two ends, and how long each is."""
    for number, (start, stop) in enumerate(spans):
        if math.isfinite(start) and math.isfinite(stop):
            label = name if number == 0 else None
            ax.plot([start, stop], [y, y], "-|", color=color, linewidth=2, markersize=10, label=label)
            ax.text((start + stop) / 2, y - 0.1, f"{stop - start:g}", ha="center", va="bottom", fontsize=9)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)


def listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def told(trace: Trace) -> str:
    """The requests of a trace in words. What is not said: that it ends with its last token."""
    return "; ".join(f"{t.request_id}: {', '.join(_facts(t))}" for t in trace.timelines) or "no requests"


def _facts(t: Timeline) -> Iterator[str]:
    yield f"arrives at {t.arrival:g} s"
    if t.scheduled is not None:
        yield f"runs from {t.scheduled:g} s"
    if t.token_times:
        yield f"tokens at {listed(t.token_times)} s"
    if t.finish_reason is None:
        yield "has not ended"
    elif t.finish_reason == "rejected":
        yield "is refused"
    elif t.finish_reason == "abort":
        yield f"{'' if t.scheduled is not None else 'never runs, '}is aborted at {t.finish:g} s"
    elif t.finish_reason == "stop":
        yield "stops"


def looked_at(part: Callable[..., Any], given: Timeline | Trace, case: str, **named: Any) -> Any:
    """What the part returns. Metrics only look: what they are given (a copy) has to be the same afterwards."""
    lent = copy.deepcopy(given)
    got = _come_out(part(lent, **named), case)
    if lent != given:
        was, is_now = (told(each if isinstance(each, Trace) else Trace(timelines=[each])) for each in (given, lent))
        raise CounterExample(
            "A metric looks at what happened and changes nothing of it.",
            case=case,
            expected=f"afterwards the same: {was}",
            happened=is_now,
            picture=lambda: pictures.text("What was given is something else afterwards."),
        )
    return got


def _come_out(got: Any, case: str) -> Any:
    """Raises a CounterExample for what has yet to be run: of a generator, or of ``async def``."""
    said = "a coroutine" if inspect.iscoroutine(got) else "a generator" if inspect.isgenerator(got) else ""
    if not said:
        return got
    got.close()
    idea = "Your function does not return a value: with `async def` or `yield` in it, nothing has been computed yet."
    raise CounterExample(
        idea,
        case=case,
        expected="a value, from a plain def with a return",
        happened=said,
        picture=lambda: pictures.text(f"What comes out is {said}, and no value."),
    )
