"""Checks of chunked.1: how much of it now."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from hypothesis import strategies as st

from minibatch.chunked_prefill import ChunkedPrefill
from minibatch.labs.checks.chunked.runs import expect_tokens
from minibatch.labs.counterexample import expect
from minibatch.labs.properties import for_all
from minibatch.labs.strips import GONE, RIGHT, WRONG, Cell, strips
from minibatch.labs.trial import requests_of, run
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.plan_draft import PlanDraft
from minibatch.policies.admission import Watermark
from minibatch.policies.preemption import Recompute

BUDGET = 8


def check(part: type[PlanDraft]) -> None:
    size = partial(_size, part)
    size(3, 8, "Nobody computes more tokens than are pending.")
    size(10, 8, "A prompt that is longer than the budget is cut: uncut it would wait for ever.")
    size(10, 5, "Others have taken their part already: what counts is what is left of the budget, not all of it.")
    size(10, 8, "max_chunk is the most that one request may have of an iteration, however much is left.", cap=6)
    size(10, 3, "max_chunk is a limit, no unit: what is left is used, even if that is less than max_chunk.", cap=6)
    size(10, 0, "When nothing is left of the budget, the request waits.")
    size(10, 5, "Without partial it is all or nothing: what does not fit whole has to wait.", cut=False)
    size(5, 5, "Without partial, what fits exactly is computed.", cut=False)
    size(5, 8, "Without partial it is all or nothing: what max_chunk would cut has to wait.", cap=4, cut=False)
    idea = "The most that pending tokens, budget and max_chunk allow."
    for_all(
        lambda **drawn: size(idea=idea, **drawn),
        pending=st.integers(1, 12),
        left=st.integers(0, BUDGET),
        cap=st.integers(1, 12),
        cut=st.booleans(),
    )
    _in_the_engine()


def _size(part: type[PlanDraft], pending: int, left: int, idea: str, cap: float = math.inf, cut: bool = True) -> None:
    draft = part([], PagedKVCache(8, 4), BUDGET, 8, Watermark(), Recompute(), partial=cut, max_chunk=cap)
    draft.budget = left
    got, again, want = draft._size(pending), draft._size(pending), _counted_up(pending, left, cap, cut)
    capped = "no max_chunk" if cap == math.inf else f"max_chunk {cap:g}"
    case = f"{pending} pending, {left} of a budget of {BUDGET} left, {capped}, partial {cut}"
    rows = {"pending": _bar(pending), f"left of {BUDGET}": _bar(left), "max_chunk": _bar(cap)}
    rows |= {"expected": _bar(want, RIGHT), "happened": _bar(got, RIGHT if got == want else WRONG)}
    drawing: dict[str, Any] = {"what": "tokens now", "picture": lambda: strips(rows, "tokens")}
    expect(got, want, case=case, idea=idea, **drawing)
    idea = "Asking is not planning: nothing changes, and the answer is the same again. Whoever asks pays."
    expect(draft.budget, left, case=case, idea=idea, what="left of the budget after it")
    expect(again, want, case=f"{case}; asked a second time", idea=idea, **drawing)


def _counted_up(pending: int, left: int, cap: float, cut: bool) -> int:
    """Token by token, as long as there is another one and nothing forbids it."""
    count = 0
    while count < pending and count < left and count < cap:
        count += 1
    return count if cut or count == pending else 0


def _bar(tokens: Any, color: str = GONE) -> list[Cell]:
    """As long as the number."""
    if not isinstance(tokens, (int, float)) or not 0 < tokens < 100:
        return [Cell("no limit" if tokens == math.inf else tokens, color)]
    return [Cell(f"{tokens:g}", color, tokens)]


def _in_the_engine() -> None:
    trial = run(requests_of([(14, 3)]), ChunkedPrefill(token_budget=4), PagedKVCache(8, 4))
    pieces = [m.stop - m.start for step in trial.trace.steps for m in step.members if m.prefill]
    idea = "Each iteration goes on with the prompt where the last one stopped."
    trial.expect(pieces, [4, 4, 4, 2], idea=idea, what="pieces of the prompt of a, in tokens")
    expect_tokens(trial, "a", [4, 5, 6], "The first token comes with the last piece of the prompt.")
