"""Guesses of how many tokens a request will generate, for the policies that act on length.

A predictor is any function from a request to a number of output tokens. Nobody knows this number in advance; so that
the price of a guess can be seen, there is a perfect one, a crude one, and noise to add to either.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random

from minibatch.checks import check_float
from minibatch.policies.base import Policy
from minibatch.request import RequestState

Predictor = Callable[[RequestState], float]


def tokens_left(predictor: Predictor, request: RequestState) -> float:
    """What the request will still generate, if the guess is right; not above 0 if it was too low."""
    return predictor(request) - len(request.generated)


def upper_bound(request: RequestState) -> float:
    """The most that the request may generate. Exact for a request that ignores the end of sequence."""
    return request.max_new_tokens


def like_its_prompt(request: RequestState) -> float:
    """As long an answer as the question: what can be guessed for nothing."""
    return min(request.num_prompt, request.max_new_tokens)


@dataclass(frozen=True)
class Oracle:
    """Knows the true lengths: ``lengths``, by request id. For others, the upper bound."""

    lengths: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, request: RequestState) -> float:
        return min(self.lengths.get(request.request_id, request.max_new_tokens), request.max_new_tokens)


@dataclass(frozen=True, repr=False)
class Noisy(Policy):
    """Another predictor times a log-normal factor of median 1: ``sigma`` 0.5 is off by up to 1.6 two times in three.

    The factor of a request depends on ``seed`` and the request's id alone. Never more than the request may generate.
    """

    predictor: Predictor = upper_bound
    sigma: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        check_float("sigma", self.sigma, 0.0, math.inf)

    def __call__(self, request: RequestState) -> float:
        factor = math.exp(min(self.sigma * _normal(self.seed, request.request_id), 50.0))
        return min(self.predictor(request) * factor, request.max_new_tokens)


@lru_cache(maxsize=1 << 16)  # asked again in every plan
def _normal(seed: int, request_id: str) -> float:
    """A draw from the standard normal distribution."""
    return Random(zlib.crc32(f"{seed} {request_id}".encode())).gauss(0.0, 1.0)
