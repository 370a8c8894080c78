"""paging.3: a table that grows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hypothesis import strategies as st
from matplotlib.figure import Figure

from minibatch.continuous_batching import ContinuousBatching
from minibatch.labs.checks.paging.sharing import answers_of, as_lists, forked, tables_drawn
from minibatch.labs.counterexample import expect
from minibatch.labs.properties import for_all
from minibatch.labs.runs import after_a_found_prefix, small_runs
from minibatch.labs.states import accepted
from minibatch.labs.trial import request
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.policies import ReserveMaximum
from minibatch.request import RequestState

ROUNDED_UP = "n tokens need n / 4 blocks, rounded up: at a block boundary not one more."
BY_HAND = (  # (request 0, 1 or 2; tokens to reserve, 0 for a release)
    *(([(0, tokens)], ROUNDED_UP) for tokens in (5, 4, 3, 8, 9)),
    (
        [(0, 5), (1, 3), (0, 6), (0, 9), (0, 7), (1, 9)],
        "What a request holds counts: exactly the blocks that are missing are taken, and none is given back.",
    ),
    ([(0, 11), (0, 9)], "Less than before changes nothing: a keeps its blocks."),
    ([(0, 9), (0, 0), (0, 4)], "Who has released everything begins with an empty table."),
)
NOTED = "self.reserved notes what the blocks were taken for: the largest number of tokens since a holds anything."


def check(part: type[PagedKVCache]) -> None:
    for moves, idea in BY_HAND:
        _growing(part, 4, moves, idea)
    _for_other_answers(part)
    _writes_to_shared(part)
    moves = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 14)), max_size=12)
    for_all(lambda size, moves: _growing(part, size, moves), size=st.integers(1, 5), moves=moves)
    small_runs(lambda: PagedKVCache(6, 4), examples=12)
    asked = request(6, 4, n=3, temperature=1.0, seed=5)
    for kind in (ContinuousBatching(), ContinuousBatching(admission=ReserveMaximum())):
        answers_of(asked, kind, 8, "3 answers to one prompt of 6 tokens, of 4 tokens each")
    trial = after_a_found_prefix(ContinuousBatching())
    most = max(13 - (step.kv.free + step.kv.cached) // 4 for step in trial.trace.steps)
    idea = "b finds 8 of its blocks in the prefix cache; they are in its table already, and only 2 are missing."
    trial.expect(most, 12, idea=idea, what="most blocks in use")


def _growing(part: type[PagedKVCache], size: int, moves: Sequence[tuple[int, int]], idea: str = "") -> None:
    """Three requests that reserve or release in any order, against their largest number of tokens. Moves for which
    there are too few blocks are left out."""
    kv, most, tables, told = part(8, size), [0, 0, 0], [(), (), ()], []
    states = accepted(kv, *(request(1, 8 * size, first=i) for i in range(3)))
    for who, tokens in moves:
        state, name = states[who], states[who].label
        largest = max(most[who], tokens) if tokens else 0
        blocks = -(-largest // size)
        if blocks - len(tables[who]) > kv.num_free:
            continue
        most[who], before = largest, {each.label: kv.units(each) for each in states}
        told.append(f"{name} reserves {tokens}" if tokens else f"{name} releases all")
        drawn = partial(_drawn, kv, states, f"the last call: {told[-1]}", before)
        same = partial(expect, case=f"8 blocks of {size}: {', '.join(told)}", picture=drawn)
        copy, table = kv.reserve(state, tokens) if tokens else kv.release(state), kv.units(state)
        why = "A request holds as many blocks as the most tokens reserved for it need, rounded up."
        same(len(table), blocks, idea=idea or why, what=f"blocks of {name}")
        if tokens:
            why = "Computed tokens stay where they are: a table grows at its end, and its first blocks stay the same."
            same(table[: len(tables[who])], tables[who], idea=why, what=f"{name}'s first blocks")
        tables[who] = table
        why = "The others' tables stay as they are, and no block is in two of them."
        same([kv.units(each) for each in states], tables, idea=why, what="tables")
        different = len(set(sum(tables, ())))
        same(different, sum(map(len, tables)), idea=why, what="different blocks in the tables")
        why = "Blocks that are in no table, and yet taken, are lost."
        same(kv.num_free, 8 - different, idea=why, what="free blocks")
        why = "room: a request may write all rows of its blocks, also those after the last reserved token."
        same(state.room, blocks * size, idea=why, what=f"room of {name}")
        noted, want = kv.reserved.get(state, "no entry"), most[who] if tokens else "no entry"
        says = f"the last call: {told[-1]}; self.reserved[{name}]: expected {want}, happened {noted}"
        noted_so, what = partial(_drawn, kv, states, says, before), f"self.reserved[{name}]"
        same(noted, want, idea=NOTED.replace("since a", f"since {name}"), what=what, picture=noted_so)
        same(copy, None, idea="There is nothing to copy: None is returned.", what="returned")


def _drawn(kv: PagedKVCache, states: Sequence[RequestState], says: str, before: dict[str, tuple[int, ...]]) -> Figure:
    """The tables of those who hold something, or have held it before."""
    holders = [one for one in states if kv.units(one) or before[one.label]]
    return tables_drawn(kv, holders, says, before={one.label: before[one.label] for one in holders})


def _for_other_answers(part: type[PagedKVCache]) -> None:
    kv = part(8, 4)
    (a,) = accepted(kv, request(6, 4, n=3))
    case = "8 free blocks of 4; a, a prompt of 6 tokens to which 3 answers are wanted, reserves 9 tokens"
    kv.reserve(a, 9)
    idea = (
        "Until the answers fork off, a reserves for all of them: self.need() says how many blocks that takes. Here the "
        "first, full block is for all, and each answer has 2 of its own."
    )
    drawn = partial(tables_drawn, kv, [a], "after a has reserved 9 tokens")
    expect(len(kv.units(a)), 7, case=case, idea=idea, what="blocks that a holds", picture=drawn)


def _writes_to_shared(part: type[PagedKVCache]) -> None:
    for tokens, blocks in ((7, 2), (13, 4)):
        _copies(part, tokens, blocks)
    kv, a, b = forked(part, 8)
    case = "blocks of 4; a has computed 8 tokens, b shares both blocks; now room for a's 9th token is reserved"
    before = {"a": kv.units(a)}
    copy = kv.reserve(a, 9)
    idea = "The blocks that are shared are full: a grows, and has nothing to copy."
    state = {"blocks": len(kv.units(a)), "still shared": kv.pool.num_shares, "copy": as_lists(copy)}
    drawn = partial(tables_drawn, kv, [a, b], "after a has reserved 9 tokens", as_lists(copy), before)
    expect(state, {"blocks": 3, "still shared": 2, "copy": None}, case=case, idea=idea, what="a", picture=drawn)


def _copies(part: type[PagedKVCache], tokens: int, blocks: int) -> None:
    """a has to copy a block that it shares with b, and perhaps needs more of them in the same call."""
    kv, a, b = forked(part, 6)
    before = {"a": kv.units(a)}
    case = f"blocks of 4; a has computed 6 tokens, b shares both blocks; now a reserves {tokens} tokens"
    copy = kv.reserve(a, tokens)
    drawn = partial(tables_drawn, kv, [a, b], f"after a has reserved {tokens} tokens", as_lists(copy), before)
    same = partial(expect, case=case, picture=drawn)
    idea = "The block that a writes next is shared with b, whether one is missing or not: ask self._copy_on_write."
    if kv.pool.num_shares < 2:  # somebody has given a reference back
        idea = (
            "self._copy_on_write was asked, but given another list: it replaces a block in the list that it is passed, "
            "so that has to be the very list in self.tables, and no copy of it."
        )
    whose = "shared with b" if kv.units(a)[1:2] == kv.units(b)[1:2] else "its own"
    same(whose, "its own", idea=idea, what="the block that a writes")
    want = {"from": kv.rows(b, 4, 6).tolist(), "to": kv.rows(a, 4, 6).tolist()}
    idea = "The engine copies what reserve returns: without it the first rows of a's new block are empty."
    same(as_lists(copy) or "nothing", want, idea=idea, what="rows to copy")
    after = {"blocks": len(kv.units(a)), "room": a.room, "reserved": kv.reserved.get(a, "no entry")}
    idea = "A copy replaces a block of the table: afterwards the table is as long as it was, and all of it is a's."
    if blocks > 2 or after["blocks"] == blocks:
        idea = (
            "A call that copies does all the rest too: it takes blocks that are missing, and notes room and reserved."
        )
    same(after, {"blocks": blocks, "room": 4 * blocks, "reserved": tokens}, idea=idea, what="a")
