"""The whole run at a glance, above its iterations: who took part when, and the track on which the cursor moves."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from minibatch import membership_plot
from minibatch.player.film import Frame
from minibatch.plot_style import LINES
from minibatch.trace import Trace

LABELLED = 30  # rows that have a name beside them


def strip(trace: Trace, film: Sequence[Frame]) -> str:
    """Membership over the whole run, as in ``plots.membership``: a row a request, a column an iteration.

    In percent of width and height. The cursor is no part of it.
    """
    cells = membership_plot.read(trace)
    low, high = film[0].index - 0.5, film[-1].index + 0.5
    cut = [
        (kind, row, max(left, low), min(right, high))
        for kind in (*LINES, *membership_plot.LOOKS)
        for row, left, right in cells.spans[kind]
        if left < high and right > low
    ]
    rows = {row: place for place, row in enumerate(sorted({row for _, row, _, _ in cut}))}
    pieces = [f"<div class=cells style='height:{_height(len(rows))}px'>"]
    if len(rows) <= LABELLED:
        names = {row: name for name, row, _, _ in cells.stays if row in rows}
        for row, name in names.items():
            pieces.append(f"<small style='top:{100 * rows[row] / len(rows):.4g}%'>{escape(name)}</small>")
    for kind, row, left, right in cut:
        x, width = 100 * (left - low) / (high - low), 100 * (right - left) / (high - low)
        y, height = 100 * rows[row] / len(rows), 100 / len(rows)
        pieces.append(
            f"<i class={kind} style='left:{x:.4g}%;width:{width:.4g}%;top:{y:.4g}%;height:{height:.4g}%'></i>"
        )
    return "".join([*pieces, "</div>"])


def _height(rows: int) -> int:
    """Pixels: what the rows would like, within reason."""
    return min(max(12 * rows, 40), 220)
