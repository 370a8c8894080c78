"""Who waits, as a distribution: a mean, and even a P99, can be bought at somebody else's expense.

One panel a latency, one row a configuration, one dot a request (a gap between tokens, for TBT). Where there are more
than ``DOTS`` values, the dots are that many evenly spaced quantiles, so the picture keeps its shape and its size.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import AutoLocator, FuncFormatter, NullFormatter

from minibatch.metrics import describe, latencies
from minibatch.plot_style import SMALL, clock, tidy
from minibatch.trace import Trace

DOTS = 400
PANELS = {
    "queueing_delay": "queueing delay",
    "ttft": "time to first token",
    "tbt": "time between tokens",
    "e2e": "end to end",
}


def draw_latency(ax: Axes, traces: Mapping[str, Trace], measure: str, title: str) -> None:
    every = {name: latencies(trace)[measure] for name, trace in traces.items()}
    kinds = " and ".join(sorted({clock(trace) for trace in traces.values()}))
    tidy(ax, title, f"s ({kinds})" if kinds else "s", "")
    ax.xaxis.set_major_locator(AutoLocator())
    _scale(ax, np.concatenate([np.empty(0), *every.values()]))
    for row, values in enumerate(every.values()):
        if len(values):
            _draw_row(ax, row, values)
        else:
            ax.text(0.02, row, "no value", transform=ax.get_yaxis_transform(), va="center", fontsize=SMALL)
    ax.set_yticks(range(len(every)), every.keys())
    ax.set_ylim(max(len(every), 1) - 0.4, -0.6)
    ax.grid(axis="x", color="#E0E0E0", linewidth=0.6)
    ax.set_axisbelow(True)


def _draw_row(ax: Axes, row: int, values: np.ndarray) -> None:
    """Dots below, the two percentiles as diamonds among them, their values written above."""
    numbers = describe(values)
    dots = _dots(values)
    spread = row + 0.14 + 0.24 * (np.arange(len(dots)) * 0.618 % 1 - 0.5)  # golden-ratio jitter: even, and reproducible
    look = {"color": "#777777", "markersize": 7 if len(dots) < 80 else 5, "markeredgewidth": 0, "alpha": 0.7}
    ax.plot(dots, spread, ".", label="values", zorder=2, clip_on=False, **look)
    for key, fill in (("p50", "black"), ("p99", "white")):
        style = {"marker": "D", "markersize": 5, "markerfacecolor": fill, "markeredgecolor": "black"}
        ax.plot([numbers[key]], [row + 0.14], linestyle="none", label=key, zorder=3, clip_on=False, **style)
    text = f"◆ P50 {numbers['p50']:.3g}   ◇ P99 {numbers['p99']:.3g}"
    ax.text(0.01, row - 0.22, text, transform=ax.get_yaxis_transform(), va="center", fontsize=7)


def _dots(values: np.ndarray) -> np.ndarray:
    return np.sort(values) if len(values) <= DOTS else np.quantile(values, np.linspace(0, 1, DOTS))


def _scale(ax: Axes, values: np.ndarray) -> None:
    """Logarithmic where the values span more than a factor of 50; linear near 0 if some are (almost) 0."""
    positive = values[values > 0]
    low, high = (float(positive.min()), float(positive.max())) if len(positive) else (1.0, 1.0)
    if high / low <= 50:
        ax.set_xlim(0, 1.05 * high)
        return
    if len(positive) == len(values) and low >= high / 1000:
        ax.set_xscale("log")
    else:
        low = max(low, high / 1000)
        ax.set_xscale("symlog", linthresh=low)
        ax.set_xlim(0, 1.5 * high)
    powers = 10.0 ** np.arange(np.ceil(np.log10(low)), np.floor(np.log10(high)) + 1)
    ax.set_xticks([0.0, *powers] if ax.get_xscale() == "symlog" else powers)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
