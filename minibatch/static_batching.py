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
from dataclasses import dataclass

from minibatch.checks import check_float, check_int
from minibatch.kv_cache import KVCache
from minibatch.plan import Admission, Chunk, Padding, Plan, Waiting
from minibatch.request import RequestState


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
        """Any request that the cache can hold can run."""

    def plan(self, queue: Sequence[RequestState], active: Sequence[RequestState], kv: KVCache, now: float) -> Plan:
        return self._decode(queue, active) if active else self._form(queue, kv, now)

    def leaving(self, active: Sequence[RequestState]) -> list[RequestState]:
        """Everybody together, when the last one has finished."""
        return list(active) if all(request.is_finished for request in active) else []

    def _decode(self, queue: Sequence[RequestState], active: Sequence[RequestState]) -> Plan:
        chunks = tuple(Chunk(r, r.num_computed, r.num_tokens) for r in active if not r.is_finished)
        dead = tuple(Padding(r, 1, dead=True) for r in active if r.is_finished)
        return Plan(chunks, dead, rest=f"the batch of {len(active)} still runs: {len(chunks)} alive" if queue else "")

    def _form(self, queue: Sequence[RequestState], kv: KVCache, now: float) -> Plan:
        batch, waiting, free = self._candidates(queue, kv)
        full = len(batch) == self.batch_size or bool(waiting) or not free  # of requests, or the cache is
        ready_at = queue[0].arrival_time + self.max_wait
        if not full and now < ready_at:
            reason = f"batch: {len(batch)} of {self.batch_size}, waits for more until t = {ready_at:g} s"
            return Plan(waiting=(Waiting(queue[0], reason),), rest=f"behind {queue[0].label}", wake_at=ready_at)
        longest = max(request.num_tokens for request in batch)
        return Plan(
            chunks=tuple(Chunk(r, 0, r.num_tokens) for r in batch),
            padding=tuple(Padding(r, longest - r.num_tokens, dead=False) for r in batch if r.num_tokens < longest),
            admissions=tuple(Admission(r, r.max_cached_tokens) for r in batch),
            waiting=waiting,
            rest=f"batch: {self.batch_size} of {self.batch_size} taken" if len(queue) > len(batch) else "",
        )

    def _candidates(
        self, queue: Sequence[RequestState], kv: KVCache
    ) -> tuple[list[RequestState], tuple[Waiting, ...], int]:
        """The first requests whose *maximum* fits together (a batch cannot be stopped, so nobody can be preempted), the
        one that does not, and how many units are left."""
        batch: list[RequestState] = []
        draft = kv.draft()
        for request in queue:
            if len(batch) == self.batch_size:
                break
            if not draft.reserve(request, request.max_cached_tokens):
                reason = f"{kv.unit_name}s: {draft.shortage(request, request.max_cached_tokens)}"
                return batch, (Waiting(request, reason),), draft.free
            batch.append(request)
        return batch, (), draft.free
