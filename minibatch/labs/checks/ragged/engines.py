"""Any requests on the real engine, whose toy model sees the packed sequence and the masks."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from minibatch.chunked_prefill import ChunkedPrefill
from minibatch.continuous_batching import ContinuousBatching
from minibatch.kv_cache import ContiguousKVCache
from minibatch.labs.counterexample import in_words
from minibatch.labs.packed_toy import PackedToy
from minibatch.labs.properties import for_all
from minibatch.labs.trial import request, run
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.static_batching import StaticBatching

KINDS = (
    lambda: (StaticBatching(3), ContiguousKVCache(3, 16)),
    lambda: (ContinuousBatching(4), PagedKVCache(8, 4)),
    lambda: (ChunkedPrefill(5, 4, max_chunk=3), PagedKVCache(8, 4)),
)


def kind(got: Any, right: type, words: str) -> str | None:
    """``words`` if it is of the right type; else what came out: ``3, an int``."""
    if got is None or isinstance(got, right):
        return None if got is None else words
    name = type(got).__name__
    return f"{in_words(got, 60)}, a{'n' * (name[0] in 'aeiou')} {name}"


def engines() -> None:
    """The tokens have to be those of a run alone, under every kind of batching."""
    for kind in range(len(KINDS)):
        _run([(5, 4, 0), (2, 6, 0), (7, 2, 0), (3, 3, 2)], kind)
    one = st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(0, 3))
    for_all(_run, 20, sizes=st.lists(one, min_size=1, max_size=4), kind=st.integers(0, len(KINDS) - 1))


def _run(sizes: list[tuple[int, int, int]], kind: int) -> None:
    asked = [request(p, new, at, first=i) for i, (p, new, at) in enumerate(sizes)]
    run(asked, *KINDS[kind](), model=PackedToy())
