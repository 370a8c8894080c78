"""Pictures of counter-examples, for what is not a run of the engine (those have the pictures of any trace)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minibatch import plot_style, plots
from minibatch.labs.counterexample import Picture, in_words, plain
from minibatch.labs.strips import RIGHT, WRONG, compared, strips
from minibatch.trace import Trace

EXPECTED, HAPPENED = RIGHT, WRONG
MOST_CELLS = 40


def draw(picture: Picture, title: str) -> Figure:
    """The figure of a counter-example: of a trace, who was in the batch and what memory did."""
    if not isinstance(picture, Trace):
        figure = picture()
    elif picture.num_steps:
        trace, axes = from_one(picture), plot_style.new_axes(3.0 + 0.22 * len(picture.timelines) + 2.6, rows=2)
        plots.membership(trace, axes[0])
        plots.kv_memory(trace, axes[1])
        figure = axes[0].figure
    else:
        figure = text("nothing ran")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def from_one(trace: Trace) -> Trace:
    """The same run with its iterations counted from 1, as the words of a counter-example count them."""
    return Trace(trace.meta, [replace(step, index=step.index + 1) for step in trace.steps], trace.timelines)


def text(said: str) -> Figure:
    figure = plot_style.new_figure(1.2)
    figure.text(0.5, 0.4, said, ha="center")
    return figure


def difference(want: Any, got: Any, what: str = "") -> Figure:
    """Two values below each other; of sequences, the places where they differ are marked."""
    return strips(compared(_cells(want), _cells(got)), what)


def _cells(value: Any) -> list[str]:
    value = plain(value)
    if isinstance(value, Mapping):
        return [f"{key}: {in_words(each, 20)}" for key, each in value.items()]
    cells = [in_words(cell, 24) for cell in value] if isinstance(value, (list, tuple)) else [in_words(value, 24)]
    return cells if len(cells) <= MOST_CELLS else [*cells[: MOST_CELLS - 1], "..."]


def events(requests: Mapping[str, tuple[float, Sequence[float]]], says: str = "") -> Figure:
    """A line a request: its arrival and its tokens, on a time axis."""
    figure = plot_style.new_figure(1.5 + 0.4 * len(requests))
    ax = figure.add_subplot()
    for y, (arrival, tokens) in enumerate(requests.values()):
        known = [t for t in (arrival, *tokens) if t is not None and math.isfinite(t)]
        ax.plot([min(known), max(known)], [y, y], color="#BBBBBB", zorder=1)
        ax.plot([arrival], [y], "|", color="black", markersize=16, label="arrival" if y == 0 else None)
        ax.plot(
            list(tokens),
            [y] * len(tokens),
            "o",
            color=plot_style.TOKENS["decode"].color,
            label="token" if y == 0 else None,
        )
    _requests_axis(ax, list(requests), says)
    return figure


def _requests_axis(ax: Axes, names: list[str], says: str) -> None:
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlabel("seconds")
    ax.set_title(says, loc="left", fontsize=10)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
