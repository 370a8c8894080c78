"""What can happen to a request, and the only place where it changes.

                        preempted
                    +------<------+
                    v             |
    submitted -> waiting -> active -> finished
                  arrive    admit, commit, fork, emit
                            (and from anywhere: finish)

Every change is noted, so that the next report can say what has happened since the last one.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from minibatch.kv_cache import KVCache, RowCopy
from minibatch.models import Store
from minibatch.plan import Admission, Chunk, Preemption
from minibatch.policies.queueing import Order
from minibatch.request import MOST_ANSWERS, Group, RequestState, Result, Status
from minibatch.sampling import Outcome, SamplingError, token_of
from minibatch.trace import Admitted, Forked, Preempted


@dataclass
class Changes:
    """Since the last report: the fields of a :class:`~minibatch.trace.StepReport` of the same names."""

    arrived: list[str] = field(default_factory=list)
    admitted: list[Admitted] = field(default_factory=list)
    preempted: list[Preempted] = field(default_factory=list)
    forked: list[Forked] = field(default_factory=list)
    finished: list[tuple[str, str]] = field(default_factory=list)
    copied_rows: int = 0


class Lifecycle:
    """The requests of one engine, with the memory they hold: ``queue`` and ``active``, ``ids`` of all that have no
    result yet, and ``results``."""

    def __init__(self, kv: KVCache, store: Store, queue: Order) -> None:
        self.kv, self.store, self.queue = kv, store, queue
        self.active: list[RequestState] = []  # holding memory, in admission order
        self.results: dict[str, Result] = {}  # by id; an id that is used again has its newest result
        self.live: dict[str, RequestState] = {}  # every sequence that has no result yet
        self.groups: dict[str, Group] = {}  # the requests with n > 1 that have none
        self.ids = ChainMap[str, Any](self.live, self.groups)
        self.num_dead = 0  # active ones that have finished
        self.ended: list[Result] = []  # since somebody last looked
        self.changes = Changes()
        self._num_arrived = 0

    def enter(self, state: RequestState) -> None:
        """It is the engine's from now on, with all its answers, and will get a result."""
        for answer in (state, *state.siblings):
            self.live[answer.request_id] = answer
        if state.group is not None:
            self.groups[state.group.request_id] = state.group

    def take_changes(self) -> Changes:
        """Those since the last time."""
        changes, self.changes = self.changes, Changes()
        return changes

    def arrive(self, state: RequestState) -> None:
        state.status, state.rank = Status.WAITING, self._num_arrived
        self._num_arrived += 1
        try:
            self.queue.add(state)
        except Exception as error:  # of an order that is not ours: nobody is to be lost for it
            self.refuse(state, error)
            raise
        self.changes.arrived.append(state.label)

    def refuse(self, state: RequestState, error: Exception) -> None:
        """It has come, and cannot wait here."""
        for answer in (state, *state.siblings):
            self.finish(answer, "rejected", state.arrival_time, error)

    def preempt(self, preemption: Preemption, now: float) -> None:
        """Takes memory and place away. Swapped, it keeps what it has computed; else that is to be computed again."""
        state, by, swap = preemption
        self.changes.preempted.append(Preempted(state.label, by.label, state.num_computed, swap))
        if swap:
            self.store.swap_out(state, self.kv.rows(state, 0, state.num_computed))
            self.kv.host[state] = state.num_computed
            state.timeline.num_swapped += state.num_computed
        else:
            state.num_computed = 0
        self.kv.release(state)
        self.active.remove(state)
        state.timeline.num_preemptions += 1
        state.timeline.runs[-1][1] = now
        state.status = Status.WAITING
        try:
            self.queue.add(state)
        except Exception as error:
            self.finish(state, "abort", now, error)
            raise

    def admit(self, admission: Admission, now: float) -> None:
        state, _, cached = admission
        self.queue.take(state)
        self.active.append(state)
        state.status = Status.ACTIVE
        resumed = bool(state.timeline.runs)
        self.changes.admitted.append(Admitted(state.label, cached, state.num_computed, resumed))
        state.timeline.runs.append([now, now])
        if cached:
            self.kv.adopt(state, cached)
            state.num_computed = cached
            if resumed:
                state.timeline.num_recached += cached
            else:
                state.num_cached = state.timeline.num_cached = cached

    def reserve(self, state: RequestState, num_tokens: int) -> None:
        if (copy := self.kv.reserve(state, num_tokens)) is not None:
            self._copy(copy)

    def _copy(self, copy: RowCopy) -> None:
        self.store.copy_rows(*copy)
        self.changes.copied_rows += len(copy.source)

    def swap_in(self, state: RequestState) -> None:
        if self.kv.host.pop(state, None) is not None:
            self.store.swap_in(state, self.kv.rows(state, 0, state.num_computed))

    def commit(self, chunks: Iterable[Chunk], index: int, start: float) -> None:
        """Iteration ``index``, which began at ``start``, has computed the tokens of these chunks."""
        for state, _, stop in chunks:
            state.num_computed = stop
            if stop > state.high_water:
                state.high_water = stop
            if state.last_scheduled < 0:
                state.timeline.scheduled = start
            state.last_scheduled = index
        self.kv.publish(chunk.request for chunk in chunks)

    def fork(self, parent: RequestState, outcomes: dict[RequestState, Outcome], now: float) -> None:
        """The prompt is computed: its other answers begin, each from its own first token."""
        for number, child in enumerate(parent.siblings, start=1):
            if (copy := self.kv.fork(parent, child)) is not None:
                self._copy(copy)
            child.num_computed = child.high_water = parent.num_computed
            child.last_scheduled = parent.last_scheduled
            child.rank = parent.rank + number / MOST_ANSWERS  # right behind it
            child.prompt_logprobs = list(parent.prompt_logprobs)
            child.timeline.num_cached = child.num_cached
            child.status, child.timeline.scheduled = Status.ACTIVE, parent.timeline.scheduled
            child.timeline.runs.append([now, now])
            self.changes.forked.append(Forked(child.label, parent.label, token_of(outcomes[child])))
        place = self.active.index(parent) + 1
        self.active[place:place], parent.siblings = parent.siblings, []

    def emit(self, outcomes: dict[RequestState, Outcome], now: float) -> None:
        """Gives each request its next token, and ends those for whom it was the last."""
        for state, outcome in outcomes.items():
            token, generated = outcome, state.generated
            if type(outcome) is not int:  # a simulated model gives the token itself
                if isinstance(outcome, SamplingError):
                    self.finish(state, "abort", now, outcome)
                    continue
                token = outcome.token
            generated.append(token)
            state.num_tokens += 1
            state.timeline.token_times.append(now)
            if state.request.params.logprobs is not None:
                state.logprobs.append(outcome)
            matched = state.text is not None and state.text.push(token)
            if token in state.stop_token_ids:
                state.stop_reason = token if token in state.params.stop_token_ids else None
                self.finish(state, "stop", now)
            elif matched:
                state.stop_reason = state.text.stop_reason
                self.finish(state, "stop", now)
            elif len(generated) == state.max_new_tokens:
                self.finish(state, "length", now)

    def finish(self, state: RequestState, reason: str, now: float, error: Exception | None = None) -> None:
        """The one place where a request ends: exactly one Result."""
        was_active = state.status is Status.ACTIVE
        if self.kv.host.pop(state, None) is not None:
            self.store.swap_drop(state)
        state.status, state.finish_reason = Status.FINISHED, reason
        if state.text is not None:
            state.text.finish()
        timeline = state.timeline
        timeline.finish, timeline.finish_reason = now, reason
        if was_active:
            timeline.runs[-1][1] = now
            self.num_dead += 1
        del self.live[state.request_id]
        self.changes.finished.append((state.label, reason))
        self.queue.end(state)
        state.result = self.results[state.request_id] = state.to_result(error)
        timeline.error = state.result.error
        group = state.group
        if group is None:
            self.ended.append(state.result)
        elif group.is_finished:
            group.result = self.results[group.request_id] = group.to_result()
            self.ended.append(group.result)
            del self.groups[group.request_id]

    def abort(self, state: RequestState, now: float) -> None:
        """Ends it; and, before their prompt is computed, the other answers that wait for it to do that."""
        for answer in (state, *state.siblings):
            self.finish(answer, "abort", now)
        if state.group is not None and state in state.group.states[0].siblings:  # it will not be forked
            state.group.states[0].siblings.remove(state)
            self.kv.trim(state.group.states[0])

    def leave(self, states: Iterable[RequestState]) -> None:
        """They give up place and memory."""
        gone = set(states)
        for state in states:
            self.kv.release(state)
        self.active[:] = [state for state in self.active if state not in gone]
        self.num_dead -= sum(state.is_finished for state in gone)
