"""The figure of the Orca study: latency against throughput, and the ratio of throughputs by the limit on latency."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minibatch.plot_style import DPI, SMALL, tidy

LOOKS = {
    ("static", 1): ("#999999", "s", "static, 1"),
    ("static", 8): ("#E69F00", "^", "static, up to 8"),
    ("static", 24): ("#D55E00", "v", "static, up to 24"),
    ("iteration-level", 24): ("#0072B2", "o", "iteration-level, up to 24"),
}


def draw(
    sweeps: Mapping[tuple[str, int], np.ndarray],
    alone: float,
    tables: Mapping[str, pd.DataFrame],
    limit: float,
    footer: str,
) -> Figure:
    """``sweeps``: by contender, float ``[rates, 2]``, throughput and latency. ``limit``: that of the headline."""
    figure = Figure(figsize=(9.6, 4.6), dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    _sweeps(left, sweeps, alone, limit)
    _ratios(right, tables, limit)
    figure.supxlabel(footer, fontsize=SMALL - 1, color="#555555", x=0.01, ha="left")
    return figure


def _sweeps(ax: Axes, sweeps: Mapping[tuple[str, int], np.ndarray], alone: float, limit: float) -> None:
    for who, points in sweeps.items():
        color, marker, label = LOOKS[who]
        ax.plot(points[:, 0], points[:, 1] / alone, marker=marker, color=color, markersize=4, label=label)
    ax.axhline(limit, color="black", linewidth=1, linestyle=":")
    ax.set_yscale("log")
    tidy(ax, "Same latency, more requests (simulated)", "completed requests/s", "median latency a token, x alone")
    ax.set_ylim(0.9, 30)
    ax.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    ax.minorticks_off()
    ax.text(
        0.88, limit * 1.03, f"limit: {limit:g} x alone", fontsize=SMALL, ha="right", transform=ax.get_yaxis_transform()
    )
    ax.legend(fontsize=SMALL, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)


def _ratios(ax: Axes, tables: Mapping[str, pd.DataFrame], limit: float) -> None:
    for column, color, rival in (
        ("published", "#0072B2", "better of static 1 and 8"),
        ("same", "#D55E00", "static 24"),
    ):
        for lengths, style in (("unequal", "-"), ("equal", "--")):
            values = tables[lengths][column].replace(np.inf, np.nan)
            ax.plot(values.index, values, style, color=color, label=f"over {rival}, {lengths} lengths")
    ax.axhline(1, color="black", linewidth=1)
    ax.axvline(limit, color="black", linewidth=1, linestyle=":")
    ax.set_xscale("log")
    title = "How much more, by the limit on latency (simulated)"
    tidy(ax, title, "limit on the median latency a token, x alone", "ratio of sustained throughput")
    ax.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    ax.minorticks_off()
    ax.set_ylim(0, None)
    ax.legend(fontsize=SMALL, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
