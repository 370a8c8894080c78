"""Prefix caching: K/V that has been computed once is found again by its tokens (vLLM's automatic prefix caching).

The K/V of a token depend on all tokens before it and on nothing else. So a *full* block is identified by its own tokens
and the block before it: a chain of hashes, whose root is the request's ``cache_salt``. A new request whose first blocks
are found points to them instead of computing them.

- A hash only says where to look. Tokens, salt and the block before are compared as well, so that two prefixes with the
  same hash cannot be taken for each other.
- A block can be found when it has been *computed*, not when it has been planned or allocated.
- Nobody's blocks stay findable until their room is needed: the free list is the eviction queue. Blocks without content
  go first, then those idle longest; of one request the tail goes before the head, because without its head a tail can
  never be found.
- At least one token of a request is always computed, since there have to be logits to sample from: of ``P`` tokens at
  most ``(P - 1) // block_size`` blocks are found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from minibatch.kv_cache import RowCopy
from minibatch.paged_kv_cache import BlockPool, PagedKVCache
from minibatch.request import RequestState

Tokens = tuple[int, ...]


def block_hash(parent: int, tokens: Tokens, salt: str | None) -> int:
    """Of a full block: from the hash of the block before it (0 at the root), its tokens, and the salt."""
    return hash((parent, tokens, salt))


@dataclass(eq=False, slots=True)
class CachedBlock:
    """A full block whose content is known. ``parent`` is the one before it in the chain, None at the root."""

    block: int
    hash: int
    parent: CachedBlock | None
    tokens: Tokens
    salt: str | None


class PrefixCache(BlockPool):
    """A block pool that remembers what is in the blocks, those that nobody points to included."""

    def __init__(self, num_blocks: int, hash_function: Callable[[int, Tokens, str | None], int] = block_hash) -> None:
        super().__init__(num_blocks)
        self._hash = hash_function
        self._by_hash: dict[int, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # nobody's, with content; the next to be evicted first

    def __len__(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Blocks of nobody that can still be found."""
        return len(self._idle)

    def idle(self) -> tuple[int, ...]:
        """Which these are, the next to be evicted first."""
        return tuple(self._idle)

    def known(self) -> Iterator[CachedBlock]:
        """Every block whose content is known, those that somebody holds included."""
        return iter(self._by_block.values())

    def find(self, parent: CachedBlock | None, tokens: Tokens, salt: str | None) -> CachedBlock | None:
        """The known block that holds ``tokens`` after ``parent`` (None: at the beginning); None if there is none."""
        found = self._by_hash.get(self._hash(parent.hash if parent else 0, tokens, salt))
        if found is not None and found.parent is parent and found.tokens == tokens and found.salt == salt:
            return found
        return None

    def remember(self, block: int, parent: CachedBlock | None, tokens: Tokens, salt: str | None) -> CachedBlock | None:
        """The block has been computed and can be found from now on. Returns what later blocks have as parent.

        If another block holds the same already, that one stays the one to be found. None if the hash belongs to other
        content: then this block, and all after it, cannot be found.
        """
        key = self._hash(parent.hash if parent else 0, tokens, salt)
        if (holder := self._by_hash.get(key)) is not None:
            if self._can_be_found(holder):
                return self.find(parent, tokens, salt)
            self._forget(holder)
        new = self._by_hash[key] = self._by_block[block] = CachedBlock(block, key, parent, tokens, salt)
        return new

    def take(self) -> int:
        """A block of one's own: one without content, or else the one idle longest."""
        if not self._free:
            self._forget(self._by_block[next(iter(self._idle))])  # before it is overwritten
        return super().take()

    def share(self, block: int) -> None:
        self._idle.pop(block, None)
        super().share(block)

    def _can_be_found(self, known: CachedBlock) -> bool:
        """Not if the block before it has been evicted."""
        return known.parent is None or self._by_block.get(known.parent.block) is known.parent

    def _forget(self, known: CachedBlock) -> None:
        del self._by_hash[known.hash], self._by_block[known.block]
        if known.block in self._idle:
            del self._idle[known.block]
            self._free.append(known.block)

    def _put_back(self, block: int) -> None:
        if block in self._by_block:
            self._idle[block] = None
        else:
            super()._put_back(block)


class PrefixCachedKVCache(PagedKVCache):
    """A paged KV cache whose full blocks are found again by requests that begin with the same tokens.

    A preempted request may find its own blocks. Requests that ask for ``prompt_logprobs`` find nothing, because these
    need all positions computed.
    """

    pool: PrefixCache

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        super().__init__(num_blocks, block_size)
        self.pool = PrefixCache(num_blocks)
        # Of each request, its leading computed blocks; None after one that cannot be found.
        self._chains: dict[RequestState, list[CachedBlock | None]] = {}

    @property
    def num_cached(self) -> int:
        return self.pool.num_idle

    def idle(self) -> tuple[int, ...]:
        return self.pool.idle()

    def match(self, request: RequestState) -> tuple[int, ...]:
        return tuple(found.block for found in self._find(request))

    def adopt(self, request: RequestState, num_tokens: int) -> None:
        chain = self._find(request)[: num_tokens // self.unit_size]
        for found in chain:
            self.pool.share(found.block)
        self.tables[request] = [found.block for found in chain]
        self.reserved[request] = num_tokens
        self._chains[request] = list(chain)

    def publish(self, requests: Iterable[RequestState]) -> None:
        for request in requests:
            self._publish(request)

    def _publish(self, request: RequestState) -> None:
        """Others can find those of its full blocks that have been computed meanwhile."""
        chain, table = self._chains.setdefault(request, []), self.tables[request]
        first, last = len(chain), request.num_computed // self.unit_size
        for index, tokens in enumerate(self._pieces(request, first, last), start=first):
            parent = chain[-1] if chain else None
            if parent is None and chain:
                chain.append(None)
            else:
                chain.append(self.pool.remember(table[index], parent, tokens, request.request.cache_salt))

    def fork(self, parent: RequestState, child: RequestState) -> RowCopy | None:
        self._chains[child] = list(self._chains.get(parent, ()))
        return super().fork(parent, child)

    def release(self, request: RequestState) -> None:
        super().release(request)
        self._chains.pop(request, None)

    def _find(self, request: RequestState) -> list[CachedBlock]:
        """The longest chain of known blocks at the beginning of a request, but never all of its tokens."""
        chain: list[CachedBlock] = []
        if request.params.prompt_logprobs is not None:
            return chain
        found, salt = None, request.request.cache_salt
        for tokens in self._pieces(request, 0, (request.num_tokens - 1) // self.unit_size):
            found = self.pool.find(found, tokens, salt)
            if found is None:
                break
            chain.append(found)
        return chain

    def _pieces(self, request: RequestState, first: int, last: int) -> Iterator[Tokens]:
        """The tokens of its full blocks ``first`` to ``last - 1``."""
        size, prompt, num_prompt = self.unit_size, request.prompt, request.num_prompt
        for start in range(first * size, last * size, size):
            stop = start + size  # nearly always within the prompt, and that is quicker
            yield tuple(prompt[start:stop] if stop <= num_prompt else request.tokens(start, stop))
