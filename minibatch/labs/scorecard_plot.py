"""Two cards of the capstone's scorecard side by side, as a table and as a figure."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minibatch import plot_style

DIGITS = {"score": 1, "goodput": 2, "fairness_gap": 2, "preemption_tax": 3, "longest_wait": 1}
SHOWN = {"score": "more", "goodput": "more", "fairness_gap": "less", "preemption_tax": "less"}  # and what is better


def table(mine: pd.DataFrame, theirs: pd.DataFrame, gain: float) -> str:
    """Both cards, ``yours (reference)`` in every cell, and the gain."""
    mine, theirs = _with_mean(mine), _with_mean(theirs)
    shown = {
        name.replace("_", " "): [f"{a:.{n}f} ({b:.{n}f})" for a, b in zip(mine[name], theirs[name], strict=True)]
        for name, n in DIGITS.items()
    }
    return f"yours (reference)\n{pd.DataFrame(shown, index=mine.index).to_string()}\ngain {gain:+.2f}"


def _with_mean(rows: pd.DataFrame) -> pd.DataFrame:
    mean = {**rows.mean(), "longest_wait": rows["longest_wait"].max()}
    return pd.concat([rows, pd.DataFrame([mean], index=["all"])])


def figure(mine: pd.DataFrame, theirs: pd.DataFrame) -> Figure:
    """A row a workload, a panel a measure: the reference, and how far you are from it."""
    drawn = plot_style.new_figure(3.6)
    axes = drawn.subplots(1, len(SHOWN), sharey=True)
    for ax, (name, better) in zip(axes, SHOWN.items(), strict=True):
        both = (_with_mean(rows)[name].to_numpy() for rows in (mine, theirs))
        _panel(ax, *both, f"{name.replace('_', ' ')}, {better} is better")
    axes[0].set_yticks(range(len(mine) + 1), [*mine.index, "all"])
    handles, labels = axes[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower left", ncols=2, frameon=False, fontsize=plot_style.SMALL)
    return drawn


def _panel(ax: Axes, mine: np.ndarray, theirs: np.ndarray, title: str) -> None:
    rows = np.arange(len(mine))
    for values, place, size, label in ((theirs, 0, 10, "reference"), (mine, 3, 6, "yours")):
        look = {**plot_style.SERIES[place], "linestyle": "none", "markersize": size}
        ax.plot(values, rows, label=label, zorder=3, clip_on=False, **look)
    ax.hlines(rows, theirs, mine, color=plot_style.SERIES[1]["color"], linewidth=1.5, zorder=2)
    plot_style.tidy(ax, "", title, "")
    highest, lowest = max(mine.max(), theirs.max()), min(0, mine.min(), theirs.min())
    most = 100 if title.startswith("score") else 1.0 if highest > 0.2 else 0.2
    ax.set_xlim(lowest, most)
    ax.set_xticks([0, most / 2, most], [f"{tick:g}" for tick in (0, most / 2, most)])
    ax.axhline(len(rows) - 1.5, color="#BBBBBB", linewidth=0.8)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.grid(axis="x", color="#E0E0E0", linewidth=0.6)
