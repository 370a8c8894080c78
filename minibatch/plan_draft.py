"""A plan in the making: one iteration's budget and memory, spent request by request.

The schedulers that re-decide membership every iteration differ only in *who is asked first* and in whether a prompt may
be cut. What asking means is the same for all and stands here: a request gets tokens while the token budget lasts and
rows while the cache lasts. Three decisions are left to policies: in which order waiting requests are asked
(``policies/queueing.py``), whether one may join (``policies/admission.py``), and who gives way when a running one finds
no rows (``policies/preemption.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any

from minibatch.kv_cache import KVCache
from minibatch.plan import Admission, Chunk, Plan, PlanError, Preemption, Waiting
from minibatch.policies.admission import Optimistic
from minibatch.policies.preemption import Never, Recompute
from minibatch.policies.queueing import Order
from minibatch.request import NeverFits, RequestState


class PlanDraft:
    """``partial``: a request may compute part of what it has pending, at most ``max_chunk`` tokens of it."""

    def __init__(
        self,
        active: Sequence[RequestState],
        kv: KVCache,
        token_budget: float,
        max_num_seqs: int,
        admission: Optimistic,
        preemption: Recompute | Never,
        partial: bool = False,
        max_chunk: int | None = None,
    ) -> None:
        self.memory = kv.draft()
        self.token_budget, self.budget = token_budget, token_budget
        self.max_num_seqs, self.partial, self.max_chunk = max_num_seqs, partial, max_chunk
        self.admission, self.preemption = admission, preemption
        self.running = list(active)  # in the order of their admission
        self.num_seqs = sum(request.num_seqs for request in active)
        self.chunks: dict[RequestState, Chunk] = {}
        self.admissions: dict[RequestState, Admission] = {}
        self.preempted: dict[RequestState, Preemption] = {}
        self.num_displaced = 0  # these, and whoever was to join in this plan and had to make room again
        self.waiting: list[Waiting] = []
        self.rest = ""
        self.notes: dict[Any, Any] = {}  # what a policy wants to remember while this plan is made, by policy

    def run(self, requests: Iterable[RequestState]) -> None:
        """Gives each of these running requests its pending tokens, while the budget lasts."""
        for request in requests:
            size = self._size(request.num_pending)
            if size and request not in self.preempted and self._make_room(request, request.num_computed + size):
                self._schedule(request, request.num_computed, size)

    def admit(self, queue: Order, now: float) -> None:
        """Admits waiting requests in the queue's order, until one, and ``lookahead`` more, do not fit."""
        asked: set[RequestState] = set()
        first, behind = None, 0
        walk = queue.walk(self, now)
        if not isinstance(walk, Iterable):
            raise PlanError(f"{queue!r} walks over {walk!r}: walk has to return, or be, an iterator over its requests")
        for request in walk:
            if request in asked or request not in queue:
                what = "twice" if request in asked else "which does not wait in it"
                raise PlanError(f"{queue!r} named {getattr(request, 'label', request)}, {what}")
            asked.add(request)
            behind += first is not None
            if reason := self._try_admit(request):
                self.waiting.append(Waiting(request, reason))
                first = first or request
            if first is not None and (behind >= queue.lookahead or self._is_full):
                break
        more = len(queue) - len(asked)
        if first is not None and more > 0:
            note = queue.note(first)
            self.rest = f"behind {first.label}{note and f' ({note})'}: {more:,} more"

    def plan(self) -> Plan:
        return Plan(
            chunks=tuple(self.chunks.values()),
            admissions=tuple(self.admissions.values()),
            preemptions=tuple(self.preempted.values()),
            waiting=tuple(self.waiting),
            rest=self.rest,
        )

    @property
    def _is_full(self) -> bool:
        """Whether nobody at all could join any more."""
        return bool(self.num_displaced) or self.num_seqs >= self.max_num_seqs or not self.budget

    def _size(self, pending: int) -> int:
        """How many pending tokens may be computed within the budget; 0 if they have to wait for the next iteration."""
        if self.partial:
            return min(pending, self.budget, self.max_chunk or pending)
        return pending if pending <= self.budget else 0

    def _schedule(self, request: RequestState, start: int, size: int) -> None:
        self.chunks[request] = Chunk(request, start, start + size)
        self.budget -= size

    def _make_room(self, request: RequestState, num_tokens: int) -> bool:
        """Displaces others until the request's rows are there; False if it is displaced itself, or nobody may be."""
        while not self.memory.reserve(request, num_tokens):
            newcomer = next(reversed(self.admissions), None)  # nobody loses what he has while another joins
            victim = newcomer or self.preemption.choose(self.running, self.memory)
            if victim is None:
                shortage = self.memory.shortage(request, num_tokens)
                self.waiting.append(Waiting(request, f"{self.memory.kv.unit_name}s: {shortage}"))
                return False
            self._displace(victim, request, f"needs its {self.memory.kv.unit_name}s")
            if victim is request:
                return False
        return True

    def _displace(self, victim: RequestState, by: RequestState, why: str) -> None:
        """Takes memory, budget and place away, whether or not the victim has already been planned."""
        if victim not in self.running:
            raise PlanError(f"{self.preemption!r} chose {getattr(victim, 'label', victim)}, which does not run")
        self.running.remove(victim)
        self.num_displaced += 1
        self.num_seqs -= victim.num_seqs
        self.memory.release(victim)
        if chunk := self.chunks.pop(victim, None):
            self.budget += chunk.stop - chunk.start
        joined = self.admissions.pop(victim, None)  # in this very plan: then it simply stays in the queue
        if joined is None:
            self.preempted[victim] = Preemption(victim, by, self._swaps(victim))
        verb = "preempted" if joined is None else "not admitted"
        self.waiting.insert(0, Waiting(victim, f"{verb}: {by.label} {why}"))
        self.rest = f"behind {victim.label}"

    def _swaps(self, victim: RequestState) -> bool:
        """Whether its K/V goes to host memory, and does not have to be computed again."""
        on_host = sum(self.memory.kv.host.values())
        on_host += sum(p.request.num_computed for p in self.preempted.values() if p.swap)
        return 0 < victim.num_computed <= self.preemption.host_tokens - on_host

    def _try_admit(self, request: RequestState) -> str:
        """Admits the request, or says why not."""
        if self.num_displaced:  # what was taken from one must not go to another: they would take turns for ever
            return f"thrash guard: {self.num_displaced} preempted in this iteration"
        reason = self._join(request)
        return "" if reason and self._join_by_displacing(request) else reason

    def _join(self, request: RequestState) -> str:
        if self.num_seqs + request.num_seqs > self.max_num_seqs:
            need = f"needs {request.num_seqs}, " if request.siblings else ""
            return f"slots: {need}{self.num_seqs} of {self.max_num_seqs} taken"
        cached = self.memory.cached_tokens(request)
        start = request.num_computed + cached
        size = self._size(request.num_tokens - start)
        if not size:
            return f"token budget: needs {request.num_tokens - start}, {self.budget} of {self.token_budget} left"
        num_tokens, most = self.admission.tokens(request, start + size), request.max_cached_tokens
        if not (isinstance(num_tokens, int) and start + size <= num_tokens <= most):
            what = f"{request.label}, which computes up to token {start + size} now and {most} in all"
            raise PlanError(f"{self.admission!r} sets aside {num_tokens!r} tokens for {what}")
        if objection := self.admission.objection(request, num_tokens, self):
            return str(objection)
        if not self.memory.reserve(request, num_tokens):
            return f"{self.memory.kv.unit_name}s: {self.memory.shortage(request, num_tokens)}"
        self.running.append(request)
        self.num_seqs += request.num_seqs
        self.admissions[request] = Admission(request, num_tokens, cached)
        self._schedule(request, start, size)
        return ""

    def _join_by_displacing(self, request: RequestState) -> bool:
        """Displaces running requests that it outranks, as many as it takes; nobody, if even that is not enough."""
        if not self.preemption.outranked(request, self.running):
            return False
        trial = self._copy()
        while outranked := self.preemption.outranked(request, trial.running):
            trial._displace(self.preemption.victim(outranked, trial.memory), request, "outranks it")
            if not trial._join(request):
                self.__dict__.update(trial.__dict__)
                return True
        return False

    def _copy(self) -> PlanDraft:
        twin = copy(self)
        twin.memory = self.memory.copy()
        for name in ("running", "chunks", "admissions", "preempted", "waiting", "notes"):
            setattr(twin, name, copy(getattr(self, name)))
        return twin


def least_recently_scheduled(requests: Iterable[RequestState]) -> list[RequestState]:
    """Who went without in the last iteration comes first in this one, so decodes beyond the budget take turns.

    While the budget covers all of them, this is the order they came in.
    """
    return sorted(requests, key=lambda request: request.last_scheduled)


def may_be_recomputed(scheduler: Any, kv: KVCache) -> bool:
    """Whether a request may lose its K/V while it runs: to one that grows, or to one that outranks it."""
    preemption = scheduler.preemption
    grows = kv.grows and not scheduler.admission.reserves_maximum
    return not isinstance(preemption, Never) and (grows or preemption.displaces is not None)


def check_room(scheduler: Any, request: RequestState, kv: KVCache) -> None:
    """Raises a RequestRefused if the request could not even join an empty engine."""
    if request.num_seqs > scheduler.max_num_seqs:
        raise NeverFits(f"{request.num_seqs} answers need as many places, max_num_seqs is {scheduler.max_num_seqs}")
    scheduler.admission.check(request, kv)
