"""paging.4: a copy of a shared block, before it is written to."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
from hypothesis import strategies as st

from minibatch.continuous_batching import ContinuousBatching
from minibatch.labs.checks.paging.sharing import Copied, answers_of, as_lists, forked, tables_drawn
from minibatch.labs.counterexample import expect
from minibatch.labs.properties import for_all
from minibatch.labs.states import accepted
from minibatch.labs.trial import request
from minibatch.paged_kv_cache import PagedKVCache


def check(part: type[PagedKVCache]) -> None:
    for tokens in (6, 5, 7):
        _first_writer(part, tokens)
    _nothing_to_copy(part)
    _block_ahead(part)
    for_all(
        partial(_any_order, part),
        tokens=st.integers(1, 9),
        size=st.integers(1, 5),
        order=st.lists(st.integers(0, 3), min_size=1, max_size=10),
    )
    sizes = {"prompt": st.integers(1, 9), "new": st.integers(1, 6), "n": st.integers(2, 4)}
    for_all(_crowded, examples=12, other=st.tuples(st.integers(1, 9), st.integers(1, 8)), **sizes)


def _first_writer(part: type[PagedKVCache], tokens: int) -> None:
    kv, a, b = forked(part, tokens)
    before, rest = kv.units(b), tokens % 4
    case = f"blocks of 4; a and b share the blocks {list(before)} with {tokens} tokens; a is to write its next token"
    copy = kv.reserve(a, tokens + 1)
    after = kv.units(a)
    drawn = partial(tables_drawn, kv, [a, b], "after the copy", as_lists(copy))
    same = partial(expect, case=case, picture=drawn)
    whose = "shared with b" if after[1] == before[1] else "its own"
    idea = "The table has to point to the new block: put it there, in the list that is passed."
    same(whose, "its own", idea=idea, what="the block that a writes")
    idea = "Only the block that is written next is copied: the full ones before it stay shared."
    same(after[0], before[0], idea=idea, what="the first block of a")
    idea = "Nothing changes for the others who hold the shared block."
    same(kv.units(b), before, idea=idea, what="the table of b")
    counts = dict(sorted(Counter([*after, *before]).items()))
    idea = "a no longer points to the shared block: its reference has to be dropped, and no other."
    same({block: kv.pool.references[block] for block in counts}, counts, idea=idea, what="references by block")
    idea = "References are given back with pool.drop(), which keeps num_shares right as well."
    same(kv.pool.num_shares, 1, idea=idea, what="num_shares")
    want = {"from": [before[1] * 4 + r for r in range(rest)], "to": [after[1] * 4 + r for r in range(rest)]}
    idea = _what_is_wrong(as_lists(copy), want, before[1], after[1])
    same(as_lists(copy) or "nothing", want, idea=idea, what="rows to copy")
    arrays = all(isinstance(each, np.ndarray) and each.dtype.kind == "i" for each in copy)
    same(arrays, True, idea="A RowCopy has two arrays of integers.", what="two integer arrays")


def _what_is_wrong(got: Copied, want: dict[str, list[int]], source: int, target: int) -> str:
    """The idea that a wrong copy from block ``source`` to block ``target`` has missed."""
    if got is None:
        return "The new block is empty: return what has to be copied into it."
    if got == {"from": want["to"], "to": want["from"]}:
        return "The copy goes from the shared block to the new one, not back."
    if got == {"from": [source], "to": [target]}:
        return "A RowCopy names rows, not blocks: block b begins with row b times the block size."
    if set(got["from"]) > set(want["from"]):
        return "Only the rows that are computed are copied: the others of the block are written later."
    return "The rows that are computed are copied to the same places of the new block."


def _nothing_to_copy(part: type[PagedKVCache]) -> None:
    last = "The last holder owns the block alone, although others are still shared: it writes in place, without a copy."
    full = "Full blocks are never written again: at a block boundary there is nothing to copy."
    for tokens, idea in ((6, last), (8, full)):
        kv, a, b = forked(part, tokens)
        kv.reserve(a, tokens + 1)
        before = kv.units(b)
        case = f"blocks of 4; a and b shared {list(before)} with {tokens} tokens; a has written one more, now b does"
        copy = as_lists(kv.reserve(b, tokens + 1))
        drawn = partial(tables_drawn, kv, [a, b], "after b has reserved", copy)
        same = partial(expect, case=case, idea=idea, picture=drawn)
        same(kv.units(b)[:2], before, what="the first two blocks of b")
        same(copy, None, what="returned")


def _block_ahead(part: type[PagedKVCache]) -> None:
    kv, a, b = forked(part, 6, ahead=4)
    before = kv.units(b)
    case = f"blocks of 4; a and b share the blocks {list(before)}: 6 computed tokens, 4 more reserved; a is to write"
    copy = as_lists(kv.reserve(a, 7))
    idea = "The block that is written next is that of token num_computed, which need not be the last of the table."
    drawn = partial(tables_drawn, kv, [a, b], "after the copy", copy)
    same = partial(expect, case=case, idea=idea, picture=drawn)
    whose = ["shared" if mine == its else "own" for mine, its in zip(kv.units(a), before, strict=False)]
    same(whose, ["shared", "own", "shared"], what="the blocks of a")
    source, target = before[1] * 4, kv.units(a)[1] * 4
    same(copy or "nothing", {"from": [source, source + 1], "to": [target, target + 1]}, what="rows to copy")


def _any_order(part: type[PagedKVCache], tokens: int, size: int, order: list[int]) -> None:
    """Answers to one prompt write in any order; each has to read the prompt and what it has written itself."""
    kv, told, copied = part(40, size), [], 0
    states = accepted(kv, *[request(tokens, 12)] * (max(order) + 2))
    kv.reserve(states[0], tokens)
    store = {row: f"prompt {place}" for place, row in enumerate(kv.rows(states[0], 0, tokens).tolist())}
    for state in states:
        state.num_computed = tokens
    for child in states[1:]:
        kv.fork(states[0], child)
    for who in order:
        state = states[who]
        told.append(state.label)
        copy = kv.reserve(state, state.num_computed + 1)
        if copy is not None:
            moved = [store.get(row) for row in copy.source.tolist()]
            store.update(zip(copy.target.tolist(), moved, strict=True))
            copied += len(moved)
        [row] = kv.rows(state, state.num_computed, state.num_computed + 1).tolist()
        store[row] = f"{state.label} {state.num_computed}"
        state.num_computed += 1
        case = f"{len(states)} answers share {tokens} tokens in blocks of {size}; they write in the order"
        same = partial(expect, case=f"{case} {' '.join(told)}")
        for one in states:
            want = [f"{'prompt' if place < tokens else one.label} {place}" for place in range(one.num_computed)]
            got = [store.get(row, "nothing") for row in kv.rows(one, 0, one.num_computed).tolist()]
            idea = "Every answer reads the prompt and its own tokens, whatever the others have written."
            drawn = partial(tables_drawn, kv, states, f"{one.label} reads something else")
            same(got, want, idea=idea, what=f"what {one.label} reads", picture=drawn)
        others = len(states) - len(set(told))  # who has not written shares the block still
        want = (len(set(told)) - (not others)) * (tokens % size)
        idea = "Each answer copies once, when it writes first, and the last holder not at all."
        same(copied, want, idea=idea, what="rows copied in all")
        counts = Counter(block for each in states for block in kv.units(each))
        idea = "references counts the tables that point to each block."
        same(list(kv.pool.references), [counts[block] for block in range(40)], idea=idea, what="references")
        shares = sum(counts.values()) - len(counts)
        same(kv.pool.num_shares, shares, idea="num_shares follows the references.", what="num_shares")


def _crowded(prompt: int, new: int, n: int, other: tuple[int, int]) -> None:
    asked = request(prompt, new, n=n, temperature=1.0, seed=5)
    case = f"{n} answers of {new} tokens to a prompt of {prompt}, beside a request of {other[0]} + {other[1]} tokens"
    answers_of(asked, ContinuousBatching(), 9, case, request(*other, first=3))
