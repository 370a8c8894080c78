"""Checks of priority.2: overtaking, and patience."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from hypothesis import strategies as st
from matplotlib.figure import Figure

from minibatch.continuous_batching import ContinuousBatching
from minibatch.labs.counterexample import expect
from minibatch.labs.properties import for_all
from minibatch.labs.states import line_up, state
from minibatch.labs.strips import Cell, compared, strips
from minibatch.labs.trial import requests_of, run
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.plan_draft import PlanDraft
from minibatch.policies.admission import Watermark
from minibatch.policies.preemption import Never
from minibatch.policies.queueing import Order
from minibatch.request import RequestState
from minibatch.trace import counted

Asks = Sequence[tuple[int, float]]  # blocks and arrivals
NOW, FREE = 10.0, 4  # of the plans that are made by hand: the time, and how many blocks of one token are free
JOINS, NO_ROOM, NOT_ASKED = "joins", "no room", "not asked"


def check(part: type[Order]) -> None:
    _by_hand(partial(_walked, part))
    idea = "In order of arrival, until one that did not join has waited longer than patience."
    for_all(
        lambda **drawn: _walked(part, idea=idea, **drawn),
        asks=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 20).map(lambda n: n / 2)), max_size=6),
        lookahead=st.integers(0, 4),
        patience=st.sampled_from([0, 2, 5, math.inf]),
    )
    _heavy(part)
    _starving(part)


def _by_hand(walked: partial) -> None:
    walked([(1, 0), (2, 1), (1, 2)], 0, math.inf, "All that fit are admitted, in the order of their arrival.")
    idea = "The walk goes on behind a request that did not fit: how far is counted by the caller, by lookahead."
    walked([(2, 0), (3, 1), (1, 2)], 1, math.inf, idea)
    walked([(2, 0), (3, 1), (1, 2)], 0, math.inf, "With lookahead 0 nobody overtakes one that does not fit.")
    walked(
        [(2, 0)], 2, 5, "Whoever has waited too long must still be asked: patience stops those behind it, not itself."
    )
    idea = (
        "A request that has joined holds nobody back, however long it had waited: look at draft.admissions after the "
        "yield, then it says who joined."
    )
    walked([(1, 0), (1, 1), (1, 9)], 2, 5, idea)
    idea = (
        "Once a request that did not fit has waited longer than patience, the walk ends: nobody overtakes it any more."
    )
    walked([(5, 0), (1, 9)], 2, 5, idea)
    idea = "It is not only the first of the queue that may lose patience, but any request that did not fit."
    walked([(2, 0), (3, 1), (1, 9)], 2, 5, idea)
    walked(
        [(5, 8), (5, 1), (1, 9)], 3, 5, "Each one is judged by its own wait, not by that of the first that did not fit."
    )
    walked([(5, 8), (1, 9)], 2, 5, "As long as it has not waited for long, others may overtake it.")
    walked([(5, 5), (1, 9)], 2, 5, "Exactly patience is not longer than patience: after 5 s others may still overtake.")
    walked([(5, 4.5), (1, 9)], 2, 5, "Parts of a second count: 5.5 s are longer than 5.")
    walked([(5, 0), (1, 9)], 2, 0, "With patience 0 nobody overtakes whoever has waited at all.")
    walked([], 2, 5, "An empty queue is a walk without anybody.")


def _walked(part: type[Order], asks: Asks, lookahead: int, patience: float, idea: str) -> None:
    """One plan, and another one."""
    states = [state("abcdef"[i], size, arrival=float(at)) for i, (size, at) in enumerate(asks)]
    order = line_up(part(lookahead, patience), states)
    told = [f"{one.label} needs {one.num_prompt}, waits since {one.arrival_time:g} s" for one in states]
    case = f"{FREE} free blocks at {NOW:g} s; {'; '.join(told) or 'nobody waits'}; lookahead {lookahead}, "
    case += f"patience {'without end' if patience == math.inf else f'{patience:g} s'}"
    labels = [one.label for one in states]
    want = dict(zip(labels, _decided(asks, lookahead, patience), strict=True))
    got = _plan(order, states)

    def picture() -> Figure:
        asked = [
            f"{one.label}: {counted(one.num_prompt, 'block')},\nwaits {NOW - one.arrival_time:g} s" for one in states
        ]
        rows = {"in line": [Cell(said, width=2) for said in asked]}
        return strips(rows | compared(list(want.values()), list(got.values()), width=2), f"{FREE} blocks are free")

    expect(got, want, case=case, idea=idea, what="what becomes of them", picture=picture)
    again = "A walk changes nothing: neither the queue nor the order, so that the same plan can be made again."
    expect(_plan(order, states), want, case=f"{case}; planned a second time", idea=again, what="what becomes of them")
    expect([one.label for one in order], labels, case=case, idea=again, what="the queue afterwards")


def _plan(order: Order, states: Sequence[RequestState]) -> dict[str, str]:
    draft = PlanDraft([], PagedKVCache(FREE, 1), 99, 99, Watermark(), Never())
    draft.admit(order, NOW)
    refused = {waiting.request for waiting in draft.waiting}
    return {s.label: JOINS if s in draft.admissions else NO_ROOM if s in refused else NOT_ASKED for s in states}


def _decided(asks: Asks, lookahead: int, patience: float) -> list[str]:
    decided: list[str] = []
    free = FREE
    for size, _ in asks:
        behind = len(decided) - decided.index(NO_ROOM) if NO_ROOM in decided else 0  # its place behind the first
        refused = [since for what, (_, since) in zip(decided, asks, strict=False) if what == NO_ROOM]
        if behind > lookahead or NOT_ASKED in decided or any(NOW - since > patience for since in refused):
            decided.append(NOT_ASKED)
        elif size <= free:
            decided.append(JOINS)
            free -= size
        else:
            decided.append(NO_ROOM)
    return decided


def _heavy(part: type[Order]) -> None:
    """A heavy request that does not fit yet, and light ones behind it."""
    strict = "Strict FCFS: light requests wait behind a heavy one that does not fit yet (head-of-line blocking)."
    skips = "With lookahead light requests get past a heavy one that does not fit yet, and do not delay it here."
    for order, want, idea in ((part(), [1, 13, 13, 13], strict), (part(2), [1, 13, 2, 2], skips)):
        asked = requests_of([(20, 12), (24, 4, 1), (3, 1, 1), (3, 1, 1)])
        trial = run(asked, ContinuousBatching(), PagedKVCache(10, 4), order=order)
        starts = [trial.steps(label)[0] for label in "abcd"]
        trial.expect(starts, want, idea=idea, what="iterations in which a, b, c, d start")


def _starving(part: type[Order]) -> None:
    """A light request at every step: there is always one active, and the heavy one never has all blocks for itself."""
    said = "a needs all 4 blocks and arrives at 1 s; light requests need one block for 2 s, and one comes every second"
    starves = "With lookahead and no patience a heavy request starves, for as long as light ones come."
    starts = "With patience nobody overtakes it any more after 4 s: it starts as soon as those that run have ended."
    for order, want, idea in ((part(4), 18, starves), (part(4, 4.0), 8, starts)):
        asked = requests_of([(13, 1, 1), *((3, 2, second) for second in range(16))])
        case = f"{said} from 0 to 15 s; {order!r}"
        trial = run(asked, ContinuousBatching(max_num_seqs=8), PagedKVCache(4, 4), order=order, case=case)
        got = trial.steps("a")[0]
        trial.expect(got, want, idea=idea, what="the iteration in which a starts", iteration=min(got, want))
