"""admission.3: the most blocks that everybody together will hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from numbers import Integral
from typing import Any

from hypothesis import strategies as st
from matplotlib.figure import Figure

from minibatch.continuous_batching import ContinuousBatching
from minibatch.engine import Engine
from minibatch.labs.counterexample import expect
from minibatch.labs.properties import for_all
from minibatch.labs.states import state
from minibatch.labs.strips import EMPTY, RIGHT, Cell, strips
from minibatch.labs.trial import Broken, request, run
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.policies import Forecast
from minibatch.policies.admission import Future
from minibatch.request import RequestState
from minibatch.trace import StepReport

Ask = tuple[int, int]  # tokens now, iterations left
BY_HAND = (
    ([(4, 1)], "The newest token has no K/V yet: with 4 tokens and 1 iteration left, 4 rows are the most."),
    ([(5, 1)], "num_tokens counts: the tokens that a request has generated so far are in it, not only its prompt."),
    ([(4, 5)], "In each iteration a request gets a row more; in its last one it holds tokens + left - 1 rows."),
    ([(4, 1), (4, 1)], "Who ends in an iteration still holds its blocks in it: two that end together both count."),
    ([(5, 1), (5, 1)], "Blocks are rounded up for each request: nobody has the rest of another one's last block."),
    ([(8, 1), (5, 2)], "The peak need not be when the last one ends: others may have gone by then, and freed much."),
    ([(4, 9), (4, 5)], "Not all are at their longest at the same time: who has ended holds nothing any more."),
    ([(4, 1), (4, 9)], "The peak need not be when the first one ends: the others go on growing."),
    ([(3, 2), (9, 4), (1, 12), (6, 6)], "The peak is the most that all hold in any iteration."),
)
JOINING = (
    ([(4, 5), (4, 9)], "Who joins has an end of its own, at which memory may peak."),
    ([(4, 9), (4, 5)], "At the end of the one who joins, the others that have not ended hold their blocks as well."),
    ([(12, 2), (1, 8)], "Who joins adds to what is held at every end that it lives to see."),
)


def check(part: type[Future]) -> None:
    for asks, idea in BY_HAND:
        _peak(part, 4, asks, idea)
    _asking_changes_nothing(part)
    for asks, idea in JOINING:
        _peak(part, 4, asks, idea, joining=1)
    _notes_at_once(part)
    asks = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=6)
    idea = "The peak is the most that all hold in any iteration, rounded up to blocks for each request."
    for_all(lambda size, asks: _peak(part, size, asks, idea), size=st.integers(1, 5), asks=asks)
    joined = "joined_by is the same as one more from the start."
    for_all(lambda size, asks: _peak(part, size, asks, joined, len(asks) - 1), size=st.integers(1, 5), asks=asks)
    sizes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=6)
    for_all(_small_run, examples=15, sizes=sizes, later=st.integers(0, 4))


def peak(asks: Sequence[Ask], size: int) -> int:
    return max(sum(held) for held in zip(*_held(asks, size), strict=True))


def _held(asks: Sequence[Ask], size: int) -> list[list[int]]:
    """Of each, the blocks in each iteration from now on."""
    last = max(left for _, left in asks)
    return [[-(-(tokens + i) // size) * (i < left) for i in range(last)] for tokens, left in asks]


def _running(asks: Sequence[Ask]) -> list[RequestState]:
    """Requests that have so many tokens by now, some of them generated."""
    return [state(chr(97 + i), n - n // 3, n // 3, computed=n - 1) for i, (n, _) in enumerate(asks)]


def _future(part: type[Future], size: int, asks: Sequence[Ask]) -> Future:
    states = _running(asks)
    return part(states, dict(zip(states, [left for _, left in asks], strict=True)).__getitem__, size)


def _peak(part: type[Future], size: int, asks: Sequence[Ask], idea: str, joining: int = 0) -> None:
    """The last ones join one after the other. Asked from the end, so that nothing is lost on the way."""
    first = len(asks) - joining
    futures = [_future(part, size, asks[:first])]
    for tokens, left in asks[first:]:
        futures.append(futures[-1].joined_by(tokens, left))
    for number in range(len(asks), first - 1, -1):
        case = f"blocks of {size}; (tokens, iterations left): {', '.join(map(str, asks[:first]))}"
        if joining:
            case += f"; joined by {', '.join(map(str, asks[first:number])) or 'nobody'}"
        got, want = futures[number - first].peak, peak(asks[:number], size)
        if isinstance(got, Integral) and got == 0:
            idea = "Who ends in an iteration still holds its blocks in it: there is no peak of 0 blocks."
        drawn = partial(_held_drawn, asks[:number], size, want, got)
        expect(got, want, case=case, idea=idea, what="peak in blocks", picture=drawn)


def _held_drawn(asks: Sequence[Ask], size: int, want: int, got: Any) -> Figure:
    """The blocks that each holds, iteration by iteration, and their sum."""
    held = _held(asks, size)
    rows = {f"{chr(97 + i)} {asks[i]}": [Cell(n or "") for n in blocks] for i, blocks in enumerate(held)}
    rows["together"] = [Cell(n, RIGHT if n == want else EMPTY) for n in map(sum, zip(*held, strict=True))]
    return strips(rows, f"blocks held, iteration by iteration from now; peak: {want} expected, {got} happened")


def _asking_changes_nothing(part: type[Future]) -> None:
    first = _future(part, 4, [(4, 9)])
    case = "blocks of 4; first has (4, 9), and first.joined_by(4, 9) is asked for"
    joined = first.joined_by(4, 9)
    idea = "joined_by says what would be, and changes nothing: it returns another Future, and this one stays."
    expect(first.peak, 3, case=case, idea=idea, what="peak of first, in blocks")
    other = first.joined_by(1, 1)
    case += ", then first.joined_by(1, 1)"
    idea = "Each Future that joined_by returns is one of its own: the scheduler asks several times what would be."
    got = [first.peak, joined.peak, other.peak]
    expect(got, [3, 6, 3], case=case, idea=idea, what="peaks of the three, in blocks")


def _notes_at_once(part: type[Future]) -> None:
    states = _running([(4, 9), (4, 5)])
    running, left = states[:1], dict(zip(states, (9, 5), strict=True))
    future = part(running, left.__getitem__, 4)
    running.append(states[1])
    case = "blocks of 4; a Future of the list [(4, 9)], to which the scheduler appends (4, 5) afterwards"
    idea = "The list belongs to the scheduler, who goes on using it: note at once what is needed from it."
    expect(future.peak, 3, case=case, idea=idea, what="peak in blocks")


def _small_run(sizes: list[Ask], later: int) -> None:
    """Requests of which each second one arrives later, in 6 blocks of 4."""
    ends = {chr(97 + i): p + g for i, (p, g) in enumerate(sizes)}

    def watch(engine: Engine, report: StepReport) -> Iterator[Broken]:
        if report.preempted:
            who = ", ".join(change.request_id for change in report.preempted)
            yield "Who joins only if the peak fits is never preempted.", "nobody preempted", f"{who} preempted"
        members = [(m.stop, ends[m.request_id] - m.stop) for m in report.members]
        head = next(iter(engine.queue), None)
        if head is not None and members:
            most = peak([*members, (head.num_tokens, head.max_new_tokens)], 4)
            if most <= 6:
                idea = "Somebody waits for memory, although the peak with it would fit."
                yield idea, f"{head.label} joins: {most} blocks at the peak, the pool has 6", f"{head.label} waits"

    asked = [request(p, g, at=later * (i % 2), first=i) for i, (p, g) in enumerate(sizes)]
    run(asked, ContinuousBatching(admission=Forecast()), PagedKVCache(6, 4), watch=watch)
