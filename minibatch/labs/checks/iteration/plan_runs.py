"""Checks of iteration.3 in runs of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from minibatch.continuous_batching import ContinuousBatching
from minibatch.engine import Engine
from minibatch.kv_cache import ContiguousKVCache, KVCache
from minibatch.labs.checks.iteration.asked import ASKED, DISPLACING, MIXED, PHASES, PREFILLS, SETTINGS, Asked
from minibatch.labs.plans import twice
from minibatch.labs.properties import for_all
from minibatch.labs.trial import Broken, Trial, Watch, describe, request, requests_of, run
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.plan import Plan
from minibatch.plan_draft import PlanDraft
from minibatch.policies.queueing import Order, Priority
from minibatch.request import Request, RequestState
from minibatch.trace import StepReport


def check() -> None:
    _budget_of_two()
    _displacing()
    for settings in SETTINGS:
        for_all(lambda asked, s=settings: _phases(asked, s), examples=10, asked=ASKED)


def _run(
    requests: list[Request],
    kv: KVCache,
    settings: dict[str, Any],
    order: Order | None = None,
    watch: Watch | None = None,
) -> Trial:
    scheduler = twice(ContinuousBatching)(**settings)
    case = describe({chr(97 + i): each for i, each in enumerate(requests)}, scheduler, kv, order)
    return run(requests, scheduler, kv, order=order, watch=watch, case=case)


def _budget_of_two() -> None:
    """A budget that is smaller than the number of places."""
    for settings in (PREFILLS, PHASES):
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 2}
        trial = _run(requests_of([(1, 4)] * 5), ContiguousKVCache(8, 16), {**limits, **settings})
        longest = max(later - one for label in "abcde" for one, later in pairwise(trial.emitted(label)))
        idea = "Five run and two tokens fit: they take turns, and nobody waits longer than 5 / 2, that is 3 iterations."
        trial.expect(longest <= 3, True, idea=idea, what="longest gap between tokens is at most 3")


class _RunFirst(ContinuousBatching):
    """Those who run are asked first."""

    def plan(self, queue: Order, active: Sequence[RequestState], kv: KVCache, now: float) -> Plan:
        limits = self.max_num_batched_tokens, self.max_num_seqs
        draft = PlanDraft(active, kv, *limits, self.admission, self.preemption)
        draft.run(sorted(active, key=lambda one: one.last_scheduled))
        draft.admit(queue, now)
        return draft.plan()


def _in_words(report: StepReport) -> str:
    said = [f"{change.request_id} preempted by {change.by}" for change in report.preempted]
    said += [f"{change.request_id} joins" for change in report.admitted]
    return "; ".join([*said, *(f"{m.request_id} computes {m.start}:{m.stop}" for m in report.members)])


def _displacing() -> None:
    """a grows, b may be displaced by c, and c by nobody who is worth more than it."""
    requests = [request(7, 9), request(9, 3, first=1, priority=5), request(15, 2, 2, first=2, priority=1)]
    right = run(requests, _RunFirst(preemption=DISPLACING), PagedKVCache(6, 4), order=Priority())
    wanted = {report.index + 1: _in_words(report) for report in right.trace.steps}

    def watch(engine: Engine, report: StepReport) -> Iterator[Broken]:
        joined = {change.request_id for change in report.admitted}
        for change in report.preempted:
            if change.by == "c" and "c" not in joined:
                idea = (
                    "Where newcomers may displace others, those who run are asked first, whatever `first` says: else "
                    "they push the newcomer out again, and somebody has lost its K/V for nothing."
                )
                number = report.index + 1
                yield idea, f"in iteration {number}: {wanted[number]}", f"in iteration {number}: {_in_words(report)}"

    for settings in (MIXED, PREFILLS):
        _run(requests, PagedKVCache(6, 4), {**settings, "preemption": DISPLACING}, Priority(), watch)


def _phases(asked: Asked, settings: dict[str, Any]) -> None:
    def watch(engine: Engine, report: StepReport) -> Iterator[Broken]:
        if settings is PHASES and report.prefill and report.decode:
            idea = "prefill-first: an iteration holds prompts or decodes, never both."
            yield idea, "prefill alone, or decode alone", f"{report.prefill} prefill and {report.decode} decode"

    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 5}
    _run(requests_of(asked), ContiguousKVCache(4, 16), {**limits, **settings}, watch=watch)
