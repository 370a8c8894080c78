"""Static (request-level) batching: the baseline that continuous batching replaced.

A batch is formed once and stays a rectangle until its longest member has ended. All prompts are padded to the longest
one and computed in one iteration; then every row takes part in every decode iteration, whether its request is still
alive or not. Nobody joins, nobody leaves: a request that arrives one iteration late waits for the whole batch, and the
slots of finished members stay reserved. This is ``model.generate`` on a padded batch, and what Orca (Yu et al., OSDI
2022, section 2) calls request-level scheduling. The padding is really executed, so that its cost is measured.

Two courtesies keep the baseline from being a straw man: a finished member's tokens go to its client at once, and a
batch is padded only to its own longest prompt, with no row for a slot that nobody took.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from minibatch.checks import check_float, check_int
from minibatch.kv_cache import KVCache
from minibatch.plan import Chunk, Padding, Plan, Waiting
from minibatch.plan_draft import PlanDraft
from minibatch.policies.admission import ReserveMaximum
from minibatch.policies.preemption import Never
from minibatch.policies.queueing import Order
from minibatch.request import InvalidParams, RequestState


@dataclass(frozen=True)
class StaticBatching:
    """Batches of up to ``batch_size`` requests, formed when full or when the oldest has waited ``max_wait`` seconds."""

    batch_size: int = 8
    max_wait: float = 0.0
    token_budget = None  # the batch is a rectangle, however many tokens that takes

    def __post_init__(self) -> None:
        check_int("batch_size", self.batch_size, 1)
        check_float("max_wait", self.max_wait, 0.0, math.inf)

    def max_request_tokens(self, kv: KVCache) -> int:
        """All that the cache can hold."""
        return kv.max_request_tokens

    def check(self, request: RequestState, kv: KVCache) -> None:
        """Any request that the cache can hold can run, but a row of the batch cannot become several."""
        if request.siblings:
            raise InvalidParams(f"n = {request.num_seqs}: the rows of a static batch are fixed when it is formed")

    def plan(self, queue: Order, active: Sequence[RequestState], kv: KVCache, now: float) -> Plan:
        return self._decode(queue, active) if active else self._form(queue, kv, now)

    def leaving(self, active: Sequence[RequestState]) -> list[RequestState]:
        """Everybody together, when the last one has finished."""
        return list(active) if all(request.is_finished for request in active) else []

    def _decode(self, queue: Order, active: Sequence[RequestState]) -> Plan:
        """A token for each member that is alive, and a dead row for each that is not."""
        chunks = tuple(Chunk(r, r.num_computed, r.num_tokens) for r in active if not r.is_finished)
        dead = tuple(Padding(r, 1, dead=True) for r in active if r.is_finished)
        return Plan(chunks, dead, rest=f"the batch of {len(active)} still runs: {len(chunks)} alive" if queue else "")

    def _form(self, queue: Order, kv: KVCache, now: float) -> Plan:
        """The first requests whose *maximum* fits together: a batch cannot be stopped, so nobody can be preempted."""
        draft = PlanDraft([], kv, math.inf, self.batch_size, ReserveMaximum(), Never())
        draft.admit(queue, now)
        plan = draft.plan()
        if not plan.chunks:
            return plan
        full = len(plan.chunks) == self.batch_size or plan.waiting or not draft.memory.free
        oldest = min((chunk.request for chunk in plan.chunks), key=lambda request: request.arrival_time)
        ready_at = oldest.arrival_time + self.max_wait
        if not full and now < ready_at:
            reason = f"batch: {len(plan.chunks)} of {self.batch_size}, waits for more until t = {ready_at:g} s"
            return Plan(waiting=(Waiting(oldest, reason),), rest=f"behind {oldest.label}", wake_at=ready_at)
        longest = max(chunk.stop - chunk.start for chunk in plan.chunks)
        pads = ((chunk.request, longest - (chunk.stop - chunk.start)) for chunk in plan.chunks)
        return replace(plan, padding=tuple(Padding(request, pad, dead=False) for request, pad in pads if pad))
