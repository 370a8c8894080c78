"""ragged.2: which keys a query sees."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from hypothesis import strategies as st
from matplotlib.figure import Figure

from minibatch.labs.checks.ragged.engines import engines, kind
from minibatch.labs.counterexample import expect
from minibatch.labs.properties import for_all
from minibatch.labs.strips import EMPTY, GONE, RIGHT, WRONG, Cell, strips

Visible = Callable[[np.ndarray, int, "int | None"], np.ndarray]
CORNER = (
    "Aligned at the bottom right: the queries are the last tokens of the request, so the first of them sees all keys "
    "of earlier chunks."
)
OWN_END = "Each request of the batch is aligned at its own end; the columns after it are padding, which nobody sees."
BY_HAND = (  # lengths, queries, window
    ([3], 3, None, "A query sees its own key and those before it, and none after it."),
    ([5], 2, None, CORNER),
    ([4], 1, None, "A decode is the newest token, and sees all of its request."),
    ([3, 5], 1, None, OWN_END),
    ([5, 3], 2, None, OWN_END),
    ([4], 1, 2, "The query's own key counts: with window 2 a query sees itself and the one before it."),
    ([4], 3, 2, "Each query has a window of its own: it ends at its own key, and moves on with the query."),
    ([3], 3, 1, "With window 1 a query sees itself alone."),
    ([6, 3], 1, 4, "The window of a shorter request ends at its own end."),
    ([3], 3, 9, "A window that is longer than the request hides nothing."),
    ([1], 1, None, "One token sees itself."),
)


def check(part: Visible) -> None:
    for case in BY_HAND:
        _mask(part, *case)
    for_all(
        lambda lengths, queries, window: _mask(part, [n + queries - 1 for n in lengths], queries, window),
        lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
        queries=st.integers(1, 4),
        window=st.one_of(st.none(), st.integers(1, 8)),
    )
    engines()


def _mask(part: Visible, lengths: list[int], queries: int, window: int | None, idea: str = "Who sees whom.") -> None:
    many = "query" if queries == 1 else "queries"
    case = f"lengths {lengths}, {queries} {many} each, {f'window {window}' if window else 'no window'}"
    same, given = partial(expect, case=case), np.array(lengths)
    got, shape = part(given, queries, window), (len(lengths), queries, max(lengths))
    same(given, lengths, idea="The lengths are the caller's: leave them as they are.", what="lengths afterwards")
    same(kind(got, np.ndarray, "an array"), "an array", idea="Return a numpy array.", what="what comes out")
    same(got.shape, shape, idea="[batch, queries, keys], with as many keys as the longest request has.", what="shape")
    same(str(got.dtype), "bool", idea="An array of truth values (dtype bool).", what="dtype")
    want = np.zeros(shape, dtype=bool)
    for n, query, key in np.ndindex(shape):
        own = lengths[n] - queries + query
        want[n, query, key] = key <= own and (window is None or own - key < window)
    picture = partial(_drawn, want, got)
    same(_in_words(got), _in_words(want), idea=idea, what="keys that are seen", picture=picture)


def _name(shape: tuple[int, ...], request: int, query: int) -> str:
    return f"query {query}" + (f" of request {request}" if shape[0] > 1 else "")


def _in_words(mask: np.ndarray) -> list[str]:
    seen = {place: " ".join(map(str, np.flatnonzero(mask[place]))) or "none" for place in np.ndindex(mask.shape[:2])}
    return [f"{_name(mask.shape, *place)}: {keys}" for place, keys in seen.items()]


def _drawn(want: np.ndarray, got: np.ndarray) -> Figure:
    """The keys of each query, by who should see them and who does."""
    look = {(True, True): RIGHT, (False, False): EMPTY, (False, True): WRONG, (True, False): GONE}
    rows = {}
    for place in np.ndindex(want.shape[:2]):
        pairs = zip(want[place].tolist(), got[place].tolist(), strict=True)
        rows[_name(want.shape, *place)] = [Cell(key, look[pair]) for key, pair in enumerate(pairs)]
    return strips(rows, "keys. Green: seen. Orange: seen, and should not be. Grey: not seen, and should be.")
