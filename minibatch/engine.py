"""The one loop: arrivals -> plan -> reserve -> forward -> sample -> commit -> report.

``engine.step()`` is the whole engine: one iteration, start to end, in one thread. The scheduler decides, the KV cache
keeps addresses, the model computes; this module carries the decision out, keeps the books, and is the only place where
a request changes state. The four configurations of the project are this loop with other parts:

    static      StaticBatching       ContiguousKVCache
    continuous  ContinuousBatching   ContiguousKVCache
    paged       ContinuousBatching   PagedKVCache
    chunked     ChunkedPrefill       PagedKVCache
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from minibatch.arrivals import Arrivals
from minibatch.checks import check_int
from minibatch.clock import Clock
from minibatch.door import Door
from minibatch.kv_cache import KVCache, KVSnapshot
from minibatch.models import Model
from minibatch.next_tokens import next_tokens
from minibatch.plan import Chunk, Plan, Scheduler, check_plan
from minibatch.request import (
    EngineStalled,
    QueueFull,
    Request,
    RequestRefused,
    RequestState,
    Result,
    Status,
)
from minibatch.sampling import Sample, SamplingError
from minibatch.streaming import Stream
from minibatch.trace import Member, PadRow, StepReport, Trace, versions


class Engine:
    """Runs requests on a model, one iteration a ``step()``.

    ``clock``          default: the one that fits the model (real for a model that computes, virtual for a toy)
    ``max_model_len``  context limit in tokens; default: the model's
    ``max_queue``      most requests that may wait, preempted ones included, active ones not; an arrival that finds so
                       many is refused (default: no limit)
    ``seed``           of the draws of requests that have no seed of their own; None: different in every run
    ``meta``           facts to keep in the trace's header, such as the workload's name
    """

    def __init__(
        self,
        model: Model,
        scheduler: Scheduler,
        kv_cache: KVCache,
        *,
        clock: Clock | None = None,
        max_model_len: int | None = None,
        max_queue: int | None = None,
        seed: int | None = None,
        meta: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.scheduler, self.kv = model, scheduler, kv_cache
        self.clock = clock or model.clock()
        if max_model_len is not None:
            check_int("max_model_len", max_model_len, 2)  # one token of prompt and a new one
        if max_queue is not None:
            check_int("max_queue", max_queue, 0)
        if kv_cache.num_free < kv_cache.num_units:
            raise ValueError(f"{kv_cache!r} is in use by another engine: give each engine a cache of its own")
        limits = [limit for limit in (max_model_len, model.max_model_len) if limit is not None]
        self.max_model_len = min(limits) if limits else None
        self.door = Door(model, scheduler, kv_cache, self.max_model_len)
        self.max_queue = max_queue
        self.store = model.allocate(kv_cache.num_rows)  # the K/V themselves, in the executor's own form
        self.queue: deque[RequestState] = deque()  # waiting, in arrival order
        self.active: list[RequestState] = []  # holding memory, in admission order
        self.arrivals = Arrivals()  # submitted, still to come
        self._live: dict[str, RequestState] = {}  # every request that has no result yet, by id
        self._arrived: list[str] = []  # since the last report, as are the next three
        self._admitted: list[str] = []
        self._preempted: list[str] = []
        self._ended: list[tuple[str, str]] = []
        self._stepping, self._aborts = False, []  # aborts that came during a step
        self._random = random.Random(seed)
        self.results: dict[str, Result] = {}  # by id; an id that is used again has its newest result
        self.trace = Trace(
            {
                **(meta or {}),
                "clock": self.clock.kind,
                "model": model.name,
                "scheduler": repr(scheduler),
                "kv_cache": repr(kv_cache),
                "max_model_len": self.max_model_len,
                "sampling_seed": seed,
                "versions": versions(),
            }
        )

    # ---------------------------------------------------------------- the user's side

    def submit(self, request: Request) -> str:
        """Takes a request and returns its id; raises a RequestRefused that says why, and then nothing has changed."""
        return self._submit(request).request_id

    def stream(self, request: Request) -> Stream:
        """Takes a request and returns an iterator over its output as it is made; closing it aborts the request."""
        return Stream(self, self._submit(request))

    def abort(self, request_id: str) -> bool:
        """Ends a request now, wherever it is. False if no live request has this id.

        It gives up its place and memory as if it had finished: at once, but for a member of a static batch.

        Called from within a step (by a stream that is collected there), it takes effect when the step is over.
        """
        state = self._live.get(request_id)
        if state is None:
            return False
        if self._stepping:
            self._aborts.append(state)
        else:
            self._abort(state)
        return True

    def run(self, requests: Iterable[Request], on_step: Callable[[StepReport], object] | None = None) -> list[Result]:
        """Runs requests to their end; one Result each, in input order, those refused at the door included.

        ``on_step`` is called with every report: a progress bar, or a client that submits its next request.
        """
        outcomes = [self._submit_or_refuse(request) for request in requests]
        while (report := self.step()) is not None:
            if on_step is not None:
                on_step(report)
        return [outcome if isinstance(outcome, Result) else outcome.result for outcome in outcomes]

    def step(self) -> StepReport | None:
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

    def _submit_or_refuse(self, request: Request) -> RequestState | Result:
        try:
            return self._submit(request)
        except RequestRefused as error:
            timeline = self.trace.timelines[-1]
            name = request.request_id if isinstance(request.request_id, str) else timeline.request_id
            return Result(name, "rejected", error=f"{type(error).__name__}: {error}", timeline=timeline)

    def _submit(self, request: Request) -> RequestState:
        now = self.clock.now() if request.arrival_time is None else 0.0  # else reading it could start a real clock
        timeline = self.door.timeline(request, now)
        self.trace.timelines.append(timeline)
        try:
            state = self.door.accept(request, timeline, self._live)
            if request.arrival_time is None:
                self._deliver(now)
                self._check_queue()
        except RequestRefused:
            timeline.finish, timeline.finish_reason = timeline.arrival, "rejected"
            raise
        if request.params.seed is None:
            state.seed = self._random.getrandbits(63)
        self._live[state.request_id] = state
        if request.arrival_time is None:
            self._arrive(state)
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
                self._finish(state, "rejected", state.arrival_time, error)
            else:
                self._arrive(state)

    def _arrive(self, state: RequestState) -> None:
        state.status = Status.WAITING
        self.queue.append(state)
        self._arrived.append(state.label)

    # ---------------------------------------------------------------- one iteration

    def _step(self) -> StepReport | None:
        while True:
            now = self.clock.now()
            self._deliver(now)
            if self.queue or self.active:
                plan = self.scheduler.plan(self.queue, self.active, self.kv, now)
                check_plan(plan, self.scheduler, self.kv, self._live)
                if plan.chunks:
                    return self._execute(plan, now)
                self._wait(plan, now)
            elif self.arrivals:
                self.clock.wait_until(self.arrivals.next_time)
            else:
                return None

    def _abort(self, state: RequestState) -> None:
        if state.status is Status.WAITING:
            self.queue.remove(state)
        elif state.status is Status.SUBMITTED:
            self.arrivals.remove(state)
        self._finish(state, "abort", max(self.clock.now(), state.arrival_time))  # it may not even have arrived
        self._let_go()

    def _execute(self, plan: Plan, start: float) -> StepReport:
        for state in plan.preemptions:
            self._preempt(state, start)
        for admission in plan.admissions:
            self._admit(admission.request, start)
            self.kv.reserve(admission.request, admission.reserve)
        for chunk in plan.chunks:  # those who were active before grow
            self.kv.reserve(chunk.request, chunk.stop)
        outcomes = next_tokens(plan, self.model.forward(plan, self.kv, self.store))
        self.clock.advance(plan)
        end = self.clock.now()
        members = tuple(self._commit(chunk, outcomes.get(chunk.request), start) for chunk in plan.chunks)
        snapshot = self.kv.snapshot(self.active)  # after the forward, before anyone leaves
        for state, outcome in outcomes.items():
            self._emit(state, outcome, end)
        self._let_go()
        return self._report(plan, start, end, members, snapshot)

    def _preempt(self, state: RequestState, now: float) -> None:
        """By recomputation: all its K/V is dropped, and computed again from its tokens when it is back."""
        self.kv.release(state)
        self.active.remove(state)
        self.queue.appendleft(state)  # victims come newest first, so the order of arrival is kept
        state.status, state.num_computed = Status.WAITING, 0
        self._preempted.append(state.label)
        state.timeline.num_preemptions += 1
        state.timeline.runs[-1][1] = now

    def _admit(self, state: RequestState, now: float) -> None:
        self.queue.remove(state)
        self.active.append(state)
        state.status = Status.ACTIVE
        self._admitted.append(state.label)
        state.timeline.runs.append([now, now])

    def _commit(self, chunk: Chunk, outcome: Sample | SamplingError | None, start: float) -> Member:
        """The chunk's tokens are computed now."""
        state, kinds = chunk.request, chunk.kinds
        state.num_computed = chunk.stop
        state.high_water = max(state.high_water, chunk.stop)
        state.last_scheduled = len(self.trace.steps)
        if state.timeline.scheduled is None:
            state.timeline.scheduled = start
        emitted = outcome.token if isinstance(outcome, Sample) else None
        return Member(state.label, chunk.start, chunk.stop, *kinds, emitted)

    def _emit(self, state: RequestState, outcome: Sample | SamplingError, now: float) -> None:
        """Gives a request its next token, and ends it if that was its last."""
        if isinstance(outcome, SamplingError):
            self._finish(state, "abort", now, outcome)
            return
        state.generated.append(outcome.token)
        state.timeline.token_times.append(now)
        if state.params.logprobs is not None:
            state.logprobs.append(outcome)
        matched = state.text is not None and state.text.push(outcome.token)
        if outcome.token in state.stop_token_ids:
            state.stop_reason = outcome.token if outcome.token in state.params.stop_token_ids else None
            self._finish(state, "stop", now)
        elif matched:
            state.stop_reason = state.text.stop_reason
            self._finish(state, "stop", now)
        elif len(state.generated) == state.max_new_tokens:
            self._finish(state, "length", now)

    def _finish(self, state: RequestState, reason: str, now: float, error: Exception | None = None) -> None:
        """The one place where a request ends: exactly one Result."""
        was_active = state.status is Status.ACTIVE
        state.status, state.finish_reason = Status.FINISHED, reason
        if state.text is not None:
            state.text.finish()
        timeline = state.timeline
        timeline.finish, timeline.finish_reason = now, reason
        if was_active:
            timeline.runs[-1][1] = now
        del self._live[state.request_id]
        self._ended.append((state.label, reason))
        state.result = self.results[state.request_id] = state.to_result(error)

    def _let_go(self) -> None:
        """An iteration boundary: those whom the scheduler lets leave give up place and memory."""
        leaving = self.scheduler.leaving(self.active)
        for state in leaving:
            self.kv.release(state)
        if leaving:
            gone = set(leaving)
            self.active = [state for state in self.active if state not in gone]

    def _report(
        self, plan: Plan, start: float, end: float, members: tuple[Member, ...], snapshot: KVSnapshot
    ) -> StepReport:
        report = StepReport(
            index=len(self.trace.steps),
            start=start,
            end=end,
            members=members,
            padding=tuple(PadRow(p.request.label, p.num_tokens, p.dead) for p in plan.padding),
            arrived=tuple(self._arrived),
            admitted=tuple(self._admitted),
            preempted=tuple(self._preempted),
            finished=tuple(self._ended),
            waiting=tuple((waiting.request.label, waiting.reason) for waiting in plan.waiting),
            num_waiting=len(self.queue),
            rest=plan.rest,
            token_budget=self.scheduler.token_budget,
            kv=snapshot,
        )
        self._arrived, self._admitted, self._preempted, self._ended = [], [], [], []
        self.trace.steps.append(report)
        return report

    # ---------------------------------------------------------------- between iterations

    def _wait(self, plan: Plan, now: float) -> None:
        """Nothing to compute yet: waits for the time that the plan names, or for an arrival before it."""
        if plan.wake_at is None or not now < plan.wake_at < math.inf:
            head = self.queue[0] if self.queue else self.active[0]
            reason = next((waiting.reason for waiting in plan.waiting if waiting.request is head), plan.rest)
            raise EngineStalled(
                f"{type(self.scheduler).__name__} planned nothing with {len(self.queue)} waiting and "
                f"{len(self.active)} active; the head is {head.label}: {reason or 'no reason given'}"
            )
        self.clock.wait_until(min(plan.wake_at, self.arrivals.next_time))
