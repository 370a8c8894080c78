"""Preemption: who is displaced when memory runs out, and how its K/V comes back.

``Never``       nobody: a request without room holds what it has and waits for others to end
``Recompute``   the victim's K/V is dropped; when it is back, its tokens are computed again like a prompt
``Swap``        the victim's K/V is copied to host memory, and back (vLLM, SOSP 2023, section 4.5)

*Who* is a rule of its own, a function that picks one of the candidates.

A waiting request can displace running ones too, if the policy says by what (``displaces``: a number a request, such as
its priority). It displaces only those whose number is strictly greater, so that equals never take turns.

Whatever the rule, the *senior* is no candidate while there is another: the running request with the lowest number
(without ``displaces``: priority), among equals the one that arrived first. So of those who run there is always one that
none of the others can displace; it ends, and then there is another senior: only new arrivals bring new preemptions. The
plan adds the other half of that guarantee (the thrash guard): what was just taken from one does not go to a newcomer in
the same iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minibatch.checks import check_int
from minibatch.kv_cache import KVDraft
from minibatch.plan import PlanError
from minibatch.policies.base import Policy
from minibatch.policies.predictors import Predictor, tokens_left, upper_bound
from minibatch.request import RequestState

VictimRule = Callable[[Sequence[RequestState], KVDraft], RequestState]
Rank = Callable[[RequestState], float]


# --- victim rules: candidates, in the order in which they were admitted, never none of them -> the one that goes ---


def newest(candidates: Sequence[RequestState], memory: KVDraft) -> RequestState:
    """The one admitted last (vLLM)."""
    return candidates[-1]


def lowest_priority(candidates: Sequence[RequestState], memory: KVDraft) -> RequestState:
    """The least urgent; of those, the one that arrived last."""
    return max(candidates, key=lambda request: (request.priority, request.rank))


def most_blocks(candidates: Sequence[RequestState], memory: KVDraft) -> RequestState:
    """The one that holds most: the fewest victims."""
    return max(reversed(candidates), key=memory.held)


def least_progress_lost(candidates: Sequence[RequestState], memory: KVDraft) -> RequestState:
    """The one with the fewest computed tokens: the least to compute again, or to copy."""
    return min(reversed(candidates), key=lambda request: request.num_computed)


# --- by what a waiting request may displace running ones: the lower, the more it may ---


def by_priority(request: RequestState) -> float:
    return request.priority


@dataclass(frozen=True, repr=False)
class ByTokensLeft(Policy):
    """With the order ``ShortestFirst``, this is shortest-remaining-time-first."""

    predictor: Predictor = upper_bound

    def __call__(self, request: RequestState) -> float:
        return tokens_left(self.predictor, request)


# --- policies ---


class PreemptionPolicy(Policy):
    """What a plan asks. By itself nobody is ever displaced.

    ``displaces``    by what a waiting request may displace running ones; None: it may not
    ``host_tokens``  tokens of K/V of swapped requests that host memory has room for
    """

    displaces: Rank | None = None
    host_tokens: int = 0

    def choose(self, candidates: Sequence[RequestState], memory: KVDraft) -> RequestState | None:
        """The next victim, of candidates in the order of their admission; None: nobody."""
        return None

    def seniority(self, request: RequestState) -> tuple[float, float]:
        """The lowest of those who run is no candidate."""
        return (self.displaces or by_priority)(request), request.rank

    def outranked(self, waiting: RequestState, running: Sequence[RequestState]) -> list[RequestState]:
        """Those of the running requests that the waiting one may displace."""
        if self.displaces is None:
            return []
        rank = self.displaces(waiting)
        return [request for request in running if self.displaces(request) > rank]


@dataclass(frozen=True, repr=False)
class Never(PreemptionPolicy):
    """Nobody is displaced.

    Safe where nobody grows: with ``ReserveMaximum``, or on slots. Elsewhere all may come to wait for room that the
    others hold; then the engine raises EngineStalled and says so.
    """


@dataclass(frozen=True, repr=False)
class Recompute(PreemptionPolicy):
    """Drop and compute again. Costs the *recompute tax*: tokens that go through the model twice."""

    victim: VictimRule = newest
    displaces: Rank | None = None

    def __post_init__(self) -> None:
        """Raises TypeError for what is not a function, or a class that nobody has called."""
        for name in ("victim", "displaces"):
            value = getattr(self, name)
            if isinstance(value, type) or not (callable(value) or (name == "displaces" and value is None)):
                raise TypeError(
                    f"{name} must be a function such as {'newest' if name == 'victim' else 'by_priority'}, "
                    f"got {value!r}"
                )

    def choose(self, candidates: Sequence[RequestState], memory: KVDraft) -> RequestState | None:
        victim = self.victim(candidates, memory)
        if victim is None:
            raise PlanError(f"{self!r}: its victim rule chose nobody")
        return victim


@dataclass(frozen=True, repr=False)
class Swap(Recompute):
    """Copy to the host and back. Costs transfers, and nothing is computed twice.

    A victim for which the host has no room is recomputed.
    """

    host_tokens: int = 1 << 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("host_tokens", self.host_tokens, 1)
