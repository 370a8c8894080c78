"""The figure of the negative controls: four panels, in the order of the tables."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from minibatch.plot_style import RC, SERIES, SHADES, SMALL, TOKENS, new_figure, sign, tidy
from minibatch.studies.negative_runs import CUT, Chunking

SCHEDULERS = ("prompts first", "prompts whole", "cut, 2048", "cut, 512")


@mpl.rc_context(RC)
def draw(load: pd.DataFrame, equal: pd.DataFrame, chunks: Chunking, footer: str) -> Figure:
    figure = new_figure(7.2)
    (top_left, top_right), (left, right) = figure.subplots(2, 2)
    _load(top_left, load)
    _equal(top_right, equal)
    _waits(left, chunks.waits)
    _throughput(right, chunks)
    sign(figure, footer)
    return figure


def _load(ax: Axes, load: pd.DataFrame) -> None:
    for name, look in zip(("mean TTFT", "mean latency", "throughput"), SERIES[1:], strict=True):
        ax.errorbar(load.index, load[name], load[f"{name} ±"], markersize=4, capsize=3, label=name, **look)
    _one(ax)
    tidy(ax, "Low load: nothing to gain (simulated)", "load: arrival rate x time alone", "continuous / static")
    ax.set_xscale("log")
    ax.set_xticks(load.index, [f"{x:g}" for x in load.index])
    ax.minorticks_off()
    ax.set_ylim(0, 1.2)
    ax.legend(fontsize=SMALL, frameon=False, loc="lower left")


def _equal(ax: Axes, equal: pd.DataFrame) -> None:
    places = np.arange(len(equal))
    ax.bar(places, equal["throughput"], 0.6, color=SHADES[1], yerr=equal["throughput ±"], capsize=3)
    for place, (_, row) in zip(places, equal.iterrows(), strict=True):
        ax.text(
            place,
            row["throughput"] + row["throughput ±"] + 0.03,
            f"{row['throughput']:.2f}",
            ha="center",
            fontsize=SMALL,
        )
    _one(ax)
    tidy(ax, "All at once: the gap is padding (simulated)", "", "throughput, continuous / static")
    labels = [
        f"{case}\n{row['left_padding']:.0%} {TOKENS['left_padding'].label}\n{row['dead_padding']:.0%} dead rows"
        for case, row in equal.iterrows()
    ]
    ax.set_xticks(places, labels)
    ax.set_ylim(0, 1.15 * float((equal["throughput"] + equal["throughput ±"]).max()) + 0.1)


def _waits(ax: Axes, waits: pd.DataFrame) -> None:
    for who, look in zip(SCHEDULERS, SERIES, strict=True):
        rows, dots = waits.xs(who, level="scheduler"), {**look, "linestyle": "none"}
        ax.plot(rows["P50 TTFT, s"], rows["P99 TBT, s"], markersize=7, label=who, **dots)
    for regime in waits.index.get_level_values(0).unique():
        rows = waits.loc[regime]
        ax.plot(rows["P50 TTFT, s"], rows["P99 TBT, s"], "-", color="#BBBBBB", linewidth=1, zorder=0)
        last = rows.iloc[0]
        place = (last["P50 TTFT, s"], last["P99 TBT, s"])
        ax.annotate(regime, place, (6, 4), textcoords="offset points", fontsize=SMALL)
    tidy(ax, "Chunking moves the wait (simulated)", "P50 time to first token, s", "P99 time between tokens, s")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.margins(0.15)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
    ax.minorticks_off()
    ax.legend(fontsize=SMALL, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, columnspacing=1)


def _throughput(ax: Axes, chunks: Chunking) -> None:
    cut, gains = (table.xs(CUT, level="scheduler") for table in chunks)
    places = np.arange(len(cut))
    bars = (
        (-0.2, cut["full, ratio"], cut["full ±"], SHADES[0], "when all requests wait"),
        (0.2, gains["gain"], gains["gain ±"], SHADES[1], "at the limit on mean latency"),
    )
    for shift, values, half, color, label in bars:
        ax.bar(places + shift, values, 0.36, yerr=half, capsize=3, color=color, label=label)
        for place, value, error in zip(places + shift, values, half, strict=True):
            ax.text(
                place,
                max(value + (error if np.isfinite(error) else 0), 1) + 0.02,
                f"{value:.2f}",
                ha="center",
                fontsize=SMALL,
            )
    _one(ax)
    tidy(
        ax,
        "Throughput: lost in chunks, won at the limit (simulated)",
        "prompt + answer, tokens",
        "cut to 512 / prompts first",
    )
    ax.set_xticks(places, list(cut.index))
    ax.set_ylim(0, 1.5)
    ax.legend(fontsize=SMALL, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)


def _one(ax: Axes) -> None:
    ax.axhline(1, color="black", linewidth=1, linestyle=":")
