"""Chunked prefill: iterations of a bounded number of tokens, decodes first (Sarathi-Serve, OSDI 2024, section 4).

A long prompt in an iteration makes everybody who is decoding wait for it: a generation stall. So a prompt is cut, and
every iteration takes one token for each decoding request, then as much of the prompts as the token budget has left.
The budget is the trade: a small one bounds the time between tokens, a large one finishes prompts sooner.

Only the computation is cut. By default a request is admitted when the cache has room for its whole prompt, and gets
that room at once, exactly as without chunking: with memory for the first piece alone (``Optimistic()``, or
``Watermark(whole_prompt=False)``), a prompt gets stuck half-way, is preempted, loses what it has computed, and begins
again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minibatch.checks import check_int
from minibatch.kv_cache import KVCache
from minibatch.plan import Plan
from minibatch.plan_draft import IterationLevel, PlanDraft, least_recently_scheduled
from minibatch.policies.admission import AdmissionPolicy, Watermark
from minibatch.policies.preemption import PreemptionPolicy, Recompute
from minibatch.policies.queueing import Order
from minibatch.request import RequestState


@dataclass(frozen=True)
class ChunkedPrefill(IterationLevel):
    """At most ``token_budget`` tokens an iteration, shared by up to ``max_num_seqs`` active requests.

    ``max_chunk``  the most that one request may have of an iteration, so that a long prompt cannot keep the whole
                   budget to itself while short ones wait (None: no such cap)
    ``admission``, ``preemption``  see ``policies/``
    """

    token_budget: int = 512
    max_num_seqs: int = 256
    max_chunk: int | None = None
    admission: AdmissionPolicy = Watermark()
    preemption: PreemptionPolicy = Recompute()

    def __post_init__(self) -> None:
        check_int("token_budget", self.token_budget, 1)
        check_int("max_num_seqs", self.max_num_seqs, 1)
        if self.max_chunk is not None:
            check_int("max_chunk", self.max_chunk, 1)
        self._check_policies()

    def max_request_tokens(self, kv: KVCache) -> int:
        """All that the cache can hold."""
        return kv.max_request_tokens

    def check(self, request: RequestState, kv: KVCache) -> None:
        """Any request that the cache can hold can run: whatever its length, it is cut to the budget."""
        self._check_room(request, kv)

    def plan(self, queue: Order, active: Sequence[RequestState], kv: KVCache, now: float) -> Plan:
        limits, policies = (self.token_budget, self.max_num_seqs), (self.admission, self.preemption)
        draft = PlanDraft(active, kv, *limits, *policies, partial=True, max_chunk=self.max_chunk or math.inf)
        decodes, prompts = [], []
        for request in active:
            (decodes if request.is_decoding else prompts).append(request)
        draft.run(least_recently_scheduled(decodes))
        draft.run(prompts)  # begun before: they hold memory, so finish them
        draft.admit(queue, now)
        return draft.plan()
