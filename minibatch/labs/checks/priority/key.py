"""Checks of priority.1: priority with ageing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import partial

from hypothesis import strategies as st
from matplotlib.figure import Figure

from minibatch import plot_style
from minibatch.continuous_batching import ContinuousBatching
from minibatch.labs.counterexample import expect, in_words
from minibatch.labs.properties import for_all
from minibatch.labs.states import line_up, state
from minibatch.labs.trial import Trial, request, run
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.policies.queueing import Order

Asks = Sequence[tuple[int, float]]  # priorities and arrivals, as they come
NAMES = "cabfde"  # as they come: in no order
AGEING = st.sampled_from([0.5, 1.0, 2.0, 8.0, 64.0, math.inf])  # with these, sums of quarters are exact


def check(part: type[Order]) -> None:
    sorts = partial(_sorts, part)
    sorts([(2, 0), (0, 5), (1, 6)], math.inf, "The lower the number, the more urgent: 0 is before 1.")
    _stays(part)
    sorts([(0, 0), (0, 5)], 10, "Of equally urgent ones, whoever came first has waited longest, at any time.")
    idea = "A request gains one level for every `ageing` seconds it waits: after 15 s, with 10 s a level, it has 1.5."
    sorts([(1, 0), (0, 15)], 10, idea)
    idea = "A head start of 5 s is worth half a level where a level takes 10 s, no more: the urgent one goes first."
    sorts([(1, 0), (0, 5)], 10, idea)
    sorts([(1, 1), (0, 10)], 10, "Parts of a level count too: 9 s earlier is 0.9 of a level, which is not enough.")
    idea = "Parts of a level count, however small: a key must not be rounded."
    sorts([(1, 0), (0, 9.6)], 10, idea)
    sorts([(1, 0), (0, 999.9)], 1000, idea)
    sorts([(1, 0), (0, 10)], 10, "Equal after ageing: then it is first come, first served.")
    sorts([(1, 0), (0, 1000)], math.inf, "Without ageing (math.inf) no wait makes up for priority.")
    sorts([(1, 0), (0, 10**12)], math.inf, "Without ageing (math.inf) no wait makes up for priority, ever so long.")
    sorts([(1000, 0), (0, 9999)], 10, "Levels have no end: 1,000 of them take 10,000 s, and 9,999 s are not enough.")
    idea = "Late on the clock it is the same: what counts is who came how much earlier than the other."
    sorts([(1, 10**9), (0, 10**9 + 9)], 10, idea)
    sorts([(1, 10**9), (0, 10**9 + 11)], 10, idea)
    sorts([(-1, 3), (0, 0)], 2, "Priorities below 0 are numbers like others.")
    idea = "By priority - (now - arrival) / ageing, the same `now` for all."
    for_all(lambda asks, ageing: sorts(asks, ageing, idea), asks=_drawn(-2, 12, 0), ageing=AGEING)
    _nobody_starves(part)
    for_all(
        lambda **drawn: _overtaken(part, **drawn),
        examples=30,
        asks=_drawn(0, 8, 2),
        new=st.integers(1, 3),
        ageing=AGEING,
    )


def _drawn(most_urgent: int, latest: int, fewest: int) -> st.SearchStrategy:
    asks = st.lists(
        st.tuples(st.integers(most_urgent, 3), st.integers(0, 4 * latest).map(lambda n: n / 4)),
        min_size=fewest,
        max_size=6,
    )
    return asks.map(lambda asks: sorted(asks, key=lambda ask: ask[1]))


def _sorts(part: type[Order], asks: Asks, ageing: float, idea: str) -> None:
    waiting = [state(NAMES[i], 9 - i, arrival=float(at), priority=p) for i, (p, at) in enumerate(asks)]
    said = [f"{NAMES[i]} of priority {p}, arrived at {at:,.13g} s" for i, (p, at) in enumerate(asks)]
    case = (
        f"as they come: {'; '.join(said) or 'nobody'}; {'no ageing' if ageing == math.inf else f'{ageing:g} s a level'}"
    )
    got, want = [one.label for one in line_up(part(ageing), waiting)], _next_first(asks, ageing)
    expect(got, want, case=case, idea=idea, what="order", picture=lambda: _levels(asks, ageing, want, got))


def _next_first(asks: Asks, ageing: float) -> list[str]:
    """Sorted by what each number is at one common time, exactly."""
    per_second = Fraction(0) if ageing == math.inf else 1 / Fraction(ageing)
    aged = [Fraction(priority) - (1000 - Fraction(arrival)) * per_second for priority, arrival in asks]
    return [NAMES[i] for i in sorted(range(len(asks)), key=lambda i: (aged[i], i))]


def _levels(asks: Asks, ageing: float, want: list[str], got: list[str]) -> Figure:
    """A line a request: its priority less the levels gained, from its arrival on. The lowest is next."""
    ax = plot_style.new_axes(3.4)
    first, last = (end(arrival for _, arrival in asks) for end in (min, max))
    end = last + 0.3 * (last - first) + 2
    for number, (priority, arrival) in enumerate(asks):
        look = plot_style.SERIES[-1 - number % len(plot_style.SERIES)]
        lowest = priority - (end - arrival) / ageing
        ax.plot([arrival, end], [priority, lowest], **look | {"markevery": [0]}, label=NAMES[number])
    said = f"the lowest is next: expected {', '.join(want)}; happened {', '.join(got)}"
    plot_style.tidy(ax, said, "time, s (a mark is an arrival)", "priority - levels gained")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return ax.figure


def _stays(part: type[Order]) -> None:
    """The queue sorts a request in when it comes, and never again."""
    order, first, second = part(10.0), state("a", 3, priority=1), state("b", 3, arrival=15.0)
    before = order.key(first)
    order.add(first)
    order.key(second)
    second.rank = 1
    order.add(second)
    case = "a priority 1, arrived at 0 s; then b comes, priority 0, at 15 s; a level in 10 s"
    idea = (
        "The key of a request must not change while it waits: it is sorted in once. Leave out of it what is the same "
        "for all at any time, as `now` is."
    )
    after = order.key(first)
    what = f"whether the key of a, {in_words(before)}, is still the same (now {in_words(after)})"
    expect(bool(after == before), True, case=case, idea=idea, what=what)
    waiting = [one.label for one in order]
    order.take(first)
    first.generated.append(0)
    order.add(first)
    idea = "Who comes back after a preemption returns to its place: its arrival counts, not when it was queued again."
    case += "; a is admitted, preempted and waits again"
    expect([one.label for one in order], waiting, case=case, idea=idea, what="order")


def _nobody_starves(part: type[Order]) -> None:
    stream = [request(3, 2, t, first=t) for t in range(2, 21, 2)]
    trial = _one_at_a_time([request(3, 2, first=30), request(3, 2, first=31, priority=3), *stream], part(4.0))
    idea = "Nobody starves: with 4 s a level, only those that come less than 4 * 3 = 12 s later overtake b."
    trial.expect(trial.steps("b")[0], 13, idea=idea, what="the iteration in which b starts", iteration=13)


def _one_at_a_time(requests: list, order: Order) -> Trial:
    return run(requests, ContinuousBatching(max_num_seqs=1), PagedKVCache(8, 4), order=order)


def _overtaken(part: type[Order], asks: Asks, new: int, ageing: float) -> None:
    """The bound, both ways: within it the urgent one overtakes, beyond it nobody does."""
    requests = [request(2, new, float(at), first=i, priority=priority) for i, (priority, at) in enumerate(asks)]
    trial = _one_at_a_time(requests, part(ageing))
    starts = {timeline.request_id: timeline.scheduled for timeline in trial.trace.timelines}
    for early, (low, first) in zip(starts, asks, strict=True):
        for late, (high, second) in zip(starts, asks, strict=True):
            if early >= late or max(first, second) > min(starts[early], starts[late]):
                continue  # not both there when one of them was taken
            bound = 0.0 if low <= high else ageing * (low - high)
            idea = (
                "A request is overtaken by those that come less than ageing * (its priority - theirs) seconds later, "
                "and by nobody else."
            )
            what = f"the first to start ({late} came {second - first:g} s after {early}, the bound is {bound:g} s)"
            want = late if second - first < bound else early
            trial.expect(min(early, late, key=starts.__getitem__), want, idea=idea, what=what)
