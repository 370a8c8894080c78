"""What each policy promises in its docstring, as a property of random runs, or as an example where numbers matter.

``pick`` chooses one of a sequence (see ``test_engine_properties.py``). All runs are checked against every invariant
after every step.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from random import Random
from typing import Any

import pytest
from helpers import ask, check_drained, check_invariants, names, poison_unused_rows, timeline, token_steps
from hypothesis import HealthCheck, currently_in_test_context, given, note, settings
from hypothesis import strategies as st
from test_cases_scheduling import PlansTwice
from test_engine_properties import (
    ORDERS,
    RANKS,
    SLOT,
    VICTIMS,
    make_admission,
    make_cache,
    make_request,
    picks,
)

from minibatch import (
    ChunkedPrefill,
    ContiguousKVCache,
    ContinuousBatching,
    Engine,
    PagedKVCache,
    Request,
    StaticBatching,
    ToyModel,
)
from minibatch.policies import (
    FCFS,
    ByTokensLeft,
    Fair,
    Forecast,
    LongestPrefix,
    Never,
    Optimistic,
    Priority,
    Recompute,
    ReserveMaximum,
    RoundRobin,
    ShortestFirst,
    Swap,
    Watermark,
    by_priority,
    lowest_priority,
    most_blocks,
    newest,
)
from minibatch.policies.predictors import Noisy, like_its_prompt, upper_bound
from minibatch.prefix_cache import PrefixCachedKVCache
from minibatch.request import InvalidParams, NeverFits, PromptTooLong, RequestRefused, RequestState
from minibatch.trace import StepReport


def few(examples: int) -> Callable[[Any], Any]:
    """So many random runs, the same every time."""
    options = settings(max_examples=examples, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    return lambda test: options(given(data=st.data())(test))


# ---------------------------------------------------------------- parts, runs


def continuous(pick, **policies):
    limits = pick([1, 2, 3, 5]), pick([SLOT, 40])
    return ContinuousBatching(*limits, pick(["mixed", "prefill-first"]), pick(["decode", "prefill"]), **policies)


def decode_first(pick, **policies):
    """Running requests take what they need before anybody joins."""
    if pick([True, False]):
        return ContinuousBatching(pick([1, 2, 3, 5]), pick([SLOT, 40]), **policies)
    return chunked(pick, **policies)


def chunked(pick, **policies):
    return ChunkedPrefill(pick([1, 2, 5, 9]), pick([1, 2, 3, 5]), pick([None, 1, 3]), **policies)


def any_scheduler(pick, **policies):
    return pick([continuous, chunked])(pick, **policies)


def paged(pick, *kinds):
    """Room for one request of the longest kind, and hardly more."""
    size = pick([1, 2, 3, 5])
    return pick(kinds or (PagedKVCache, PrefixCachedKVCache))(-(-SLOT // size) + pick([0, 1, 4]), size)


def any_order(pick):
    return ORDERS[pick(list(ORDERS))]()


def workload(pick, most=8, *, single=False, equal=False):
    """Requests that arrive within a few iterations. ``single``: one answer each; ``equal``: of the same priority."""
    requests = [make_request(pick, number, pick(range(14)) / 2) for number in range(pick(range(2, most + 1)))]
    if single:
        requests = [replace(request, params=replace(request.params, n=1)) for request in requests]
    return [replace(request, priority=0) for request in requests] if equal else requests


def make(scheduler: Any, cache: Any, order: Any = None) -> Engine:
    show(f"{scheduler}, {cache}, {order}")
    return Engine(ToyModel(100), scheduler, cache, order=order)


def show(text: str) -> None:
    """With the example that Hypothesis reports, if it is one of its own."""
    if currently_in_test_context():
        note(text)


def steps(engine: Engine, requests: Sequence[Request] = (), most: int = 3000) -> Iterator[StepReport]:
    """Runs what the door lets in to its end; gives each report when the invariants have been checked."""
    for request in requests:
        show(str(request))
        with contextlib.suppress(NeverFits, PromptTooLong, InvalidParams):  # the last: several answers on slots
            engine.submit(request)
    for _ in range(most):
        poison_unused_rows(engine)
        report = engine.step()
        if report is None:
            check_drained(engine)
            return
        check_invariants(engine, report, fcfs=False)
        yield report
    raise AssertionError(f"still running after {most} steps")


def run(engine: Engine, requests: Sequence[Request] = ()) -> list[StepReport]:
    return list(steps(engine, requests))


def num_preemptions(engine: Engine) -> int:
    return sum(known.num_preemptions for known in engine.trace.timelines)


class Watched:
    """A scheduler that shows every plan of another one, and what it was made of, to ``watch``."""

    def __init__(self, scheduler: Any, watch: Callable[..., object]) -> None:
        self.scheduler, self.watch = scheduler, watch

    def __getattr__(self, name):
        return getattr(self.__dict__["scheduler"], name)

    def plan(self, queue, active, kv, now):
        plan = self.scheduler.plan(queue, active, kv, now)
        self.watch(plan, queue, active, kv, now)
        return plan


# ---------------------------------------------------------------- admission


@few(80)
def test_with_the_maximum_reserved_nobody_is_ever_preempted(data):
    """ReserveMaximum. Fault: answers that fork, shared blocks or a cut prompt outgrow what was reserved."""
    pick = picks(data.draw)
    preemption = pick([Recompute, Swap])(pick(VICTIMS))
    scheduler = any_scheduler(pick, admission=ReserveMaximum(), preemption=preemption)
    engine = make(scheduler, paged(pick), any_order(pick))
    assert not any(step.preempted for step in steps(engine, workload(pick)))


@few(80)
def test_in_an_empty_engine_nothing_that_the_door_accepts_waits_for_memory(data):
    """Watermark. Fault: what is kept free for others is kept free though there are none: a request waits for ever."""
    pick = picks(data.draw)
    admission = Watermark(pick([0.0, 0.01, 0.3, 1.0]), pick([True, False]))
    engine = make(any_scheduler(pick, admission=admission), paged(pick), any_order(pick))
    for number in range(4):
        try:
            name = engine.submit(make_request(pick, number, None))
        except RequestRefused:
            continue
        report = next(steps(engine))
        assert [member.request_id.partition("#")[0] for member in report.members] == [name]
        if pick([True, False]):
            engine.abort(name)
        run(engine)


@few(80)
def test_every_admission_beside_others_leaves_the_watermark_free(data):
    """Watermark. Fault: the share is counted before what was promised in the same plan, or without idle hits."""
    pick = picks(data.draw)
    admission = Watermark(pick([0.1, 0.25, 0.5]), pick([True, False]))
    engine = make(decode_first(pick, admission=admission), paged(pick), any_order(pick))
    keep = int(admission.share * engine.kv.num_units)
    for step in steps(engine, workload(pick)):
        if step.admitted:
            last = step.admitted[-1].request_id
            own = {last, *(fork.request_id for fork in step.forked if fork.parent == last)}
            alone = {holding.request_id for holding in step.kv.holdings} <= own
            assert alone or step.kv.free + step.kv.cached >= keep * engine.kv.unit_size


@few(60)
def test_a_cut_prompt_gets_room_for_all_of_it_or_for_its_first_chunk_only(data):
    """Watermark. Fault: ``whole_prompt`` False sets the whole prompt aside, or True only its first chunk."""
    pick = picks(data.draw)
    whole = pick([True, False])
    engine = make(chunked(pick, admission=Watermark(0.0, whole)), paged(pick), any_order(pick))
    for step in steps(engine, workload(pick)):
        stops = {member.request_id: member.stop for member in step.members}
        units = {holding.request_id: len(holding.units) for holding in step.kv.holdings}
        for label in (change.request_id for change in step.admitted if not change.resumed):
            num_tokens = timeline(engine, label).num_prompt if whole else stops[label]
            assert units[label] == engine.kv.units_for(num_tokens)


@pytest.mark.parametrize("whole", [True, False])
def test_only_with_room_for_its_first_chunk_a_prompt_joins_if_that_is_asked_for(whole):
    """Watermark. Fault: a prompt that does not fit joins though it will get stuck half-way, or waits though it may."""
    scheduler = ChunkedPrefill(5, 4, admission=Watermark(0.0, whole))
    engine = make(scheduler, PagedKVCache(5, 4))
    run(engine, [ask("a", 5, 7), ask("b", 14, 2, at=1.0)])  # a holds 2 blocks, b needs 4, and 1 for the first chunk
    (joined,) = [
        step.index + 1
        for step in engine.trace.steps
        for c in step.admitted
        if (c.request_id, c.resumed) == ("b", False)
    ]
    assert joined == (8 if whole else 2)


def forecasting(pick, admission):
    """Whoever runs gets a token in every iteration."""
    return ContinuousBatching(pick([2, 4, 6]), 400, first=pick(["decode", "prefill"]), admission=admission)


@few(100)
def test_what_was_forecast_happens_so_nobody_is_preempted(data):
    """Forecast. Fault: the peak is looked for at the wrong moments, or a row too early or too late."""
    pick = picks(data.draw)
    engine = make(forecasting(pick, Forecast()), paged(pick), any_order(pick))
    engine.model.eos_token_ids = frozenset(range(0, 100, pick([9, 1000])))
    for step in steps(engine, workload(pick, 10, single=True)):
        assert not step.preempted
        if engine.queue and pick([True, False, False]):
            engine.abort(pick([state.request_id for state in [*engine.queue, *engine.active]]))


@few(60)
def test_a_request_waits_for_the_forecast_only_if_a_simulation_runs_out_of_blocks(data):
    """Forecast. Fault: what is added up as the plan goes on is not what would be found from the beginning."""
    pick = picks(data.draw)
    predictor = pick([upper_bound, like_its_prompt, Noisy(sigma=0.7), expects_one])

    def peak(members, size):
        left = [max(math.ceil(predictor(member)) - len(member.generated), 1) for member in members]
        return max(
            sum(-(-(m.num_tokens + after) // size) for m, end in zip(members, left, strict=True) if after < end)
            for after in range(max(left))
        )

    def watch(plan, queue, active, kv, now):
        running = list(active)
        for joined in (change.request for change in plan.admissions):
            assert not running or peak([*running, joined], kv.unit_size) <= kv.num_units
            running.append(joined)
        for request, reason in plan.waiting:
            if reason.startswith("forecast"):
                assert peak([*running, request], kv.unit_size) > kv.num_units

    scheduler = Watched(ContinuousBatching(pick([2, 4, 6]), 400, admission=Forecast(predictor)), watch)
    run(make(scheduler, paged(pick), pick([FCFS(), ShortestFirst(), Fair()])), workload(pick, 12))


def expects_one(request: RequestState) -> float:
    return 1


@pytest.mark.parametrize("predictor", [None, expects_one])
def test_only_a_forecast_that_expects_too_little_preempts(predictor):
    """Forecast. Fault: the property above holds because nobody would be preempted anyway."""
    admission = Forecast() if predictor is None else Forecast(predictor)
    engine = make(ContinuousBatching(4, 64, admission=admission), PagedKVCache(5, 4))
    run(engine, [ask(f"r{i}", 3, 9) for i in range(4)])
    assert (num_preemptions(engine) > 0) == (predictor is expects_one)


def test_a_forecast_admits_who_would_have_to_wait_for_the_maximum():
    """Forecast. Fault: it adds up everybody's longest, which is the reservation that it is meant to replace."""
    requests = [ask("long", 4, 9), ask("short", 4, 5)]  # 3 + 2 blocks at their longest, 2 + 2 when the short one ends
    starts = {}
    for admission in (Forecast(), ReserveMaximum()):
        engine = make(ContinuousBatching(4, 64, admission=admission), PagedKVCache(4, 4))
        run(engine, requests)
        assert num_preemptions(engine) == 0
        starts[type(admission)] = token_steps(engine, "short")[0]
    assert starts == {Forecast: 1, ReserveMaximum: 10}


@few(80)
def test_nobody_waits_whose_first_iteration_fits(data):
    """Optimistic. Fault: something is kept free, or what others may need later counts."""
    pick = picks(data.draw)
    scheduler = any_scheduler(pick, admission=Optimistic(), preemption=pick([Recompute, Swap])(pick(VICTIMS)))
    engine = make(scheduler, paged(pick, PagedKVCache))
    for step in steps(engine, workload(pick)):
        head = next(iter(engine.queue), None)
        if head is None or step.preempted:
            continue
        seqs = len(step.kv.holdings) + sum(len(state.siblings) for state in engine.active)
        size, budget = head.num_pending, scheduler.token_budget - step.num_tokens
        if isinstance(scheduler, ChunkedPrefill):
            size = min(size, budget, scheduler.max_chunk or size)
        blocks = engine.kv.units_for(head.num_computed + size)
        fits = blocks * engine.kv.unit_size <= step.kv.free and 0 < size <= budget
        assert not fits or seqs + head.num_seqs > scheduler.max_num_seqs


# ---------------------------------------------------------------- order: by arrival


class Asked(FCFS):
    """Remembers, plan by plan, whom it was asked for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.plans: list[list[RequestState]] = []

    def walk(self, draft, now):
        self.plans.append([])
        for request in super().walk(draft, now):
            self.plans[-1].append(request)
            yield request


@few(80)
def test_strict_fcfs_admits_in_the_order_of_arrival(data):
    """FCFS. Fault: a request that fits overtakes one that does not, or those preempted go to the end."""
    pick = picks(data.draw)
    preemption = pick([Recompute, Swap])(pick(VICTIMS))
    scheduler = any_scheduler(pick, admission=make_admission(pick), preemption=preemption)
    engine = make(pick([scheduler, scheduler, StaticBatching(2)]), make_cache(pick))
    arrived, first = [], []
    for step in steps(engine, workload(pick)):
        arrived += step.arrived
        first += [change.request_id for change in step.admitted if not change.resumed]
        ranks = [state.rank for state in engine.queue]
        assert ranks == sorted(ranks), "one that was preempted is not back in its place"
    assert first == [label for label in arrived if label in set(first)]


def test_strict_fcfs_lets_nobody_overtake_a_newcomer_that_a_more_urgent_one_has_kept_out():
    """FCFS with ``displaces``. Fault: the thrash guard and the head of the line know of preempted requests only, not of
    one that was to join in this very plan."""
    engine = make(ContinuousBatching(4, 32, preemption=Recompute(displaces=by_priority)), PagedKVCache(5, 4))
    urgent = replace(ask("urgent", 16, 2), priority=-1)
    run(engine, [ask("first", 16, 2), urgent, ask("last", 2, 2)])  # 5 blocks, 5 blocks, 1 block
    assert names(engine.trace.steps[0].admitted) == ("urgent",)


def test_lookahead_is_how_many_are_asked_after_the_first_that_does_not_fit():
    """FCFS. Fault: more requests overtake in one iteration than ``lookahead`` says."""
    order = Asked(lookahead=1)
    engine = make(ContinuousBatching(8, 64), PagedKVCache(8, 4), order)
    run(engine, [ask("a", 12, 9), ask("large", 24, 4), *(ask(f"small{i}", 2, 2) for i in range(3))])
    assert [request.label for request in order.plans[0]] == ["a", "large", "small0"]


@pytest.mark.slow
@few(80)
def test_at_most_lookahead_more_are_refused_after_the_first(data):
    """FCFS. Fault: the queue is searched to its end, or left too early."""
    pick = picks(data.draw)
    order = Asked(lookahead=pick([0, 1, 2, 4]), patience=pick([float("inf"), 3.0]))

    def watch(plan, queue, active, kv, now):
        asked, joined = order.plans[-1], {change.request for change in plan.admissions}
        refused = [request for request in asked if request not in joined]
        assert len(refused) <= order.lookahead + 1
        assert refused or len(asked) == len(queue)

    scheduler = ContinuousBatching(pick([2, 4]), 64, admission=make_admission(pick))
    run(make(Watched(scheduler, watch), paged(pick), order), workload(pick, 10))


@pytest.mark.slow
@few(80)
def test_nobody_overtakes_a_request_that_has_run_out_of_patience(data):
    """FCFS. Fault: a large request starves though it was to be overtaken for a while only."""
    pick = picks(data.draw)
    order = FCFS(lookahead=pick([1, 3, 9]), patience=float(pick([0, 1, 3, 6])))
    preemption = pick([Recompute, Swap])(pick(VICTIMS))

    def watch(plan, queue, active, kv, now):
        for joined, passed in overtakings(plan, queue):
            assert now - passed.arrival_time <= order.patience, f"{joined.label} overtakes {passed.label}"

    scheduler = any_scheduler(pick, admission=make_admission(pick), preemption=preemption)
    run(make(Watched(scheduler, watch), paged(pick), order), workload(pick, 10))


def overtakings(plan, queue) -> Iterator[tuple[RequestState, RequestState]]:
    """Who is admitted, and who arrived before and goes on waiting."""
    joined = [change.request for change in plan.admissions]
    for request in joined:
        for other in queue:
            if other.rank < request.rank and other not in joined:
                yield request, other


# ---------------------------------------------------------------- order: by urgency


@pytest.mark.slow
@few(80)
def test_a_request_is_overtaken_only_by_more_urgent_ones_that_come_soon_enough(data):
    """Priority. Fault: ageing counts from the wrong time, has the wrong sign, or changes the order while they wait."""
    pick = picks(data.draw)
    order = Priority(pick([0.5, 2.0, 5.0, float("inf")]))
    preemption = pick([Recompute, Swap])(pick(VICTIMS))

    def watch(plan, queue, active, kv, now):
        for joined, passed in overtakings(plan, queue):
            assert joined.priority < passed.priority
            later = joined.arrival_time - passed.arrival_time
            assert later < order.ageing * (passed.priority - joined.priority)

    scheduler = any_scheduler(pick, admission=make_admission(pick), preemption=preemption)
    run(make(Watched(scheduler, watch), paged(pick), order), workload(pick, 10))


@pytest.mark.parametrize("ageing", [float("inf"), 10.0])
def test_under_an_endless_stream_of_urgent_requests_only_ageing_ends_the_wait(ageing):
    """Priority. Fault: a patient request starves behind a stream that is faster than the engine, in spite of ageing."""
    engine = make(ContinuousBatching(1, 64), PagedKVCache(8, 4), Priority(ageing))
    stream = [replace(ask(f"u{i}", 2, 2, at=float(i)), priority=0) for i in range(60)]
    run(engine, [replace(ask("patient", 2, 2), priority=1), *stream])
    overtook = sum(known.scheduled < timeline(engine, "patient").scheduled for known in engine.trace.timelines)
    assert overtook == (60 if ageing == float("inf") else 10)  # those that come in the first ten seconds


# ---------------------------------------------------------------- order: by length


@few(30)
def test_shortest_first_has_the_least_mean_wait_of_all_orders(data):
    """ShortestFirst. Fault: the longest comes first, prompts count, or what has been generated counts twice."""
    pick = picks(data.draw)
    requests = [ask(f"r{i}", pick(range(1, 9)), pick(range(1, 10))) for i in range(pick([4, 5]))]
    waits = {}
    for order in (FCFS(), ShortestFirst()):
        engine = make(ContinuousBatching(1, 64), PagedKVCache(8, 4), order)
        run(engine, requests)
        waits[type(order)] = sum(known.scheduled for known in engine.trace.timelines)
    lengths = [request.params.max_tokens for request in requests]
    assert waits[FCFS] == total_wait(lengths)
    assert waits[ShortestFirst] == min(map(total_wait, permutations(lengths)))


def total_wait(lengths: Sequence[int]) -> int:
    """Of requests that run one after the other, a token an iteration."""
    return sum(sum(lengths[:place]) for place in range(len(lengths)))


@few(60)
def test_with_the_right_to_displace_whoever_has_least_left_runs(data):
    """ByTokensLeft. Fault: a long request is not interrupted, or equals interrupt each other in turns."""
    pick = picks(data.draw)
    preemption = pick([Recompute, Swap])(pick(VICTIMS), ByTokensLeft())

    def left(request):
        return request.max_new_tokens - len(request.generated)

    def watch(plan, queue, active, kv, now):
        (chunk,) = plan.chunks
        assert left(chunk.request) == min(left(request) for request in [*queue, *active])
        assert not active or chunk.request is active[0] or left(chunk.request) < left(active[0])

    limits = pick([ContinuousBatching(1, SLOT, preemption=preemption), ChunkedPrefill(4, 1, preemption=preemption)])
    cache = pick([ContiguousKVCache(1, SLOT), PagedKVCache(SLOT, 1), PrefixCachedKVCache(12, 2)])
    run(make(Watched(limits, watch), cache, ShortestFirst()), workload(pick, single=True))


def test_a_short_newcomer_interrupts_a_long_request_only_if_it_may():
    """ShortestFirst. Fault: non-preemptive shortest-first interrupts, or shortest-remaining-first does not."""
    starts = {}
    for displaces in (None, ByTokensLeft()):
        engine = make(ContinuousBatching(1, 64, preemption=Recompute(displaces=displaces)), PagedKVCache(8, 4))
        engine = make(engine.scheduler, PagedKVCache(8, 4), ShortestFirst())
        run(engine, [ask("long", 3, 12), ask("short", 3, 2, at=4.0), ask("shorter", 3, 1, at=5.0)])
        starts[displaces is not None] = [token_steps(engine, name)[0] for name in ("long", "short", "shorter")]
        assert num_preemptions(engine) == (displaces is not None)  # shorter has as much left as short: no exchange
    assert starts == {False: [1, 14, 13], True: [1, 5, 7]}


# ---------------------------------------------------------------- order: by prefix


class CountingCache(PrefixCachedKVCache):
    """Remembers for whom a prefix was looked up since the last draft was made."""

    def draft(self):
        self.looked_up: list[RequestState] = []
        return super().draft()

    def match(self, request):
        self.looked_up.append(request)
        return super().match(request)


@few(40)
def test_the_longest_prefix_in_the_window_is_next_unless_the_first_has_lost_patience(data):
    """LongestPrefix. Fault: the best of the whole queue, or the worst, or a request is overtaken for ever."""
    pick = picks(data.draw)
    order = LongestPrefix(window=pick([1, 2, 4]), patience=pick([float("inf"), 4.0]))

    def watch(plan, queue, active, kv, now):
        if plan.admissions:
            window = list(queue)[: order.window]
            best = max(window, key=lambda request: len(kv.match(request)))
            impatient = now - window[0].arrival_time > order.patience
            assert plan.admissions[0].request is (window[0] if impatient else best)

    scheduler = Watched(ContinuousBatching(1, 64), watch)
    run(make(scheduler, PrefixCachedKVCache(20, pick([1, 2])), order), workload(pick, 12, single=True))


@pytest.mark.parametrize("window", [1, 5, 16])
@pytest.mark.parametrize("slots", [1, 3])
def test_a_plan_looks_up_the_prefixes_of_a_window_of_a_long_queue_only(window, slots):
    """LongestPrefix. Fault: every plan searches the cache for each of thousands of waiting requests."""
    most = [0]

    def watch(plan, queue, active, kv, now):
        assert len(kv.looked_up) <= window + len(plan.admissions)
        most[0] = max(most[0], len(kv.looked_up))

    scheduler = Watched(ContinuousBatching(slots, 64), watch)
    engine = make(scheduler, CountingCache(12, 2), LongestPrefix(window=window))
    for i in range(100):
        engine.submit(ask(f"r{i}", 3, 2))
    while engine.step():
        pass
    assert most[0] >= window


# ---------------------------------------------------------------- order: by client


@few(80)
def test_no_client_has_two_turns_while_another_waits_for_one(data):
    """RoundRobin. Fault: a client's turns follow its requests' arrivals, or all of a plan go to one client."""
    pick = picks(data.draw)
    since: dict[str, Counter] = {}  # by waiting client: the turns that others have had since its own last one

    def watch(plan, queue, active, kv, now):
        waiting = Counter(request.client for request in queue)
        for client in set(since) - set(waiting):
            del since[client]
        for client in waiting:
            since.setdefault(client, Counter())
        for client in (change.request.client for change in plan.admissions):
            waiting[client] -= 1
            since[client] = Counter()
            for other in +waiting:
                since[other][client] += other != client
                assert since[other][client] <= 1, f"{client} has two turns and {other} none"

    scheduler = any_scheduler(pick, admission=ReserveMaximum(), preemption=Never())
    run(make(Watched(scheduler, watch), paged(pick), RoundRobin()), workload(pick, 14))


def fair_scheduler(pick, slots=(1, 2, 4)):
    """The conditions of the published bound: nobody can be preempted."""
    policies = {"admission": ReserveMaximum(), "preemption": Never()}
    phases = pick(["mixed", "prefill-first"]), pick(["decode", "prefill"])
    unchunked = ContinuousBatching(pick(slots), 64, *phases, **policies)
    return pick([unchunked, ChunkedPrefill(pick([3, 6, 20]), pick(slots), **policies)])


def fair_workload(pick, clients, most_tokens):
    """Each client has its own kind of request, up to those that fill the whole cache; some come late."""
    kinds = {}
    for client in clients:
        prompt = pick(range(1, most_tokens + 1))
        kinds[client] = min(prompt, pick([2, 5, 99])), min(most_tokens + 1 - prompt, pick([2, 5, 99]))
    requests = []
    for number in range(pick(range(8, 25))):
        client = pick(clients)
        request = ask(f"r{number}", *kinds[client], at=float(pick([0, 0, 0, 3, 9, 20])))
        requests.append(replace(request, client=client))
    return requests


def backlogs(engine: Engine, requests: Sequence[Request]) -> Iterator[dict[str, float]]:
    """After each step, the service that each client with waiting requests has had, from the reports alone."""
    order, served = engine.queue, Counter()
    client = {request.request_id: request.client for request in requests}
    for step in steps(engine, requests):
        for change in step.admitted:
            served[client[change.request_id]] += order.input_weight * timeline(engine, change.request_id).num_prompt
        for member in step.members:
            served[client[member.request_id]] += order.output_weight * (member.emitted is not None)
        yield {state.client: served[state.client] for state in engine.queue}


def most_unfair(histories: Sequence[dict[str, float]], one: str, other: str) -> float:
    """How much more service one of two clients had than the other in any interval in which both always waited."""
    most, lead = 0.0, []
    for served in histories:
        if one in served and other in served:
            lead.append(served[one] - served[other])
            most = max(most, max(lead) - min(lead))
        else:
            lead = []
    return most


@pytest.mark.slow
@few(100)
def test_backlogged_clients_get_the_same_service_but_for_a_bound(data):
    """Fair. Fault: a token is charged twice or not at all, or a client is served out of turn.

    With ``u = output_weight * (rows of the cache) + input_weight``: a client that is ahead gets no further request
    admitted, so its lead grows by what it has running only. Their rows are ``P + G - 1`` each, and all fit; and one of
    the prompts may have been charged since the lead was 0.
    """
    pick = picks(data.draw)
    size = pick([1, 2, 4])
    cache = PagedKVCache(pick([6, 12, 18]) // size + 1, size)
    order = Fair(input_weight=pick([0.0, 0.5, 1.0, 2.0]), output_weight=pick([2.0, 3.0]))
    engine = make(fair_scheduler(pick), cache, order)
    bound = order.output_weight * cache.num_rows + order.input_weight
    histories = []
    for served in backlogs(engine, fair_workload(pick, "vwxy"[: pick([2, 3, 4])], cache.num_rows)):
        counters = [order.counter(client) for client in served]
        assert not counters or max(counters) - min(counters) <= bound
        histories.append(served)
    for pair in permutations({client for served in histories for client in served}, 2):
        assert most_unfair(histories, *pair) <= 2 * bound


def test_the_bound_is_reached_by_a_request_that_fills_the_cache():
    """Fair. Fault: the newest token is charged and not yet cached, so the capacity alone is too small a bound."""
    engine = make(ContinuousBatching(4, 64, admission=ReserveMaximum()), PagedKVCache(8, 1), Fair())
    requests = [replace(ask(name, 1, 8), client=name[0]) for name in ("a1", "b1", "a2", "b2")]
    leads = []
    for _ in backlogs(engine, requests):
        counters = [engine.queue.counter(client) for client in {state.client for state in engine.queue}]
        leads.append(max(counters, default=0) - min(counters, default=0))
    assert max(leads) == 2.0 * 8 + 1.0


@pytest.mark.slow
@few(40)
def test_weighted_clients_get_service_in_proportion(data):
    """Fair. Fault: a weight that is squared, inverted, or forgotten where a counter is compared."""
    pick = picks(data.draw)
    weights = {"x": pick([2.0, 3.0]), "y": 1.0, "z": pick([0.5, 1.0])}
    cache, order = PagedKVCache(18, 1), Fair(weights)
    engine = make(fair_scheduler(pick), cache, order)
    bound = order.output_weight * cache.num_rows + order.input_weight
    for served in backlogs(engine, fair_workload(pick, "xyz", cache.num_rows)):
        for one, other in permutations(served, 2):
            lead = order.counter(one) / weights[one] - order.counter(other) / weights[other]
            assert lead <= bound / weights[one]


def test_in_the_long_run_three_times_the_weight_is_three_times_the_service():
    """Fair. Fault: weights that are within a bound, and without effect."""
    engine = make(ContinuousBatching(2, 64), PagedKVCache(16, 2), Fair({"x": 3.0}))
    requests = [replace(ask(f"{client}{i}", 3, 4), client=client) for i in range(80) for client in "xy"]
    both = [served for served in backlogs(engine, requests) if len(served) == 2]
    assert len(both) > 150
    assert both[-1]["x"] / both[-1]["y"] == pytest.approx(3.0, rel=0.05)


@pytest.mark.slow
@few(80)
def test_each_admission_is_of_the_waiting_client_with_the_lowest_counter(data):
    """Fair. Fault: all admissions of a plan go to one client, because they are charged only when the plan is carried
    out; or those that come back from a preemption are charged again."""
    pick = picks(data.draw)
    order = Fair({"x": 2.0, "y": 0.5}, input_weight=pick([0.5, 2.0]), lift=pick([True, False]))

    def watch(plan, queue, active, kv, now):
        waiting = Counter(request.client for request in queue)
        standing = {client: order.counter(client) / order.weights.get(client, 1.0) for client in waiting}
        for request, _, cached in plan.admissions:
            assert standing[request.client] == min(standing[client] for client in +waiting)
            waiting[request.client] -= 1
            if not request.timeline.runs:
                cost = order.input_weight * (request.num_prompt - cached)
                standing[request.client] += cost / order.weights.get(request.client, 1.0)

    preemption = pick([Recompute, Swap])(pick(VICTIMS))
    scheduler = any_scheduler(pick, admission=make_admission(pick), preemption=preemption)
    run(make(Watched(scheduler, watch), paged(pick), order), workload(pick, 12))


@pytest.mark.parametrize("lift", [True, False])
def test_only_without_the_lift_a_client_that_comes_back_is_served_alone(lift):
    """Fair. Fault: the credit of an idle client is kept, so that others starve until it is used up; or the bound on
    the service in an interval of common backlog is so wide that it says nothing."""
    cache, order = PagedKVCache(8, 1), Fair(lift=lift)
    engine = make(ContinuousBatching(2, 64, admission=ReserveMaximum()), cache, order)
    busy = [replace(ask(f"busy{i}", 2, 3), client="busy") for i in range(60)]
    back = [replace(ask(f"back{i}", 2, 3, at=60.0), client="back") for i in range(30)]
    histories = list(backlogs(engine, [*busy, *back]))
    bound = order.output_weight * cache.num_rows + order.input_weight
    assert sum(len(served) == 2 for served in histories) > 20
    assert (most_unfair(histories, "back", "busy") <= 2 * bound) == lift


@few(60)
def test_counters_are_what_was_computed_and_generated_whatever_happened(data):
    """Fair. Fault: recomputed or cached tokens are paid for, an aborted request pays for what was never computed, or
    a counter drifts with every preemption."""
    pick = picks(data.draw)
    order = Fair(input_weight=0.5, output_weight=3.0, lift=False)
    cut = pick([True, False])
    if cut:  # then what a prompt costs is known when all of it has been computed
        scheduler = chunked(pick, admission=ReserveMaximum(), preemption=Never())
    else:
        preemption = pick([Recompute, Swap])(pick(VICTIMS), pick(RANKS))
        scheduler = continuous(pick, admission=make_admission(pick), preemption=preemption)
    engine = make(scheduler, paged(pick), order)
    requests, due = workload(pick, 10), Counter()
    client = {request.request_id: request.client for request in requests}
    for step in steps(engine, requests):
        for member in step.members:
            due[client[member.request_id.partition("#")[0]]] += 0.5 * member.prefill + 3.0 * (
                member.emitted is not None
            )
        for fork in step.forked:
            due[client[fork.request_id.partition("#")[0]]] += 3.0 * (fork.emitted is not None)
        if pick([True, False, False, False]):
            engine.abort(pick([request.request_id for request in requests]))
        assert cut or {name: order.counter(name) for name in due} == due
    assert {name: order.counter(name) for name in due} == due


# ---------------------------------------------------------------- preemption


@pytest.mark.slow
@few(120)
def test_the_senior_is_never_displaced_and_everybody_ends(data):
    """Preemption. Fault: a victim rule that takes the senior too, or two ideas of who is senior, so that requests
    displace each other for ever."""
    pick = picks(data.draw)
    displaces = pick([None, by_priority, ByTokensLeft(), ByTokensLeft(like_its_prompt)])
    preemption = pick([Recompute, Swap])(pick(VICTIMS), displaces)
    by = displaces or by_priority

    def watch(plan, queue, active, kv, now):
        running = [*active, *(change.request for change in plan.admissions)]
        senior = min(running, key=lambda request: (by(request), request.rank), default=None)
        displacers = displaced_by_rank(plan)
        assert displacers <= set(running), "displaced in vain"
        for victim, other, _ in plan.preemptions:
            assert victim is not senior
            assert other not in displacers or by(other) < by(victim), "displaced by an equal"

    admission = pick([Optimistic(), Watermark(0.0), Watermark(0.0, False), Forecast(expects_one)])
    scheduler = any_scheduler(pick, admission=admission, preemption=preemption)
    size = pick([1, 2, 3])
    cache = pick([PagedKVCache, PrefixCachedKVCache])(SLOT // size, size)
    run(make(Watched(scheduler, watch), cache, any_order(pick)), workload(pick, 12))


def displaced_by_rank(plan) -> set[RequestState]:
    """Newcomers that have displaced somebody whom they outrank."""
    reasons = {waiting.request: waiting.reason for waiting in plan.waiting}
    return {change.by for change in plan.preemptions if "outranks" in reasons[change.request]}


@pytest.mark.parametrize("order", [FCFS, ShortestFirst])
def test_by_length_and_by_arrival_two_requests_do_not_displace_each_other_in_turns(order):
    """ByTokensLeft. Fault: the short one takes the place of the one that arrived first, which takes it back for that
    reason when they have both grown; neither ever gets its prompt computed."""
    preemption = Recompute(displaces=ByTokensLeft())
    scheduler = ChunkedPrefill(2, 2, max_chunk=1, admission=Optimistic(), preemption=preemption)
    engine = make(scheduler, PagedKVCache(2, 3), order())
    for _ in steps(engine, [ask("senior", 4, 3), ask("short", 3, 2)], most=200):
        pass


@few(80)
def test_nobody_joins_once_somebody_is_preempted_but_the_one_that_displaced_it(data):
    """Thrash guard. Fault: what was just taken from one is given to a newcomer, and they take turns for ever."""
    pick = picks(data.draw)
    preemption = pick([Recompute, Swap])(pick(VICTIMS), pick(RANKS))

    def watch(plan, queue, active, kv, now):
        if plan.preemptions and preemption.displaces is None:
            assert not plan.admissions
        elif plan.preemptions:
            displacers = displaced_by_rank(plan)
            assert displacers <= {change.request for change in plan.admissions[-1:]}, "somebody joined after it"
            assert displacers or not plan.admissions

    scheduler = decode_first(pick, admission=make_admission(pick), preemption=preemption)
    run(make(Watched(scheduler, watch), paged(pick), any_order(pick)), workload(pick, 10))


@pytest.mark.slow
@few(150)
def test_where_prefills_come_first_newcomers_give_way_before_anybody_is_preempted(data):
    """Thrash guard. Fault: a running request is preempted so that one that joins in the same iteration can stay."""
    pick = picks(data.draw)

    def watch(plan, queue, active, kv, now):
        assert not (plan.preemptions and plan.admissions)

    admission = pick([Optimistic(), Watermark(0.0), Forecast(expects_one)])
    policies = {"admission": admission, "preemption": pick([Recompute, Swap])(pick(VICTIMS))}
    scheduler = ContinuousBatching(pick([3, 5]), 40, "mixed", "prefill", **policies)
    size = pick([1, 2, 3])
    run(make(Watched(scheduler, watch), PagedKVCache(SLOT // size, size), any_order(pick)), workload(pick, 12))


@pytest.mark.parametrize("victim", [most_blocks, lowest_priority])
def test_a_newcomer_that_took_the_last_block_gives_it_back_before_anybody_is_preempted(victim):
    """Thrash guard. Fault: as above; the victim rule knows only who has most, or is least urgent."""
    scheduler = ContinuousBatching(4, 64, first="prefill", admission=Optimistic(), preemption=Recompute(victim))
    engine = make(scheduler, PagedKVCache(5, 2))
    requests = [ask("senior", 2, 4), replace(ask("junior", 4, 4), priority=2), ask("newcomer", 2, 1, at=1.0)]
    reports = run(engine, [replace(requests[0], priority=0), requests[1], replace(requests[2], priority=1)])
    assert not any(step.preempted and step.admitted for step in reports)


def test_where_prefills_come_first_nobody_is_displaced_in_vain():
    """Preemption. Fault: a newcomer takes the blocks of one that it outranks, and has to give them up in the same plan
    to one that outranks it."""
    scheduler = ContinuousBatching(
        4, 64, first="prefill", admission=Optimistic(), preemption=Recompute(displaces=by_priority)
    )
    engine = make(scheduler, PagedKVCache(3, 2), Priority())
    late, urgent = replace(ask("late", 2, 3), priority=2), replace(ask("urgent", 4, 1, at=1.0), priority=1)
    for step in steps(engine, [ask("senior", 2, 3), late, urgent]):
        assert {change.by for change in step.preempted} <= {member.request_id for member in step.members} | {"late"}


# ---------------------------------------------------------------- swap


@few(80)
def test_with_a_host_that_is_large_enough_nothing_is_computed_twice(data):
    """Swap. Fault: what was swapped is forgotten, found in the prefix cache as well, or only partly brought back."""
    pick = picks(data.draw)
    preemption = Swap(pick(VICTIMS), pick(RANKS))
    engine = make(
        any_scheduler(pick, admission=make_admission(pick), preemption=preemption), paged(pick), any_order(pick)
    )
    reports = run(engine, workload(pick, 10))
    assert sum(step.recomputed for step in reports) == 0
    assert all(change.swapped for step in reports for change in step.preempted)
    assert sum(step.swapped_out for step in reports) == sum(step.swapped_in for step in reports)


@few(80)
def test_the_host_is_never_overfull_and_who_does_not_fit_is_computed_again(data):
    """Swap. Fault: victims of one plan are each counted alone, those that come back are counted as gone too early, or a
    victim that would fit is dropped."""
    pick = picks(data.draw)
    preemption = Swap(pick(VICTIMS), pick(RANKS), host_tokens=pick([1, 6, 13, 25]))

    def watch(plan, queue, active, kv, now):
        on_host = sum(kv.host.values())
        assert on_host <= preemption.host_tokens
        for request, _, swap in plan.preemptions:
            assert swap == (on_host + request.num_computed <= preemption.host_tokens)
            on_host += swap * request.num_computed

    scheduler = any_scheduler(pick, admission=make_admission(pick), preemption=preemption)
    engine = make(Watched(scheduler, watch), paged(pick), any_order(pick))
    for step in steps(engine, workload(pick, 10)):
        assert step.kv.host <= preemption.host_tokens
        if pick([True, False, False, False, False, False]) and engine.queue:
            engine.abort(next(iter(engine.queue)).request_id)  # perhaps one that is swapped out: its room is free then


@pytest.mark.parametrize(("host_tokens", "recomputed"), [(7, 8), (8, 0)])
def test_a_victim_of_eight_tokens_is_swapped_if_the_host_has_room_for_eight(host_tokens, recomputed):
    """Swap. Fault: the comparison is off by one."""
    engine = make(ContinuousBatching(4, 64, preemption=Swap(host_tokens=host_tokens)), PagedKVCache(4, 4))
    reports = run(engine, [ask("old", 4, 9), ask("new", 4, 9)])  # both have 8 rows and need a third block
    assert [(p.request_id, p.num_tokens) for step in reports for p in step.preempted] == [("new", 8)]
    assert sum(step.recomputed for step in reports) == recomputed
    assert max(step.kv.host for step in reports) == 8 - recomputed


@pytest.mark.parametrize(("host_tokens", "swapped"), [(4, 0), (9, 1), (10, 2)])
def test_two_victims_of_one_plan_have_to_fit_the_host_together(host_tokens, swapped):
    """Swap. Fault: each is compared with a host that the other has not filled yet."""
    preemption = Swap(displaces=by_priority, host_tokens=host_tokens)
    engine = make(ContinuousBatching(4, 64, preemption=preemption), PagedKVCache(4, 4), Priority())
    urgent = replace(ask("urgent", 13, 2, at=2.0), priority=-1)
    reports = run(engine, [ask("a", 4, 5), ask("b", 4, 5), urgent])
    assert [change.num_tokens for change in reports[2].preempted] == [5, 5]
    assert [change.swapped for change in reports[2].preempted].count(True) == swapped


# ---------------------------------------------------------------- planning is pure


COMBINATIONS = [
    (order, admission, preemption)
    for order in ORDERS
    for admission in (Watermark(0.0), Watermark(0.3, False), ReserveMaximum(), Forecast(), Optimistic())
    for displaces in RANKS
    for preemption in (*(Recompute(victim, displaces) for victim in VICTIMS), Swap(newest, displaces, host_tokens=12))
]


def check_purity(combinations: Sequence[tuple[str, Any, Any]]) -> None:
    num_preemptions = 0
    for seed, (order, admission, preemption) in enumerate(combinations):
        rng = Random(seed)
        scheduler = any_scheduler(rng.choice, admission=admission, preemption=preemption)
        scheduler = PlansTwice(scheduler)
        try:
            run(Engine(ToyModel(100), scheduler, paged(rng.choice), order=ORDERS[order]()), workload(rng.choice))
        except Exception as error:
            raise AssertionError(f"{order}, {scheduler.scheduler}") from error
        num_preemptions += scheduler.num_preemptions
    assert num_preemptions > len(combinations) / 4


@pytest.mark.slow
def test_planning_twice_gives_the_same_plan_and_changes_nothing():
    """Fault: a policy that counts, remembers, or sorts the queue while it is asked."""
    check_purity(COMBINATIONS[::19])


@pytest.mark.slow
def test_planning_twice_with_any_combination_of_policies():
    """The same, for all of them."""
    check_purity(COMBINATIONS)


@pytest.mark.parametrize("order", ORDERS)
def test_a_static_batch_is_planned_twice_from_any_order(order):
    """Fault: as above."""
    scheduler = PlansTwice(StaticBatching(2, 1.0))
    engine = Engine(ToyModel(100), scheduler, PagedKVCache(SLOT, 2), order=ORDERS[order]())
    assert len(run(engine, workload(Random(0).choice, single=True))) <= scheduler.num_plans
