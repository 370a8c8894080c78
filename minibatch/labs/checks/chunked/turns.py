"""Checks of chunked.3: taking turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from hypothesis import strategies as st
from matplotlib.figure import Figure

from minibatch.chunked_prefill import ChunkedPrefill
from minibatch.labs import pictures
from minibatch.labs.checks.chunked.runs import FOUR_ANSWERS, expect_tokens
from minibatch.labs.counterexample import expect
from minibatch.labs.properties import for_all
from minibatch.labs.states import decoding
from minibatch.labs.trial import request, run
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.request import RequestState

NAMES = "cabfde"  # as they are given: in no order
Ordering = Callable[[Iterable[RequestState]], list[RequestState]]


def check(part: Ordering) -> None:
    ordered = partial(_ordered, part)
    ordered([3, 4], "Whoever ran in the last iteration comes last in this one, behind those that went without.")
    ordered([4, 3], "Whoever went without in the last iteration comes first in this one, wherever it stood.")
    ordered([4, 4, 4], "Among those that ran in the same iteration, the order stays as it was given.")
    ordered([4, 4], "Of those that ran in the same iteration none comes first for having got less.", generated=[5, 1])
    ordered([3, 2, 1], "Of several that went without, the one that has waited longest comes first.")
    ordered([3, 4], "Turns are by when somebody ran last, not by how much it has got.", generated=[5, 1])
    ordered([0, -1], "Whoever has never run (-1) has waited longest.")
    ordered([], "Nobody, no order: an empty list.")
    idea = "Least recently scheduled first; ties as given."
    for_all(lambda last: ordered(last, idea), last=st.lists(st.integers(-1, 4), max_size=6))
    for_all(lambda many, budget: _gaps(part, many, budget), many=st.integers(1, 9), budget=st.integers(1, 5))
    _in_the_engine()


def _ordered(part: Ordering, last: Sequence[int], idea: str, generated: Sequence[int] = (1,) * 6) -> None:
    given = [decoding(NAMES[i], 2 + i % 3, generated[i], last=when, **_unlike(i)) for i, when in enumerate(last)]
    said = {r.label: f"{r.label} {f'in {r.last_scheduled}' if r.last_scheduled >= 0 else 'never'}" for r in given}
    case = f"last scheduled: {', '.join(said.values()) or 'nobody is there'}"
    case += "; names, prompts, arrivals and priorities are in no order" if len(given) > 1 else ""
    case += f"; tokens generated: {list(generated)}" if len(generated) < 6 else ""
    requests, want = list(given), _labels(_sorted_slowly(given))
    found = part(requests)
    expect(type(found).__name__, "list", case=case, idea="The result is a list of the requests.", what="type")
    got = _labels(found)

    def picture() -> Figure:
        shown = [[said.get(name, name) for name in names] for names in (want, got)]
        return pictures.difference(*shown, "order, and the iteration in which each was last scheduled")

    expect(got, want, case=case, idea=idea, what="order", picture=picture)
    pure = "Ordering makes a new list: the one that was given is the engine's, and stays as it is."
    expect(_labels(requests), _labels(given), case=case, idea=pure, what="the list that was given")
    expect(found is requests, False, case=case, idea=pure, what="whether the result is the list that was given")
    lazily = _labels(part(one for one in given))
    expect(lazily, want, case=f"{case}; given by a generator", idea="Any iterable can be ordered, not only a list.")


def _unlike(i: int) -> dict[str, Any]:
    """Nothing agrees with the order in which they are given: who was preempted is admitted again behind others, before
    whom it had come."""
    return {"rank": i ^ 1, "arrival": float(i ^ 1), "priority": (i + 1) % 3}


def _labels(requests: Iterable[RequestState]) -> list[str]:
    return [one.label for one in requests]


def _sorted_slowly(requests: Sequence[RequestState]) -> list[RequestState]:
    """Takes the first of those that have waited longest, again and again."""
    left, done = list(requests), []
    while left:
        longest = min(one.last_scheduled for one in left)
        done.append(next(one for one in left if one.last_scheduled == longest))
        left.remove(done[-1])
    return done


def _gaps(part: Ordering, many: int, budget: int) -> None:
    running, most = [decoding("abcdefghi"[i], 2, 1, last=0, rank=i) for i in range(many)], -(-many // budget)
    for number in range(1, 4 * many):
        for each in part(list(running))[:budget]:
            each.last_scheduled = number
        waited = {one.label: number - one.last_scheduled for one in running if number - one.last_scheduled >= most}
        idea = "With R decodes and a budget of B everybody gets a turn in any ceil(R / B) iterations."
        case = f"{many} decodes, budget {budget}, iteration {number}"
        expect(waited, {}, case=case, idea=idea, what=f"without a turn for {most} iterations or more")


def _in_the_engine() -> None:
    idea = "Decodes beyond the budget take turns."
    case = f"{FOUR_ANSWERS}; ChunkedPrefill, 2 tokens an iteration"
    four = run([request(2, 4, n=4)], ChunkedPrefill(token_budget=2), PagedKVCache(16, 4), case=case)
    expect_tokens(four, "a#0", [1, 2, 4, 6], idea)
    expect_tokens(four, "a#3", [3, 5, 7], idea)
