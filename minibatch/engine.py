"""The one loop: arrivals -> plan -> reserve -> forward -> sample -> commit -> report.

``engine.step()`` is the whole engine: one iteration, start to end, in one thread. The scheduler decides, the KV cache
keeps addresses, the model computes; this module carries the decision out (what it means for each request is in
``lifecycle.py``) and keeps the books. The four configurations of the project are this loop with other parts:

    static      StaticBatching       ContiguousKVCache
    continuous  ContinuousBatching   ContiguousKVCache
    paged       ContinuousBatching   PagedKVCache
    chunked     ChunkedPrefill       PagedKVCache
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

from minibatch.arrivals import Arrivals
from minibatch.checks import check_int
from minibatch.clock import Clock
from minibatch.door import Door
from minibatch.iteration import Iteration, kinds_of
from minibatch.kv_cache import KVCache
from minibatch.lifecycle import Lifecycle
from minibatch.models import Model
from minibatch.next_tokens import next_tokens
from minibatch.plan import Plan, Scheduler, check_plan
from minibatch.policies.base import check_policy
from minibatch.policies.queueing import FCFS, Order
from minibatch.request import (
    EngineStalled,
    Group,
    InvalidParams,
    QueueFull,
    Request,
    RequestRefused,
    RequestState,
    Result,
    SamplingParams,
    Status,
)
from minibatch.sampling import Outcome
from minibatch.streaming import Stream
from minibatch.trace import StepCounts, StepReport, Trace, versions

Record = StepReport | StepCounts  # of an iteration: who did what, or numbers only

POLICIES = ("admission", "preemption")  # of a scheduler, that its trace names


class Engine:
    """Runs requests on a model, one iteration a ``step()``.

    ``order``          who is next among the waiting; default: strict FCFS
    ``clock``          default: the one that fits the model (real for a model that computes, virtual for a toy)
    ``max_model_len``  context limit in tokens; default: the model's
    ``max_queue``      most requests that may wait, preempted ones included, active ones not; an arrival that finds so
                       many is refused (default: no limit)
    ``seed``           of the draws of requests that have no seed of their own; None: different in every run
    ``meta``           facts to keep in the trace's header, such as the workload's name
    ``record_steps``   False: the trace keeps only the numbers of each iteration, not who did what (long simulations)
    ``check_plans``    False: the scheduler is trusted. The project's own are checked by its tests; of another one, a
                       wrong plan would then do anything
    """

    def __init__(
        self,
        model: Model,
        scheduler: Scheduler,
        kv_cache: KVCache,
        *,
        order: Order | None = None,
        clock: Clock | None = None,
        max_model_len: int | None = None,
        max_queue: int | None = None,
        seed: int | None = None,
        meta: dict[str, Any] | None = None,
        record_steps: bool = True,
        check_plans: bool = True,
    ) -> None:
        self.model, self.scheduler, self.kv = model, scheduler, kv_cache
        self.clock = clock or model.clock()
        if max_model_len is not None:
            check_int("max_model_len", max_model_len, 2)  # one token of prompt and a new one
        if max_queue is not None:
            check_int("max_queue", max_queue, 0)
        self.queue = FCFS() if order is None else order
        check_policy("order", self.queue, Order, "FCFS()")
        if not hasattr(self.queue, "used"):
            raise TypeError(f"{type(order).__name__} has no queue yet: its __init__ has to call super().__init__()")
        for part, what in ((kv_cache, "a cache"), (self.queue, "an order")):
            if part.used:
                raise ValueError(f"{part!r} is or was used by another engine: give each engine {what} of its own")
        kv_cache.used = self.queue.used = True
        limits = [limit for limit in (max_model_len, model.max_model_len) if limit is not None]
        self.max_model_len = min(limits) if limits else None
        self.door = Door(model, scheduler, kv_cache, self.max_model_len)
        self.max_queue, self.record_steps, self.check_plans = max_queue, record_steps, check_plans
        self.store = model.allocate(kv_cache.num_rows)  # the K/V themselves, in the executor's own form
        self.arrivals = Arrivals()  # submitted, still to come
        self.life = Lifecycle(kv_cache, self.store, self.queue)
        self.active, self.results = self.life.active, self.life.results
        self._stepping, self._aborts = False, []  # aborts that came during a step
        self._random = random.Random(seed)
        self.trace = Trace(
            {
                **(meta or {}),
                "clock": self.clock.kind,
                "model": model.name,
                "scheduler": repr(scheduler),
                "kv_cache": repr(kv_cache),
                "order": repr(self.queue),
                **{name: repr(getattr(scheduler, name)) for name in POLICIES if hasattr(scheduler, name)},
                "kv_bytes_per_token": model.kv_bytes_per_token,
                "max_model_len": self.max_model_len,
                "sampling_seed": seed,
                "versions": versions(),
            }
        )

    # ---------------------------------------------------------------- the user's side

    def submit(self, request: Request) -> str:
        """Takes a request and returns its id; raises a RequestRefused that says why, and then nothing has changed."""
        state = self._submit(request)
        return (state.group or state).request_id

    def stream(self, request: Request) -> Stream:
        """Takes a request and returns an iterator over its output as it is made; closing it aborts the request."""
        if isinstance(request.params, SamplingParams) and request.params.n > 1:
            raise InvalidParams(f"n = {request.params.n}: a stream has one answer; use submit, or as many streams")
        return Stream(self, self._submit(request))

    def abort(self, request_id: str) -> bool:
        """Ends a request now, wherever it is. False if no live request has this id.

        It gives up its place and memory as if it had finished: at once, but for a member of a static batch. Of a
        request with ``n > 1`` all answers end; one alone is named ``id#0``, ``id#1``, ... (but ``id#0`` computes the
        prompt for all: until that is done, the others end with it).

        Called from within a step (by a stream that is collected there), it takes effect when the step is over.
        """
        found = self.life.ids.get(request_id)
        if found is None:
            return False
        for state in [s for s in found.states if not s.is_finished] if isinstance(found, Group) else [found]:
            if self._stepping:
                self._aborts.append(state)
            elif not state.is_finished:  # it may have ended with another answer
                self._abort(state)
        return True

    def run(
        self,
        requests: Iterable[Request],
        on_step: Callable[[Record], object] | None = None,
        on_finish: Callable[[Result], Iterable[Request] | None] | None = None,
    ) -> list[Result]:
        """Runs requests to their end; one Result each, in input order, those refused at the door included.

        ``on_step`` is called with the record of every iteration: a progress bar.

        ``on_finish`` is called with the Result of every request, once its last iteration is over, and may return more
        requests, which are submitted at once: the next turn of a conversation, a client that sends one request after
        the other (a closed loop). Their Results follow those of ``requests``. (Of an arrival that finds the queue full
        it hears after the iteration that follows.)
        """
        outcomes: list[RequestState | Result] = []
        self.life.ended.clear()
        self._submit_all(requests, outcomes)
        while True:
            ended, self.life.ended = self.life.ended, []
            if ended and on_finish is not None:
                for result in ended:
                    self._submit_all(on_finish(result) or (), outcomes)
            elif (record := self.step()) is not None:
                if on_step is not None:
                    on_step(record)
            elif not self.life.ended:
                break
        return [o if isinstance(o, Result) else (o.group or o).result for o in outcomes]

    def step(self) -> Record | None:
        """Executes one iteration, after waiting for one to become possible; None when nothing submitted remains."""
        self._stepping = True
        try:
            return self._step()
        finally:
            self._stepping = False
            while self._aborts:
                state = self._aborts.pop()
                if not state.is_finished:
                    self._abort(state)

    # ---------------------------------------------------------------- into the engine

    def _submit_all(self, requests: Iterable[Request], outcomes: list[RequestState | Result]) -> None:
        """Adds what became of each; one that is refused has ended."""
        for request in requests:
            outcomes.append(self._submit_or_refuse(request))
            if isinstance(outcomes[-1], Result):
                self.life.ended.append(outcomes[-1])

    def _submit_or_refuse(self, request: Request) -> RequestState | Result:
        place = len(self.trace.timelines)
        try:
            return self._submit(request)
        except RequestRefused as error:
            timeline = self.trace.timelines[place]
            name = request.request_id if isinstance(request.request_id, str) else timeline.request_id
            return Result(name, "rejected", error=f"{type(error).__name__}: {error}", timeline=timeline)

    def _submit(self, request: Request) -> RequestState:
        now = self.clock.now() if request.arrival_time is None else 0.0  # else reading it could start a real clock
        timeline = self.door.timeline(request, now)
        timelines = [timeline]
        self.trace.timelines.append(timeline)
        try:
            state = self.door.accept(request, timeline, self.life.ids)
            timelines += [sibling.timeline for sibling in state.siblings]
            self.trace.timelines += timelines[1:]
            if request.arrival_time is None:
                self._deliver(now)
                self._check_queue()
        except RequestRefused as error:
            for refused in timelines:
                refused.finish, refused.finish_reason = refused.arrival, "rejected"
                refused.error = f"{type(error).__name__}: {error}"
            raise
        for answer in (state, *state.siblings):
            if request.params.seed is None:
                answer.seed = self._random.getrandbits(63)
        self.life.enter(state)
        if request.arrival_time is None:
            self.life.arrive(state)
        else:
            self.arrivals.add(state)
        return state

    def _check_queue(self) -> None:
        if self.max_queue is not None and len(self.queue) >= self.max_queue:
            raise QueueFull(f"{len(self.queue)} requests wait already, max_queue is {self.max_queue}")

    def _deliver(self, now: float) -> None:
        """Arrivals whose time has come enter the queue, or find it full."""
        for state in self.arrivals.due(now):
            try:
                self._check_queue()
            except QueueFull as error:
                self.life.refuse(state, error)
            else:
                self.life.arrive(state)

    # ---------------------------------------------------------------- one iteration

    def _step(self) -> Record | None:
        while True:
            now = self.clock.now()
            self._deliver(now)
            if self.queue or self.active:
                plan = self._plan(now)
                if plan.chunks:
                    return self._execute(plan, now)
                self._wait(plan, now)
            elif self.arrivals:
                self.clock.wait_until(self.arrivals.next_time)
            elif self.life.live:
                raise EngineStalled(f"{self.queue!r} has lost {', '.join(self.life.live)}: neither waiting nor active")
            else:
                return None

    def _plan(self, now: float) -> Plan:
        plan = self.scheduler.plan(self.queue, self.active, self.kv, now)
        if self.check_plans:
            check_plan(plan, self.scheduler, self.kv, self.life.live, self.active)
        return plan

    def _execute(self, plan: Plan, start: float) -> Record:
        self._reserve(plan, start)
        computed = self.model.forward(plan, self.kv, self.store)
        outcomes = self._sample(plan, computed)
        self.clock.advance(plan)
        return self._commit(plan, outcomes, start)

    def _reserve(self, plan: Plan, start: float) -> None:
        """Who gives way, who joins, and the rows that everybody writes to."""
        life = self.life
        for preemption in plan.preemptions:
            life.preempt(preemption, start)
        for admission in plan.admissions:  # all of them take what is cached before anybody takes a block and evicts it
            life.admit(admission, start)
        for admission in plan.admissions:
            life.reserve(admission.request, admission.reserve)
            life.swap_in(admission.request)
        for request, _, stop in plan.chunks:  # those who were active before grow
            if stop > request.room:
                life.reserve(request, stop)

    def _sample(self, plan: Plan, computed: Any) -> dict[RequestState, Outcome]:
        """Of a simulated model the tokens are there already."""
        return computed if self.model.simulated else next_tokens(plan, computed)

    def _commit(self, plan: Plan, outcomes: dict[RequestState, Outcome], start: float) -> Record:
        """What the iteration has changed, and its record."""
        life, index, end = self.life, self.trace.num_steps, self.clock.now()
        kinds = kinds_of(plan.chunks)  # before the commit, which forgets what was computed before
        life.commit(plan.chunks, index, start)
        if life.groups:
            for chunk in plan.chunks:
                if chunk.forks:
                    life.fork(chunk.request, outcomes, end)
        snapshot = self.kv.snapshot(self.active, self.record_steps)  # after the forward, before anyone leaves
        life.emit(outcomes, end)
        self._let_go()
        iteration = Iteration(
            index=index,
            start=start,
            end=end,
            plan=plan,
            kinds=kinds,
            outcomes=outcomes,
            changes=life.take_changes(),
            num_waiting=len(self.queue),
            token_budget=self.scheduler.token_budget,
            kv=snapshot,
        )
        record = iteration.report() if self.record_steps else iteration.counts()
        self.trace.add(record)
        return record

    def _abort(self, state: RequestState) -> None:
        if state.status is Status.SUBMITTED:
            self.arrivals.remove(state)
        self.life.abort(state, max(self.clock.now(), state.arrival_time))  # it may not even have arrived
        self._let_go()

    def _let_go(self) -> None:
        """An iteration boundary: those whom the scheduler lets leave give up place and memory."""
        if self.life.num_dead and (leaving := self.scheduler.leaving(self.active)):
            self.life.leave(leaving)

    # ---------------------------------------------------------------- between iterations

    def _wait(self, plan: Plan, now: float) -> None:
        """Nothing to compute yet: waits for the time that the plan names, or for an arrival before it."""
        if plan.wake_at is None or not now < plan.wake_at < math.inf:
            stuck = [waiting for waiting in plan.waiting if waiting.request.status is Status.ACTIVE]
            head = stuck[0].request if stuck else next(iter(self.queue), None) or self.active[0]
            reason = next((waiting.reason for waiting in plan.waiting if waiting.request is head), plan.rest)
            who = f"{head.label} is active and stuck" if stuck else f"the head is {head.label}"
            raise EngineStalled(
                f"{type(self.scheduler).__name__} planned nothing with {len(self.queue)} waiting and "
                f"{len(self.active)} active; {who}: {reason or 'no reason given'}"
            )
        self.clock.wait_until(min(plan.wake_at, self.arrivals.next_time))
