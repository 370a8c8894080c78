"""What is true after something has happened: several facts, each as expected beside what came out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minibatch.labs import pictures
from minibatch.labs.counterexample import Picture, expect, in_words, same
from minibatch.plot_style import new_figure

Facts = Sequence[tuple[str, Any, Any, str]]  # name, what came out, what is expected, the idea if that differs


def judge(facts: Facts, case: str, iteration: int | None = None, picture: Picture | None = None) -> None:
    """Raises a CounterExample for the first fact that is wrong; without another ``picture`` it shows all of them."""
    for name, got, want, idea in facts:
        shown = picture or (lambda: table(facts))
        expect(got, want, what=name, case=case, idea=idea, iteration=iteration, picture=shown)


def table(facts: Facts) -> Figure:
    figure = new_figure(0.9 + 0.3 * len(facts))
    draw(figure.add_subplot(), facts)
    return figure


def draw(ax: Axes, facts: Facts) -> None:
    """A row a fact, those marked that are not as expected."""
    ax.set_xlim(0, 1)
    ax.set_ylim(len(facts) - 0.4, -1.4)
    ax.axis("off")
    for x, head in ((0.27, "expected"), (0.64, "happened")):
        ax.text(x, -0.9, head, va="center", fontweight="bold")
    for y, (name, got, want, _) in enumerate(facts):
        wrong = not same(got, want)
        if wrong:
            ax.axhspan(y - 0.42, y + 0.42, color=pictures.HAPPENED, alpha=0.25, linewidth=0)
        for x, said in ((0.01, name), (0.27, _words(want)), (0.64, _words(got))):
            ax.text(x, y, said, va="center", fontsize=9, fontweight="bold" if wrong and x > 0.5 else None)


def _words(value: Any) -> str:
    """Of a list its elements: what is in brackets is hard to read in a picture."""
    if isinstance(value, (list, dict)) and not value:
        return "none"
    said = in_words(value, 60)
    return said[1:-1] if isinstance(value, list) else said
