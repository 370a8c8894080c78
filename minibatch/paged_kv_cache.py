"""PagedAttention's memory manager (Kwon et al., SOSP 2023, section 4): K/V in blocks of a few tokens.

A request's tokens live in any blocks of the pool; its *block table* lists them in token order, as a page table does for
a process. A block is taken when a token needs it, so a request never holds more than ``block_size - 1`` rows that it
does not fill, and any free block serves any request. The price: requests grow while they run, so the pool can run out
under them. Then somebody has to be preempted; who, is the scheduler's decision, not this module's.
"""

from __future__ import annotations

from collections import deque

from minibatch.kv_cache import KVCache
from minibatch.request import RequestState


class BlockPool:
    """The free list: blocks go out from the left and come back on the right, so the one idle longest is taken next."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))

    def __len__(self) -> int:
        """Free blocks."""
        return len(self._free)

    def take(self) -> int:
        return self._free.popleft()

    def give_back(self, blocks: list[int]) -> None:
        self._free.extend(blocks)


class PagedKVCache(KVCache):
    """Block tables over a pool of ``num_blocks`` blocks of ``block_size`` rows."""

    unit_name = "block"
    grows = True

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        super().__init__(num_blocks, block_size)
        self.pool = BlockPool(num_blocks)
        self._tables: dict[RequestState, list[int]] = {}
        self._reserved: dict[RequestState, int] = {}  # tokens that the blocks of a table were taken for

    @property
    def max_request_tokens(self) -> int:
        return self.num_rows

    @property
    def num_free(self) -> int:
        return len(self.pool)

    def units_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.unit_size)

    def units(self, request: RequestState) -> tuple[int, ...]:
        return tuple(self._tables.get(request, ()))

    def reserve(self, request: RequestState, num_tokens: int) -> None:
        table = self._tables.setdefault(request, [])
        while len(table) * self.unit_size < num_tokens:
            table.append(self.pool.take())
        self._reserved[request] = max(self._reserved.get(request, 0), num_tokens)

    def release(self, request: RequestState) -> None:
        self.pool.give_back(self._tables.pop(request, []))
        self._reserved.pop(request, None)

    def reserved_for(self, request: RequestState) -> int:
        return self._reserved.get(request, 0)
