"""The figure of the VTC study: service over time, and by how much two clients differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minibatch.plot_style import DPI, SMALL, tidy

if TYPE_CHECKING:
    from minibatch.studies.vtc import Served

COLORS = {"FCFS": "#D55E00", "VTC": "#0072B2", "no lift": "#CC79A7"}


def draw(two: dict[str, Served], late: dict[str, Served], since: float, bound: float, footer: str) -> Figure:
    """``two``, ``late``: one run of each order, of two clients that are there from the beginning, and of one that comes
    ``since`` so many seconds; ``bound``: of the difference of their services."""
    figure = Figure(figsize=(9.6, 6.4), dpi=DPI, layout="constrained")
    axes = figure.subplots(2, 2)
    _services(axes[0, 0], two["FCFS"], "FCFS: who asks twice as much gets twice as much")
    _services(axes[0, 1], two["VTC"], "VTC: both get the same")
    _differences(axes[1, 0], two, bound, "The difference: without bound, and within it")
    _differences(axes[1, 1], late, bound, f"b comes at {since:g} s, with and without the lift", since)
    top = max(axes[0, 0].get_ylim()[1], axes[0, 1].get_ylim()[1])
    for ax in axes[0]:
        ax.set_ylim(0, top)
    figure.supxlabel(footer, fontsize=SMALL - 1, color="#555555", x=0.01, ha="left")
    return figure


def _services(ax: Axes, served: Served, title: str) -> None:
    for name, rate, style in (("b", 180, "-"), ("a", 90, "--")):
        color, label = ("#009E73", "#444444")[name == "a"], f"client {name}, {rate} requests a minute"
        ax.plot(served.times, served.service[name] / 1000, style, color=color, linewidth=1.6, label=label)
    ax.legend(fontsize=SMALL, frameon=False, loc="upper left")
    tidy(ax, title, "simulated time, s", "service so far, thousands")


def _differences(ax: Axes, runs: dict[str, Served], bound: float, title: str, since: float = 0.0) -> None:
    for order, served in runs.items():
        difference = (served.service["b"] - served.service["a"]) / 1000
        inside = served.times >= since
        difference = np.abs(difference[inside] - difference[inside][0])
        ax.plot(served.times[inside], difference, color=COLORS[order], linewidth=1.4, label=order)
    ax.axhline(bound / 1000, color="black", linewidth=1, linestyle="--", label="bound, 2U")
    tidy(ax, title, "simulated time, s", "difference of services, thousands")
    ax.set_ylim(0, 1.15 * ax.get_ylim()[1])
    ax.legend(fontsize=SMALL, frameon=False, loc="upper left")
