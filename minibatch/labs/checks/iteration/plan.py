"""Checks of iteration.3: who is asked first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from hypothesis import strategies as st

from minibatch.continuous_batching import ContinuousBatching
from minibatch.kv_cache import ContiguousKVCache, KVCache
from minibatch.labs.checks.iteration import plan_runs
from minibatch.labs.checks.iteration.asked import DISPLACING, MIXED, PHASES, PREFILLS, SETTINGS
from minibatch.labs.counterexample import expect
from minibatch.labs.plans import expect_plan, planned
from minibatch.labs.properties import for_all
from minibatch.labs.states import decoding, described, holding, line_up, state
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.plan import Admission, Chunk, Plan, Preemption
from minibatch.policies.admission import Watermark
from minibatch.policies.queueing import FCFS, Order
from minibatch.request import RequestState
from minibatch.trace import counted

States = Sequence[RequestState]
NOW = 9.0


def check(part: type[ContinuousBatching]) -> None:
    asked = partial(_asked, part)
    _mixed(asked)
    _prefill_first(asked)
    _limits(asked)
    _policies(asked)
    for_all(
        lambda **drawn: _as_by_hand(asked, **drawn),
        last=st.lists(st.integers(0, 3), max_size=4),
        prompts=st.lists(st.integers(1, 5), max_size=3),
        budget=st.integers(1, 8),
        places=st.integers(1, 7),
        slots=st.integers(1, 7),
        settings=st.sampled_from(SETTINGS),
    )
    plan_runs.check()


def _asked(
    part: type[ContinuousBatching],
    active: States,
    waiting: States,
    want: str,
    idea: str,
    *,
    budget: int = 64,
    places: int = 8,
    slots: int = 8,
    kv: KVCache | None = None,
    gone: str = "",
    waits: str = "",
    order: Order | None = None,
    **settings: Any,
) -> None:
    """``want``: the labels of those who compute all that they have pending; who waited joins. ``gone``: of the one that
    has to give way to them. ``waits``: of those who are asked in vain."""
    kv = holding(kv or ContiguousKVCache(slots, 16), active)
    queue = line_up(FCFS() if order is None else order, waiting)
    for rank, one in enumerate(reversed(active), start=-len(active)):  # active is in the order of admission, which
        one.rank = rank  # after a preemption need not be that of arrival
    limits = [f"{budget} tokens an iteration", counted(places, "place")]
    limits += [f"{kv.num_free} of {counted(kv.num_units, kv.unit_name)} of {kv.unit_size} free"]
    limits += [f"{name} {value}" for name, value in settings.items()]
    limits += [f"{order!r}, t = {NOW:g}"] if order is not None else []
    case = f"active: {described(active)}; waiting: {described(waiting)}; {', '.join(limits)}"
    scheduler = part(max_num_seqs=places, max_num_batched_tokens=budget, **settings)
    active = list(active)
    plan = planned(lambda: scheduler.plan(queue, active, kv, NOW), queue, active, kv, case)
    chosen = [one for one in (*active, *waiting) if one.label in want]
    expected = Plan(
        tuple(Chunk(one, one.num_computed, one.num_tokens) for one in chosen),
        admissions=tuple(Admission(one, one.num_tokens) for one in chosen if one in queue),
        preemptions=tuple(Preemption(one, chosen[0]) for one in active if one.label in gone),
    )
    expect_plan(plan, expected, case=case, idea=idea, who=[*active, *waiting])
    if waits:
        idea = (
            "A plan also says in `waiting` who was asked and goes without: what draft.plan() gives is the whole of it."
        )
        expect(sorted(one.request.label for one in plan.waiting), list(waits), case=case, idea=idea, what="waiting")


def _running(names: str, last: Sequence[int] = (0, 0, 0)) -> list[RequestState]:
    return [decoding(name, last=when, new=8) for name, when in zip(names, last, strict=False)]


def _prompts(names: str, *sizes: int) -> list[RequestState]:
    return [state(name, size, new=8) for name, size in zip(names, sizes, strict=True)]


def _mixed(asked: partial) -> None:
    idea = "Who waits joins in the next iteration, beside those who run: nobody waits until the others have ended."
    asked(_running("a"), _prompts("b", 3), "ab", idea, **MIXED)
    idea = "The budget is for the tokens of this iteration: nothing is set aside for places that nobody has."
    asked(_running("a"), _prompts("b", 2), "ab", idea, budget=3, **MIXED)
    idea = "At most max_num_seqs requests are active."
    asked(_running("a"), _prompts("bc", 2, 2), "ab", idea, places=2, **MIXED)
    idea = "All who fit join in the same iteration, not one at a time."
    asked(_running("a"), _prompts("bc", 2, 2), "abc", idea, **MIXED)
    idea = "first='decode': the decodes take their tokens from the budget, and a prompt gets what is left, or waits."
    asked(_running("ab"), _prompts("c", 3), "ab", idea, budget=4, **MIXED)
    idea = "first='prefill': the prompt takes its tokens from the budget, and the decodes get what is left, or wait."
    asked(_running("ab", (5, 6)), _prompts("c", 3), "ac", idea, budget=4, **PREFILLS)
    asked(_running("ab"), _prompts("c", 3), "abc", "All of them fit.", budget=5, **PREFILLS)


def _prefill_first(asked: partial) -> None:
    idea = "prefill-first: while a prompt can join, the iteration holds prompts only, and the decodes stall."
    asked(_running("a"), _prompts("b", 3), "b", idea, **PHASES)
    idea = "In prefill-first the prompts come first, whatever `first` says: that is for the mixed order."
    asked(_running("a"), _prompts("b", 3), "b", idea, **PHASES, first="prefill")
    asked(_running("a"), _prompts("b", 3), "b", idea, **PHASES, preemption=DISPLACING)
    idea = "When no prompt can join, the decodes run: else nobody got a token, nobody left, and it stayed so."
    asked(_running("a"), _prompts("b", 3), "a", idea, places=1, **PHASES)
    asked(_running("ab"), _prompts("c", 3), "ab", idea, slots=2, **PHASES)
    asked(_running("ab"), [], "ab", "Nobody waits: the decodes run.", **PHASES)


def _limits(asked: partial) -> None:
    idea = (
        "If the budget is too small for all decodes, those who went without the last time come first; among equals, "
        "the order is that of active."
    )
    for settings in SETTINGS:
        asked(_running("cab", (6, 6, 5)), [], "cb", idea, budget=2, **settings)
    idea = "A prompt is not cut here: it waits until the budget is enough for the whole of it."
    asked(_running("a"), _prompts("b", 5), "a", idea, budget=5, waits="b", **MIXED)
    idea = "First come, first served: behind one that cannot join nobody does."
    asked(_running("a"), _prompts("bc", 6, 2), "a", idea, budget=5, **MIXED)


def _policies(asked: partial) -> None:
    """Whether one may join, and whether one has to give way, is not for the plan to say."""
    idea = "Who gives way is for self.preemption to say: here a waiting request displaces one of lower priority."
    for settings in (MIXED, PHASES):
        low = [decoding("a", priority=1, new=8)]
        asked(low, _prompts("b", 3), "b", idea, gone="a", places=1, preemption=DISPLACING, **settings)
    idea = "`now` is handed on to admit: an order may look at how long somebody waits. Here b has lost patience."
    for settings in (MIXED, PREFILLS, PHASES):
        kv = PagedKVCache(6, 4)  # a holds 3, b would take 4
        asked(_running("a"), _prompts("bc", 13, 2), "a", idea, kv=kv, order=FCFS(2, patience=5.0), **settings)
    idea = "Whether one may join is for self.admission to say: here half of the memory has to stay free."
    kv = PagedKVCache(10, 4)  # a holds 3, b would take 3
    asked(_running("a"), _prompts("b", 9), "a", idea, kv=kv, admission=Watermark(0.5), **MIXED)


def _as_by_hand(
    asked: partial, last: list[int], prompts: list[int], budget: int, places: int, slots: int, settings: dict[str, str]
) -> None:
    """No memory but a slot for each, nobody preempted."""
    active = _running("dacb", last[: min(places, slots)])
    waiting = _prompts("rpq"[: len(prompts)], *prompts)
    left, chosen = budget, ""

    def run_decodes() -> None:
        nonlocal left, chosen
        for one in sorted(active, key=lambda one: one.last_scheduled):
            if left:
                left, chosen = left - 1, chosen + one.label

    def let_join() -> None:
        nonlocal left, chosen
        for number, one in enumerate(waiting, start=len(active) + 1):
            if number > min(places, slots) or one.num_prompt > left:
                return
            left, chosen = left - one.num_prompt, chosen + one.label

    if settings is MIXED:
        run_decodes()
        let_join()
    else:
        let_join()
        if settings is PREFILLS or not chosen:
            run_decodes()
    idea = "Within budget, places and memory: decodes and newcomers, in the order that the settings say."
    asked(active, waiting, chosen, idea, budget=budget, places=places, slots=slots, **settings)
