"""What has happened in one iteration, and its record: in full for pictures and stories, or in numbers only.

Both say the same: the numbers of a report are the counts of the same iteration (``StepReport.counts``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minibatch.kv_cache import KVSnapshot
from minibatch.lifecycle import Changes
from minibatch.plan import Chunk, Plan
from minibatch.request import RequestState
from minibatch.sampling import Outcome, token_of
from minibatch.trace import Member, PadRow, StepCounts, StepReport

Kinds = tuple[int, int, int]  # of a chunk's tokens: prefill, decode, recomputed


def kinds_of(chunks: Sequence[Chunk]) -> list[Kinds]:
    """``chunk.kinds`` of each; of a decode, which nearly all are, it is known at once."""
    return [
        (0, chunk[2] - chunk[1], 0)
        if chunk[1] >= (request := chunk[0]).high_water and chunk[1] >= request.num_prompt
        else chunk.kinds
        for chunk in chunks
    ]


class Iteration(NamedTuple):
    """``kinds``: of each chunk of the plan, its tokens as (prefill, decode, recomputed); ``outcomes``: the token of
    each request that was given one, or the error; ``kv``: after the forward, before anyone leaves."""

    index: int
    start: float
    end: float
    plan: Plan
    kinds: list[Kinds]
    outcomes: dict[RequestState, Outcome]
    changes: Changes
    num_waiting: int
    token_budget: int | None
    kv: KVSnapshot

    def report(self) -> StepReport:
        """Who did what."""
        plan, changes = self.plan, self.changes
        return StepReport(
            index=self.index,
            start=self.start,
            end=self.end,
            members=tuple(self._members()),
            padding=tuple(PadRow(p.request.label, p.num_tokens, p.dead) for p in plan.padding),
            arrived=tuple(changes.arrived),
            admitted=tuple(changes.admitted),
            preempted=tuple(changes.preempted),
            finished=tuple(changes.finished),
            waiting=tuple((waiting.request.label, waiting.reason) for waiting in plan.waiting),
            num_waiting=self.num_waiting,
            rest=plan.rest,
            token_budget=self.token_budget,
            kv=self.kv,
            forked=tuple(changes.forked),
            copied_rows=changes.copied_rows,
        )

    def _members(self) -> list[Member]:
        members = []
        for (request, start, stop), kinds in zip(self.plan.chunks, self.kinds, strict=True):
            members.append(Member(request.label, start, stop, *kinds, token_of(self.outcomes.get(request))))
        return members

    def counts(self) -> StepCounts:
        """How many."""
        prefill = decode = recomputed = 0
        for kind in self.kinds:
            prefill, decode, recomputed = prefill + kind[0], decode + kind[1], recomputed + kind[2]
        dead = [pad.num_tokens for pad in self.plan.padding if pad.dead]
        changes, kv, num_seqs = self.changes, self.kv, len(self.kinds)
        return StepCounts(
            index=self.index,
            start=self.start,
            end=self.end,
            num_seqs=num_seqs,
            prefill=prefill,
            decode=decode,
            recomputed=recomputed,
            padding=sum([pad.num_tokens for pad in self.plan.padding]),
            dead_padding=sum(dead),
            useful_rows=sum([k[0] + k[1] > 0 for k in self.kinds]) if recomputed else num_seqs,
            num_rows=num_seqs + len(dead),
            token_budget=self.token_budget,
            arrived=len(changes.arrived),
            admitted=len(changes.admitted),
            preempted=len(changes.preempted),
            cached=sum([a.cached for a in changes.admitted]),
            swapped_out=sum([p.num_tokens for p in changes.preempted if p.swapped]),
            swapped_in=sum([a.swapped_in for a in changes.admitted]),
            forked=len(changes.forked),
            copied_rows=changes.copied_rows,
            finished=len(changes.finished),
            num_waiting=self.num_waiting,
            kv_filled=kv.filled,
            kv_reserved=kv.reserved,
            kv_fragmentation=kv.fragmentation,
            kv_cached=kv.cached,
            kv_free=kv.free,
            kv_host=kv.host,
            kv_capacity=kv.capacity,
        )
