"""The figure of the vLLM study: where the memory is, by how it is reserved, and what large blocks cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minibatch.plot_style import MEMORY, RC, SHADES, SMALL, new_figure, sign, tidy

Published = Mapping[str, Sequence[float]]


@mpl.rc_context(RC)
def draw(table: pd.DataFrame, blocks: pd.DataFrame, published: Published, footer: str) -> Figure:
    """``table``, ``blocks``: shares and batches by kind of memory, and by rows a block; ``published``: batch and share
    of token states by kind, of those that are drawn."""
    figure = new_figure(5.4)
    axes = figure.subplot_mosaic([["bars", "batch"], ["bars", "waste"]], width_ratios=[1.55, 1])
    _bars(axes["bars"], table, published)
    _curve(axes["batch"], blocks["batch"], "Large blocks hold fewer requests", "requests at a time", SHADES[-1])
    axes["batch"].set_ylim(0, 1.12 * blocks["batch"].max())
    _curve(
        axes["waste"], blocks["waste"], "Waste: half of the last block", "rows a request", MEMORY["fragmentation"].color
    )
    axes["waste"].plot(blocks.index, (blocks.index - 1) / 2, "k:", linewidth=1.2)
    axes["waste"].text(3, 70, "dotted: (B − 1)/2", fontsize=SMALL)
    axes["waste"].set_xlabel("rows a block, B", fontsize=9)
    sign(figure, footer)
    return figure


def _bars(ax: Axes, table: pd.DataFrame, published: Published) -> None:
    parts = {
        "filled": MEMORY["filled"],
        "reserved": replace(MEMORY["reserved"], label="reserved, filled later"),
        "fragmentation": replace(MEMORY["fragmentation"], label="lost inside chunks and blocks"),
        "free": replace(MEMORY["free"], label="free, mostly in pieces too small"),
    }
    names = list(published)
    bottom = np.zeros(len(names))
    for part, look in parts.items():
        heights = table.loc[names, part].to_numpy() * 100
        ax.bar(names, heights, bottom=bottom, width=0.62, label=look.label, **look.patch)
        bottom += heights
    for place, name in enumerate(names):
        batch, filled = published[name][:2]
        ax.plot([place - 0.4, place + 0.4], [100 * filled] * 2, color="black", linewidth=2, label="_")
        ax.text(
            place, 103, f"{table.loc[name, 'batch']:.1f} requests\n(published {batch:.1f})", ha="center", fontsize=8
        )
    ax.plot([], [], color="black", linewidth=2, label="published share of token states")
    tidy(ax, "Memory decides how many requests run together (simulated)", "", "share of 15,700 rows of K/V, %")
    ax.set_xticks(range(len(names)), [name.replace("Orca (", "Orca\n(").replace(", ", ",\n") for name in names])
    ax.set_ylim(0, 116)
    ax.set_yticks(range(0, 101, 20))
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.11), ncols=2, fontsize=SMALL, frameon=False)


def _curve(ax: Axes, values: pd.Series, title: str, ylabel: str, color: str) -> None:
    ax.plot(values.index, values.to_numpy(), "o-", color=color, markersize=4)
    tidy(ax, title, "", ylabel)
    ax.set_xscale("log", base=2)
    ax.set_xticks(values.index[::2], [str(size) for size in values.index[::2]])
