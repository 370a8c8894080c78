"""Time between tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st
from matplotlib.figure import Figure

from minibatch import metrics
from minibatch.continuous_batching import ContinuousBatching
from minibatch.labs import pictures
from minibatch.labs.checks.metrics.timelines import brackets, listed, looked_at, timeline
from minibatch.labs.counterexample import expect, in_words, plain
from minibatch.labs.properties import for_all
from minibatch.labs.trial import request, run
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.trace import Timeline

BY_HAND = (  # times of tokens, of the arrival
    ((5, 6, 7), 0, "There is a gap between two tokens and nowhere else: n tokens have n - 1 gaps."),
    ((5, 6, 7, 9), 0, "Each gap for itself, and not the mean of all: a stall is inside the gap that it makes."),
    ((5, 6, 7, 9), 3, "The arrival does not matter for the time between tokens; the wait before the first is TTFT."),
    ((4, 4, 6), 0, "Two tokens at the same time are 0 s apart: a zero that was measured stays."),
    ((1.25, 1.5, 3.75), 0, "Seconds are not whole numbers: no gap is rounded."),
    ((5,), 0, "One token has no gap: an empty array, not a zero, which would be a measured gap of 0 s."),
    ((), 0, "No token, no gap: an empty array."),
)
ARRAY = "Return a numpy array of floats: means and maxima of it are taken."
SECONDS = st.integers(0, 80).map(lambda quarters: quarters / 4)  # exact, and not all of them whole

Gaps = Callable[[Timeline], np.ndarray]


def check(part: Gaps) -> None:
    for tokens, arrival, idea in BY_HAND:
        _of(part, tokens, arrival, idea)
    got = part(timeline((5, 6, 7, 9)))
    expect(_kind(got), "an array of float64", case="tokens at 5, 6, 7, 9 s", idea=ARRAY)
    for_all(
        lambda tokens, arrival: _of(part, tokens, arrival, "The n - 1 gaps, in order."),
        tokens=st.lists(SECONDS, max_size=6).map(sorted),
        arrival=st.integers(0, 5),
    )
    _in_a_run()


def _of(part: Gaps, tokens: Sequence[float], arrival: float, idea: str) -> None:
    case = f"arrival at {arrival:g} s, tokens at {listed(tokens) or 'no time'}{' s' if tokens else ''}"
    want = [later - earlier for earlier, later in pairwise(tokens)]
    got = looked_at(part, timeline(tokens, arrival), case)
    if not isinstance(got, (np.ndarray, list, tuple, type(None))):
        expect(_kind(got), "an array of float64", case=case, idea=ARRAY)
    shown = {"picture": lambda: _picture(arrival, tokens, want, got)}
    expect(got, want, what="gaps in seconds", case=case, idea=idea, **shown)


def _kind(got: Any) -> str:
    return f"an array of {got.dtype}" if isinstance(got, np.ndarray) else f"a {type(got).__name__}"


def _picture(arrival: float, tokens: Sequence[float], want: Sequence[float], got: Any) -> Figure:
    """The tokens; above them the gaps that were expected, and below them those that came out, one after the other."""
    says = f"gaps in seconds: expected {in_words(want)}, happened {in_words(got, 60)}"
    figure = pictures.events({"a": (arrival, tokens)}, says)
    brackets(figure.axes[0], list(pairwise(tokens)), -0.45, "expected", pictures.EXPECTED)
    gaps = plain(got)
    if isinstance(gaps, (list, tuple)) and all(isinstance(gap, (int, float)) for gap in gaps) and tokens:
        from_arrival = sum(gaps) == tokens[-1] - arrival  # the wait for the first token is one of them
        first = arrival if from_arrival else tokens[0]
        brackets(figure.axes[0], list(pairwise(accumulate(gaps, initial=first))), 0.6, "happened", pictures.HAPPENED)
    figure.axes[0].set_ylim(1.0, -1.0)
    return figure


def _in_a_run() -> None:
    """The real engine: a waits an iteration for the prompt of b, so its tokens come at 1, 3 and 4 s."""
    scheduler = ContinuousBatching(phase_order="prefill-first")
    trial = run([request(2, 3, 0.0), request(2, 2, 1.0, first=1)], scheduler, PagedKVCache(8, 4))
    table = metrics.requests_table(trial.trace)
    got = {key: table[key].tolist() for key in ("tpot", "max_tbt")}
    idea = "In the table of a real run: a waits for the prompt of b, and that is in one of its gaps."
    trial.expect(got, {"tpot": [1.5, 1], "max_tbt": [2, 1]}, idea=idea)
