"""The block map over time: which request has which physical block (or slot), and how far it is filled.

A paged cache gives a request blocks as it grows, from wherever some are free, so the parts of one request lie
scattered, and nothing is lost between them (Kwon et al., SOSP 2023, section 4). A block fills from bottom to top; what
is pale is allocated and empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from minibatch.block_map import Unit, unit_size, units_of
from minibatch.plot_style import MEMORY, OWNERS, SHARED
from minibatch.trace import Trace

HALF = 0.44  # of the height of a cell, of a unit's 1


def spans(trace: Trace) -> list[tuple[int, float, float, Unit]]:
    """(unit, left, right, what it was) for every stretch of iterations in which it stayed the same, and not free."""
    size, done, now = unit_size(trace), [], {}
    for step in trace.steps:
        new = {unit: what for unit, what in enumerate(units_of(step, size)) if what.owners or what.idle}
        for unit, (left, what) in list(now.items()):
            if new.get(unit) != what:
                done.append((unit, left, step.index - 0.5, what))
                del now[unit]
        for unit, what in new.items():
            now.setdefault(unit, (step.index - 0.5, what))
    end = trace.steps[-1].index + 0.5
    return [*done, *((unit, left, end, what) for unit, (left, what) in now.items())]


def draw(ax: Axes, trace: Trace) -> list[Patch]:
    """Paints the map, unit 0 at the bottom; returns what the legend has to explain."""
    order = list(dict.fromkeys(h.request_id for step in trace.steps for h in step.kv.holdings))
    colors = {request_id: OWNERS[place % len(OWNERS)] for place, request_id in enumerate(order)}
    every, size = spans(trace), unit_size(trace)
    held = [(*span, to_rgb(colors[span[3].owners[0]])) for span in every if span[3].owners]
    _paint(ax, [(u, a, b, 1.0) for u, a, b, _, _ in held], [_pale(color) for *_, color in held])
    _paint(ax, [(u, a, b, what.filled / size) for u, a, b, what, _ in held], [color for *_, color in held])
    shared = [(u, a, b, 1.0) for u, a, b, what, _ in held if len(what.owners) > 1]
    _paint(ax, shared, "none", hatch=SHARED.hatch, edgecolors=SHARED.ink)
    idle = [(u, a, b, 1.0) for u, a, b, what in every if what.idle]
    _paint(ax, idle, MEMORY["cached"].color)
    count = max(trace.steps[-1].kv.capacity // max(size, 1), 1)
    ax.set_ylim(-0.5, count - 0.5)
    _label(ax, trace, count)
    grey = to_rgb("#888888")
    entries = [Patch(facecolor=grey, label="filled (a colour a request)")]
    entries += (
        [Patch(facecolor=_pale(grey), label="allocated, empty")]
        if any(what.filled < size for _, _, _, what, _ in held)
        else []
    )
    entries += [Patch(label=SHARED.label, **SHARED.patch)] if shared else []
    return entries + ([Patch(facecolor=MEMORY["cached"].color, label=MEMORY["cached"].label)] if idle else [])


def _pale(color: tuple[float, float, float]) -> tuple[float, ...]:
    return tuple(0.3 * part + 0.7 for part in color)


def _paint(ax: Axes, cells: list[tuple[int, float, float, float]], color, **kwargs) -> None:
    boxes = [
        [(a, u - HALF), (a, u - HALF + 2 * HALF * share), (b, u - HALF + 2 * HALF * share), (b, u - HALF)]
        for u, a, b, share in cells
    ]
    if boxes:
        ax.add_collection(PolyCollection(boxes, facecolors=color, linewidths=0, zorder=2, **kwargs))


def _label(ax: Axes, trace: Trace, count: int) -> None:
    """The request's id at the beginning of its first block, where there is room for it."""
    height = 72 * ax.get_position().height * ax.get_figure().get_figheight() / count
    if height < 6:
        return
    width = ax.get_xlim()[1] - ax.get_xlim()[0]
    for request_id, unit, left, right in _firsts(trace):
        if (right - left) / width > 0.011 * len(request_id):
            text = ax.text(left, unit, f" {request_id}", va="center", fontsize=min(7.5, height), zorder=6)
            text.set_path_effects([withStroke(linewidth=2, foreground="white")])


def _firsts(trace: Trace) -> Iterator[tuple[str, int, float, float]]:
    """(request, the first unit that it does not share, from, to) of every stay; if it shares all: its first."""
    now: dict[str, tuple[int, float]] = {}
    for step in trace.steps:
        owners = Counter(unit for holding in step.kv.holdings for unit in holding.units)
        here = {
            h.request_id: next((unit for unit in h.units if owners[unit] == 1), h.units[0])
            for h in step.kv.holdings
            if h.units
        }
        for request_id, (unit, left) in list(now.items()):
            if here.get(request_id) != unit:
                yield request_id, unit, left, step.index - 0.5
                del now[request_id]
        for request_id, unit in here.items():
            now.setdefault(request_id, (unit, step.index - 0.5))
    for request_id, (unit, left) in now.items():
        yield request_id, unit, left, trace.steps[-1].index + 0.5


def held_share(trace: Trace) -> float:
    """Of the rows in units that somebody had, the filled share, over all iterations; NaN if there were none."""
    size = unit_size(trace)
    shares = [unit.filled / size for step in trace.steps for unit in units_of(step, size) if unit.owners]
    return float(np.mean(shares)) if shares else float("nan")
