"""Runs in static batches."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from minibatch.kv_cache import ContiguousKVCache
from minibatch.labs.plans import twice
from minibatch.labs.trial import Trial, run
from minibatch.request import Request
from minibatch.static_batching import StaticBatching

SIZES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=5)  # prompts, new tokens


def run_static(requests: Sequence[Request], places: int, max_wait: float = 0.0) -> Trial:
    """Every plan is made twice."""
    return run(requests, twice(StaticBatching)(places, max_wait), ContiguousKVCache(places, 16))
