"""The block map over time: which request has which physical block (or slot), and how far it is filled.

A paged cache gives a request blocks as it grows, from wherever some are free, so the parts of one request lie
scattered, and nothing is lost between them (Kwon et al., SOSP 2023, section 4). A block fills from bottom to top; what
is pale is allocated and empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from minibatch.block_map import Unit, holders, units_of
from minibatch.metrics import ratio
from minibatch.plot_style import MEMORY, OWNERS, SHARED
from minibatch.trace import StepReport, Trace

Span = tuple[int, float, float, Unit]
HALF = 0.44  # of the height of a cell, of a unit's 1


def spans(trace: Trace, size: int) -> list[Span]:
    """(unit, left, right, what it was) for every stretch of iterations in which it stayed the same, and not free.
    ``size``: rows of a unit."""
    return _stretches(
        trace, lambda step: {unit: what for unit, what in enumerate(units_of(step, size)) if what.owners or what.idle}
    )


def _stretches(trace: Trace, of: Callable[[StepReport], dict[Any, Any]]) -> list[tuple[Any, float, float, Any]]:
    """(key, left, right, value) for every stretch of iterations in which the key had that value."""
    done, now = [], {}
    for step in trace.steps:
        new = of(step)
        for key, (left, value) in list(now.items()):
            if new.get(key) != value:
                done.append((key, left, step.index - 0.5, value))
                del now[key]
        for key, value in new.items():
            now.setdefault(key, (step.index - 0.5, value))
    end = trace.steps[-1].index + 0.5
    return [*done, *((key, left, end, value) for key, (left, value) in now.items())]


def held_share(every: list[Span], size: int) -> float:
    """Of the rows in units that somebody had, the filled share, over all iterations; NaN if there were none."""
    held = [(right - left, what.filled) for _, left, right, what in every if what.owners]
    return ratio(sum(stay * filled for stay, filled in held), size * sum(stay for stay, _ in held))


def draw(ax: Axes, trace: Trace, every: list[Span], size: int) -> list[Patch]:
    """Paints the map of these spans, unit 0 at the bottom; returns what the legend has to explain."""
    colors = {request_id: OWNERS[place % len(OWNERS)] for place, request_id in enumerate(holders([trace]))}
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
    partly = any(what.filled < size for _, _, _, what, _ in held)
    entries += [Patch(facecolor=_pale(grey), label="allocated, empty")] if partly else []
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
    for request_id, left, right, unit in _firsts(trace):
        if (right - left) / width > 0.011 * len(request_id):
            text = ax.text(left, unit, f" {request_id}", va="center", fontsize=min(7.5, height), zorder=6)
            text.set_path_effects([withStroke(linewidth=2, foreground="white")])


def _firsts(trace: Trace) -> list[tuple[str, float, float, int]]:
    """(request, from, to, the first unit that it does not share) of every stay; if it shares all: its first."""

    def first(step: StepReport) -> dict[str, int]:
        owners = Counter(unit for holding in step.kv.holdings for unit in holding.units)
        held = (holding for holding in step.kv.holdings if holding.units)
        return {h.request_id: next((unit for unit in h.units if owners[unit] == 1), h.units[0]) for h in held}

    return _stretches(trace, first)
