"""Solo generation, the oracle: scheduling may change when a token is made, never which.

The reference does not share our code: each request alone through transformers' own ``generate``, stock attention and
cache. In float64 the tokens must be the same. In float32 a batch multiplies matrices of other shapes, the sums round
differently, and where the two best logits nearly tie the other one can win; from there on the answers differ. So a
difference has to be *shown* to be such a tie, from the logits of the very runs that are compared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
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
    """The first token that differs: at ``index`` the reference's two best logits are ``gap`` apart.

    ``noise``  the largest difference of a logit between the two runs where they had the same tokens before them
    ``tie``    the other token is the reference's second best, and the gap at most twice the noise
    """

    request_id: str
    index: int
    gap: float
    noise: float
    tie: bool


@dataclass(frozen=True)
class Verdict:
    """How one configuration's tokens compare with solo generation."""

    num_requests: int
    num_equal: int
    differences: tuple[Difference, ...]

    @property
    def holds(self) -> bool:
        """Whether every request is equal, up to numerical ties."""
        return all(difference.tie for difference in self.differences)

    def __str__(self) -> str:
        text = f"{self.num_equal} of {self.num_requests} equal solo generation"
        ties = sum(difference.tie for difference in self.differences)
        wrong = len(self.differences) - ties
        text += f", {ties} part at a numerical tie" if ties else ""
        return text + (f", {wrong} DIFFER" if wrong else "")


def compare(results: Sequence[Result], solos: dict[str, Solo], best: dict[tuple[str, int], TopTwo]) -> Verdict:
    """Compares results with solo runs by request id; ``best`` are the logits that a Watched executor kept."""
    noise = max((_noise(result, solos[result.request_id], best) for result in results), default=0.0)
    apart = [result for result in results if result.tokens != solos[result.request_id].tokens]
    differences = tuple(_difference(result, solos[result.request_id], noise) for result in apart)
    return Verdict(len(results), len(results) - len(apart), differences)


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def _noise(result: Result, alone: Solo, best: dict[tuple[str, int], TopTwo]) -> float:
    """Over the positions with the same tokens before them, the largest difference of a logit that both runs kept."""
    noise = 0.0
    for index in range(min(_first_difference(result.tokens, alone.tokens) + 1, len(alone.best))):
        ours = best.get((result.request_id, index))
        if ours is not None:
            theirs = dict(zip(*alone.best[index], strict=True))
            noise = max([noise, *(abs(x - theirs[i]) for i, x in zip(*ours, strict=True) if i in theirs)])
    return noise


def _difference(result: Result, alone: Solo, noise: float) -> Difference:
    index = _first_difference(result.tokens, alone.tokens)
    if index >= min(len(alone.best), len(result.tokens)):  # one simply ended before the other, or nothing was kept
        return Difference(result.request_id, index, float("inf"), noise, tie=False)
    first, second = alone.best[index].logits
    tie = result.tokens[index] == alone.best[index].ids[1] and first - second <= 2 * noise
    return Difference(result.request_id, index, first - second, noise, tie)
