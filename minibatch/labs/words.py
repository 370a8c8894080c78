"""Outcomes in words, for a terminal and for a notebook. Never more than "all public checks passed"."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from minibatch.labs.checker import FAILED, NOT_DONE, PASSED, Outcome
from minibatch.labs.exercise import Exercise, Lab
from minibatch.labs.manifest import EXERCISES

WIDTH = 100
SAYS = {PASSED: "all public checks passed", FAILED: "not right yet", NOT_DONE: "not done yet"}


def syllabus(labs: Iterable[Lab]) -> str:
    """A row a lab, in Markdown."""
    lines = [
        "| lab | after notebook | exercises | minutes | points | afterwards a student can |",
        "|---|---|---|---|---|---|",
    ]
    for lab in labs:
        notebook = lab.exercises[0].notebook
        after = f"[{notebook[:2]}](../{notebook}.ipynb)"
        what = "; ".join(lab.goals)
        lines.append(
            f"| `{lab.name}`: {lab.title} | {after} | {len(lab.exercises)} | {lab.minutes} | {lab.points} | {what} |"
        )
    return "\n".join(lines)


def report(lab: Lab, outcomes: Sequence[Outcome]) -> str:
    """A line an exercise, the points, and below it what is wrong."""
    widest = max(len(o.title) for o in outcomes)
    lines = [
        f"{o.id:<14}{o.title:<{widest + 2}}{points(o.points, o.max_points):>8}  {SAYS[o.status]}" for o in outcomes
    ]
    total, most = sum(o.points for o in outcomes), sum(o.max_points for o in outcomes)
    lines += ["", f"lab {lab.name}: {total:g} of {most} points"]
    for each in outcomes:
        if each.status == FAILED:
            lines += ["", *failure(each)]
        elif each.status == PASSED and each.idea:
            lines += ["", f"{each.id}: {each.idea}"]
    return "\n".join(lines)


def points(got: float, most: int) -> str:
    return f"{got:g}/{most}"


def failure(outcome: Outcome) -> Iterator[str]:
    """The lines of a counter-example."""
    yield from _wrap(f"{outcome.id}: ", outcome.idea)
    for name, text in details(outcome):
        yield from _wrap(f"    {name:<11}", text)


def details(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """What there is to say of a failure: (name, text)."""
    exercise = EXERCISES[outcome.id]
    at = f" (iteration {outcome.iteration})" if outcome.iteration else ""
    for name, text in (("case", outcome.case), ("expected", outcome.expected), ("happened", outcome.happened)):
        if text:
            yield name, text + (at if name == "happened" else "")
    if outcome.case:
        yield "to read", where(exercise)
    if outcome.picture:
        yield "picture", outcome.picture
        stepper = Path(outcome.picture).with_suffix(".html")
        if stepper.exists():
            yield "stepper", f"{stepper} (the run, iteration by iteration, in a browser)"


def calls(count: int) -> str:
    """How often a part was called."""
    return f"called {count:,} times" if count else "not needed in this run"


def where(exercise: Exercise) -> str:
    """Where the idea of an exercise is explained."""
    return f"the docstring of {exercise.name} in your file; notebooks/{exercise.notebook}.ipynb"


def _wrap(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * max(len(head), 4)) or [head]


def as_html(outcome: Outcome) -> str:
    """For a notebook."""
    mark = {PASSED: "#009E73", FAILED: "#D55E00", NOT_DONE: "#777777"}[outcome.status]
    title = (
        f"{outcome.id} {outcome.title}: {SAYS[outcome.status]} ({points(outcome.points, outcome.max_points)} points)"
    )
    rows = [f'<p style="margin:0"><b style="color:{mark}">{html.escape(title)}</b></p>']
    if outcome.status != NOT_DONE and outcome.idea:
        rows.append(f'<p style="margin:4px 0">{html.escape(outcome.idea)}</p>')
    if outcome.status == FAILED:
        cells = "".join(
            f'<tr><td style="text-align:left;vertical-align:top">{name}</td>'
            f'<td style="text-align:left">{html.escape(text)}</td></tr>'
            for name, text in details(outcome)
            if name not in ("picture", "stepper")
        )
        rows.append(f"<table>{cells}</table>")
    return "\n".join(rows)
