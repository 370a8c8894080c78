"""The figure of the VTC study: service over time, and by how much two clients differ."""

from __future__ import annotations

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minibatch.plot_style import RC, SERIES, SMALL, new_figure, sign, tidy

LOOKS = {"FCFS": SERIES[1], "no lift": SERIES[1], "VTC": SERIES[3]}
CLIENTS = (("b", 180, {"color": "black"}), ("a", 90, {"color": "#666666", "linestyle": "--"}))


@mpl.rc_context(RC)
def draw(together: pd.DataFrame, late: pd.DataFrame, bound: float, footer: str) -> Figure:
    """Index: order. Columns: time and what each of two clients has been served by then; of two that are there from the
    beginning, and from when the second one comes. ``bound``: of the difference of their services."""
    figure = new_figure(6.4)
    axes = figure.subplots(2, 2)
    _services(axes[0, 0], together.loc["FCFS"], "FCFS: who asks twice as much gets twice as much")
    _services(axes[0, 1], together.loc["VTC"], "VTC: both get the same")
    _differences(axes[1, 0], together, bound, "The difference: without bound, and within it")
    since = late["time, s"].min()
    _differences(axes[1, 1], late, bound, f"b comes at {since:.0f} s, with and without the lift")
    top = max(axes[0, 0].get_ylim()[1], axes[0, 1].get_ylim()[1])
    for ax in axes[0]:
        ax.set_ylim(0, top)
    sign(figure, footer)
    return figure


def _services(ax: Axes, served: pd.DataFrame, title: str) -> None:
    for name, rate, look in CLIENTS:
        label = f"client {name}, {rate} requests a minute"
        ax.plot(served["time, s"], served[name] / 1000, linewidth=1.6, label=label, **look)
    ax.legend(fontsize=SMALL, frameon=False, loc="upper left")
    tidy(ax, title, "simulated time, s", "service so far, thousands")


def _differences(ax: Axes, runs: pd.DataFrame, bound: float, title: str) -> None:
    for order in runs.index.unique():
        served = runs.loc[order]
        difference = (served["b"] - served["a"]) / 1000
        look = LOOKS[order] | {"marker": ""}
        ax.plot(served["time, s"], (difference - difference.iloc[0]).abs(), linewidth=1.4, label=order, **look)
    ax.axhline(bound / 1000, color="black", linewidth=1, linestyle=":", label="bound, 2U")
    tidy(ax, title, "simulated time, s", "difference of services, thousands")
    ax.set_ylim(0, 1.15 * ax.get_ylim()[1])
    ax.legend(fontsize=SMALL, frameon=False, loc="upper left")
