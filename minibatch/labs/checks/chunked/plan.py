"""Checks of chunked.2: decodes first, then what the budget has left."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from hypothesis import strategies as st

from minibatch.chunked_prefill import ChunkedPrefill
from minibatch.engine import Engine
from minibatch.labs.checks.chunked.runs import FOUR_ANSWERS, expect_tokens, with_budget
from minibatch.labs.counterexample import expect, same
from minibatch.labs.plans import expect_plan, planned, twice
from minibatch.labs.properties import for_all
from minibatch.labs.states import decoding, described, holding, line_up, state
from minibatch.labs.trial import Broken, Trial, request, requests_of, run
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.plan import Chunk, Plan
from minibatch.policies.admission import ReserveMaximum
from minibatch.policies.preemption import Swap
from minibatch.policies.queueing import FCFS
from minibatch.request import RequestState
from minibatch.trace import StepReport

Asks = list[tuple[int, int, int]]  # prompts, new tokens, arrivals
States = Sequence[RequestState]
LIMITS = {
    "asks": st.lists(st.tuples(st.integers(1, 14), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4),
    "budget": st.integers(1, 6),
    "places": st.integers(1, 4),
    "cap": st.one_of(st.none(), st.integers(1, 5)),
}


def check(part: type[ChunkedPrefill]) -> None:
    _decodes_first(partial(_computed, part))
    _prompts_then_newcomers(partial(_computed, part))
    _turns(part)
    _max_chunk()
    _own_policies()
    for_all(_as_by_hand, examples=40, **LIMITS)
    for_all(_short_of_memory, examples=20, **LIMITS)


def _run(
    asks: Sequence[tuple[int, ...]], budget: int, blocks: int = 16, order: FCFS | None = None, **settings: Any
) -> Trial:
    """With blocks of 4. Every plan is made twice."""
    scheduler = twice(ChunkedPrefill)(token_budget=budget, **settings)
    return run(requests_of(asks), scheduler, PagedKVCache(blocks, 4), order=order)


def _computed(
    part: type[ChunkedPrefill],
    active: States,
    want: dict[str, int],
    idea: str,
    waiting: States = (),
    waits: str = "",
    **settings: Any,
) -> None:
    """Of one plan: how many tokens each active request computes, with memory for all. ``waits``: who asks in vain."""
    scheduler, queue, kv = part(**settings), line_up(FCFS(), waiting), holding(PagedKVCache(32, 4), active)
    case = f"active: {described(active)}; waiting: {described(waiting)}; "
    case += ", ".join(f"{name} {value}" for name, value in settings.items())
    plan = planned(lambda: scheduler.plan(queue, active, kv, 9.0), queue, active, kv, case)
    chunks = [Chunk(one, one.num_computed, one.num_computed + want.get(one.label, 0)) for one in active]
    expected = Plan(tuple(chunk for chunk in chunks if chunk.stop > chunk.start))
    expect_plan(plan, expected, case=case, idea=idea, who=[*active, *waiting])
    if waits:
        idea = (
            "A plan also says in `waiting` who was asked and goes without: what draft.plan() gives is the whole of it."
        )
        expect(sorted(one.request.label for one in plan.waiting), list(waits), case=case, idea=idea, what="waiting")


def _decodes_first(computed: partial) -> None:
    trial = _run([(2, 6), (9, 2, 1)], 4)
    idea = "Decodes come first: whoever decodes gets a token in every iteration, and prompts get what is left. "
    expect_tokens(trial, "a", range(1, 7), idea + "Otherwise a long prompt stalls all answers.")
    expect_tokens(trial, "b", [4, 5], "Prompts get all that decodes leave: 9 tokens in pieces of 3.")
    idea = (
        "To have generated something is not to decode: after a preemption all is computed again, and that is "
        "like a prompt. is_decoding says who decodes."
    )
    again = [decoding("a", 2, 1, last=5), state("b", 6, 2, 3, last=5), decoding("c", 2, 1, last=5)]
    computed(again, {"a": 1, "c": 1, "b": 1}, idea, token_budget=3)
    idea = "The last piece of a prompt is still prompt, even if it is one token: it is no decode, and waits its turn."
    computed([state("a", 9, 0, 4, last=5), state("b", 9, 0, 8, last=5)], {"a": 4}, idea, token_budget=4)


def _prompts_then_newcomers(computed: partial) -> None:
    trial = _run([(5, 1), (3, 1)], 4)
    idea = "An iteration that finishes a prompt can admit as well: newcomers join whenever some of the budget is left."
    expect_tokens(trial, "b", [2], idea)
    trial = _run([(10, 1), (10, 1, 1)], 4)
    idea = "A prompt that was begun before goes on before anybody joins: it already holds memory for all its tokens."
    expect_tokens(trial, "a", [3], idea)
    expect_tokens(trial, "b", [5], "What a finished prompt leaves of the budget goes to the next one.")
    begun = [state("b", 9, 0, 3, last=5, rank=1), state("a", 9, 0, 3, last=4, rank=0)]
    idea = (
        "Prompts begun before go on in the order of their admission, which is that of active; only decodes take turns."
    )
    computed(begun, {"b": 4}, idea, token_budget=4)
    idea = "Several prompts can be under way at once: what one does not use, or may not, is for the next."
    computed(begun, {"a": 2, "b": 2}, idea, token_budget=4, max_chunk=2)
    idea = "What is computed again after a preemption was begun before, and goes on before anybody joins."
    computed([state("a", 6, 2, 3, last=5)], {"a": 4}, idea, token_budget=4, waiting=[state("b", 9)])
    idea = "max_num_seqs is how many requests may be active."
    computed([decoding("a")], {"a": 1}, idea, token_budget=4, max_num_seqs=1, waiting=[state("b", 2)], waits="b")


def _turns(part: type[ChunkedPrefill]) -> None:
    decodes = [decoding(label, 2, 1, last=when) for label, when in (("c", 5), ("b", 4), ("a", 5))]
    idea = "More decodes than budget take turns: whoever went without in the last iteration comes first in this one."
    _computed(part, decodes, {"c": 1, "b": 1}, idea, token_budget=2)
    case = f"{FOUR_ANSWERS}; b, a prompt of 3 with 2 new tokens, arrives at 1; token_budget 2"
    four = [request(2, 4, n=4), request(3, 2, 1)]
    trial = run(four, twice(ChunkedPrefill)(token_budget=2), PagedKVCache(16, 4), case=case)
    expect_tokens(trial, "a#3", [3, 5, 7], idea)


def _max_chunk() -> None:
    long = [(80, 1), (2, 1, 1)]
    free, capped = _run(long, 8, 32), _run(long, 8, 32, max_chunk=6)
    expect_tokens(free, "a", [10], "Without max_chunk a prompt may have all of the budget that decodes leave.")
    expect_tokens(free, "b", [11], "Without max_chunk a short prompt waits until the long one before it is computed.")
    expect_tokens(capped, "a", [14], "With max_chunk no request has more than that of an iteration: 80 tokens by 6.")
    expect_tokens(capped, "b", [2], "What max_chunk leaves of the budget admits a short prompt beside a long one.")


def _own_policies() -> None:
    idea = "Who may join is for the scheduler's own admission policy to say: self.admission, whichever it is."
    trial = _run([(4, 8), (4, 2)], 8, 4, admission=ReserveMaximum())
    expect_tokens(trial, "b", [9, 10], idea + " ReserveMaximum keeps 3 of the 4 blocks for a until it ends.")
    trial = _run([(4, 12), (4, 12)], 8, 6, preemption=Swap())
    again = [f"iteration {step.index + 1}" for step in trial.trace.steps if step.recomputed]
    idea = "Who gives way, and how, is for the scheduler's own preemption policy to say: self.preemption."
    trial.expect(again, [], idea=f"{idea} With Swap() nothing is computed again.", what="iterations that recompute")
    trial = _run([(5, 8), (13, 1), (3, 1, 5)], 16, 4, FCFS(2, patience=2.0))
    idea = (
        "The queue is told what time it is: `now` is handed on to it, for orders that look at how long somebody waits."
    )
    expect_tokens(trial, "c", [10], idea)
    trial = _run([(2, 3), (2, 1)], 8, max_num_seqs=1)
    idea = "max_num_seqs is how many requests may be active, however much of the budget is left."
    expect_tokens(trial, "b", [4], idea)


def _as_by_hand(asks: Asks, budget: int, places: int, cap: int | None) -> None:
    trial = _run(asks, budget, 64, max_num_seqs=places, max_chunk=cap)
    got = [{m.request_id: m.stop - m.start for m in step.members} for step in trial.trace.steps]
    want = _by_hand(asks, budget, places, cap or math.inf)
    for number, (mine, yours) in enumerate(zip(want, got, strict=False), start=1):
        if not same(yours, mine):
            idea = "Decodes, then prompts begun before, then newcomers, each with as much as is left."
            facts = {"what": f"tokens in iteration {number}", "iteration": number}
            expect(yours, mine, case=trial.case, idea=idea, picture=partial(with_budget, trial.trace), **facts)
    trial.expect(len(got), len(want), idea="No iteration is wasted.", what="iterations")


def _by_hand(asks: Asks, budget: int, places: int, cap: float) -> list[dict[str, int]]:
    """What each iteration computes, with memory for all; an iteration takes a second."""
    names = "abcd"[: len(asks)]
    prompt, new, at = (dict(zip(names, column, strict=True)) for column in zip(*asks, strict=True))
    waiting, active = sorted(names, key=lambda name: at[name]), []
    iterations: list[dict[str, int]] = []
    now = 0
    while waiting or active:
        now = now if active else max(now, at[waiting[0]])
        step = {name: 1 for name in active if not prompt[name]}

        def compute(name: str, step: dict[str, int] = step) -> None:
            if size := min(prompt[name], budget - sum(step.values()), cap):
                step[name] = int(size)

        for name in [name for name in active if prompt[name]]:
            compute(name)
        while waiting and at[waiting[0]] <= now and len(active) < places and sum(step.values()) < budget:
            active.append(waiting.pop(0))
            compute(active[-1])
        for name, size in step.items():
            prompt[name] = max(prompt[name] - size, 0)
            new[name] -= not prompt[name]
        active = [name for name in active if new[name]]
        iterations.append(step)
        now += 1
    return iterations


def _short_of_memory(asks: Asks, budget: int, places: int, cap: int | None) -> None:
    """With blocks for little more than one request; who decodes must not go without for prompts or recomputation."""
    before: list[str] = []

    def watch(engine: Engine, report: StepReport) -> Iterator[Broken]:
        ran, gone = {m.request_id for m in report.members}, {p.request_id for p in report.preempted}
        stalled = [name for name in before if name not in ran | gone]
        if stalled and any(member.prefill or member.recomputed for member in report.members):
            idea = "Decodes come first: no prompt, and no recomputation, is computed while somebody who decodes waits."
            yield idea, f"a token for {', '.join(stalled)}", f"tokens for {', '.join(sorted(ran))}"
        before[:] = [one.label for one in engine.active if one.is_decoding]

    requests = requests_of((prompt, 2 * new, at) for prompt, new, at in asks)
    scheduler = ChunkedPrefill(token_budget=budget, max_num_seqs=places, max_chunk=cap)
    run(requests, scheduler, PagedKVCache(6, 4), watch=watch)
