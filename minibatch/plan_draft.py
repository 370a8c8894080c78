"""A plan in the making: one iteration's budget and memory, spent request by request.

The schedulers that re-decide membership every iteration differ only in *who is asked first* and in whether a prompt may
be cut. What asking means is the same for all and stands here: a request gets tokens while the token budget lasts and
rows while the cache lasts. Three decisions are left to policies: in which order waiting requests are asked
(``policies/queueing.py``), whether one may join (``policies/admission.py``), and who gives way when a running one finds
no rows (``policies/preemption.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from functools import partial
from numbers import Integral
from operator import attrgetter
from typing import Any

from minibatch.kv_cache import KVCache, KVDraft
from minibatch.plan import Admission, Chunk, Plan, PlanError, Preemption, Waiting
from minibatch.policies.admission import AdmissionPolicy
from minibatch.policies.base import check_policy
from minibatch.policies.preemption import Never, PreemptionPolicy
from minibatch.policies.queueing import Order
from minibatch.request import NeverFits, RequestState

_chunk = partial(tuple.__new__, Chunk)  # Chunk(...) in half the time: there is one for every token generated


class PlanDraft:
    """``partial``: a request may compute part of what it has pending, at most ``max_chunk`` tokens of it."""

    def __init__(
        self,
        active: Sequence[RequestState],
        kv: KVCache,
        token_budget: float,
        max_num_seqs: int,
        admission: AdmissionPolicy,
        preemption: PreemptionPolicy,
        partial: bool = False,
        max_chunk: float = math.inf,
    ) -> None:
        self.memory = kv.draft()
        self.token_budget, self.budget = token_budget, token_budget
        self.max_num_seqs, self.partial, self.max_chunk = max_num_seqs, partial, max_chunk
        self.admission, self.preemption = admission, preemption
        self.running = list(active)  # in the order of their admission
        self.num_seqs = len(active) + sum([len(request.siblings) for request in active])
        self.chunks: dict[RequestState, Chunk] = {}
        self.admissions: dict[RequestState, Admission] = {}
        self.preempted: dict[RequestState, Preemption] = {}
        self.num_displaced = 0  # these, and whoever was to join in this plan and had to make room again
        self.on_host = sum(self.memory.kv.host.values())  # tokens
        self.senior: RequestState | None = None  # once somebody had to be displaced: who cannot be
        self.tried_in_vain = False  # to make room for one that outranks others
        self.waiting: list[Waiting] = []
        self.rest = ""
        self.notes: dict[Any, Any] = {}  # what a policy wants to remember while this plan is made, by policy

    def run(self, requests: Iterable[RequestState]) -> None:
        """Gives each of these running requests its pending tokens, while the budget lasts."""
        for request in requests:
            start = request.num_computed
            size = request.num_tokens - start
            if size > self.budget or size > self.max_chunk:
                size = self._size(size)
            if size and request not in self.preempted:
                stop = start + size
                if stop <= request.room or self._make_room(request, stop):
                    self.chunks[request] = _chunk((request, start, stop))
                    self.budget -= size

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
        size = min(pending, self.budget, self.max_chunk)
        return size if self.partial or size == pending else 0

    def _schedule(self, request: RequestState, start: int, size: int) -> None:
        self.chunks[request] = Chunk(request, start, start + size)
        self.budget -= size

    def _make_room(self, request: RequestState, num_tokens: int) -> bool:
        """Displaces others until the request's rows are there; False if it is displaced itself, or nobody may be."""
        while not self.memory.reserve(request, num_tokens):
            newcomer = next(reversed(self.admissions), None)  # nobody loses what he has while another joins
            victim = newcomer or self._choose(self._candidates(), self.memory)
            if victim is None:
                shortage = self.memory.shortage(request, num_tokens)
                self.waiting.append(Waiting(request, f"{self.memory.kv.unit_name}s: {shortage}"))
                return False
            self._displace(victim, request, f"needs its {self.memory.kv.unit_name}s")
            if victim is request:
                return False
        return True

    def _candidates(self) -> list[RequestState]:
        """The running requests but for the senior, unless it is alone; the order of their admission is kept."""
        if self.senior not in self.running:
            self.senior = min(self.running, key=self.preemption.seniority)
        others = self.running.copy()
        others.remove(self.senior)
        return others or self.running

    def _choose(self, candidates: Sequence[RequestState], memory: KVDraft) -> RequestState | None:
        victim = self.preemption.choose(candidates, memory)
        if victim is not None and victim not in candidates:
            what = getattr(victim, "label", None) or f"{type(victim).__name__} {victim!r:.40}"
            among = ", ".join(candidate.label for candidate in candidates)
            raise PlanError(f"{self.preemption!r} chose {what}, which is no candidate: those are the requests {among}")
        return victim

    def _displace(self, victim: RequestState, by: RequestState, why: str) -> None:
        """Takes memory, budget and place away, whether or not the victim has already been planned."""
        self._forget(victim)
        self.num_displaced += 1
        if chunk := self.chunks.pop(victim, None):
            self.budget += chunk.stop - chunk.start
        joined = self.admissions.pop(victim, None)  # in this very plan: then it simply stays in the queue
        if joined is None:
            swap = 0 < victim.num_computed <= self.preemption.host_tokens - self.on_host  # else it is computed again
            self.on_host += victim.num_computed if swap else 0
            self.preempted[victim] = Preemption(victim, by, swap)
        verb = "preempted" if joined is None else "not admitted"
        self.waiting.insert(0, Waiting(victim, f"{verb}: {by.label} {why}"))
        self.rest = f"behind {victim.label}"

    def _try_admit(self, request: RequestState) -> str:
        """Admits the request, or says why not."""
        if self.num_displaced:  # what was taken from one must not go to another: they would take turns for ever
            preempted = f"{len(self.preempted)} preempted" if self.preempted else f"{self.num_displaced} made way"
            return f"thrash guard: {preempted} in this iteration"
        cached = self.memory.cached_tokens(request)
        start = request.num_computed + cached
        pending = request.num_tokens - start
        size = self._size(pending) or (1 if self.partial else pending)  # the least that it would compute
        num_tokens = self._to_reserve(request, start + size)
        victims: list[RequestState] = []
        if (no_room := self._no_room(request, num_tokens)) and not (victims := self._victims(request, num_tokens)):
            return no_room
        budget = self.budget + sum(self.chunks[v].stop - self.chunks[v].start for v in victims if v in self.chunks)
        if size > budget:  # there is a new budget in every iteration: nobody has to lose K/V for that
            return f"token budget: needs {size}, {budget} of {self.token_budget} left"
        for victim in victims:
            self._displace(victim, request, "outranks it")
        self.memory.reserve(request, num_tokens)
        self.running.append(request)
        self.num_seqs += request.num_seqs
        self.admissions[request] = Admission(request, num_tokens, cached)
        self._schedule(request, start, size)
        return ""

    def _to_reserve(self, request: RequestState, stop: int) -> int:
        num_tokens, most = self.admission.tokens(request, stop), request.max_cached_tokens
        if not (isinstance(num_tokens, Integral) and stop <= num_tokens <= most):
            what = f"{request.label}: this has to be a whole number from {stop} (computed now) to {most} (in all)"
            raise PlanError(f"{self.admission!r} sets aside {num_tokens!r} tokens for {what}")
        return int(num_tokens)

    def _no_room(self, request: RequestState, num_tokens: int) -> str:
        """Which place or memory is missing for the request to join; the empty string: none."""
        if self.num_seqs + request.num_seqs > self.max_num_seqs:
            need = f"needs {request.num_seqs}, " if request.siblings else ""
            return f"places: {need}{self.num_seqs} of {self.max_num_seqs} taken"
        objection = self.admission.objection(request, num_tokens, self)
        if not isinstance(objection, str):
            raise PlanError(f"{self.admission!r} objects {objection!r}: give the reason as a text, '' if there is none")
        if objection:
            return objection
        if self.memory.need(request, num_tokens) > self.memory.free:
            return f"{self.memory.kv.unit_name}s: {self.memory.shortage(request, num_tokens)}"
        return ""

    def _victims(self, request: RequestState, num_tokens: int) -> list[RequestState]:
        """Whom the request has to displace, of those that it outranks; nobody if even all of them are not enough.

        Tried on a view of this draft. After one attempt in vain there is no other in this plan: it costs too much.
        """
        outranked = [] if self.tried_in_vain else self.preemption.outranked(request, self.running)
        if not outranked:
            return []
        if self._without(outranked)._no_room(request, num_tokens):
            self.tried_in_vain = True
            return []
        view, victims = self._without([]), []
        while view._no_room(request, num_tokens):
            victim = self._choose(outranked, view.memory)
            if victim is None:
                return []
            outranked.remove(victim)
            view._forget(victim)
            victims.append(victim)
        return victims

    def _without(self, requests: Sequence[RequestState]) -> PlanDraft:
        view = copy(self)
        view.memory, view.running, view.notes = self.memory.copy(), list(self.running), {}
        for request in requests:
            view._forget(request)
        return view

    def _forget(self, request: RequestState) -> None:
        self.running.remove(request)
        self.num_seqs -= request.num_seqs
        self.memory.release(request)


def least_recently_scheduled(requests: Iterable[RequestState]) -> list[RequestState]:
    """Who went without in the last iteration comes first in this one, so decodes beyond the budget take turns: of R
    decodes and a budget of B nobody waits longer than ceil(R / B) iterations. Ties stay in the order given, so whoever
    stands first there may run more often than others.

    While the budget covers all of them, this is the order given.
    """
    return sorted(requests, key=attrgetter("last_scheduled"))


class IterationLevel:
    """What schedulers that decide membership again in every iteration have in common: two policies, and that whoever
    has finished leaves at once."""

    max_num_seqs: int
    admission: AdmissionPolicy
    preemption: PreemptionPolicy

    def leaving(self, active: Sequence[RequestState]) -> list[RequestState]:
        """Each one as soon as it has finished."""
        return [request for request in active if request.finish_reason]

    def _may_be_recomputed(self, kv: KVCache) -> bool:
        """Whether a request may lose its K/V while it runs: to one that grows, or to one that outranks it."""
        grows = kv.grows and not self.admission.reserves_maximum
        return not isinstance(self.preemption, Never) and (grows or self.preemption.displaces is not None)

    def _check_policies(self) -> None:
        """Raises TypeError if one of them is not one: a class that nobody has called, or a name."""
        check_policy("admission", self.admission, AdmissionPolicy, "Watermark()")
        check_policy("preemption", self.preemption, PreemptionPolicy, "Recompute()")

    def _check_room(self, request: RequestState, kv: KVCache) -> None:
        """Raises a RequestRefused if the request could not even join an empty engine."""
        if request.num_seqs > self.max_num_seqs:
            raise NeverFits(f"{request.num_seqs} answers need as many places, max_num_seqs is {self.max_num_seqs}")
        self.admission.check(request, kv)
