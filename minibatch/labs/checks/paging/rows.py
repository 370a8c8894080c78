"""paging.2: which row of the cache a token is in."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from hypothesis import strategies as st
from matplotlib.figure import Figure

from minibatch.continuous_batching import ContinuousBatching
from minibatch.kv_cache import ContiguousKVCache, KVCache
from minibatch.labs.counterexample import expect
from minibatch.labs.properties import for_all
from minibatch.labs.runs import small_runs
from minibatch.labs.states import accepted
from minibatch.labs.strips import EMPTY, RIGHT, WRONG, Cell, strips
from minibatch.labs.trial import request, run
from minibatch.paged_kv_cache import PagedKVCache

BY_HAND = (  # table, block size, start, stop
    ([7], 4, 1, 2, "A row is the block's number times the block size, plus the place in the block."),
    ([7, 2], 4, 1, 2, "A block is filled before the next one: tokens 0 to 3 are all in the first of the table."),
    ([7, 2], 4, 5, 6, "Blocks need not lie side by side: token 5 is in the second block of the table, block 2."),
    ([7, 2], 4, 4, 5, "The first token of a block is in its row 0: token 4 begins the second block of the table."),
    ([7, 2], 4, 3, 4, "The last token of a block is in its last row: token 3 ends the first block of the table."),
    ([7, 2], 4, 2, 8, "A stretch of tokens goes on from the end of one block to the start of the next."),
    ([3, 1, 0], 2, 3, 5, "The rows are those of tokens start to stop - 1, and of no others."),
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


class _Table(PagedKVCache):
    """A cache in which everybody has the same table."""

    def __init__(self, table: list[int], block_size: int) -> None:
        super().__init__(max(table) + 1, block_size)
        self.table = tuple(table)

    def units(self, request: Any) -> tuple[int, ...]:
        return self.table

    def num_held(self, request: Any) -> int:
        return len(self.table)


def _any_table(table: list[int], size: int, ends: tuple[int, int]) -> None:
    start, stop = sorted(end % (len(table) * size + 1) for end in ends)
    _same_rows(table, size, start, stop, "Each token's row follows from the table and the block size alone.")


def _same_rows(table: list[int], size: int, start: int, stop: int, idea: str) -> None:
    same = partial(expect, case=f"blocks of {size}, table {table}, tokens {start}:{stop}")
    want = [table[token // size] * size + token % size for token in range(start, stop)]
    got = _Table(table, size).rows(None, start, stop)
    if np.shape(got) != (stop - start,):
        why = "There is one row for each of the tokens start to stop - 1, and for no others."
        same(got, want, idea=why, what="rows")
    same(got, want, idea=idea, what="rows", picture=partial(_rows_drawn, table, size, want, list(got)))
    kind = f"array of {got.dtype.name}" if isinstance(got, np.ndarray) else type(got).__name__
    why = "The rows are an array of integers (int64), also if it is empty: np.array([]) alone has floats."
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
    for state in (holders := accepted(slots, *[request(4, 3)] * 3)):
        slots.reserve(state, 4)
    slot = slots.units(holders[1])[0]
    case, idea = f"slots of 6 rows; a request in slot {slot}, tokens 2:5", "A slot is a table with one long block."
    expect(slots.rows(holders[1], 2, 5), [slot * 6 + t for t in (2, 3, 4)], case=case, idea=idea, what="rows")
