"""An executor that computes no tokens, only says how long computing them takes.

Schedulers, policies and caches are the same objects as with a real model; only the clock is virtual. So a laptop can
ask what an A100 would do with thousands of requests.

Tokens still exist, as names, because prefix caching compares them: the simulated model *counts*. The token after token
t is t + 1, so an answer continues the numbers of its prompt, and the next turn of a conversation, whose prompt holds
that answer, can find it in the cache. A prompt is best a ``range`` of numbers that no other request has: it is never
built, however long it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np

from minibatch.clock import Clock, VirtualClock
from minibatch.kv_cache import KVCache
from minibatch.plan import Plan
from minibatch.request import RequestState

END = 0  # end of sequence; contents count from other numbers


class NoStore:
    """There are no K/V: what would be copied is a matter of time only."""

    def copy_rows(self, source: np.ndarray, target: np.ndarray) -> None:
        pass

    def swap_out(self, key: Hashable, rows: np.ndarray) -> None:
        pass

    def swap_in(self, key: Hashable, rows: np.ndarray) -> None:
        pass

    def swap_drop(self, key: Hashable) -> None:
        pass


class SimulatedModel:
    """``duration(plan)``: seconds that an iteration takes, such as a :class:`~minibatch.cost_model.CostModel`.

    A request ends after its ``output_length`` tokens, or else at its ``max_tokens``.
    """

    simulated = True
    vocab_size = 2**63  # names, not ids of a vocabulary
    eos_token_ids = frozenset({END})
    tokenizer = None

    def __init__(self, duration: Callable[[Plan], float], max_model_len: int | None = None) -> None:
        self.duration = duration
        self.name = f"simulated {getattr(duration, 'name', 'model')}"
        self.kv_bytes_per_token = getattr(duration, "kv_bytes_per_token", 1)
        self.max_model_len = max_model_len or getattr(duration, "max_model_len", None)

    def clock(self) -> Clock:
        return VirtualClock(self.duration)

    def allocate(self, num_rows: int) -> NoStore:
        return NoStore()

    def forward(self, plan: Plan, kv: KVCache, store: NoStore) -> dict[RequestState, int]:
        """The next tokens themselves: there are no logits to choose them from."""
        requests = [request for request, _, stop in plan.chunks if stop == request.num_tokens]
        if any([request.siblings for request in requests]):  # noqa: C419 (quicker)
            requests = [answer for request in requests for answer in (request, *request.siblings)]
        return {
            request: END
            if len(request.generated) + 1 == request.request.output_length
            else (request.generated or request.prompt)[-1] + 1
            for request in requests
        }
