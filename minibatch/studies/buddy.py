"""A buddy allocator for K/V: how memory was handed out before paging, in the comparison of the vLLM paper.

A request gets one run of consecutive rows when it is admitted, of a size that is a power of two, and keeps it to its
end. A chunk that is larger than needed is halved until it fits; two halves that are both free become one chunk again
(K. C. Knowlton, A Fast Storage Allocator, CACM 1965; in *PagedAttention*, SOSP 2023, section 6.1, it manages the memory
of the three Orca baselines). So memory is lost twice: inside the chunks, to rounding, and between them, when what is
free is there but in pieces.

What a baseline believes about the length of an answer is a *rule*, a function that says how many rows a request asks
for. The rules here cheat as those of the paper do: they look at the true length (``max_cached_tokens`` of a simulated
request whose ``max_tokens`` is its exact length) and pretend to know less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from minibatch.checks import check_int
from minibatch.kv_cache import KVCache, KVDraft
from minibatch.request import RequestState

Rule = Callable[[RequestState], int]


def order_of(num_rows: int) -> int:
    """The smallest k with 2^k >= num_rows."""
    return (num_rows - 1).bit_length()


def oracle(request: RequestState) -> int:
    """Orca (Oracle): asks for exactly what will be filled."""
    return request.max_cached_tokens


@dataclass(frozen=True)
class PowerOfTwo:
    """Orca (Pow2): the answer's length is known up to a factor of two; for one of 25 tokens it asks for 32.

    No request may be longer than ``max_model_len``, so none asks for more; infinity: as if nobody knew that.
    """

    max_model_len: float

    def __call__(self, request: RequestState) -> int:
        return int(min(request.num_prompt + (1 << order_of(request.max_new_tokens)), self.max_model_len))


@dataclass(frozen=True)
class Maximum:
    """Orca (Max): asks for the longest that a request may be, whatever it is."""

    max_model_len: int

    def __call__(self, request: RequestState) -> int:
        return self.max_model_len


class Buddies:
    """The free chunks of ``num_rows`` rows: ``free[k]`` are the first rows of those with 2^k rows.

    A number of rows that is no power of two is the sum of some: these are the chunks that there are at first.
    """

    def __init__(self, num_rows: int) -> None:
        check_int("num_rows", num_rows, 1)
        self.num_rows = self.num_free = num_rows
        self.free: list[set[int]] = [set() for _ in range(num_rows.bit_length())]
        start = 0
        for order in reversed(range(num_rows.bit_length())):  # the largest first, so that each begins at a multiple
            if num_rows >> order & 1:
                self.free[order].add(start)
                start += 1 << order

    def copy(self) -> Buddies:
        twin = object.__new__(Buddies)
        twin.num_rows, twin.num_free = self.num_rows, self.num_free
        twin.free = [set(chunks) for chunks in self.free]
        return twin

    @property
    def largest(self) -> int:
        """Rows of the largest free chunk; 0 if there is none."""
        return next((1 << order for order in reversed(range(len(self.free))) if self.free[order]), 0)

    def take(self, order: int) -> int | None:
        """The first row of a chunk of 2^order rows, or None: the smallest that is large enough, its lower end."""
        found = next((larger for larger in range(order, len(self.free)) if self.free[larger]), None)
        if found is None:
            return None
        start = min(self.free[found])
        self.free[found].remove(start)
        while found > order:
            found -= 1
            self.free[found].add(start + (1 << found))
        self.num_free -= 1 << order
        return start

    def put_back(self, start: int, order: int) -> None:
        """A chunk that was taken is free; with its buddy, if that is free too, it becomes one of twice the size."""
        self.num_free += 1 << order
        while (buddy := start ^ (1 << order)) in self.free[order]:
            self.free[order].remove(buddy)
            start, order = min(start, buddy), order + 1
        self.free[order].add(start)


class BuddyKVCache(KVCache):
    """``num_rows`` rows in chunks whose sizes are powers of two; ``rule`` says how many rows a request asks for.

    It is given at least what it can fill, and at most the largest chunk there is. A unit is a row, so a chunk is that
    many units. In a snapshot ``reserved`` is what will be filled later, if ``max_tokens`` is the exact length;
    ``fragmentation`` is the rest of the chunk, whether the rule or the rounding took it.
    """

    unit_name = "row"
    grows = False
    shares = False

    def __init__(self, num_rows: int, rule: Rule = oracle) -> None:
        super().__init__(num_rows, 1)
        self.rule, self.buddies = rule, Buddies(num_rows)
        self._largest = self.buddies.largest
        self._chunks: dict[RequestState, tuple[int, int]] = {}  # first row, order

    @property
    def max_request_tokens(self) -> int:
        return self._largest

    @property
    def num_free(self) -> int:
        return self.buddies.num_free

    def units_for(self, num_tokens: int) -> int:
        return 1 << order_of(num_tokens)

    def need(self, request: RequestState, num_tokens: int) -> int:
        """The same at any time of its life, whatever ``num_tokens`` are to be computed now."""
        asked = max(self.rule(request), request.max_cached_tokens)
        return min(self.units_for(asked), self._largest)

    def units(self, request: RequestState) -> tuple[int, ...]:
        start, order = self._chunks.get(request, (0, None))
        return () if order is None else tuple(range(start, start + (1 << order)))

    def num_held(self, request: RequestState) -> int:
        return 1 << self._chunks[request][1] if request in self._chunks else 0

    def reserve(self, request: RequestState, num_tokens: int) -> None:
        if request not in self._chunks:
            size = self.need(request, num_tokens)
            start = self.buddies.take(order_of(size))
            assert start is not None, f"no chunk of {size} rows: the plan has not asked"
            self._chunks[request] = start, order_of(size)
            request.room = size

    def release(self, request: RequestState) -> None:
        if request in self._chunks:
            self.buddies.put_back(*self._chunks.pop(request))
            request.room = 0

    def reserved_for(self, request: RequestState) -> int:
        return request.max_cached_tokens

    def rows(self, request: RequestState, start: int, stop: int) -> np.ndarray:
        return self._chunks[request][0] + np.arange(start, stop)

    def describe_need(self, num_tokens: int) -> str:
        return f"needs {num_tokens} rows in one chunk, the largest has {self._largest}"

    def draft(self) -> BuddyDraft:
        return BuddyDraft(self)

    def __repr__(self) -> str:
        rule = getattr(self.rule, "__name__", None) or repr(self.rule)
        return f"BuddyKVCache({self.num_rows} rows, {rule})"


class BuddyDraft(KVDraft):
    """Plays what it promises on a copy of the free chunks, made when it is first needed: how many rows are free does
    not say whether a chunk is. ``free`` are the rows of the largest one."""

    kv: BuddyKVCache

    def __init__(self, kv: BuddyKVCache) -> None:
        self.kv = kv
        self._buddies: Buddies | None = None
        self._chunks: dict[RequestState, tuple[int, int] | None] = {}  # only where the draft differs from the cache

    def copy(self) -> BuddyDraft:
        twin = BuddyDraft(self.kv)
        twin._buddies = self._buddies and self._buddies.copy()
        twin._chunks = dict(self._chunks)
        return twin

    @property
    def free(self) -> int:
        return (self._buddies or self.kv.buddies).largest

    def held(self, request: RequestState) -> int:
        if request not in self._chunks:
            return self.kv.num_held(request)
        chunk = self._chunks[request]
        return 0 if chunk is None else 1 << chunk[1]

    def reserve(self, request: RequestState, num_tokens: int) -> bool:
        need = self.need(request, num_tokens)
        if need > self.free:
            return False
        if need:
            order = order_of(need)
            self._chunks[request] = self._own().take(order), order
        return True

    def release(self, request: RequestState) -> None:
        chunk = self._chunks.get(request, self.kv._chunks.get(request))
        if chunk is not None:
            self._own().put_back(*chunk)
        self._chunks[request] = None

    def shortage(self, request: RequestState, num_tokens: int) -> str:
        rows = (self._buddies or self.kv.buddies).num_free
        return f"needs a chunk of {self.need(request, num_tokens)}, of {rows} free the largest has {self.free}"

    def _own(self) -> Buddies:
        if self._buddies is None:
            self._buddies = self.kv.buddies.copy()
        return self._buddies
