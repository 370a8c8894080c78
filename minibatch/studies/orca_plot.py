"""The figure of the Orca study: latency against throughput, and the ratio of throughputs by the limit on latency."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minibatch.plot_style import RC, SERIES, SMALL, new_figure, sign, tidy

CONTENDERS = {("static", 1): "static, 1", ("static", 8): "static, up to 8", ("static", 24): "static, up to 24"}
CONTENDERS |= {("iteration-level", 24): "iteration-level, up to 24"}


@mpl.rc_context(RC)
def draw(sweeps: pd.DataFrame, ratios: pd.DataFrame, limit: float, footer: str) -> Figure:
    """``sweeps``: by scheduler and maximum batch, throughput and latency at ascending rates. ``ratios``: by lengths and
    limit on the latency. ``limit``: that of the headline."""
    figure = new_figure(4.6)
    left, right = figure.subplots(1, 2)
    _sweeps(left, sweeps, limit)
    _ratios(right, ratios, limit)
    sign(figure, footer)
    return figure


def _sweeps(ax: Axes, sweeps: pd.DataFrame, limit: float) -> None:
    for (who, label), look in zip(CONTENDERS.items(), SERIES, strict=True):
        points = sweeps.loc[[who]]
        ax.plot(points["requests/s"], points["latency, x alone"], markersize=4, label=label, **look)
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


def _ratios(ax: Axes, ratios: pd.DataFrame, limit: float) -> None:
    for column, look, rival in (("published", SERIES[3], "better of static 1 and 8"), ("same", SERIES[1], "static 24")):
        for lengths, style in (("unequal", "-"), ("equal", "--")):
            values = ratios.loc[lengths, column].replace(np.inf, np.nan)
            ax.plot(values.index, values, style, color=look["color"], label=f"over {rival}, {lengths} lengths")
    ax.axhline(1, color="black", linewidth=1)
    ax.axvline(limit, color="black", linewidth=1, linestyle=":")
    ax.set_xscale("log")
    title = "How much more, by the limit on latency (simulated)"
    tidy(ax, title, "limit on the median latency a token, x alone", "ratio of sustained throughput")
    ax.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    ax.minorticks_off()
    ax.set_ylim(0, None)
    ax.legend(fontsize=SMALL, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
