"""Lab paging."""

from __future__ import annotations

import heapq

import numpy as np

from lab_solutions import Wrong
from minibatch.kv_cache import RowCopy

# ---------------------------------------------------------------- paging.1: BlockPool


class _Pool:
    """A right one with a list, for the wrong ones to deviate from."""

    def __init__(self, num_blocks):
        self.references = [0] * num_blocks
        self.num_shares = 0
        self.free = list(range(num_blocks))

    def __len__(self):
        return len(self.free)

    def take(self):
        block = self.free.pop(0)
        self.references[block] = 1
        return block

    def share(self, block):
        self.references[block] += 1
        self.num_shares += 1

    def drop(self, blocks):
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free.append(block)
            else:
                self.num_shares -= 1


class _Stack(_Pool):
    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.free.reverse()

    def take(self):
        block = self.free.pop()
        self.references[block] = 1
        return block


class _LowestNumber(_Pool):
    def take(self):
        heapq.heapify(self.free)
        block = heapq.heappop(self.free)
        self.references[block] = 1
        return block


class _FreeAtTheFirstDrop(_Pool):
    def drop(self, blocks):
        for block in blocks:
            self.num_shares -= self.references[block] > 1
            self.references[block] -= 1
            self.free.append(block)


class _CountsSharedBlocks(_Pool):
    def share(self, block):
        self.references[block] += 1
        self.num_shares += self.references[block] == 2

    def drop(self, blocks):
        for block in blocks:
            self.references[block] -= 1
            self.num_shares -= self.references[block] == 1
            if not self.references[block]:
                self.free.append(block)


class _GoesThroughTwice(_Pool):
    def drop(self, blocks):
        for block in blocks:
            self.num_shares -= self.references[block] > 1
            self.references[block] -= 1
        self.free += [block for block in blocks if not self.references[block]]


class _Stamps:
    """Since when each block is free; the counts follow."""

    def __init__(self, num_blocks):
        self.references = [0] * num_blocks
        self.since = {block: block for block in range(num_blocks)}
        self.now = num_blocks

    def __len__(self):
        return len(self.since)

    @property
    def num_shares(self):
        return sum(max(count - 1, 0) for count in self.references)

    def take(self):
        block = min(self.since, key=self.since.get)
        del self.since[block]
        self.references[block] += 1
        return block

    def share(self, block):
        self.references[block] += 1

    def drop(self, blocks):
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block]:
                self.since[block] = self.now
                self.now += 1


# ---------------------------------------------------------------- paging.2: rows


def _side_by_side(self, request, start, stop):
    units = self.units(request)
    return units[0] * self.unit_size + np.arange(start, stop) if units else np.arange(0)


def _dealt_out(self, request, start, stop):
    table = np.array(self.units(request), dtype=np.int64)
    tokens = np.arange(start, stop)
    return table[tokens % len(table)] * self.unit_size + tokens // len(table)


def _boundary_a_token_late(self, request, start, stop):
    table, size = self.units(request), self.unit_size
    rows = [table[max(t - 1, 0) // size] * size + t % size for t in range(start, stop)]
    return np.array(rows, dtype=np.int64)


def _from_token_0(self, request, start, stop):
    table, size = self.units(request), self.unit_size
    rows = [block * size + place for block in table for place in range(size)]
    return np.array(rows[:stop] if start < stop else [], dtype=np.int64)


def _floats_if_empty(self, request, start, stop):
    table, size = self.units(request), self.unit_size
    return np.array([table[t // size] * size + t % size for t in range(start, stop)])


def _all_rows_cut(self, request, start, stop):
    blocks = [np.arange(unit * self.unit_size, (unit + 1) * self.unit_size) for unit in self.units(request)]
    return np.concatenate([np.zeros(0, dtype=np.int64), *blocks])[start:stop]


def _by_divmod(self, request, start, stop):
    found, table = [], self.units(request)
    for token in range(start, stop):
        index, place = divmod(token, self.unit_size)
        found.append(table[index] * self.unit_size + place)
    return np.array(found, dtype=np.int64)


# ---------------------------------------------------------------- paging.3: reserve


def _reserve(self, request, num_tokens, blocks=None, ask=True, give=True):
    """A right one; with other arguments it is wrong in one way."""
    table = self.tables.setdefault(request, [])
    copy = self._copy_on_write(request, table) if ask else None
    blocks = self.need(request, num_tokens) if blocks is None else blocks
    while len(table) < blocks:
        table.append(self.pool.take())
    self.reserved[request] = max(num_tokens, self.reserved.get(request, 0))
    request.room = self.unit_size * len(table)
    return copy if give else None


def _one_more_at_the_boundary(self, request, num_tokens):
    return _reserve(self, request, num_tokens, num_tokens // self.unit_size + 1)


def _takes_all_again(self, request, num_tokens):
    table = self.tables.setdefault(request, [])
    copy = self._copy_on_write(request, table)
    for _ in range(self.need(request, num_tokens)):
        if len(self.pool):
            table.append(self.pool.take())
    self.reserved[request] = max(num_tokens, self.reserved.get(request, 0))
    request.room = self.unit_size * len(table)
    return copy


def _only_for_itself(self, request, num_tokens):
    return _reserve(self, request, num_tokens, self.units_for(num_tokens))


def _copies_only_when_it_grows(self, request, num_tokens):
    grows = self.need(request, num_tokens) > self.num_held(request)
    return _reserve(self, request, num_tokens, ask=grows)


def _keeps_the_copy_to_itself(self, request, num_tokens):
    return _reserve(self, request, num_tokens, give=False)


def _reserve_by_lists(self, request, num_tokens):
    if request not in self.tables:
        self.tables[request] = []
    missing = max(0, self.need(request, num_tokens) - self.num_held(request))
    new = [self.pool.take() for _ in range(missing)]
    rows_to_copy = self._copy_on_write(request, self.tables[request])
    self.tables[request] += new
    if num_tokens > self.reserved.get(request, -1):
        self.reserved[request] = num_tokens
    request.room = sum(self.unit_size for _ in self.units(request))
    return rows_to_copy


# ---------------------------------------------------------------- paging.4: _copy_on_write


def _copied(self, request, table, index, num_rows=None):
    """A right copy of block ``index`` of the table."""
    old, new = table[index], self.pool.take()
    table[index] = new
    self.pool.drop([old])
    rows = np.arange(request.num_computed % self.unit_size if num_rows is None else num_rows)
    return RowCopy(old * self.unit_size + rows, new * self.unit_size + rows)


def _last_holder_copies_too(self, request, table):
    index = request.num_computed // self.unit_size
    return _copied(self, request, table, index) if index < len(table) else None


def _the_last_of_the_table(self, request, table):
    return None if self.shared_block(request) is None else _copied(self, request, table, len(table) - 1)


def _keeps_its_reference(self, request, table):
    index = self.shared_block(request)
    if index is None:
        return None
    old, table[index] = table[index], self.pool.take()
    rows = np.arange(request.num_computed % self.unit_size)
    return RowCopy(old * self.unit_size + rows, table[index] * self.unit_size + rows)


def _the_whole_block(self, request, table):
    index = self.shared_block(request)
    return None if index is None else _copied(self, request, table, index, self.unit_size)


def _back(self, request, table):
    index = self.shared_block(request)
    if index is None:
        return None
    source, target = _copied(self, request, table, index)
    return RowCopy(target, source)


def _copy_by_counting(self, request, table):
    index, rest = divmod(request.num_computed, self.unit_size)
    if index >= len(table) or self.pool.references[table[index]] == 1:
        return None
    old = table.pop(index)
    self.pool.drop(iter((old,)))
    new = self.pool.take()
    table.insert(index, new)
    ends = [[block * self.unit_size + row for row in range(rest)] for block in (old, new)]
    return RowCopy(*(np.array(rows, dtype=np.int64) for rows in ends))


WRONG = {
    "paging.1": [
        Wrong("the block freed last is taken first", _Stack, "not a stack"),
        Wrong("the free block of the lowest number is taken", _LowestNumber, "The number of a block does not matter"),
        Wrong("a shared block is free when the first table drops it", _FreeAtTheFirstDrop, "last reference is dropped"),
        Wrong(
            "num_shares counts blocks that are shared", _CountsSharedBlocks, "references beyond the first of a block"
        ),
        Wrong("an iterator is gone through twice", _GoesThroughTwice, "only once"),
    ],
    "paging.2": [
        Wrong("blocks lie side by side", _side_by_side, "need not lie side by side"),
        Wrong("tokens are dealt out to the blocks in turn", _dealt_out, "filled before the next"),
        Wrong("the first token of a block is looked for in the one before", _boundary_a_token_late, "in its row 0"),
        Wrong("all rows from token 0 on", _from_token_0, "and for no others"),
        Wrong("an empty array of floats", _floats_if_empty, "array of integers"),
    ],
    "paging.3": [
        Wrong("a block too many at a boundary", _one_more_at_the_boundary, "rounded up"),
        Wrong("what is held already is taken again", _takes_all_again, "exactly the blocks that are missing"),
        Wrong("the other answers get nothing", _only_for_itself, "reserves for all of them"),
        Wrong("only who grows can need a copy", _copies_only_when_it_grows, "whether one is missing or not"),
        Wrong("nobody hears of the copy", _keeps_the_copy_to_itself, "The engine copies what reserve returns"),
    ],
    "paging.4": [
        Wrong("the last holder copies too", _last_holder_copies_too, "owns the block alone"),
        Wrong("the block that is written is the last of the table", _the_last_of_the_table, "need not be the last"),
        Wrong("the shared block keeps the reference", _keeps_its_reference, "its reference has to be dropped"),
        Wrong("the whole block is copied", _the_whole_block, "Only the rows that are computed"),
        Wrong("the copy goes back to the shared block", _back, "not back"),
    ],
}
RIGHT = {
    "paging.1": [_Stamps, _Pool],
    "paging.2": [_all_rows_cut, _by_divmod],
    "paging.3": [_reserve, _reserve_by_lists],
    "paging.4": [_copy_by_counting],
}
