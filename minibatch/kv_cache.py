"""The KV cache as an address book: which physical row holds the K/V of which token.

A cache hands out *units* of consecutive rows (a slot of a contiguous cache, a block of a paged one) and translates
``(request, token index)`` into a row. It owns no tensors and needs no torch: the executor allocates ``num_rows`` rows
and reads and writes where the cache points. Attention therefore does not know which kind of cache it runs on, and a
difference between two kinds can only come from *how many requests fit*.

:class:`ContiguousKVCache` is how serving engines began (FasterTransformer, Orca): a request gets one run of rows as
long as the longest request may be, at once, whether it will use them or not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from minibatch.checks import check_int
from minibatch.request import NeverFits, RequestState


@dataclass(frozen=True, slots=True)
class Holding:
    """What one request holds at the end of an iteration: its units, and what their rows are used for."""

    request_id: str
    units: tuple[int, ...]
    filled: int
    reserved: int
    fragmentation: int


@dataclass(frozen=True, slots=True)
class KVSnapshot:
    """Where every row of the cache is, after the forward and before anyone leaves. Each row is counted once, however
    many requests share it (so the parts of the holdings may add up to more).

    ``filled``         rows that hold the K/V of a live request's token
    ``reserved``       set aside for tokens that may still come, or kept by a finished member of a static batch
    ``fragmentation``  allocated, but of no use to anyone: the end of a request's last block, or the part of a slot
                       beyond the longest that its request can become
    ``cached``         of nobody, but still holding a prefix that a later request may find (or could have found, were
                       the block before it not gone); taken when needed
    ``free``           of nobody
    ``host``           rows of swapped requests in host memory: not part of the capacity
    ``idle``           the units of the ``cached`` rows, the next to be taken first
    """

    capacity: int
    filled: int
    reserved: int
    fragmentation: int
    free: int
    holdings: tuple[Holding, ...]
    cached: int = 0
    host: int = 0
    idle: tuple[int, ...] = ()


class RowCopy(NamedTuple):
    """Rows that the executor has to copy before the next forward, int64 ``[n]`` each."""

    source: np.ndarray
    target: np.ndarray


class KVCache(ABC):
    """Hands out units of ``unit_size`` rows, and translates token indices into rows.

    ``grows``   a request gets its rows as it needs them, so that the cache can run out under a running request (and
                somebody must be preempted); else all of them when it is admitted
    ``shares``  two requests can hold the same unit
    ``host``    swapped requests, and how many of their tokens are in host memory
    """

    unit_name: str
    grows: bool
    shares: bool

    def __init__(self, num_units: int, unit_size: int) -> None:
        check_int(f"num_{self.unit_name}s", num_units, 1)
        check_int(f"{self.unit_name}_size", unit_size, 1)
        self.num_units, self.unit_size = num_units, unit_size
        self.num_rows = num_units * unit_size
        self.host: dict[RequestState, int] = {}
        self.used = False  # whether an engine has it

    @property
    @abstractmethod
    def max_request_tokens(self) -> int:
        """The most tokens that one request could have in an otherwise empty cache."""

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Units that a request can have: those that nobody holds."""

    @property
    def num_cached(self) -> int:
        """Those of the free units that still hold a prefix which can be found."""
        return 0

    def idle(self) -> tuple[int, ...]:
        """Which these are, the next to be taken first."""
        return ()

    @abstractmethod
    def units_for(self, num_tokens: int) -> int:
        """Units that one sequence with ``num_tokens`` cached tokens holds."""

    def need(self, request: RequestState, num_tokens: int) -> int:
        """Units that the request holds with its first ``num_tokens`` tokens reserved."""
        return self.units_for(num_tokens)

    @abstractmethod
    def units(self, request: RequestState) -> tuple[int, ...]:
        """The units that a request holds, in token order; empty if none."""

    @abstractmethod
    def num_held(self, request: RequestState) -> int:
        """How many these are."""

    @abstractmethod
    def reserve(self, request: RequestState, num_tokens: int) -> RowCopy | None:
        """Makes sure that the first ``num_tokens`` tokens have rows that may be written.

        The plan has established that they fit. Returns what has to be copied first, if anything. Up to ``request.room``
        tokens the cache need not be asked again.
        """

    @abstractmethod
    def release(self, request: RequestState) -> None:
        """Takes back all that a request holds; nothing if it holds nothing."""

    def trim(self, request: RequestState) -> None:  # noqa: B027 (a slot is a slot)
        """Gives back what was reserved for answers that will not be forked any more."""

    @abstractmethod
    def reserved_for(self, request: RequestState) -> int:
        """How many tokens the request's units were taken for; the rows beyond them are fragmentation."""

    def match(self, request: RequestState) -> tuple[int, ...]:
        """Units that hold the beginning of a request which holds nothing itself (see ``prefix_cache.py``)."""
        return ()

    def adopt(self, request: RequestState, num_tokens: int) -> None:  # noqa: B027 (most caches find nothing)
        """Gives the request the units that ``match`` found for its first ``num_tokens`` tokens."""

    def publish(self, requests: Iterable[RequestState]) -> None:  # noqa: B027 (and remember nothing)
        """More of their tokens have been computed: others may find them from now on."""

    def fork(self, parent: RequestState, child: RequestState) -> RowCopy | None:
        """Lets ``child`` share all that ``parent`` has computed. Returns what has to be copied at once, if anything."""
        raise NotImplementedError(f"the {self.unit_name}s of {self!r} cannot be shared")

    def rows(self, request: RequestState, start: int, stop: int) -> np.ndarray:
        """Physical rows of ``tokens[start:stop]``, int64 ``[stop - start]``: the one address translation."""
        tokens = np.arange(start, stop)
        table = np.asarray(self.units(request), dtype=np.int64)
        return table[tokens // self.unit_size] * self.unit_size + tokens % self.unit_size

    def check(self, num_tokens: int, what: str) -> None:
        """Raises NeverFits if even an empty cache has no room for ``num_tokens`` tokens of one request."""
        if num_tokens > self.max_request_tokens:
            raise NeverFits(f"{what} {self.describe_need(num_tokens)}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_units} {self.unit_name}s of {self.unit_size})"

    def describe_need(self, num_tokens: int) -> str:
        return (
            f"needs {self.units_for(num_tokens)} {self.unit_name}s of {self.unit_size}, the pool has {self.num_units}"
        )

    def draft(self) -> KVDraft:
        """A what-if view for planning."""
        return KVDraft(self)

    def snapshot(self, active: Iterable[RequestState], holdings: bool = True) -> KVSnapshot:
        """Where every row is. ``active`` are the requests that may hold something.

        ``holdings`` False: only the sums, which costs much less.
        """
        parts = tuple(self._holding(request) for request in active) if holdings else ()
        filled, reserved, fragmentation = self._sums(active)
        twice_filled, twice_reserved, twice_wasted = self._counted_twice(active)
        return KVSnapshot(
            capacity=self.num_rows,
            filled=filled - twice_filled,
            reserved=reserved - twice_reserved,
            fragmentation=fragmentation - twice_wasted,
            cached=self.num_cached * self.unit_size,
            free=(self.num_free - self.num_cached) * self.unit_size,
            host=sum(self.host.values()),
            holdings=parts,
            idle=self.idle() if holdings else (),
        )

    def _sums(self, active: Iterable[RequestState]) -> tuple[int, int, int]:
        """Rows of all holdings: filled, reserved, fragmented."""
        held = filled = meant = 0
        for request in active:
            rows = self.num_held(request) * self.unit_size
            held += rows
            if request.is_finished:
                meant += rows
            else:
                filled += request.num_computed
                meant += self.reserved_for(request)
        return filled, meant - filled, held - meant

    def _counted_twice(self, active: Iterable[RequestState]) -> tuple[int, int, int]:
        """Filled, reserved and fragmented rows that are in more than one holding, for each holding but the first."""
        return 0, 0, 0

    def _holding(self, request: RequestState) -> Holding:
        units = self.units(request)
        rows = len(units) * self.unit_size
        if request.is_finished:  # a dead member of a static batch: nobody will read these rows again
            return Holding(request.label, units, 0, rows, 0)
        meant = self.reserved_for(request)
        return Holding(request.label, units, request.num_computed, meant - request.num_computed, rows - meant)


class KVDraft:
    """An overlay on a cache in which units promised earlier in the same plan are gone, and a victim's are back.

    Costs nothing to make (it copies no table) and is thrown away with the planning, so that planning is pure.
    ``free`` are the units that can still be promised.
    """

    def __init__(self, kv: KVCache) -> None:
        self.kv = kv
        self.free = kv.num_free
        self._held = _Held(kv)

    def copy(self) -> KVDraft:
        """One to try something on."""
        twin = type(self)(self.kv)
        twin.free = self.free
        twin._held.update(self._held)
        return twin

    @property
    def held(self) -> Callable[[RequestState], int]:
        """``held(request)``: units that the request would hold.

        The look-up itself, because a victim rule may ask for hundreds of requests, again for every victim.
        """
        return self._held.__getitem__

    def cached_tokens(self, request: RequestState) -> int:
        """Leading tokens of a waiting request that need not be computed, because a prefix cache has their K/V."""
        return 0

    def need(self, request: RequestState, num_tokens: int) -> int:
        """Free units that it would take for the request's first ``num_tokens`` tokens to have rows."""
        return max(self.kv.need(request, num_tokens) - self.held(request), 0)

    def reserve(self, request: RequestState, num_tokens: int) -> bool:
        """Promises rows for the first ``num_tokens`` tokens; False, and no change, if they are not there."""
        need = self.need(request, num_tokens)
        if need > self.free:
            return False
        if need > 0:
            self.free -= need
            self._held[request] = self.held(request) + need
        return True

    def release(self, request: RequestState) -> None:
        """As if the request gave everything back."""
        self.free += self.held(request)
        self._held[request] = 0

    def shortage(self, request: RequestState, num_tokens: int) -> str:
        """Why ``num_tokens`` do not fit now, with the numbers."""
        promised = self.kv.num_free - self.free
        return f"needs {self.need(request, num_tokens)} {self.kv.unit_name}s, {self.kv.num_free} free" + (
            f", {promised} promised" if promised > 0 else f", {-promised} given back" if promised else ""
        )


class _Held(dict[RequestState, int]):
    """Units by request, as in the cache where the draft has changed nothing."""

    def __init__(self, kv: KVCache) -> None:
        self.kv = kv

    def __missing__(self, request: RequestState) -> int:
        units = self[request] = self.kv.num_held(request)
        return units


class ContiguousKVCache(KVCache):
    """One slot of ``slot_size`` consecutive rows a request, whatever its length."""

    unit_name = "slot"
    grows = False
    shares = False

    def __init__(self, num_slots: int, slot_size: int) -> None:
        super().__init__(num_slots, slot_size)
        self._free = list(reversed(range(num_slots)))
        self._slot: dict[RequestState, int] = {}

    @property
    def max_request_tokens(self) -> int:
        return self.unit_size

    @property
    def num_free(self) -> int:
        return len(self._free)

    def units_for(self, num_tokens: int) -> int:
        return 1

    def units(self, request: RequestState) -> tuple[int, ...]:
        return (self._slot[request],) if request in self._slot else ()

    def num_held(self, request: RequestState) -> int:
        return int(request in self._slot)

    def reserve(self, request: RequestState, num_tokens: int) -> None:
        if request not in self._slot:
            self._slot[request] = self._free.pop()
            request.room = self.unit_size

    def release(self, request: RequestState) -> None:
        if request in self._slot:
            self._free.append(self._slot.pop(request))
            request.room = 0

    def reserved_for(self, request: RequestState) -> int:
        return request.max_cached_tokens

    def describe_need(self, num_tokens: int) -> str:
        return f"needs {num_tokens} rows, a slot has {self.unit_size}"
