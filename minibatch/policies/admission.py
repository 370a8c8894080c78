"""Admission: does a waiting request fit? What has to be set aside before a request may join.

A free place in the batch is not enough: a request brings K/V that will grow by a row an iteration, and stay. Each
policy here answers two questions about a request that could otherwise join now: for how many of its tokens rows are set
aside at once (``tokens``), and whether it has to wait although these are there (``objection``).

What each promises is in its docstring, and is what the tests of this module check. Careful ones admit late and leave
memory unused, careless ones admit early and pay with preemptions: neither is better for every workload.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minibatch.checks import check_float
from minibatch.kv_cache import KVCache
from minibatch.policies.base import Policy
from minibatch.policies.predictors import Predictor, tokens_left, upper_bound
from minibatch.request import NeverFits, RequestState

if TYPE_CHECKING:
    from minibatch.plan_draft import PlanDraft


class AdmissionPolicy(Policy, ABC):
    """What a plan asks. One of your own::

    class HalfFull(AdmissionPolicy):
        def tokens(self, request, size):
            return request.num_tokens

        def objection(self, request, num_tokens, draft):
            full = draft.memory.free < draft.memory.kv.num_units / 2
            return "the cache is half full" if full and draft.running else ""
    """

    reserves_maximum = False  # of a policy that sets aside all that a request may ever need: nobody grows

    @abstractmethod
    def tokens(self, request: RequestState, size: int) -> int:
        """For how many of its tokens rows are set aside; its first iteration would compute up to token ``size``."""

    def objection(self, request: RequestState, num_tokens: int, draft: PlanDraft) -> str:
        """Why it has to wait although these rows are there; the empty string: it need not."""
        return ""

    def check(self, request: RequestState, kv: KVCache) -> None:
        """Raises NeverFits if the request could not join even an empty engine."""


@dataclass(frozen=True, repr=False)
class Optimistic(AdmissionPolicy):
    """Joins as soon as what it computes in its first iteration fits.

    Promises that no block stays free which the next request could use now. Requests may outgrow the pool at any time,
    and a prompt that is cut may lose its first pieces before its last one is computed.
    """

    def tokens(self, request: RequestState, size: int) -> int:
        return size


@dataclass(frozen=True, repr=False)
class Watermark(AdmissionPolicy):
    """Joins if its prompt fits and ``share`` of the pool stays free for those who run to grow into (vLLM's watermark).

    ``whole_prompt``  all that it has to compute must fit, not only the first chunk: a prompt that is cut never gets
                      stuck half-way

    Promises that a request never waits for memory in an empty engine: with nobody to protect, nothing is kept free.
    """

    share: float = 0.01
    whole_prompt: bool = True

    def __post_init__(self) -> None:
        check_float("share", self.share, 0.0, 1.0)

    def tokens(self, request: RequestState, size: int) -> int:
        return request.num_tokens if self.whole_prompt else size

    def objection(self, request: RequestState, num_tokens: int, draft: PlanDraft) -> str:
        """Why it has to wait although rows for its first ``num_tokens`` tokens are there; else the empty string."""
        memory, keep = draft.memory, int(self.share * draft.memory.kv.num_units)
        alone = not draft.running or not memory.kv.grows  # or nobody grows: then nothing has to be kept for anybody
        if alone or not keep or memory.free - memory.need(request, num_tokens) >= keep:
            return ""
        return f"watermark: {memory.shortage(request, num_tokens)}, and {keep} are kept free"


@dataclass(frozen=True, repr=False)
class ReserveMaximum(AdmissionPolicy):
    """Sets aside all that the request may ever need, ``P + G - 1`` tokens, before it joins (Orca, section 4.2).

    Promises that nobody is ever preempted for memory. What is set aside for an answer that ends early is never filled.
    """

    reserves_maximum = True

    def tokens(self, request: RequestState, size: int) -> int:
        return request.max_cached_tokens

    def check(self, request: RequestState, kv: KVCache) -> None:
        need = kv.need(request, request.max_cached_tokens)
        if need > kv.num_units:
            what = f"{request.num_seqs} answers of up to {request.max_cached_tokens} tokens need"
            raise NeverFits(f"{what} {need} {kv.unit_name}s of {kv.unit_size}, the pool has {kv.num_units}")


@dataclass(frozen=True, repr=False)
class Forecast(AdmissionPolicy):
    """Joins if the *peak* of what everybody will hold, as far as lengths can be predicted, fits.

    Not everybody is at their longest at the same time. If everybody gets a token an iteration, what they hold peaks
    when one of them is about to end; so it is enough to look at these moments. This is the future half of LightLLM's
    Past-Future scheduler (Gong et al., ASPLOS 2025); the past half, lengths guessed from recent answers, would be a
    predictor.

    Promises that nobody is preempted, as long as the predictions are upper bounds, whoever runs gets a token in every
    iteration, prompts are not cut and ``n`` is 1. Blocks that are shared count once a request, which is too many.
    """

    predictor: Predictor = upper_bound

    def tokens(self, request: RequestState, size: int) -> int:
        return request.num_tokens

    def objection(self, request: RequestState, num_tokens: int, draft: PlanDraft) -> str:
        kv = draft.memory.kv
        if not (kv.grows and draft.running):  # a slot does not grow; and alone, anything that passed the door fits
            return ""
        # From one candidate of a plan to the next, those who run are the same or one more, if nobody is displaced.
        known = (future for members, future in draft.notes.get(id(self), ()) if members == draft.running)
        future = next(known, None) or Future(draft.running, self._left, kv.unit_size)
        joined = future.joined_by(request.num_tokens, self._left(request))
        draft.notes[id(self)] = (list(draft.running), future), ([*draft.running, request], joined)
        peak = joined.peak
        if peak <= kv.num_units:
            return ""
        return f"forecast: {peak} {kv.unit_name}s needed at the peak, the pool has {kv.num_units}"

    def _left(self, request: RequestState) -> int:
        """Tokens that it will still generate; at least one, for it still runs, whatever was predicted."""
        return max(math.ceil(tokens_left(self.predictor, request)), 1)


class Future:
    """Requests that all get a token an iteration, and how many blocks they hold whenever one of them ends.

    ``holds[k]``: when request ``k`` ends, ``left[k]`` iterations from now, what all have that have not ended before.
    """

    def __init__(self, requests: Sequence[RequestState], left: Callable[[RequestState], int], block_size: int) -> None:
        self.block_size = block_size
        self.tokens = np.array([request.num_tokens for request in requests], dtype=np.int32)
        self.left = np.array([left(request) for request in requests], dtype=np.int32)
        self.holds = self._blocks(self.tokens, self.left[:, None]).sum(axis=1, where=self.left >= self.left[:, None])

    @property
    def peak(self) -> int:
        """The most blocks that they hold together in any iteration."""
        return int(self.holds.max())

    def joined_by(self, tokens: int, left: int) -> Future:
        """The same with one more request: it adds to every end that it lives to see, and there is its own."""
        there = self.left >= left
        own = self._blocks(self.tokens[there], left).sum() + self._blocks(tokens, left)
        twin = copy(self)
        twin.holds = np.append(self.holds + self._blocks(tokens, self.left) * (self.left <= left), own)
        twin.tokens, twin.left = np.append(self.tokens, tokens), np.append(self.left, left)
        return twin

    def _blocks(self, tokens: np.ndarray | int, iterations: np.ndarray | int) -> np.ndarray:
        """Of requests with so many tokens now, in the last of so many iterations: the newest token has no K/V yet."""
        return -(-(tokens + iterations - 1) // self.block_size)
