"""paging.2: which row of the cache a token is in."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from hypothesis import strategies as st
from matplotlib.figure import Figure

from minibatch.continuous_batching import ContinuousBatching
from minibatch.kv_cache import ContiguousKVCache, KVCache
from minibatch.labs.counterexample import expect
from minibatch.labs.properties import for_all
from minibatch.labs.runs import small_runs
from minibatch.labs.states import accepted, state
from minibatch.labs.strips import EMPTY, RIGHT, WRONG, Cell, strips
from minibatch.labs.trial import request, run
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.request import RequestState

BY_HAND = (  # table, block size, start, stop
    ([7], 4, 1, 2, "A row is the block's number times the block size, plus the place in the block."),
    ([7, 2], 4, 1, 2, "A block is filled before the next one: tokens 0:4 are all in the first of the table."),
    ([7, 2], 4, 5, 6, "Blocks need not lie side by side: token 5 is in the second block of the table, block 2."),
    ([7, 2], 4, 4, 5, "The first token of a block is in its row 0: token 4 begins the second block of the table."),
    ([7, 2], 4, 3, 4, "The last token of a block is in its last row: token 3 ends the first block of the table."),
    ([7, 2], 4, 2, 8, "A stretch of tokens goes on from the end of one block to the start of the next."),
    ([3, 1, 0], 2, 3, 5, "The rows are those of tokens start:stop, and of no others."),
    ([1], 4, 2, 2, "No tokens, no rows: an empty array."),
    ([5, 3], 1, 0, 2, "In blocks of one row, the table is the list of rows."),
)


def check(part: type[KVCache]) -> None:
    for case in BY_HAND:
        _same_rows(*case)
    for_all(
        _any_table,
        table=st.permutations(range(5)).map(lambda order: list(order[:3])),
        size=st.integers(1, 5),
        ends=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    )
    _slots()
    for kv in (PagedKVCache(6, 4), ContiguousKVCache(2, 12)):
        run([request(5, 4), request(3, 6, first=1)], ContinuousBatching(), kv)
    small_runs(lambda: PagedKVCache(6, 4), examples=8)


def _holding(table: list[int], size: int) -> tuple[PagedKVCache, RequestState]:
    """A cache, and a request that holds the blocks of this table and has tokens for all their rows."""
    kv, one = PagedKVCache(max(table) + 1, size), state("a", len(table) * size)
    kv.tables[one], kv.reserved[one], one.room = list(table), one.num_tokens, one.num_tokens
    taken = [kv.pool.take() for _ in range(kv.num_units)]
    kv.pool.drop([block for block in taken if block not in table])
    return kv, one


def _any_table(table: list[int], size: int, ends: tuple[int, int]) -> None:
    start, stop = sorted(end % (len(table) * size + 1) for end in ends)
    _same_rows(table, size, start, stop, "Each token's row follows from the table and the block size alone.")


def _same_rows(table: list[int], size: int, start: int, stop: int, idea: str) -> None:
    same = partial(expect, case=f"blocks of {size}, table {table}, tokens {start}:{stop}")
    want = [table[token // size] * size + token % size for token in range(start, stop)]
    kv, one = _holding(table, size)
    got = kv.rows(one, start, stop)
    if np.shape(got) != (stop - start,):
        why = "There is one row for each of the tokens start:stop, and for no others."
        same(got, want, idea=why, what="rows")
    same(got, want, idea=idea, what="rows", picture=partial(_rows_drawn, table, size, want, list(got)))
    kind = f"array of {got.dtype.name}" if isinstance(got, np.ndarray) else type(got).__name__
    if not isinstance(got, np.ndarray):
        why = "The rows are a numpy array: the engine takes them as an index into its store."
    elif start == stop:
        why = "The rows are an array of integers (int64), also if it is empty: np.array([]) alone has floats."
    else:
        why = "The rows are an array of int64, not of another kind of numbers: dtype=np.int64 says so."
    same(kind, "array of int64", idea=why, what="kind of result")


def _rows_drawn(table: Sequence[int], size: int, want: Sequence[int], got: Sequence[int]) -> Figure:
    """The rows of the cache; those that were to be found, and were found, are marked."""
    blocks = range(max([*table, *(int(row) // size for row in got if 0 <= row < 60)]) + 1)
    rows = {"cache": [Cell(f"block {block}", EMPTY, size) for block in blocks]}
    for name, found in (("expected", want), ("happened", got)):
        look = {row: RIGHT if row in want else WRONG for row in found}
        rows[name] = [Cell(row, look.get(row, EMPTY)) for row in range(len(blocks) * size)]
    return strips(rows, f"the rows of the cache; the request's table is {list(table)}")


def _slots() -> None:
    slots = ContiguousKVCache(3, 6)
    holders = accepted(slots, *[request(5, 1)] * 3)
    for one in holders:
        slots.reserve(one, 5)
    slot = slots.units(holders[1])[0]
    case, idea = f"slots of 6 rows; a request in slot {slot}, tokens 2:5", "A slot is a table with one long block."
    expect(slots.rows(holders[1], 2, 5), [slot * 6 + t for t in (2, 3, 4)], case=case, idea=idea, what="rows")
