"""PagedAttention's memory manager (Kwon et al., SOSP 2023, section 4): K/V in blocks of a few tokens.

A request's tokens live in any blocks of the pool; its *block table* lists them in token order, as a page table does for
a process. A block is taken when a token needs it, so a request never holds more than ``block_size - 1`` rows that it
does not fill, and any free block serves any request. The price: requests grow while they run, so the pool can run out
under them. Then somebody has to be preempted; who, is the scheduler's decision, not this module's.

Because tables only point, several requests can point to the same block: the answers of one prompt (``n > 1``) share its
blocks, and whoever has to write into a shared block first takes a copy of it (*copy-on-write*, section 4.4).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from minibatch.kv_cache import KVCache, KVDraft, RowCopy
from minibatch.request import RequestState


class BlockPool:
    """Blocks, and how many tables point to each. One that nobody points to is free.

    Blocks go out from the left of the free list and come back on the right, so the one idle longest is taken next.
    """

    def __init__(self, num_blocks: int) -> None:
        self.references = [0] * num_blocks
        self.num_shares = 0  # references beyond the first of a block
        self._free: deque[int] = deque(range(num_blocks))

    def __len__(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    def take(self) -> int:
        """A block of one's own."""
        block = self._free.popleft()
        self.references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more table points to the block."""
        self.num_shares += self.references[block] > 0
        self.references[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """One table less points to each of these; those to which none does are free, in this order."""
        for block in blocks:
            self.references[block] -= 1
            if self.references[block]:
                self.num_shares -= 1
            else:
                self._put_back(block)

    def _put_back(self, block: int) -> None:
        self._free.append(block)


class PagedKVCache(KVCache):
    """Block tables over a pool of ``num_blocks`` blocks of ``block_size`` rows.

    ``tables``    of each request that holds anything, its blocks in token order
    ``reserved``  for how many of its tokens these were taken
    """

    unit_name = "block"
    grows = True
    shares = True

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        super().__init__(num_blocks, block_size)
        self.pool = BlockPool(num_blocks)
        self.tables: dict[RequestState, list[int]] = {}
        self.reserved: dict[RequestState, int] = {}

    @property
    def max_request_tokens(self) -> int:
        return self.num_rows

    @property
    def num_free(self) -> int:
        return len(self.pool)

    def units_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.unit_size)

    def need(self, request: RequestState, num_tokens: int) -> int:
        """With ``n > 1`` and more than the prompt reserved: for every answer, all but the prompt's full blocks."""
        blocks = self.units_for(num_tokens)
        if request.siblings and num_tokens > request.num_prompt:
            blocks += len(request.siblings) * (blocks - request.num_prompt // self.unit_size)
        return blocks

    def units(self, request: RequestState) -> tuple[int, ...]:
        return tuple(self.tables.get(request, ()))

    def num_held(self, request: RequestState) -> int:
        return len(self.tables.get(request, ()))

    def reserve(self, request: RequestState, num_tokens: int) -> RowCopy | None:
        """Makes sure that the first ``num_tokens`` tokens have rows that may be written: takes the blocks that are
        missing, and returns what has to be copied first, if the block that is written next was shared."""
        table = self.tables.setdefault(request, [])
        copy = self._copy_on_write(request, table) if self.pool.num_shares else None
        for _ in range(self.need(request, num_tokens) - len(table)):
            table.append(self.pool.take())
        self.reserved[request] = max(self.reserved.get(request, 0), num_tokens)
        request.room = len(table) * self.unit_size  # what it has still to write is its own now
        return copy

    def release(self, request: RequestState) -> None:
        """Takes back all blocks that a request holds; nothing if it holds nothing."""
        self.pool.drop(reversed(self.tables.pop(request, [])))
        self.reserved.pop(request, None)
        request.room = 0

    def trim(self, request: RequestState) -> None:
        if table := self.tables.get(request):
            most = self.need(request, self.reserved[request])
            spare = table[most:]
            del table[most:]
            self.pool.drop(spare)
            request.room = min(request.room, most * self.unit_size)

    def reserved_for(self, request: RequestState) -> int:
        """Blocks that are kept for the other answers of the request count as reserved for it."""
        meant = max(self.reserved.get(request, 0), request.num_computed)
        return meant + (self.num_held(request) - self.units_for(meant)) * self.unit_size

    def shared_block(self, request: RequestState) -> int | None:
        """Index in its table of the block that the request writes next, if it holds that and does not own it alone."""
        index = request.num_computed // self.unit_size
        table = self.tables.get(request, ())
        return index if index < len(table) and self.pool.references[table[index]] > 1 else None

    def fork(self, parent: RequestState, child: RequestState) -> RowCopy | None:
        """The child's table points to the parent's blocks. Blocks that the parent has reserved for the child are its
        own from now on; then the last, partly filled block of the prompt is copied at once, for there is room."""
        table = self.tables[parent]
        own, full = self.units_for(self.reserved[parent]), parent.num_computed // self.unit_size
        each = own - full if len(table) > own else 0
        cut = len(table) - each
        mine = table[cut:]
        del table[cut:]
        shared = table[:full] if mine else list(table)
        parent.room = full * self.unit_size  # it writes to what may be shared now
        for block in shared:
            self.pool.share(block)
        self.tables[child], self.reserved[child] = shared + mine, self.reserved[parent]
        rest = parent.num_computed % self.unit_size
        return self._rows_of(table[full], mine[0], rest) if mine and rest else None

    def draft(self) -> PagedDraft:
        return PagedDraft(self)

    def _copy_on_write(self, request: RequestState, table: list[int]) -> RowCopy | None:
        """A block of its own in place of a shared one that the request writes next. Returns what has to be copied."""
        index = self.shared_block(request)
        if index is None:
            return None
        shared, table[index] = table[index], self.pool.take()
        self.pool.drop([shared])
        return self._rows_of(shared, table[index], request.num_computed % self.unit_size)

    def _rows_of(self, source: int, target: int, num_rows: int) -> RowCopy:
        """The first rows of one block to another."""
        rows = np.arange(num_rows)
        return RowCopy(source * self.unit_size + rows, target * self.unit_size + rows)

    def _sums(self, active: Iterable[RequestState]) -> tuple[int, int, int]:
        if self.pool.num_shares or any([r.siblings or r.finish_reason for r in active]):  # noqa: C419 (quicker)
            return super()._sums(active)
        # The same, quicker.
        filled = sum([request.num_computed for request in active])
        ahead = [self.reserved[request] - request.num_computed for request in active]
        reserved = sum([rows for rows in ahead if rows > 0])
        return filled, reserved, (self.num_units - self.num_free) * self.unit_size - filled - reserved

    def _counted_twice(self, active: Iterable[RequestState]) -> tuple[int, int, int]:
        filled = reserved = wasted = 0
        seen: set[int] = set()
        holders = sorted(active, key=lambda request: request.is_finished) if self.pool.num_shares else ()
        for request in holders:  # the living first: what they read is filled, whoever else holds it
            table = self.tables.get(request, ())
            for index, block in [(i, b) for i, b in enumerate(table) if self.pool.references[b] > 1]:
                if block not in seen:
                    seen.add(block)
                elif request.is_finished:
                    reserved += self.unit_size
                else:
                    rows = min(request.num_computed - index * self.unit_size, self.unit_size)
                    filled, wasted = filled + rows, wasted + self.unit_size - rows
        return filled, reserved, wasted


class PagedDraft(KVDraft):
    """The same for blocks that may be shared: a victim's are free only if nobody else points to them, a prefix that is
    found is promised, and the copy of a shared block counts."""

    kv: PagedKVCache

    def __init__(self, kv: PagedKVCache) -> None:
        super().__init__(kv)
        self._references: dict[int, int] = {}  # of blocks for which they are not the pool's
        self._found: dict[RequestState, tuple[int, ...]] = {}  # prefixes of requests that hold nothing
        self._tables: dict[RequestState, Sequence[int]] = {}  # where not as in the cache; without what is promised

    def copy(self) -> PagedDraft:
        twin = super().copy()
        for name in ("_references", "_found", "_tables"):
            setattr(twin, name, getattr(self, name).copy())
        return twin

    def cached_tokens(self, request: RequestState) -> int:
        return len(self._prefix(request)) * self.kv.unit_size

    def need(self, request: RequestState, num_tokens: int) -> int:
        prefix = self._prefix(request)
        new = max(self.kv.need(request, num_tokens) - self._held[request] - len(prefix), 0)
        idle = sum([self._referenced(block) == 0 for block in prefix])  # found, and nobody's: no longer free
        return new + idle + (self._shared(request) is not None)

    def reserve(self, request: RequestState, num_tokens: int) -> bool:
        held, blocks = self._held[request], self.kv.need(request, num_tokens)
        index = self._shared(request) if self.kv.pool.num_shares else None
        # One that holds blocks, none of them shared, needs only the missing ones; usually one, or none.
        need = max(blocks - held, 0) if held and index is None else self.need(request, num_tokens)
        if need > self.free:
            return False
        self.free -= need
        if index is not None:
            table = self._tables[request] = list(self.kv.tables[request])
            self._refer(table.pop(index), -1)  # it takes a copy
        if not held:
            self._tables[request] = self._prefix(request)
            for block in self._tables[request]:
                self._refer(block, +1)
        self._held[request] = max(blocks, held)
        return True

    def release(self, request: RequestState) -> None:
        table = self._tables.get(request, self.kv.tables.get(request, ()))
        self.free += self._held[request] - len(table)  # what it was promised
        for block in table:
            self.free += self._refer(block, -1) == 0
        self._tables[request], self._held[request] = (), 0

    def _prefix(self, request: RequestState) -> tuple[int, ...]:
        """What a prefix cache has of a request that holds nothing and brings nothing from the host."""
        if request.num_computed or self._held[request]:
            return ()
        if request not in self._found:
            self._found[request] = self.kv.match(request)
        return self._found[request]

    def _shared(self, request: RequestState) -> int | None:
        """Index of the block that the request would write and does not own alone."""
        if not self.kv.pool.num_shares or request in self._tables:
            return None
        index = self.kv.shared_block(request)
        return index if index is not None and self._referenced(self.kv.units(request)[index]) > 1 else None

    def _referenced(self, block: int) -> int:
        return self._references.get(block, self.kv.pool.references[block])

    def _refer(self, block: int, change: int) -> int:
        """How many tables point to the block, now that ``change`` more do."""
        references = self._references[block] = self._referenced(block) + change
        return references
