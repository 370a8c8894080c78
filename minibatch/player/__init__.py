"""The stepper: a run, iteration by iteration, forward and back, in a notebook or as one HTML file.

    player.show(trace)                                   in Jupyter: a picture, and below it the stepper
    player.show(static, chunked)                         two runs of a workload on a common clock
    player.export_html({"static": a, "paged": b}, path)  one file that needs neither kernel nor network

Everything shown is in the frames (``player/film.py``), pure functions of the trace. One renderer makes HTML of them
(``player/html.py``), which the widget (``player/widget.py``) and the file show alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minibatch.player.film import Frame, events, frames
from minibatch.plot_style import name_of
from minibatch.trace import Trace, counted

if TYPE_CHECKING:
    from minibatch.player.widget import Player

__all__ = ["Frame", "Moment", "common_clock", "events", "export_html", "frames", "show"]


@dataclass(frozen=True, slots=True)
class Moment:
    """An end of an iteration, of one run or several. ``current``: of each run the position of the last frame that has
    ended by then, None before its first; ``done``: whether its last one ended before."""

    time: float
    current: tuple[int | None, ...]
    done: tuple[bool, ...]


def common_clock(films: Sequence[Sequence[Frame]]) -> list[Moment]:
    """The ends of all iterations in order of time, and what each run shows then. Of one run: a moment an iteration.

    Iterations of different runs that end together are one moment; those of one run (that took no time) are several.
    """
    ends = [_ends(film) for film in films]
    return [
        Moment(
            time=at[0],
            current=tuple(bisect_right(own, at) - 1 if own[0] <= at else None for own in ends),
            done=tuple(own[-1] < at for own in ends),
        )
        for at in sorted(set(chain(*ends)))
    ]


def _ends(film: Sequence[Frame]) -> list[tuple[float, int]]:
    """When each frame ends, and how many of the same run have ended at that very time before."""
    seen: Counter[float] = Counter()
    ends = []
    for frame in film:
        ends.append((frame.end, seen[frame.end]))
        seen[frame.end] += 1
    return ends


def export_html(
    traces: Trace | Mapping[str, Trace], path: str | Path, first: int | None = None, last: int | None = None
) -> None:
    """Writes the stepper of one run, or of several side by side, as one self-contained file.

    ``first``, ``last``  iterations of each run, both included (default: all; of a run that ends before ``last``, all
                         that there are)

    Raises ValueError, with the run's name, for what ``frames`` refuses; so no run may end before ``first``.
    """
    from minibatch.player.page import page

    named = {name_of(traces): traces} if isinstance(traces, Trace) else traces
    Path(path).write_text(page(named, first, last), encoding="utf-8")


def show(trace: Trace, *others: Trace, names: Sequence[str] | None = None) -> Player | None:
    """In Jupyter: the membership picture of the runs, and below it, where ipywidgets is installed, the stepper.

    Several runs are on a common clock; ``names`` are theirs (default: of their configurations). Returns the stepper.
    Raises ValueError for what ``frames`` refuses, before anything is shown.
    """
    from minibatch.player.widget import show as display

    traces = (trace, *others)
    names = [name_of(each) for each in traces] if names is None else names
    if len(names) != len(traces):
        raise ValueError(f"{counted(len(traces), 'trace')} and {counted(len(names), 'name')}: give each run a name")
    return display(dict(zip(distinct(names), traces, strict=True)))


def distinct(names: Sequence[Any]) -> list[str]:
    """The names, those that are given twice with a number that makes them like no other."""
    given = [str(name) for name in names]
    made: list[str] = []
    for name in given:
        others = (f"{name} ({number})" for number in count(2))
        made.append(next(o for o in others if o not in given and o not in made) if name in made else name)
    return made
