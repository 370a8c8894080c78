"""Check of lab capstone: a scheduler of one's own on the scorecard."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from minibatch import plot_style
from minibatch.labs import scorecard, scorecard_plot
from minibatch.labs.counterexample import CounterExample, in_words
from minibatch.labs.properties import Seed
from minibatch.labs.trial import refused, told
from minibatch.metrics import COMPLETED
from minibatch.plan import PlanError, Scheduler
from minibatch.policies import Order
from minibatch.request import EngineStalled
from minibatch.trace import Trace
from minibatch.workloads import Workload

Part = Callable[[], tuple[Order, Scheduler]]

DIGITS = {"goodput": 2, "fairness_gap": 2, "preemption_tax": 3}
SAME = 0.02  # a gain that is none


def check(part: Part) -> tuple[float, str]:
    """The share of the points that the part has earned, and how much more there is to earn."""
    mine = _card(part)
    theirs = scorecard.reference_card(Seed.value)
    _no_workload_is_ruined(mine, theirs)
    _better(mine, theirs)
    gain = scorecard.gain(mine, theirs)
    return scorecard.share_of_points(gain), f"a gain of {gain:.2f}; {scorecard.FULL:g} is worth all points"


# --- every single run: it ends, nobody is refused or starved, and it begins with nothing ---


def _card(part: Part) -> pd.DataFrame:
    made: list[tuple[Order, Scheduler]] = []  # kept, so that no address is used again
    first: list[tuple[Workload, Trace]] = []

    def watched(given: Workload) -> Trace:
        trace = _served(part, given, made)
        if not first:
            first.append((given, trace))
        return trace

    mine = scorecard.card(watched, Seed.value)
    given, trace = first[0]
    _no_memory(given, trace, _served(part, given, made))
    return mine


def _served(part: Part, given: Workload, made: list[tuple[Order, Scheduler]]) -> Trace:
    order, scheduler = _parts(part, made)
    case = _case(given)

    def fail(idea: str, expected: str, happened: str, picture: Callable[[], Figure]) -> None:
        raise CounterExample(idea, case=case, expected=expected, happened=happened, picture=picture)

    try:
        engine = scorecard.machine(given, order, scheduler)
    except (TypeError, ValueError) as error:  # the engine says what is wrong with them
        idea = "parts() has to give an order of the queue and a scheduler, ready to use."
        text = str(error)
        fail(idea, "(order, scheduler)", text, lambda: _said(text))
    broken = _broken(lambda: scorecard.run(engine, given))
    trace = engine.model.trace(given)
    if broken:
        fail(*broken, lambda: waits(trace))
    _untouched(trace, engine.trace, fail)
    ended = [timeline for timeline in trace.timelines if timeline.finish_reason in COMPLETED]
    if len(ended) < len(given):
        lost = next(timeline for timeline in trace.timelines if timeline.finish_reason not in COMPLETED)
        why = next(known.error for known in engine.trace.timelines if known.request_id == lost.request_id)
        what = f"{len(given) - len(ended)} have none; {lost.request_id}: {why or 'no reason given'}"
        idea = "Every request has to get its answer; refusing work is no way to be quick."
        fail(idea, f"{len(given)} answers", what, lambda: waits(trace))
    longest = scorecard.longest_wait(trace)
    if longest > scorecard.LONGEST_WAIT:
        worst = max(trace.timelines, key=scorecard.waited)
        idea = "A request starves: nothing bounds how long others go first, or how few are served at a time."
        happened = f"{longest:.1f} s, of a request with a prompt of {worst.num_prompt:,} tokens of {worst.client}"
        fail(idea, f"nobody waits for a token more than {scorecard.LONGEST_WAIT:g} s", happened, lambda: waits(trace))
    return trace


def _untouched(noted: Trace, known: Trace, fail: Callable[..., None]) -> None:
    """The engine's own book has to say what the model has noted."""
    for want, got in zip(noted.timelines, known.timelines, strict=True):
        facts = [(each.client, each.arrival, each.token_times) for each in (want, got)]
        if facts[0] != facts[1]:
            idea = "A policy looks at requests and decides; it changes nothing of what is known of them."
            expected, happened = (
                f"{client}, arrival {arrival:.3f} s, {len(times)} tokens, the first {in_words(times[:1])}"
                for client, arrival, times in facts
            )
            fail(idea, f"request {want.request_id}: {expected}", happened, lambda: waits(noted))


def _broken(run: Callable[[], None]) -> tuple[str, str, str] | None:
    """What stops a run: (idea, expected, happened)."""
    try:
        run()
    except NotImplementedError:
        raise
    except (PlanError, EngineStalled) as error:
        return refused(error)
    except scorecard.Endless as error:
        idea = "It does not come to an end: work is done again and again, or a little at a time."
        return idea, "about 1,500 iterations", str(error)
    except Exception as error:
        return "Your code raises an exception.", "none", told(error)
    return None


def _parts(part: Part, made: list[tuple[Order, Scheduler]]) -> tuple[Order, Scheduler]:
    case = f"call {len(made) + 1} of parts()"
    given: Any = part()
    if not (isinstance(given, tuple) and len(given) == 2):
        idea = "parts() has to give two things: an order of the queue, and a scheduler."
        raise CounterExample(
            idea, case=case, expected="(order, scheduler)", happened=f"{given!r:.120}", picture=lambda: _said(idea)
        )
    for place, name in enumerate(("order", "scheduler")):
        if any(given[place] is old[place] for old in made):
            raise _not_new(name, given[place], case)
    made.append(given)
    return given


def _not_new(name: str, what: object, case: str) -> CounterExample:
    idea = "parts() has to make new objects at every call: a run must not know what another has seen."
    happened = f"the one that an earlier call gave: {what!r:.120}"
    return CounterExample(idea, case=case, expected=f"a new {name}", happened=happened, picture=lambda: _said(happened))


def _no_memory(given: Workload, before: Trace, after: Trace) -> None:
    for one, two in zip(before.timelines, after.timelines, strict=True):
        if one.token_times != two.token_times:
            idea = "The same workload gave another run the second time: something is kept between runs, or is random."
            first, second = (timeline.token_times[0] - timeline.arrival for timeline in (one, two))
            raise CounterExample(
                idea,
                case=f"{_case(given)}, served once more after all others",
                expected=f"request {one.request_id} gets its tokens as before, the first after {first:.3f} s",
                happened=f"the first after {second:.3f} s",
                picture=lambda: waits(after),
            )


# --- the whole card ---


def _no_workload_is_ruined(mine: pd.DataFrame, theirs: pd.DataFrame) -> None:
    lost = theirs["score"] - mine["score"]
    name = lost.idxmax()
    if lost[name] > scorecard.TOLERANCE and scorecard.gain(mine, theirs) > SAME:
        idea = f"What helps one kind of load must not ruin another: {name} loses by {_worst(mine, theirs, name)}."
        expected = f"on no workload more than {scorecard.TOLERANCE:g} points below the reference"
        raise _on_card(idea, expected, f"{name}: {_numbers(mine, theirs, name)}", mine, theirs)


def _better(mine: pd.DataFrame, theirs: pd.DataFrame) -> None:
    gain = scorecard.gain(mine, theirs)
    if gain > scorecard.LEAST:
        return
    change = mine["score"] - theirs["score"]
    if abs(gain) <= SAME:
        name = mine["score"].idxmin()
        idea = f"It serves no better than the reference: nothing that you changed decides anything, even on {name}."
    elif gain < 0:
        name = change.idxmin()
        idea = f"It serves worse than the reference, most of all {name}, by {_worst(mine, theirs, name)}."
    else:
        name = mine["score"].idxmin()
        idea = f"It is better than the reference, but one good idea brings more. There is most to gain on {name}."
    happened = f"{gain:+.2f}; {name}: {_numbers(mine, theirs, name)}"
    raise _on_card(idea, f"a gain above {scorecard.LEAST:g}", happened, mine, theirs)


def _on_card(idea: str, expected: str, happened: str, mine: pd.DataFrame, theirs: pd.DataFrame) -> CounterExample:
    return CounterExample(
        idea,
        case=f"the scorecard: {len(mine)} workloads, each drawn twice (seed {Seed.value})",
        expected=expected,
        happened=happened,
        picture=lambda: scorecard_plot.figure(mine, theirs),
    )


def _worst(mine: pd.DataFrame, theirs: pd.DataFrame, name: str) -> str:
    """The measure that costs a workload most."""
    change = {
        measure: weight * (mine[measure][name] - theirs[measure][name]) for measure, weight in scorecard.WEIGHTS.items()
    }
    return min(change, key=change.__getitem__).replace("_", " ")


def _numbers(mine: pd.DataFrame, theirs: pd.DataFrame, name: str) -> str:
    texts = [f"score {mine['score'][name]:.1f} (reference {theirs['score'][name]:.1f})"]
    texts += [
        f"{measure.replace('_', ' ')} {mine[measure][name]:.{n}f} ({theirs[measure][name]:.{n}f})"
        for measure, n in DIGITS.items()
    ]
    return ", ".join(texts)


def _case(given: Workload) -> str:
    return f"workload {given.description} ({scorecard.WORKLOADS[given.description][0]}), seed {given.seed}"


# --- pictures ---


def _said(text: str) -> Figure:
    figure = plot_style.new_figure(1.4)
    figure.text(0.01, 0.45, textwrap.fill(text, 110), va="center")
    return figure


def waits(trace: Trace) -> Figure:
    """Of every request, how long it waited for its first token; those that got none are crosses at the top."""
    figure = plot_style.new_figure(3.4)
    ax = figure.add_subplot()
    served = [timeline for timeline in trace.timelines if timeline.token_times]
    arrivals = np.array([timeline.arrival for timeline in served])
    seconds = np.array([timeline.token_times[0] - timeline.arrival for timeline in served])
    top = 1.1 * max([scorecard.LONGEST_WAIT, *seconds])
    look = {"linestyle": "none", "color": plot_style.SERIES[3]["color"]}
    ax.plot(arrivals, seconds, "o", markersize=4, label="a request", **look)
    without = [timeline.arrival for timeline in trace.timelines if not timeline.token_times]
    if without:
        ax.plot(without, [top] * len(without), "x", label="no token at all", clip_on=False, **look)
    limits = ((scorecard.TTFT, ":", "good up to here"), (scorecard.LONGEST_WAIT, "--", "starved from here"))
    for value, stroke, label in limits:
        ax.axhline(value, color="black", linewidth=1.0, linestyle=stroke, label=label)
    ax.set_ylim(0, top)
    plot_style.tidy(ax, "", "arrival, s (simulated)", "wait for the first token, s")
    figure.legend(loc="outside lower left", ncols=4, frameon=False, fontsize=plot_style.SMALL)
    return figure
