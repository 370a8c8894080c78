"""No credit for idleness."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hypothesis import strategies as st

from minibatch.continuous_batching import ContinuousBatching
from minibatch.labs.checks.fairness.clients import CLIENTS, of, serve
from minibatch.labs.counterexample import expect, in_words
from minibatch.labs.facts import judge
from minibatch.labs.properties import for_all
from minibatch.labs.states import state
from minibatch.labs.trial import Broken, request, run
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.policies import Fair, Recompute, by_priority
from minibatch.request import RequestState

CREDIT = "What a client did not use while it was away it does not get back: it begins where those are who wait."
LOWEST = "It is lifted to the lowest counter of those who wait; who does not wait does not count."
ARRIVALS = "A client that has a request waiting was not idle: its further arrivals lift nothing."
LITTLE = (
    "A lift has no size of its own: a client that is behind is lifted all the way, be it by half a token or by a lot."
)
DOWN = "A lift never lowers a counter."
RETURN = "Who comes back from a preemption was not idle: that lifts nothing."
WEIGHTS = "Clients are compared by counter / weight, so with twice the weight a counter is lifted to twice as much."
MEASURE = "Clients are compared by counter / weight: X stands at 90 / 3 = 30, and that is what Y is lifted to."
RUNNING = "A client with nothing waiting is lifted though it has something running; all of its counter counts, 16 here."
LAST = "If nobody waits, the client that waited last is the measure: X is at 50 + 10 + 2 x 2."
FIRST = "Where nobody has waited yet there is nothing to be lifted to."
QUEUED = "Whatever happens to counters, the request waits from now on, once, with those who waited before."


def check(part: type[Fair]) -> None:
    for situation in BY_HAND:
        _arrives(part, situation)
    _take_turns(part(), "XYXYXYX", "With the lift the two take turns: no client is served more than twice in a row.")
    alone = "Without it Y is served alone until it is where X was: that is what lift=False is for."
    _take_turns(part(lift=False), "XYYYYYX", alone)
    for_all(
        lambda **drawn: _whatever_happens(part, **drawn),
        examples=40,
        asked=st.lists(
            st.tuples(st.sampled_from(CLIENTS), st.integers(0, 9), st.integers(1, 5), st.integers(0, 1)),
            min_size=2,
            max_size=9,
        ),
        places=st.integers(1, 2),
        weights=st.sampled_from([{}, {"X": 2.0}, {"Y": 0.5, "Z": 4.0}]),
        lifts=st.sampled_from([True, True, False]),
        prices=st.sampled_from([(1.0, 2.0), (0.25, 0.5), (0.125, 16.0)]),
    )


# --- one arrival, without an engine ---


class Situation(NamedTuple):
    """Clients with counters, of whom some have a request waiting (``waits``, in this order); then one arrives.

    ``want``     the counters afterwards
    ``arrives``  whose request; ``returns``: it is that which was running, and is preempted
    ``runs``     tokens that the request of a client which waited has generated: now it runs
    """

    idea: str
    counters: Mapping[str, float]
    waits: str
    want: Mapping[str, float]
    arrives: str = "Y"
    returns: bool = False
    runs: Mapping[str, int] = {}
    weights: Mapping[str, float] = {}
    lift: bool = True

    def in_words(self) -> str:
        told = [f"{client} is at {number:g}" for client, number in self.counters.items()]
        told += [f"{' and '.join(self.waits)} wait{'s' * (len(self.waits) == 1)}"] if self.waits else []
        told += [f"{client} has weight {weight:g}" for client, weight in self.weights.items()]
        told += ["lift=False"] if not self.lift else []
        for client, number in self.runs.items():
            told.append(f"that of {client} (10 prompt tokens) is admitted and runs, with {number} generated")
        what = f"the request of {self.arrives} is preempted and waits again"
        return f"{'; '.join(told)}; {what if self.returns else f'a request of {self.arrives} arrives'}"


BY_HAND = (
    Situation(CREDIT, {"X": 50, "Y": 0}, "X", {"X": 50, "Y": 50}),
    Situation(LITTLE, {"X": 50, "Y": 49}, "X", {"X": 50, "Y": 50}),
    Situation(LITTLE, {"X": 50, "Y": 49.5}, "X", {"X": 50, "Y": 50}),
    Situation(LITTLE, {"X": 90000, "Y": 0}, "X", {"X": 90000, "Y": 90000}),
    Situation(DOWN, {"X": 5, "Y": 70}, "X", {"X": 5, "Y": 70}),
    Situation(ARRIVALS, {"X": 50, "Y": 0}, "YX", {"X": 50, "Y": 0}),
    Situation(RETURN, {"X": 100, "Y": 0}, "YX", {"X": 100, "Y": 16}, runs={"Y": 3}, returns=True),
    Situation(WEIGHTS, {"X": 50, "Y": 20}, "X", {"X": 50, "Y": 100}, weights={"Y": 2.0}),
    Situation(MEASURE, {"X": 90, "Y": 20}, "X", {"X": 90, "Y": 30}, weights={"X": 3.0}),
    Situation(LOWEST, {"X": 80, "Y": 0, "Z": 50}, "XZ", {"X": 80, "Y": 50, "Z": 50}),
    Situation(LOWEST, {"X": 80, "Y": 0, "Z": 50}, "X", {"X": 80, "Y": 80, "Z": 50}),
    Situation("With lift=False nobody is lifted.", {"X": 50, "Y": 0}, "X", {"X": 50, "Y": 0}, lift=False),
    Situation(RUNNING, {"X": 50, "Y": 0}, "YX", {"X": 50, "Y": 50}, runs={"Y": 3}),
    Situation(LAST, {"X": 50, "Y": 0}, "X", {"X": 64, "Y": 64}, runs={"X": 2}),
    Situation(FIRST, {"X": 0}, "", {"X": 0}, arrives="X"),
)


def _arrives(part: type[Fair], told: Situation) -> None:
    order, case = part(dict(told.weights), lift=told.lift), told.in_words()
    first = {client: _request(client, rank) for rank, client in enumerate(told.waits)}
    for each in first.values():
        order.add(each)
    order.settled.update(told.counters)  # earned since
    for client, number in told.runs.items():
        _runs(order, first[client], number)
    new = first[told.arrives] if told.returns else _request(told.arrives, len(told.waits))
    waiting = sorted([*order, new], key=lambda each: each.rank)
    order.add(new)
    judge([(f"counter of {name}", order.counter(name), number, told.idea) for name, number in told.want.items()], case)
    expect(sorted(order, key=lambda each: each.rank), waiting, what="waiting", case=case, idea=QUEUED)


def _request(client: str, rank: int) -> RequestState:
    return state(f"{client.lower()}{rank}", 10, client=client, rank=rank)


def _runs(order: Fair, made: RequestState, generated: int) -> None:
    """It is admitted, and has generated so many tokens."""
    order.take(made)
    made.timeline.runs.append([0.0, 0.0])
    made.generated.extend(range(generated))
    made.num_computed = made.high_water = made.num_prompt + max(generated - 1, 0)


# --- in an engine ---


def _take_turns(order: Fair, want: str, idea: str) -> None:
    """Every request costs 2 x 1 + 4 x 2 = 10, and X has had 50."""
    order.settled["X"] = 40.0
    had = "X has had 40 and 8 requests at time 0, Y is new with 7 at time 1; each costs 10; one place"
    serve([*of("X", 8, new=4), *of("Y", 7, new=4, at=1)], 1, order, f"lift={order.lift}; {had}", want, idea)


def _whatever_happens(
    part: type[Fair],
    asked: list[tuple[str, int, int, int]],
    places: int,
    weights: dict[str, float],
    lifts: bool,
    prices: tuple,
) -> None:
    """Every call of ``add`` is compared with what the counters were before."""
    wrong: list[Broken] = []

    class Watched(part):
        last = ""  # the client that waited last

        def add(self, request: RequestState) -> None:
            before, waiting = self.now(), {each.client for each in self}
            client, want = request.client, dict(before)
            measure = waiting or set(self.last)
            if self.lift and client not in waiting and not request.timeline.runs and measure:
                least = min(before[each] / self.weights.get(each, 1.0) for each in measure)
                want[client] = max(before[client], least * self.weights.get(client, 1.0))
            super().add(request)
            after = self.now()
            if any(abs(after[each] - want[each]) > 1e-9 for each in want):
                who = f"{request.label} of {client} {'comes back' if request.timeline.runs else 'arrives'}"
                said = f"{who}; waiting: {', '.join(sorted(waiting)) or 'nobody'}; counters before: {in_words(before)}"
                wrong.append((f"{CREDIT} ({said}.)", in_words(want), in_words(after)))

        def take(self, request: RequestState) -> None:
            super().take(request)
            self.left(request.client)

        def left(self, client: str) -> None:
            if all(each.client != client for each in self):
                self.last = client

        def now(self) -> dict[str, float]:
            return {client: self.counter(client) for client in CLIENTS}

    requests = [
        request(2, new, at or None, first=i, client=client, priority=urgency)
        for i, (client, at, new, urgency) in enumerate(asked)
    ]
    order, scheduler = (
        Watched(weights, input_weight=prices[0], output_weight=prices[1], lift=lifts),
        ContinuousBatching(places, preemption=Recompute(displaces=by_priority)),
    )
    run(requests, scheduler, PagedKVCache(8, 2), order=order, watch=lambda engine, report: wrong)
