"""Checks of iteration.1: who leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

from minibatch.continuous_batching import ContinuousBatching
from minibatch.engine import Engine
from minibatch.kv_cache import ContiguousKVCache, KVCache
from minibatch.labs.checks.iteration.asked import ASKED, Asked
from minibatch.labs.counterexample import expect
from minibatch.labs.properties import for_all
from minibatch.labs.states import decoding, described
from minibatch.labs.strips import EMPTY, GONE, Cell, compared, strips
from minibatch.labs.trial import Broken, alone, request, requests_of, run
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.plan_draft import IterationLevel
from minibatch.request import RequestState
from minibatch.trace import StepReport

REASONS = st.lists(st.sampled_from((None, None, "length", "stop", "abort")), max_size=6)


def check(part: type[IterationLevel]) -> None:
    _left([None, None], "Nobody has finished, so nobody leaves.")
    _left([None, "length", None])
    _left(["length", "length", None, "length"])
    _left(["length", "stop"])
    _left([None, "stop", "length", "abort"])
    _left([], "An empty batch: nobody leaves.")
    for_all(_left, reasons=REASONS)
    _a_place_is_handed_on()
    _one_stops_early()
    for_all(lambda asked: _nobody_stays(asked, ContiguousKVCache(3, 16)), examples=15, asked=ASKED)
    for_all(lambda asked: _nobody_stays(asked, PagedKVCache(12, 2)), examples=15, asked=ASKED)


def _left(reasons: Sequence[str | None], idea: str = "") -> None:
    """``reasons``: for each active request why it has finished, None if it has not."""
    active = [decoding("abcdef"[i], 3, 4, new=4 if why == "length" else 9, ended=why) for i, why in enumerate(reasons)]
    case = f"active: {described(active)}"
    given = list(active)
    got = ContinuousBatching().leaving(given)
    is_list = isinstance(got, (list, tuple)) and all(isinstance(one, RequestState) for one in got)
    said, listed = "a list of requests" if is_list else f"{type(got).__name__}: {got}", "a list of requests"
    expect(said, listed, case=case, idea="What comes out is a list of requests, empty if nobody leaves.")
    pure = "Only say who leaves: the list of active requests is the engine's, and is not to be changed."
    expect(_labels(given), _labels(active), case=case, idea=pure, what="the list that was given, afterwards")
    new = "Make a new list: the list of active requests is the engine's, which will change it."
    expect(got is given, False, case=case, idea=new, what="whether the result is the very list that was given")
    want, names = _labels(one for one in active if one.is_finished), sorted(_labels(got))
    alive = {one.label: Cell(f"{one.label}: alive", EMPTY, 2) for one in active}
    ended = {one.label: Cell(f"{one.label}: finished", GONE, 2) for one in active if one.is_finished}
    rows = {"active": [*(alive | ended).values()], **compared(want, names, width=2)}
    idea = idea or _idea(got, active)
    expect(names, want, case=case, idea=idea, what="who leaves", picture=lambda: strips(rows))


def _labels(requests: Any) -> list[str]:
    return [one.label for one in requests]


def _idea(got: Sequence[RequestState], active: Sequence[RequestState]) -> str:
    """What has been got wrong, if anything."""
    kept = [one for one in active if one.is_finished and one not in got]
    if any(not one.is_finished for one in got):
        return "One request's end is not that of the others: who is alive stays."
    if kept and not got:
        return "Whoever has finished leaves now, and does not wait for the others."
    if any(one.finish_reason != "length" for one in kept):
        return "Finished is finished, whatever the reason: all its tokens, a stop token, or an abort."
    if kept:
        return "All who have finished leave, not only one of them."
    return "Each one that leaves is named once."


def _a_place_is_handed_on() -> None:
    trial = run(requests_of([(2, 2), (2, 6), (2, 3)]), ContinuousBatching(2), ContiguousKVCache(2, 16))
    idea = "The place of one that has finished is free in the next iteration: a ends in 2, so c is computed in 3."
    trial.expect_tokens("c", [3, 4, 5], idea)
    trial.expect_tokens("b", range(1, 7), "b goes on meanwhile.")


def _one_stops_early() -> None:
    """One of two stops early, and gives up its memory."""
    stop = alone(request(3, 6))[1]
    requests = [request(3, 6, stop_token_ids=(stop,)), request(3, 6, first=1)]
    trial = run(requests, ContinuousBatching(4), ContiguousKVCache(4, 16))
    held = [[h.request_id for h in step.kv.holdings] for step in trial.trace.steps]
    idea = "A request that stops early, at its 2nd token, holds no memory from the 3rd iteration on."
    trial.expect(held, [["a", "b"]] * 2 + [["b"]] * 4, idea=idea, what="who holds memory")


def _nobody_stays(asked: Asked, kv: KVCache) -> None:
    def watch(engine: Engine, report: StepReport) -> Iterator[Broken]:
        stayed = [one.label for one in engine.active if one.is_finished]
        if stayed:
            yield "Between two iterations no finished request is active.", "nobody", ", ".join(stayed)

    run(requests_of(asked), ContinuousBatching(3), kv, watch=watch)
