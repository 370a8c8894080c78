"""Runs under a token budget, against what they should do."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from minibatch import plot_style, plots
from minibatch.labs.pictures import from_one
from minibatch.labs.trial import Trial
from minibatch.trace import Trace

FOUR_ANSWERS = (
    "a is a prompt of 2 tokens to which four answers of 4 tokens are wanted (n = 4): once the prompt is computed, each "
    "answer decodes by itself, as a#0, a#1, a#2 and a#3"
)


def expect_tokens(trial: Trial, label: str, want: Sequence[int], idea: str) -> None:
    """In these iterations the request gets a token."""
    trial.expect_tokens(label, want, idea, lambda: with_budget(trial.trace))


def with_budget(trace: Trace) -> Figure:
    """Who computed when, and the tokens of each iteration below the line of the budget."""
    axes = plot_style.new_axes(3.0 + 0.22 * len(trace.timelines) + 2.6, rows=2)
    plots.membership(from_one(trace), axes[0])
    plots.token_budget(from_one(trace), axes[1])
    return axes[0].figure
