"""Continuous batching: membership is decided again before every iteration (Orca, OSDI 2022, section 3).

This is the whole mechanism: finished requests leave after an iteration, waiting ones join before the next. Everything
else is policy. The one policy that cannot be avoided here is *phase order*: an admitted prompt is computed whole, in
one iteration, and somebody has to decide how that iteration treats the requests that are decoding.

``phase_order="mixed"``          prompts and decodes share iterations (Orca's selective batching);
                                 ``first`` says who takes the token limit first
``phase_order="prefill-first"``  while anything can be admitted, iterations hold prompts only and decodes stall
                                 (vLLM before chunked prefill: best time to first token, worst time between tokens)

With a :class:`~minibatch.kv_cache.ContiguousKVCache` a request is admitted with all the memory it may ever need, and
never preempted. With a :class:`~minibatch.paged_kv_cache.PagedKVCache` it is admitted when its prompt fits, grows, and
may be preempted: that is vLLM. Both are defaults: who waits for what and who gives way, are policies of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minibatch.checks import check_int
from minibatch.kv_cache import KVCache
from minibatch.plan import Plan
from minibatch.plan_draft import IterationLevel, PlanDraft, least_recently_scheduled
from minibatch.policies.admission import AdmissionPolicy, Watermark
from minibatch.policies.preemption import PreemptionPolicy, Recompute
from minibatch.policies.queueing import Order
from minibatch.request import PromptTooLong, RequestState


@dataclass(frozen=True)
class ContinuousBatching(IterationLevel):
    """At most ``max_num_seqs`` active requests, and ``max_num_batched_tokens`` tokens an iteration.

    ``admission``, ``preemption``  see ``policies/``
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    phase_order: str = "mixed"
    first: str = "decode"
    admission: AdmissionPolicy = Watermark()
    preemption: PreemptionPolicy = Recompute()

    def __post_init__(self) -> None:
        check_int("max_num_seqs", self.max_num_seqs, 1)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.phase_order not in ("mixed", "prefill-first"):
            raise ValueError(f"phase_order must be 'mixed' or 'prefill-first', got {self.phase_order!r}")
        if self.first not in ("decode", "prefill"):
            raise ValueError(f"first must be 'decode' or 'prefill', got {self.first!r}")
        self._check_policies()

    @property
    def token_budget(self) -> int:
        return self.max_num_batched_tokens

    def max_request_tokens(self, kv: KVCache) -> int:
        """What fits the cache and, where a request may be recomputed, one iteration: see ``check``."""
        most = kv.max_request_tokens
        return min(most, self.max_num_batched_tokens) if self._may_be_recomputed(kv) else most

    def check(self, request: RequestState, kv: KVCache) -> None:
        """Its prompt, or all it may have computed when it is preempted, must fit one iteration: nothing is cut here."""
        self._check_room(request, kv)
        most, limit = request.num_prompt, self.max_num_batched_tokens
        what = f"prompt {most}"
        if self._may_be_recomputed(kv):
            most = request.max_cached_tokens
            what += f" + {request.max_new_tokens} new tokens may need {most} tokens in one iteration after a preemption"
        if most > limit:
            raise PromptTooLong(
                f"{what}, max_num_batched_tokens is {limit}: raise it, or use ChunkedPrefill, which cuts prompts"
            )

    def plan(self, queue: Order, active: Sequence[RequestState], kv: KVCache, now: float) -> Plan:
        """The next token of those who run, and whole prompts of those who join, in the phase order."""
        limits = (self.max_num_batched_tokens, self.max_num_seqs)
        draft = PlanDraft(active, kv, *limits, self.admission, self.preemption)
        decodes = least_recently_scheduled(active)
        # Where newcomers displace others, the others are asked first: else they could push them out again, in vain.
        if self.phase_order == "mixed" and (self.first == "decode" or self.preemption.displaces is not None):
            draft.run(decodes)
            draft.admit(queue, now)
        else:
            draft.admit(queue, now)
            if self.phase_order == "mixed" or not draft.chunks:
                draft.run(decodes)
        return draft.plan()
