"""The figure of the Anyscale study: the four rungs by cap, and what the published factor is made of."""

from __future__ import annotations

import math

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minibatch.plot_style import RC, SERIES, SHADES, SMALL, new_figure, sign, tidy

NAMES = {
    "whole set": "static, to the longest of all",
    "static": "static, to its own longest",
    "iteration": "iteration-level",
    "paged": "paged",
}


@mpl.rc_context(RC)
def draw(table: pd.DataFrame, parts: pd.DataFrame, lowest: float, highest: float, footer: str) -> Figure:
    """``lowest``: published tokens/s of the lowest rung, at the highest cap; ``highest``: the published factor."""
    figure = new_figure(4.6)
    left, right = figure.subplots(1, 2)
    _rates(left, table, lowest)
    _split(right, parts, highest)
    sign(figure, footer)
    return figure


def _rates(ax: Axes, table: pd.DataFrame, lowest: float) -> None:
    caps = table.index.unique("cap")
    places = range(len(caps))
    for (rung, name), look in zip(NAMES.items(), SERIES, strict=True):
        rates = table.xs(rung, level="rung").loc[caps]
        ax.errorbar(places, rates["tokens/s"], rates["±"], markersize=4, capsize=3, **look)
        ax.text(places[-1] + 0.1, rates["tokens/s"].iloc[-1], name, fontsize=SMALL, va="center")
    ax.plot(places[-1], lowest, "kx", markersize=7)
    ax.text(places[-1] - 0.1, lowest, "published: 81", fontsize=SMALL, ha="right", va="center")
    tidy(
        ax,
        "The longer the longest answer, the more it matters (simulated)",
        "cap on the answers, tokens",
        "prompt + answer tokens/s",
    )
    ax.set_yscale("log")
    ax.set_yticks([100, 200, 500, 1000, 2000, 5000], ["100", "200", "500", "1,000", "2,000", "5,000"])
    ax.minorticks_off()
    ax.set_xlim(-0.2, len(caps) + 0.6)
    ax.set_xticks(places, [f"{cap:,}" for cap in caps])


def _split(ax: Axes, parts: pd.DataFrame, highest: float) -> None:
    looks = dict(zip(("harness", "mechanism", "memory", "left"), (*SHADES[1:], "white"), strict=True))
    for place, (_, row) in enumerate(parts.iterrows()):
        bottom = 1.0
        for name, color in looks.items():
            factor = row[name]
            if math.isnan(factor) or factor <= 1:
                continue
            ax.bar(place, bottom * (factor - 1), 0.62, bottom, color=color, edgecolor="#777777", linewidth=0.5)
            if factor > 1.12:
                ax.text(
                    place,
                    bottom * math.sqrt(factor),
                    f"×{factor:.2f}",
                    ha="center",
                    va="center",
                    fontsize=SMALL,
                    color="black" if name in ("harness", "left") else "white",
                )
            bottom *= factor
    ax.axhline(highest, color="black", linewidth=1, linestyle=":")
    ax.text(-0.35, highest * 0.95, "published for cap 1,536: 23", fontsize=SMALL, va="top")
    labels = (
        "the harness: to its own longest",
        "the mechanism: iteration-level",
        "memory: paged",
        "left: kernels and all else",
    )
    for color, label in zip(looks.values(), labels, strict=True):
        ax.bar(0, 0, color=color, edgecolor="#777777", linewidth=0.5, label=label)
    tidy(ax, "What the 23 is made of (simulated)", "cap on the answers, tokens", "times the lowest rung")
    ax.set_yscale("log")
    ax.set_ylim(1, 30)
    ax.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    ax.minorticks_off()
    ax.set_xticks(range(len(parts)), [f"{cap:,}" for cap in parts.index])
    ax.legend(fontsize=SMALL, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
