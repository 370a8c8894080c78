"""Runs of the real engine that several labs make."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from minibatch.continuous_batching import ContinuousBatching
from minibatch.kv_cache import KVCache
from minibatch.labs.properties import for_all
from minibatch.labs.trial import Trial, request, run
from minibatch.plan import Scheduler
from minibatch.prefix_cache import PrefixCachedKVCache

SIZES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 8)), min_size=1, max_size=4)  # prompt, new tokens


def small_runs(kv: Callable[[], KVCache], examples: int = 20) -> None:
    """Any requests; in so little memory that blocks go round and requests are preempted."""

    def check(sizes: list[tuple[int, int]]) -> None:
        run([request(p, g, first=i) for i, (p, g) in enumerate(sizes)], ContinuousBatching(), kv())

    for_all(check, examples=examples, sizes=SIZES)


def after_a_found_prefix(scheduler: Scheduler, says: str = "") -> Trial:
    """The second request has 8 of its 10 blocks in common with the first, which runs; there are 4 others."""
    common, case = list(range(32)), "a: 33 + 7 tokens; b arrives at 2: the same 32 tokens and 5 others, + 3"
    asked = [request([*common, 1], 7), request([*common, *range(50, 55)], 3, at=2)]
    return run(asked, scheduler, PrefixCachedKVCache(13, 4), case=f"{case}; 13 blocks of 4, prefix cache{says}")
