"""A turn for each client."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st

from minibatch.engine import Engine
from minibatch.labs.checks.fairness.clients import CLIENTS, Twice, of, serve
from minibatch.labs.counterexample import expect
from minibatch.labs.properties import for_all
from minibatch.labs.states import state
from minibatch.labs.trial import Broken, request, run
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.policies import Order, Recompute, Swap
from minibatch.trace import StepReport

LENGTHS = "One turn for each client: who was served longest ago, or never, is next, whatever the lengths."
LATE = "It counts when a client had its last turn, not how many: who comes late has no turns to catch up."
AWAY = "A client keeps its turn while it has nothing to ask: when it comes back it is not new."
TOGETHER = "Those who join in the same plan have had a turn: the next one of the plan is of another client."
RETURN = "Who comes back from a preemption goes on with the turn that it had: that is no new one."
RETURNS = (
    "after: if the request comes back from a preemption, the standing of its client stays, and the next one of the "
    "same plan may be of the same client."
)

BY_HAND = (  # idea, requests, places, the clients as they are served, the case in words
    (
        LENGTHS,
        [*of("X", 3, prompt=5, new=4), *of("Y", 1), *of("Z", 2)],
        1,
        "XYZXZX",
        "X has 3 requests of 5 + 4 tokens, then Y has 1 and Z 2 of 2 + 1; one place",
    ),
    (
        LATE,
        [*of("X", 5), *of("Y", 3, at=2)],
        1,
        "XXYXYXYX",
        "X has 5 requests at time 0, Y has 3 at time 2; each takes the only place for one iteration, of 1 s",
    ),
    (
        AWAY,
        [*of("X", 1), *of("Y", 4), *of("X", 1, at=1), *of("X", 1, at=3)],
        1,
        "XYXYXYY",
        "Y has 4 requests at time 0, X has one at 0, at 1 and at 3, the first before Y's; one place, 1 s each",
    ),
    (
        TOGETHER,
        [*of("X", 4), *of("Y", 2)],
        4,
        "XYXYXX",
        "X has 4 requests, then Y has 2; 4 places, so 4 join in the first iteration",
    ),
    (
        TOGETHER,
        [*of("X", 4), *of("Y", 2), *of("Z", 3)],
        9,
        "XYZXYZXZX",
        "X has 4 requests, then Y 2, then Z 3; 9 places, so all join in the first iteration",
    ),
    (
        TOGETHER,
        [*of("X", 2), *of("X", 2, at=1), *of("Y", 2, at=1)],
        4,
        "XXYXYX",
        "X has 2 requests at time 0, then X and Y have 2 each at time 1; 4 places, 1 s each",
    ),
    (
        RETURN,
        [*of("X", 2, new=4, priority=1), *of("Y", 1, at=2), *of("Y", 1, at=3, priority=1)],
        1,
        "XYXXY",
        "X has 2 requests of 4 tokens at time 0, Y an urgent one of 1 token at 2 that displaces X's first, and another "
        "one of 1 token, not urgent, at 3; one place",
    ),
    (
        RETURNS,
        [
            *of("X", 1, new=4, priority=1),
            *of("Y", 1, new=6, priority=1),
            *of("Y", 1, priority=1),
            *of("Z", 1, new=2, at=2),
            *of("Z", 1, priority=1, at=2),
        ],
        2,
        "XYZYYZ",
        "2 places; X has a request of 4 tokens, then Y has 2, of 6 and 1; at time 2 Z has 2: an urgent one of 2 tokens "
        "that displaces Y's first, and one of 1; at 4 X's and Z's first have ended, so two join in one plan",
    ),
)


def check(part: type[Order]) -> None:
    for idea, asked, places, want, case in BY_HAND:
        serve(asked, places, part(), case, want, idea)
    note = part().note(state("a", client="X"))
    expect(isinstance(note, str), True, what="note gives a text", case="a of client X waits", idea="note gives a text.")
    for_all(
        lambda **drawn: _longest_ago(part, **drawn),
        examples=30,
        asked=st.lists(
            st.tuples(st.sampled_from(CLIENTS), st.integers(0, 6), st.integers(1, 5)), min_size=1, max_size=9
        ),
        places=st.integers(1, 3),
        blocks=st.integers(3, 12),
        way=st.sampled_from([Recompute(), Swap()]),
    )


def _longest_ago(
    part: type[Order], asked: list[tuple[str, int, int]], places: int, blocks: int, way: Recompute
) -> None:
    """Every admission is of the client whose last turn was longest ago, of equals the one that has waited longest."""
    client = {chr(97 + i): name for i, (name, _, _) in enumerate(asked)}
    arrival = {chr(97 + i): at for i, (_, at, _) in enumerate(asked)}
    turn = dict.fromkeys(CLIENTS, 0)

    def watch(engine: Engine, report: StepReport) -> Iterator[Broken]:
        preempted = {change.request_id for change in report.preempted}  # they wait now, and did not before
        waited = {each.label for each in engine.queue} - preempted | {change.request_id for change in report.admitted}
        for change in report.admitted:
            want = min(waited, key=lambda label: (turn[client[label]], arrival[label], label))
            if (got := change.request_id) != want:
                since = ", ".join(f"{name} had turn {number}" for name, number in turn.items())
                idea = "Next is the client whose last turn was longest ago, and of it the oldest request."
                yield idea, f"{want} of {client[want]} ({since})", f"{got} of {client[got]}"
                return
            waited.remove(want)
            if not change.resumed:
                turn[client[want]] = max(turn.values()) + 1

    requests = [request(2, new, at or None, first=i, client=name) for i, (name, at, new) in enumerate(asked)]
    run(requests, Twice(places, preemption=way), PagedKVCache(blocks, 2), order=part(), watch=watch)
