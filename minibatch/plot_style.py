"""One visual language for all pictures: what a colour means in one figure, it means in every other.

The colours of kinds are from Okabe and Ito's palette (2008), chosen for colour-blind readers. They also differ in
greyscale: work that moves a request forward is plain, dark (prefill) or light (decode); everything that is waste is
hatched. What is only compared (systems, orders, measures) has shades of violet, which no kind has: the darker, the
later in its list, and each with its own mark and stroke.
Figures are 800 or 960 pixels wide at 100 dpi, made without pyplot, so nothing global is left behind and no display is
needed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.path import Path as MarkerPath
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from minibatch.trace import Trace


@dataclass(frozen=True)
class Look:
    """How one kind of thing is drawn: ``color`` fills, ``ink`` hatches."""

    label: str
    color: str
    hatch: str | None = None
    ink: str = "white"

    @property
    def patch(self) -> dict[str, Any]:
        """Keyword arguments of any filled artist."""
        return {"facecolor": self.color, "edgecolor": self.ink, "hatch": self.hatch, "linewidth": 0}


TOKENS = {
    "prefill": Look("prefill", "#0072B2"),
    "decode": Look("decode", "#E69F00"),
    "recompute": Look("recomputed", "#CC79A7", "////", "#5A2040"),
    "left_padding": Look("left padding", "#E4E4E4", "....", "#777777"),
    "dead_padding": Look("dead row: finished, still runs", "#C4C4C4", "xxxx", "#666666"),
}
MEMORY = {
    "filled": Look("filled", "#009E73"),
    "fragmentation": Look("fragmentation", "#D55E00", "xxxx", "#6B2A00"),
    "reserved": Look("reserved, unused", "#F0E442", "////", "#8A8000"),
    "cached": Look("free, keeps a prefix", "#A9D3EE"),
    "free": Look("free", "#F4F4F4"),
}
RESIDENT = Look("holds memory, does not run", "#56B4E9")
FOUND = Look("found in the prefix cache", MEMORY["cached"].color)
SHARED = Look("shared by several", "#888888", "\\\\\\\\", "#333333")
# Of requests, where a colour says whose something is: lighter than those above (most are from Tol's light scheme), none
# of them blue, which is a prefix that nobody has; always with the request's id.
OWNERS = ("#B39BD8", "#EE8866", "#44BB99", "#EEDD88", "#FFAABB", "#AAAA00", "#C8A27E", "#BBCC33")

# Lines and marks: label and style. The marks are of single moments.
LINES = {
    "waiting": ("waiting", {"color": "#999999", "linewidth": 1.0, "linestyle": "-"}),
    "preempted": ("preempted, K/V given up", {"color": "#A1457A", "linewidth": 1.4, "linestyle": (0, (2, 1.5))}),
    "swapped": ("preempted, K/V on the host", {"color": "#56B4E9", "linewidth": 2.4, "linestyle": (0, (0.8, 0.8))}),
}
ARROW = [(-1, -0.7), (0, 0), (-1, 0.7)]  # its tip is at the time of arrival
BRANCH = MarkerPath([(-0.5, 1), (-0.5, 0), (0.2, 0)])  # from the row above
MARKS = {
    "arrived": ("arrival", {"marker": ARROW, "color": "#666666", "markersize": 8, "markeredgewidth": 0, "zorder": 5}),
    "forked": ("forks off", {"marker": BRANCH, "color": "black", "fillstyle": "none", "markersize": 12, "zorder": 5}),
    "finished": ("finished", {"marker": "|", "color": "black", "markersize": 9, "markeredgewidth": 2.0, "zorder": 5}),
    "ended": ("aborted or refused", {"marker": "x", "color": "black", "markersize": 5, "zorder": 5}),
}
BUDGET = ("token budget", {"color": "black", "linewidth": 1.2, "linestyle": "--"})

# What is compared, first to last; a missing mark is for lines without points.
SERIES = (
    {"color": "#BFA9E6", "marker": "s", "linestyle": (0, (1, 1.2))},
    {"color": "#9273CC", "marker": "^", "linestyle": "--"},
    {"color": "#62379E", "marker": "D", "linestyle": "-."},
    {"color": "#2A0A50", "marker": "o", "linestyle": "-"},
)
SHADES = tuple(str(series["color"]) for series in SERIES)

# What the caption does not mention: policies as they are if nobody chooses.
USUAL = {
    "order": "FCFS()",
    "admission": "Watermark(share=0.01,",
    "preemption": "Recompute(victim=newest, displaces=None)",
}

WIDTH, WIDE = 8.0, 9.6  # inches: 800 and 960 pixels at 100 dpi
DPI, SHARP = 100, 150  # of the layout, and of a PNG, which many screens show at more than 100
LETTERS = 100  # of a title that is as wide as the axes
SMALL, SMALLEST = 8, 7  # points: ticks and legends; footers
RC = {"hatch.linewidth": 0.6, "font.size": 9.0, "text.parse_math": False}
SVG = {"svg.fonttype": "none", "svg.hashsalt": "minibatch"}  # text stays text, and the same figure the same file


def new_axes(height: float, rows: int = 1, columns: int = 1, **kwargs: Any) -> Any:
    """Axes of a fresh figure: one, or an array ``[rows, columns]``."""
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    return figure.subplots(rows, columns, **kwargs)


def new_figure(height: float) -> Figure:
    """A wide figure without axes, for several panels side by side."""
    return Figure(figsize=(WIDE, height), dpi=DPI, layout="constrained")


def sign(figure: Figure, text: str) -> None:
    """Says under the picture whether its numbers are measured or simulated, and how they came about."""
    figure.supxlabel(text, fontsize=SMALLEST, color="#555555", x=0.01, ha="left", wrap=True)


def save(figure: Figure, path: str | Path) -> None:
    """Writes a figure, the format by the suffix. An SVG keeps its text; the same figure is the same file."""
    metadata = {"Date": None} if Path(path).suffix == ".svg" else None
    with mpl.rc_context(SVG):
        figure.savefig(path, dpi=SHARP, metadata=metadata)


def tidy(ax: Axes, title: str, xlabel: str, ylabel: str) -> None:
    ax.set_title(_broken(title), loc="left", fontsize=10)
    ax.set_xlabel(xlabel, fontsize=9)
    ax.set_ylabel(ylabel, fontsize=9)
    ax.tick_params(labelsize=SMALL)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _broken(title: str) -> str:
    """A title that is too long for a line, broken after commas."""
    glued = title.replace(" ", "\N{NO-BREAK SPACE}").replace(",\N{NO-BREAK SPACE}", ", ")
    return textwrap.fill(glued, LETTERS, break_long_words=False).replace("\N{NO-BREAK SPACE}", " ")


def legend(ax: Axes, panels: Iterable[Axes], handles: Sequence[Artist] = ()) -> None:
    """One legend of what the panels show, below the axis label, in as many lines as it needs: it never covers data.

    ``handles``: its entries, if they are not those of everything that is drawn
    """
    shown = {artist.get_label() for p in panels for artist in (*p.collections, *p.lines, *p.patches)}
    handles = handles or [handle for handle in _entries() if handle.get_label() in shown]
    if not handles:
        return
    room = 19.5 * ax.get_position().width * ax.get_figure().get_figwidth()
    inches = ScaledTranslation(0, -0.42, ax.get_figure().dpi_scale_trans)
    ax.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=ax.transAxes + inches,
        ncols=_columns([str(handle.get_label()) for handle in handles], room),
        fontsize=SMALL,
        frameon=False,
        borderaxespad=0,
        columnspacing=1.4,
        handlelength=1.8,
    )


def _columns(labels: list[str], room: float) -> int:
    """The columns of the fewest lines that fit into so many letters (matplotlib fills a legend column by column)."""
    count = len(labels)
    for columns in range(count, 1, -1):
        if sum(max(map(len, column)) + 7 for column in np.array_split(labels, columns)) <= room:
            lines = -(-count // columns)
            return -(-count // lines)  # no more than these lines need, so that all columns are about as long
    return 1


def _entries() -> Iterator[Artist]:
    """Everything that can be in a picture, in the order of a legend."""
    for look in (FOUND, *TOKENS.values(), RESIDENT, *MEMORY.values()):
        edge = look.ink if look.hatch else "#BBBBBB"  # an edge, so that near-white can be seen on white
        yield Patch(facecolor=look.color, edgecolor=edge, hatch=look.hatch, linewidth=0.5, label=look.label)
    for label, style in (*LINES.values(), BUDGET, *MARKS.values()):
        yield Line2D([], [], label=label, **({"linestyle": "none"} if "marker" in style else {}) | style)


def nothing(ax: Axes, trace: Trace) -> None:
    """Says in the axes why they are empty."""
    kept = not any(t.token_times for t in trace.timelines)
    text = "no iteration was executed" if kept else "this trace was kept without step reports"
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", fontsize=9, color="#666666")
    ax.set_xticks([])
    ax.set_yticks([])


def clock(trace: Trace) -> str:
    return "simulated" if trace.simulated else "measured"


def footer(traces: Iterable[Trace]) -> str:
    """What the numbers are and what made them, from the headers: one line; where traces differ, all values.

    On a virtual clock nothing depends on the versions of other packages, so there only ours is named.
    """
    traces = list(traces)
    parts = [" and ".join(sorted({f"{clock(trace)} time" for trace in traces}))]
    for key in (
        "model",
        "source",
        "dtype",
        "forward",
        "device",
        "machine",
        "workload",
        "seed",
        "kv_budget",
        "versions",
    ):
        texts = (_text(trace.meta[key], trace.simulated) for trace in traces if trace.meta.get(key) is not None)
        values = [text for text in dict.fromkeys(texts) if text]
        if values:
            parts.append((f"{key} " if key in ("model", "workload", "seed") else "") + " / ".join(values))
    return " · ".join([*parts[:-1], *_policies(traces), *parts[-1:]])


def _policies(traces: list[Trace]) -> Iterator[str]:
    """Those that are not the usual ones."""
    for key, usual in USUAL.items():
        values = list(dict.fromkeys(trace.meta[key] for trace in traces if key in trace.meta))
        if any(not value.startswith(usual) for value in values):
            yield f"{key} {' / '.join(values)}"
    cached = [trace.prefix_cached for trace in traces]
    if any(cached):
        yield "prefix cache" if all(cached) else f"prefix cache in {sum(cached)} of {len(cached)}"


def _text(value: Any, simulated: bool) -> str:
    if not isinstance(value, dict):
        return str(value)
    named = {name: version for name, version in value.items() if not simulated or name == "minibatch"}
    return ", ".join(f"{name} {version}" for name, version in named.items() if version is not None)


def name_of(trace: Trace) -> str:
    """The configuration: the trace's name, else its scheduler's class, else nothing."""
    return str(trace.meta.get("name") or trace.meta.get("scheduler", "").split("(")[0])
