"""A plan in the making: one iteration's budget and memory, spent request by request.

The schedulers that re-decide membership every iteration differ only in *who is asked first* and in whether a prompt may
be cut. What asking means is the same for all and stands here: a request gets tokens while the token budget lasts and
rows while the cache lasts; a running request that finds no rows displaces the newest running one (recompute
preemption, as in vLLM), so the oldest can always finish; a waiting one that does not fit just keeps waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minibatch.kv_cache import KVCache
from minibatch.plan import Admission, Chunk, Plan, Waiting
from minibatch.request import RequestState


class PlanDraft:
    """``partial``: a request may compute part of what it has pending, at most ``max_chunk`` tokens of it."""

    def __init__(
        self,
        active: Sequence[RequestState],
        kv: KVCache,
        token_budget: int,
        max_num_seqs: int,
        partial: bool = False,
        max_chunk: int | None = None,
    ) -> None:
        self.memory = kv.draft()
        self.token_budget, self.budget = token_budget, token_budget
        self.max_num_seqs, self.partial, self.max_chunk = max_num_seqs, partial, max_chunk
        self.running = list(active)  # the last is the newest: the next victim
        self.chunks: dict[RequestState, Chunk] = {}
        self.admissions: dict[RequestState, Admission] = {}
        self.preempted: dict[RequestState, None] = {}  # an ordered set
        self.waiting: list[Waiting] = []
        self.rest = ""

    def run(self, requests: Iterable[RequestState]) -> None:
        """Gives each of these running requests its pending tokens, while the budget lasts."""
        for request in requests:
            size = self._size(request)
            if size and request not in self.preempted and self._make_room(request, request.num_computed + size):
                self._schedule(request, size)

    def admit(self, queue: Sequence[RequestState]) -> None:
        """Admits from the head of the queue until one does not fit: nobody overtakes (strict FCFS)."""
        for index, request in enumerate(queue):
            if reason := self._try_admit(request):
                self.waiting.append(Waiting(request, reason))
                more = len(queue) - index - 1
                self.rest = f"behind {request.label}: {more:,} more" if more else ""
                return

    def plan(self) -> Plan:
        return Plan(
            chunks=tuple(self.chunks.values()),
            admissions=tuple(self.admissions.values()),
            preemptions=tuple(self.preempted),
            waiting=tuple(self.waiting),
            rest=self.rest,
        )

    def _size(self, request: RequestState) -> int:
        """Tokens that the request may compute within the budget; 0 if it has to wait for the next iteration."""
        size = request.num_pending
        if self.partial:
            return min(size, self.budget, self.max_chunk or size)
        return size if size <= self.budget else 0

    def _schedule(self, request: RequestState, size: int) -> None:
        self.chunks[request] = Chunk(request, request.num_computed, request.num_computed + size)
        self.budget -= size

    def _make_room(self, request: RequestState, num_tokens: int) -> bool:
        """Displaces the newest until the request's rows are there; False if it was the newest itself."""
        while not self.memory.reserve(request, num_tokens):
            victim = self.running.pop()
            self._displace(victim, request)
            if victim is request:
                return False
        return True

    def _displace(self, victim: RequestState, by: RequestState) -> None:
        """Takes memory, budget and place away, whether or not the victim has already been planned."""
        self.memory.release(victim)
        if chunk := self.chunks.pop(victim, None):
            self.budget += chunk.stop - chunk.start
        joined = self.admissions.pop(victim, None)  # in this very plan: then it simply stays in the queue
        if joined is None:
            self.preempted[victim] = None
        verb = "preempted" if joined is None else "not admitted"
        self.waiting.insert(0, Waiting(victim, f"{verb}: {by.label} needs its {self.memory.kv.unit_name}s"))
        self.rest = f"behind {victim.label}"

    def _try_admit(self, request: RequestState) -> str:
        """Admits the request, or says why not."""
        if self.preempted:  # what was just taken from one must not go to another: they would take turns for ever
            return f"thrash guard: {len(self.preempted)} preempted in this iteration"
        if len(self.running) >= self.max_num_seqs:
            return f"slots: {len(self.running)} of {self.max_num_seqs} taken"
        size = self._size(request)
        if not size:
            return f"token budget: needs {request.num_pending}, {self.budget} of {self.token_budget} left"
        # Room for all that it has to compute, even if it computes only the first piece now.
        if not self.memory.reserve(request, request.num_tokens):
            return f"{self.memory.kv.unit_name}s: {self.memory.shortage(request, request.num_tokens)}"
        self.running.append(request)
        self.admissions[request] = Admission(request, request.num_tokens)
        self._schedule(request, size)
        return ""


def least_recently_scheduled(requests: Iterable[RequestState]) -> list[RequestState]:
    """Who went without in the last iteration comes first in this one, so decodes beyond the budget take turns.

    While the budget covers all of them, this is the order they came in.
    """
    return sorted(requests, key=lambda request: request.last_scheduled)
