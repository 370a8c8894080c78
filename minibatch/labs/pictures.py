"""Pictures of counter-examples, for what is not a run of the engine (those have the pictures of any trace)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minibatch import plot_style, plots
from minibatch.labs.counterexample import Picture, in_words, plain, same
from minibatch.trace import Trace

EXPECTED, HAPPENED = plot_style.MEMORY["filled"].color, plot_style.MEMORY["fragmentation"].color
MOST_CELLS = 40


def draw(picture: Picture, title: str) -> Figure:
    """The figure of a counter-example: of a trace, who was in the batch and what memory did."""
    if isinstance(picture, Trace):
        picture = from_one(picture)
    if not isinstance(picture, Trace):
        figure = picture()
    elif picture.num_steps:
        axes = plot_style.new_axes(3.0 + 0.22 * len(picture.timelines) + 2.6, rows=2)
        plots.membership(picture, axes[0])
        plots.kv_memory(picture, axes[1])
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
    want, got = plain(want), plain(got)
    if _is_grid(want) and _is_grid(got):
        return grids(np.array(want), np.array(got), what)
    rows = [_cells(want), _cells(got)]
    columns = max(1, *map(len, rows))
    figure = plot_style.new_figure(2.0)
    ax = figure.add_subplot()
    for y, (row, name) in enumerate(zip(rows, ("expected", "happened"), strict=True)):
        ax.text(-0.1, 1 - y, name, ha="right", va="center")
        for x, cell in enumerate(row):
            other = rows[1 - y][x] if x < len(rows[1 - y]) else None
            right = other is not None and same(cell, other)
            face = "white" if right else (EXPECTED, HAPPENED)[y]
            ax.add_patch(_box(x, 1 - y, face))
            size = 9 if columns <= 16 else 6
            ax.text(x + 0.5, 1 - y, in_words(cell, 24), ha="center", va="center", fontsize=size)
        if not row:
            ax.text(0.1, 1 - y, "nothing", va="center", style="italic")
    ax.set_xlim(-0.02, max(columns, 8))
    ax.set_ylim(-0.6, 1.6)
    ax.axis("off")
    ax.set_title(what, loc="left", fontsize=10)
    return figure


def _box(x: float, y: float, color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x + 0.02, y - 0.4), 0.96, 0.8, facecolor=color, edgecolor="#777777", alpha=0.45)


def _cells(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        value = [f"{key}: {in_words(each, 20)}" for key, each in value.items()]
    cells = list(value) if isinstance(value, (list, tuple)) else [value]
    return cells if len(cells) <= MOST_CELLS else [*cells[: MOST_CELLS - 1], "..."]


def _is_grid(value: Any) -> bool:
    """Rows of equal length of truth values or numbers."""
    if not (
        isinstance(value, (list, tuple)) and value and all(isinstance(row, (list, tuple)) and row for row in value)
    ):
        return False
    same_length = len({len(row) for row in value}) == 1
    return same_length and all(isinstance(cell, (bool, int, float)) for row in value for cell in row)


def grids(want: np.ndarray, got: np.ndarray, what: str = "") -> Figure:
    """Two matrices side by side, and crosses on the cells that differ."""
    figure = plot_style.new_figure(3.2)
    axes = figure.subplots(1, 2)
    for ax, matrix, name in zip(axes, (want, got), ("expected", "happened"), strict=True):
        ax.imshow(matrix.astype(float), cmap="Greens", vmin=0, vmax=max(1.0, float(np.max(want))), aspect="equal")
        ax.set_title(name, fontsize=10)
        ax.set_xticks(range(matrix.shape[1]))
        ax.set_yticks(range(matrix.shape[0]))
        ax.set_xlabel(what)
    if want.shape == got.shape:
        for y, x in np.argwhere(want != got):
            axes[1].plot(x, y, "x", color=HAPPENED, markersize=9, markeredgewidth=2)
    return figure


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
