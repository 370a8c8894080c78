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
from minibatch.request import Request, Result


class TopTwo(NamedTuple):
    """The two best token ids of one position and their logits."""

    ids: tuple[int, int]
    logits: tuple[float, float]


@dataclass(frozen=True)
class Solo:
    """A request generated alone: its tokens, the seconds it took, the two best logits of each (if they are floats)."""

    tokens: tuple[int, ...]
    seconds: float
    best: tuple[TopTwo, ...] = ()


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
    return Solo(tuple(tokens), time.perf_counter() - started, tuple(map(_top_two, logits)))


def _top_two(logits: Any) -> TopTwo:
    values, ids = logits.topk(2)
    return TopTwo(tuple(ids.tolist()), tuple(values.tolist()))


class Watched:
    """An executor that also keeps the two best logits of every token it helps to choose, by request and index."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.best: dict[tuple[str, int], TopTwo] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, plan: Plan, kv: KVCache, store: Any) -> Any:
        logits = self._model.forward(plan, kv, store)
        if hasattr(logits, "topk"):  # a torch tensor; a toy's tokens are exact
            values, ids = logits.topk(2)
            sampled = [chunk.request for chunk in plan.chunks if chunk.samples]  # no prompt is scored here: a row each
            for request, top_ids, top_logits in zip(sampled, ids.tolist(), values.tolist(), strict=True):
                self.best[request.request_id, len(request.generated)] = TopTwo(tuple(top_ids), tuple(top_logits))
        return logits


@dataclass(frozen=True)
class Difference:
    """A token that differs: at ``index`` the reference's two best logits are ``gap`` apart.

    ``tie``  the other token is the reference's second best, and the gap at most twice the noise of this request
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
        ties = [difference for difference in self.differences if difference.tie]
        if ties:
            gap = max(difference.gap for difference in ties)
            parts.append(f"{self.num_requests - self.num_equal} part at a numerical tie (gaps up to {gap:.1e})")
        if len(ties) < len(self.differences):
            parts.append(f"{len(self.differences) - len(ties)} DIFFER")
        if self.tolerance:
            above = " ABOVE" if self.noise > self.tolerance else ""
            parts.append(f"logits within {self.noise:.1e} (allowed:{above} {self.tolerance:.1e})")
        return ", ".join(parts)


Again = Callable[[tuple[int, ...], int], Solo]


def compare(
    requests: Sequence[Request],
    results: Sequence[Result],
    solos: dict[str, Solo],
    best: dict[tuple[str, int], TopTwo],
    again: Again,
    dtype: str | None = None,
) -> Verdict:
    """Compares results with solo runs, request by request.

    ``best``   the logits that a Watched executor kept
    ``again``  (prompt, most new tokens) -> a solo run: after a tie the rest of an answer is compared with the rest that
               the reference gives to the same beginning, so that all of it is checked
    ``dtype``  of the model; None for one that is exact, a toy
    """
    differences, noise, equal = [], 0.0, 0
    for request, result in zip(requests, results, strict=True):
        found, own_noise = _compare_one(request, result, solos[request.request_id], best, again)
        differences += found
        noise = max(noise, own_noise)
        equal += not found
    largest = max((abs(two.logits[0]) for alone in solos.values() for two in alone.best), default=0.0)
    tolerance = 0.0 if dtype is None else EPSILON[dtype] ** 0.5 * largest
    return Verdict(len(results), equal, tuple(differences), noise, tolerance)


EPSILON = {"float64": 2.0**-23, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# of the logits that are compared: transformers rounds those of float64 to float32


def _compare_one(
    request: Request, result: Result, alone: Solo, best: dict[tuple[str, int], TopTwo], again: Again
) -> tuple[list[Difference], float]:
    ours, most = result.tokens, request.params.max_tokens
    differences, noise, offset = [], 0.0, 0
    while True:
        index = _first_difference(ours[offset:], alone.tokens)
        kept = [best.get((result.request_id, offset + i)) for i in range(index + 1)]
        noise = max([noise, *map(_noise, kept, alone.best)])
        if ours[offset:] == alone.tokens:
            return differences, noise
        differences.append(_difference(result, offset, index, alone, noise))
        offset += index + 1
        if not differences[-1].tie or offset == len(ours) == most:
            return differences, noise
        alone = again((*request.prompt, *ours[:offset]), most - offset)


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def _noise(ours: TopTwo | None, theirs: TopTwo) -> float:
    """The largest difference of a logit that both kept."""
    if ours is None:
        return 0.0
    reference = dict(zip(*theirs, strict=True))
    return max((abs(x - reference[i]) for i, x in zip(*ours, strict=True) if i in reference), default=0.0)


def _difference(result: Result, offset: int, index: int, alone: Solo, noise: float) -> Difference:
    where = offset + index
    if index >= len(alone.best) or where >= len(result.tokens):  # one ended before the other, or nothing was kept
        return Difference(result.request_id, where, float("inf"), noise, tie=False)
    first, second = alone.best[index].logits
    tie = result.tokens[where] == alone.best[index].ids[1] and first - second <= 2 * noise
    return Difference(result.request_id, where, first - second, noise, tie)
