"""Who outranks whom."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from minibatch.continuous_batching import ContinuousBatching
from minibatch.labs.counterexample import expect
from minibatch.labs.properties import for_all
from minibatch.labs.states import state
from minibatch.labs.trial import request, run
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.policies import ByTokensLeft, Never, PreemptionPolicy, Priority, Recompute, Swap, by_priority
from minibatch.request import RequestState

URGENT = "A lower number is more urgent: it may displace those with a greater one, and not the other way round."
EQUALS = "Equals never displace each other: only a strictly greater number is outranked."
AGE = "Who arrived first does not count: a victim that waits again would strike back."
NOBODY = "Without displaces (None) nobody is displaced by one that waits, whatever the priorities."
ALL = "All that are outranked, in the order in which they are given: which of them go is not decided here."
NUMBER = "The number is the one that displaces gives; it need not be the priority."
NUMBERS = st.integers(0, 8).map(lambda n: n / 4)
PRIORITIES = Recompute(displaces=by_priority)


def check(part: type[PreemptionPolicy]) -> None:
    """``part`` is the base class of the policies that are made here."""
    _one_against_one()
    _all_of_them()
    _a_new_list()
    for_all(_any_numbers, own=NUMBERS, others=st.lists(NUMBERS, max_size=6))
    _urgent_takes_the_place()


def _may_go(
    policy: PreemptionPolicy, waiting: RequestState, running: Sequence[RequestState], want: str, case: str, idea: str
) -> None:
    """``want``: the labels of those who may be displaced."""
    given = list(running)
    got = [each.label for each in policy.outranked(waiting, given)]
    expect(got, list(want), what="may be displaced", case=case, idea=idea)
    expect(given, running, what="running", case=case, idea="The list that it is given stays as it is.")


def _one_against_one() -> None:
    for own, other, first, want, idea in (
        (1, 2, False, "r", URGENT),
        (2, 1, False, "", URGENT),
        (1, 1, False, "", EQUALS),
        (1, 1, True, "", AGE),
        (2, 1, True, "", AGE),
    ):
        waiting, running = state("w", priority=own, rank=0 if first else 2), state("r", priority=other, rank=1)
        arrived = f"it arrived {'first' if first else 'last'}"
        case = f"w of priority {own} waits ({arrived}), r of priority {other} runs; displaces=by_priority"
        _may_go(PRIORITIES, waiting, [running], want, case, idea)


def _all_of_them() -> None:
    waiting = state("w", generated=1, priority=2, new=6)
    running = [
        state("a", generated=5, priority=7, new=6, rank=1),
        state("b", generated=1, priority=0, new=16, rank=4),
        state("c", generated=1, priority=3, new=8, rank=2),
        state("d", generated=2, priority=9, new=6, rank=3),
    ]
    for policy, want, idea, by in (
        (Recompute(), "", NOBODY, "None"),
        (Never(), "", NOBODY, "None"),
        (PRIORITIES, "acd", ALL, "by_priority"),
        (Swap(displaces=ByTokensLeft()), "bc", NUMBER, "tokens left"),
    ):
        said = "priority 7, 0, 3, 9, tokens left 1, 15, 7, 4"
        case = f"w waits: priority 2, 5 tokens left; a, b, c, d run: {said}; displaces={by}"
        _may_go(policy, waiting, running, want, case, idea)


def _a_new_list() -> None:
    running = [state("a", priority=3), state("b", priority=3)]
    got = PRIORITIES.outranked(state("w"), running)
    idea = "A new list, also if all are outranked: the plan takes victims out of it."
    good = isinstance(got, list) and got is not running
    expect(good, True, what="a new list", case="all that run are outranked", idea=idea)
    _may_go(PRIORITIES, state("w"), [], "", "nobody runs", "Where nobody runs, nobody can be displaced: an empty list.")


def _any_numbers(own: float, others: list[float]) -> None:
    waiting = state("w", priority=9 - int(own))  # so that the priority is no help
    running = [state("cafbed"[i], rank=9 - i) for i in range(len(others))]
    numbers = {waiting: own, **dict(zip(running, others, strict=True))}
    want = "".join(each.label for each in running if numbers[each] > own)
    said = ", ".join(f"{each.label} {numbers[each]:g}" for each in running) or "nobody"
    case = f"numbers given by displaces: w, which waits, {own:g}; those that run: {said}"
    idea = "Outranked are those with a greater number, and no others."
    _may_go(Recompute(displaces=numbers.__getitem__), waiting, running, want, case, idea)


def _urgent_takes_the_place() -> None:
    """The real engine, with one place."""
    asked = [request(3, 10, priority=1), request(3, 10, 1, first=1, priority=1), request(3, 2, 3, first=2)]
    trial = run(asked, ContinuousBatching(1, preemption=PRIORITIES), PagedKVCache(16, 4), order=Priority())
    for label, want, idea in (
        ("c", [4, 5], "A more urgent request takes the place at once."),
        ("a", [1, 2, 3, *range(6, 13)], "Who was displaced has its place back before an equal that came later."),
        ("b", list(range(13, 23)), "Equals wait for each other."),
    ):
        trial.expect(trial.emitted(label), want, what=f"iterations in which {label} gets a token", idea=idea)
