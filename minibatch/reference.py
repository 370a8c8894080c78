"""Solo generation, the oracle: scheduling may change when a token is made, never which.

The reference does not share our code: each request alone through transformers' own ``generate``, stock attention and
cache. In float64 the tokens must be the same. In float32 a batch multiplies matrices of other shapes, the sums round
differently, and where the two best logits nearly tie the other one can win; from there on the answers differ. So a
difference has to be *shown* to be such a tie, from the logits of the very runs that are compared, and all these
logits have to agree up to rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from minibatch.continuous_batching import ContinuousBatching
from minibatch.engine import Engine
from minibatch.kv_cache import ContiguousKVCache, KVCache
from minibatch.models import Model
from minibatch.plan import Plan
from minibatch.request import Request, Result, SamplingParams

KEPT = 5  # in bfloat16 more than two tokens may have the very same logit


class Best(NamedTuple):
    """The best token ids of one position, best first, and their logits."""

    ids: tuple[int, ...]
    logits: tuple[float, ...]


@dataclass(frozen=True)
class Solo:
    """A request generated alone: its tokens, the seconds it took, the best logits of each (if they are floats)."""

    tokens: tuple[int, ...]
    seconds: float
    best: tuple[Best, ...] = ()


def solo(model: Model, request: Request) -> Solo:
    """Generates the request alone and greedily: by transformers' ``generate``, or by an engine of one for a toy."""
    if hasattr(model, "generate"):
        return _solo_transformers(model, request)
    size = len(request.prompt) + request.params.max_tokens
    engine = Engine(model, ContinuousBatching(1, max_num_batched_tokens=size), ContiguousKVCache(1, size))
    (result,) = engine.run([Request(request.prompt, request.params)])
    return Solo(result.tokens, engine.clock.now())


def _solo_transformers(model: Any, request: Request) -> Solo:
    started = time.perf_counter()
    tokens, logits = model.generate(request.prompt, request.params.max_tokens)
    return Solo(tuple(tokens), time.perf_counter() - started, tuple(map(_best, logits)))


def _best(logits: Any) -> Best:
    values, ids = logits.topk(KEPT)
    return Best(tuple(ids.tolist()), tuple(values.tolist()))


class Watched:
    """An executor that also keeps the best logits of every token it helps to choose, by request and index."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.best: dict[tuple[str, int], Best] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, plan: Plan, kv: KVCache, store: Any) -> Any:
        logits = self.model.forward(plan, kv, store)
        if hasattr(logits, "topk"):  # a torch tensor; a toy's tokens are exact
            values, ids = logits.topk(KEPT)
            sampled = [chunk.request for chunk in plan.chunks if chunk.samples]  # no prompt is scored here: a row each
            for request, top_ids, top_logits in zip(sampled, ids.tolist(), values.tolist(), strict=True):
                self.best[request.request_id, len(request.generated)] = Best(tuple(top_ids), tuple(top_logits))
        return logits


@dataclass(frozen=True)
class Difference:
    """A token that differs: at ``index`` the reference has it ``gap`` below its best logit.

    ``tie``  the gap is at most twice the noise, the largest difference of a logit that has been seen between the runs
    """

    request_id: str
    index: int
    gap: float
    noise: float
    tie: bool


@dataclass(frozen=True)
class Verdict:
    """How one configuration's tokens, and the logits they were chosen from, compare with solo generation.

    ``noise``      the largest difference of a logit between the two, over all positions with the same tokens before
                   them; it must not be above ``tolerance``, what rounding in this dtype can do. Without that limit a
                   broken executor would make the noise that excuses it
    """

    num_requests: int
    num_equal: int
    differences: tuple[Difference, ...]
    noise: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether every request is equal, up to numerical ties, and all logits up to rounding."""
        return all(difference.tie for difference in self.differences) and self.noise <= self.tolerance

    def __str__(self) -> str:
        parts = [f"{self.num_equal} of {self.num_requests} equal"]
        wrong = {difference.request_id for difference in self.differences if not difference.tie}
        if tied := self.num_requests - self.num_equal - len(wrong):
            gap = max(difference.gap for difference in self.differences if difference.tie)
            parts.append(f"{tied} part at a numerical tie (gaps up to {gap:.1e})")
        if wrong:
            parts.append(f"{len(wrong)} DIFFER")
        if self.tolerance:
            above = " ABOVE" if self.noise > self.tolerance else ""
            parts.append(f"logits within {self.noise:.1e} (allowed:{above} {self.tolerance:.1e})")
        return ", ".join(parts)


Again = Callable[[tuple[int, ...], int], Solo]


def compare(
    requests: Sequence[Request],
    results: Sequence[Result],
    solos: dict[str, Solo],
    best: dict[tuple[str, int], Best],
    again: Again,
    dtype: str | None = None,
) -> Verdict:
    """Compares results with solo runs, request by request.

    ``best``   the logits that a Watched executor kept
    ``again``  (prompt, most new tokens) -> a solo run: after a tie the rest of an answer is compared with the rest that
               the reference gives to the same beginning, so that all of it is checked
    ``dtype``  of the model; None for one that is exact, a toy
    """
    pairs = [(result, solos[request.request_id]) for request, result in zip(requests, results, strict=True)]
    noise = max((_noise(result, 0, alone, best) for result, alone in pairs), default=0.0)
    differences, equal = [], 0
    for request, (result, alone) in zip(requests, pairs, strict=True):
        found, noise = _compare_one(request, result, alone, best, again, noise)
        differences += found
        equal += not found
    largest = max((abs(kept.logits[0]) for alone in solos.values() for kept in alone.best), default=0.0)
    tolerance = 0.0 if dtype is None else EPSILON[dtype] ** 0.5 * largest
    return Verdict(len(results), equal, tuple(differences), noise, tolerance)


def judge(watched: Watched, requests: Sequence[Request], results: Sequence[Result], solos: dict[str, Solo]) -> Verdict:
    """The same, of a run on an executor that was watched."""

    def again(prompt: tuple[int, ...], max_tokens: int) -> Solo:
        return solo(watched.model, Request(prompt, SamplingParams(max_tokens=max_tokens)))

    return compare(requests, results, solos, watched.best, again, getattr(watched.model, "dtype", None))


EPSILON = {"float64": 2.0**-23, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# of the logits that are compared: transformers rounds those of float64 to float32


def _compare_one(
    request: Request, result: Result, alone: Solo, best: dict[tuple[str, int], Best], again: Again, noise: float
) -> tuple[list[Difference], float]:
    """The differences of one request, and the noise that has been seen by then."""
    ours, most = result.tokens, request.params.max_tokens
    differences, offset = [], 0
    while ours[offset:] != alone.tokens:
        index = _first_difference(ours[offset:], alone.tokens)
        differences.append(_difference(result, offset, index, alone, noise))
        offset += index + 1
        if not differences[-1].tie or offset == len(ours) == most:
            break
        alone = again((*request.prompt, *ours[:offset]), most - offset)
        noise = max(noise, _noise(result, offset, alone, best))
    return differences, noise


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def _noise(result: Result, offset: int, alone: Solo, best: dict[tuple[str, int], Best]) -> float:
    """The largest difference of a logit that both kept, as long as the tokens before it (from offset on) are equal."""
    noise = 0.0
    for index in range(min(_first_difference(result.tokens[offset:], alone.tokens) + 1, len(alone.best))):
        ours = best.get((result.request_id, offset + index))
        if ours is not None:
            theirs = dict(zip(*alone.best[index], strict=True))
            noise = max([noise, *(abs(x - theirs[i]) for i, x in zip(*ours, strict=True) if i in theirs)])
    return noise


def _difference(result: Result, offset: int, index: int, alone: Solo, noise: float) -> Difference:
    where = offset + index
    if index >= len(alone.best) or where >= len(result.tokens):  # one ended before the other, or nothing was kept
        return Difference(result.request_id, where, float("inf"), noise, tie=False)
    theirs = dict(zip(*alone.best[index], strict=True))
    gap = alone.best[index].logits[0] - theirs.get(result.tokens[where], float("-inf"))
    return Difference(result.request_id, where, gap, noise, gap <= 2 * noise)
