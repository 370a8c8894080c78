"""The figure of the Sarathi-Serve study: generation stalls over time, and the capacity that they leave."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minibatch.plot_style import DPI, SMALL, tidy
from minibatch.trace import Trace

COLORS = {"prefill first": "#D55E00", "mixed, uncut": "#E69F00", "chunked": "#0072B2"}


class Window(NamedTuple):
    """What is drawn of a run: seconds, at ``rate`` requests a second."""

    start: float
    stop: float
    rate: float


def draw(
    rates: dict[str, dict[str, list[float]]],
    traces: dict[str, Trace],
    limits: dict[str, float],
    window: Window,
    footer: str,
) -> Figure:
    """``rates``: capacity by system and limit, one a seed; ``limits``: by name, seconds of TBT."""
    figure = Figure(figsize=(9.6, 5.2), dpi=DPI, layout="constrained")
    names = list(traces)
    axes = figure.subplot_mosaic([[name, "capacity"] for name in names], width_ratios=[1.5, 1])
    for name in names:
        _gaps(axes[name], name, traces[name], window, min(limits.values()))
        axes[name].sharex(axes[names[-1]])
    axes[names[0]].set_title(
        f"A prompt computed whole stalls everybody, {window.rate:g} requests/s", loc="left", fontsize=10
    )
    axes[names[-1]].set_xlabel("simulated time, s", fontsize=9)
    _bars(axes["capacity"], rates, limits)
    figure.supxlabel(footer, fontsize=SMALL - 1, color="#555555", x=0.01, ha="left")
    return figure


def _gaps(ax: Axes, name: str, trace: Trace, window: Window, limit: float) -> None:
    """The time between iterations that decode: what each request that decodes waits for its next token."""
    ends = np.array([counts.end for counts in trace.counts if counts.decode])
    waits, ends = np.diff(ends), ends[1:]
    inside = (ends >= window.start) & (ends <= window.stop)
    ax.vlines(ends[inside], 0, waits[inside], color=COLORS[name], linewidth=0.8)
    ax.axhline(limit, color="black", linewidth=1, linestyle="--")
    tidy(ax, "", "", "TBT, s")
    ax.set_title("")
    ax.set_xlim(window.start, window.stop)
    ax.set_ylim(0, 1.5)
    worst = waits[inside].max() if inside.any() else 0.0
    label = f"{name}: longest {worst:.2f} s" + (
        f" (dashed: strict limit, {limit:g} s)" if name == next(iter(COLORS)) else ""
    )
    ax.text(
        0.01,
        0.86,
        label,
        transform=ax.transAxes,
        fontsize=SMALL + 0.5,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )


def _bars(ax: Axes, found: dict[str, dict[str, list[float]]], limits: dict[str, float]) -> None:
    for number, name in enumerate(found):
        for place, limit in enumerate(limits):
            rates = found[name][limit]
            x = place + (number - 1) * 0.28
            ax.bar(x, np.mean(rates), width=0.25, color=COLORS[name], label=name if not place else "_")
            ax.plot([x] * len(rates), rates, "o", color="black", markersize=3)
            ax.text(x, max(rates) + 0.08, f"{np.mean(rates):.2f}", ha="center", fontsize=SMALL)
    tidy(ax, "Capacity under a limit on the P99 TBT", "", "requests/s (dots: seeds)")
    ax.set_xticks(range(len(limits)), [f"{limit}: {seconds:g} s" for limit, seconds in limits.items()])
    ax.set_ylim(0, None)
    ax.margins(y=0.12)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, fontsize=SMALL, frameon=False)
