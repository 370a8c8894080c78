"""Runs of the real engine in which what can be found is compared with what is in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from minibatch.chunked_prefill import ChunkedPrefill
from minibatch.continuous_batching import ContinuousBatching
from minibatch.engine import Engine
from minibatch.labs.checks.prefix.chains import HASHES, path, said
from minibatch.labs.properties import for_all
from minibatch.labs.trial import Broken, Trial, request, run
from minibatch.plan import Scheduler
from minibatch.prefix_cache import PrefixCache, PrefixCachedKVCache
from minibatch.request import Request
from minibatch.trace import StepReport

# Two different tokens, so that much is repeated; prompt, new tokens, arrival.
ASKED = st.lists(
    st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=9), st.integers(1, 5), st.integers(0, 9)),
    min_size=1,
    max_size=4,
)


def engines() -> None:
    """Any requests: no answer may change, nothing wrong may be found, with good and with bad hash functions."""

    def check(asked: list[tuple[list[int], int, int]], chunked: bool, bad: int) -> None:
        kv, (name, function) = PrefixCachedKVCache(7, 2), HASHES[max(bad, 0)]
        kv.pool = PrefixCache(7, function)
        scheduler = ChunkedPrefill(5, 4, max_chunk=3) if chunked else ContinuousBatching()
        watched([request(*one) for one in asked], kv, scheduler, f"; hash: {name}")

    for_all(check, 50, asked=ASKED, chunked=st.booleans(), bad=st.integers(-len(HASHES), len(HASHES) - 1))


def watched(
    asked: Sequence[Request], kv: PrefixCachedKVCache, scheduler: Scheduler | None = None, says: str = ""
) -> Trial:
    """A run with :func:`is_true` after every iteration."""
    words = [
        f"{chr(97 + i)}: prompt {said(one.prompt)}, {one.params.max_tokens} new, at {one.arrival_time:g}"
        for i, one in enumerate(asked)
    ]
    case = f"{'; '.join(words)}; {kv.num_units} blocks of {kv.unit_size}{says}"
    return run(asked, scheduler or ContinuousBatching(), kv, watch=is_true, case=case)


def in_turn(prompts: Sequence[tuple[Sequence[int], int]], num_blocks: int) -> Trial:
    """Requests (prompt, new tokens), one after the other; blocks of 4."""
    asked, at = [], 0
    for prompt, new in prompts:
        asked.append(request(prompt, new, at))
        at += new + 1
    return watched(asked, PrefixCachedKVCache(num_blocks, 4))


def expect_found(trial: Trial, want: Sequence[int], idea: str) -> None:
    """How many prompt tokens of each request were found when it was admitted."""
    got = {label: result.timeline.num_cached for label, result in trial.results.items()}
    named = {chr(97 + i): number for i, number in enumerate(want)}
    trial.expect(got, named, idea=idea, what="prompt tokens found")


def is_true(engine: Engine, report: StepReport) -> Iterator[Broken]:
    """Whether every block that can be found holds what it is found for."""
    size = engine.kv.unit_size
    for known in engine.kv.pool.known():
        start = (len(path(known)) - 1) * size
        want = [(start + i, token) for i, token in enumerate(known.tokens)]
        have = [entry and entry[1:] for entry in engine.store[known.block * size : (known.block + 1) * size]]
        if want != have:
            rows = [f"token {entry[1]} of position {entry[0]}" if entry else "nothing" for entry in have]
            what = f"tokens {said(known.tokens)} from position {start} on in block {known.block}"
            yield "A block that can be found does not hold what it is found for.", what, ", ".join(rows)
            return
