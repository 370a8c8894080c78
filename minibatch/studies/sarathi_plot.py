"""The figure of the Sarathi-Serve study: generation stalls over time, and the capacity that they leave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minibatch.plot_style import RC, SHADES, SMALL, new_figure, sign, tidy

COLORS = dict(zip(("prefill first", "mixed, uncut", "chunked"), SHADES[1:], strict=True))


class Window(NamedTuple):
    """What is drawn of a run: seconds, at ``rate`` requests a second."""

    start: float
    stop: float
    rate: float


@mpl.rc_context(RC)
def draw(
    gaps: pd.DataFrame, capacity: pd.DataFrame, limits: Mapping[str, float], window: Window, footer: str
) -> Figure:
    """``gaps``: by system, when an iteration that decodes ends, and for how long none had; ``capacity``: requests a
    second by system and limit, a row a seed; ``limits``: by name, seconds of TBT."""
    figure = new_figure(5.2)
    names = list(COLORS)
    axes = figure.subplot_mosaic([[name, "capacity"] for name in names], width_ratios=[1.5, 1])
    for name in names:
        _gaps(axes[name], name, gaps.loc[name], window, min(limits.values()))
        axes[name].sharex(axes[names[-1]])
    title = f"A prompt computed whole stalls everybody, {window.rate:g} requests/s"
    axes[names[0]].set_title(title, loc="left", fontsize=10)
    axes[names[-1]].set_xlabel("simulated time, s", fontsize=9)
    _bars(axes["capacity"], capacity, limits)
    sign(figure, footer)
    return figure


def _gaps(ax: Axes, name: str, gaps: pd.DataFrame, window: Window, limit: float) -> None:
    """A line for each token that somebody waits for, as high as the wait is long."""
    ax.vlines(gaps["time, s"], 0, gaps["TBT, s"], color=COLORS[name], linewidth=0.8)
    ax.axhline(limit, color="black", linewidth=1, linestyle="--")
    tidy(ax, "", "", "TBT, s")
    ax.set_title("")
    ax.set_xlim(window.start, window.stop)
    ax.set_ylim(0, 1.5)
    label = f"{name}: longest {gaps['TBT, s'].max():.2f} s"
    label += f" (dashed: strict limit, {limit:g} s)" if name == next(iter(COLORS)) else ""
    ax.text(
        0.01,
        0.86,
        label,
        transform=ax.transAxes,
        fontsize=SMALL + 0.5,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )


def _bars(ax: Axes, capacity: pd.DataFrame, limits: Mapping[str, float]) -> None:
    for number, name in enumerate(COLORS):
        for place, limit in enumerate(limits):
            rates = capacity.loc[[(name, limit)], "requests/s"]
            x = place + (number - 1) * 0.28
            ax.bar(x, rates.mean(), width=0.25, color=COLORS[name], label=name if not place else "_")
            ax.plot([x] * len(rates), rates, "o", color="black", markersize=4, markeredgecolor="white")
            ax.text(x, max(rates) + 0.08, f"{rates.mean():.2f}", ha="center", fontsize=SMALL)
    tidy(ax, "Capacity under a limit on the P99 TBT", "", "requests/s (dots: seeds)")
    ax.set_xticks(range(len(limits)), [f"{limit}: {seconds:g} s" for limit, seconds in limits.items()])
    ax.set_ylim(0, None)
    ax.margins(y=0.12)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, fontsize=SMALL, frameon=False)
