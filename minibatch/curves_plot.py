"""Lines of a tidy table: a sweep over rates, over block sizes, over token budgets.

Lines differ by shade, mark and stroke, so that they can be told apart without colour. Where a point stands for several
rows (seeds), it is their mean and the whiskers are their range.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes

from minibatch.plot_style import SERIES

MORE = (  # lines than are usual
    {"color": "#333333", "marker": "v", "linestyle": (0, (6, 1.5, 1, 1.5))},
    {"color": "#777777", "marker": "P", "linestyle": (0, (3, 3))},
    {"color": "#AAAAAA", "marker": "X", "linestyle": "-"},
)


def groups(table: pd.DataFrame, by: Sequence[str]) -> list[tuple[str, pd.DataFrame]]:
    """The rows of each line, in the order of the table; None is a value like any other."""
    if not by:
        return [("", table)]
    found = table.groupby(list(by), sort=False, observed=True, dropna=False)
    return [(", ".join(map(str, key)), rows) for key, rows in found]


def draw(ax: Axes, table: pd.DataFrame, x: str, y: str, by: Sequence[str]) -> None:
    """Raises ValueError if a column is missing, or ``y`` is not of numbers."""
    if missing := [name for name in (x, y, *by) if name not in table]:
        raise ValueError(f"the table has no column {', '.join(missing)}; it has {', '.join(map(str, table.columns))}")
    if not pd.api.types.is_numeric_dtype(table[y]):
        raise ValueError(f"column {y} is not of numbers: {table[y].dtype}")
    lines = groups(table, by)
    looks = [*SERIES[-len(lines) :], *MORE]
    for place, (name, rows) in enumerate(lines):
        values = rows.groupby(x)[y].agg(["mean", "min", "max"])
        whiskers = [values["mean"] - values["min"], values["max"] - values["mean"]]
        ax.errorbar(
            values.index,
            values["mean"],
            yerr=whiskers if (values["min"] < values["max"]).any() else None,
            label=name.lstrip("_") or None,  # matplotlib hides a label that begins so
            markersize=5,
            linewidth=1.4,
            capsize=2.5,
            elinewidth=0.9,
            **looks[place % len(looks)],
        )
