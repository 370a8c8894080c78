"""Rows of labelled boxes below each other: tokens, blocks, places of a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minibatch import plot_style

EMPTY, GONE = "white", "#DDDDDD"
RIGHT, WRONG = plot_style.MEMORY["filled"].color, plot_style.MEMORY["fragmentation"].color
LEGIBLE = 24  # columns with letters of the usual size


class Cell(NamedTuple):
    """``width`` in columns. ``color`` is laid on thinly, so that the text can be read."""

    text: object
    color: str = EMPTY
    width: int = 1


def strips(rows: Mapping[str, Sequence[Cell]], says: str = "") -> Figure:
    """One strip a row, from the top, with its name on the left."""
    columns = max(8, *(sum(cell.width for cell in row) for row in rows.values()))
    figure = plot_style.new_figure(0.9 + 0.5 * len(rows))
    ax = figure.add_subplot()
    size = 9 if columns <= LEGIBLE else 7
    for y, (name, row) in enumerate(rows.items()):
        ax.text(-0.01 * columns, y, name, ha="right", va="center", fontsize=9)
        x = 0
        for text, color, width in row:
            box = {"edgecolor": "#777777", "alpha": 0.45, "linewidth": 0.8}
            ax.add_patch(Rectangle((x + 0.03, y - 0.4), width - 0.06, 0.8, facecolor=color, **box))
            ax.text(x + width / 2, y, str(text), ha="center", va="center", fontsize=size)
            x += width
        if not row:
            ax.text(0.05, y, "nothing", va="center", style="italic", fontsize=9)
    ax.set_xlim(0, columns)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.axis("off")
    ax.set_title(says, loc="left", fontsize=10)
    return figure


def compared(want: Sequence[object], got: Sequence[object], width: int = 1) -> dict[str, list[Cell]]:
    """The strips ``expected`` and ``happened``, coloured where they differ."""
    made: dict[str, list[Cell]] = {}
    for name, mine, other, color in (("expected", want, got, RIGHT), ("happened", got, want, WRONG)):
        agree = [i < len(other) and mine[i] == other[i] for i in range(len(mine))]
        made[name] = [Cell(text, EMPTY if same else color, width) for text, same in zip(mine, agree, strict=True)]
    return made
