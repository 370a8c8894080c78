"""Displacing is taking somebody's K/V: it happens for a place or for memory, for one who then joins, and not otherwise.

And what a policy of one's own can do wrong beyond a wrong answer: not being an object, losing requests, keys that are
no numbers.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers import ask, check_drained, check_invariants, check_solo, names, run_checked, token_steps

from minibatch import (
    ChunkedPrefill,
    ContiguousKVCache,
    ContinuousBatching,
    Engine,
    PagedKVCache,
    StaticBatching,
    ToyModel,
    metrics,
)
from minibatch.plan import PlanError
from minibatch.policies import (
    AdmissionPolicy,
    ByTokensLeft,
    Fair,
    Forecast,
    Never,
    Optimistic,
    Order,
    Priority,
    Recompute,
    RoundRobin,
    ShortestFirst,
    Swap,
    Watermark,
    by_priority,
    most_blocks,
    newest,
)
from minibatch.policies.predictors import Noisy, Oracle
from minibatch.request import EngineStalled

BY_PRIORITY = Recompute(displaces=by_priority)


def of(request, priority):
    return replace(request, priority=priority)


def run(engine, requests):
    check_solo(requests, run_checked(engine, requests, fcfs=False))


def num_preempted(engine):
    return sum(len(step.preempted) for step in engine.trace.steps)


# ---------------------------------------------------------------- for what


@pytest.mark.parametrize(
    "scheduler",
    [ContinuousBatching(32, 32, preemption=BY_PRIORITY), ChunkedPrefill(20, 32, preemption=BY_PRIORITY)],
    ids=["whole", "cut"],
)
def test_nobody_loses_kv_for_the_token_budget_of_one_iteration(scheduler):
    """Fault: an urgent prompt that does not fit beside the decodes of this iteration throws out half of the batch,
    though memory is nearly empty and there is a new budget in the next iteration."""
    engine = Engine(ToyModel(), scheduler, PagedKVCache(640, 4), order=Priority())
    requests = [of(ask(f"r{i}", 1, 16), 1) for i in range(20)] + [of(ask("H", 28, 4, at=5.0), 0)]
    run(engine, requests)
    assert num_preempted(engine) == 0
    waited = [reason for step in engine.trace.steps for name, reason in step.waiting if name == "H"]
    assert waited and all(reason.startswith("token budget: needs") for reason in waited)


def test_the_budget_that_the_displaced_give_back_counts():
    """Fault: with one place, an urgent prompt as long as the limit never joins, since the one who runs has a token."""
    engine = Engine(ToyModel(), ContinuousBatching(1, 8, preemption=BY_PRIORITY), PagedKVCache(16, 4), order=Priority())
    run(engine, [of(ask("low", 2, 6), 1), of(ask("H", 8, 1, at=2.0), 0)])
    assert token_steps(engine, "H") == [3] and num_preempted(engine) == 1


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_whoever_displaces_joins(first):
    """Fault: a newcomer displaces, is pushed out again by a running request in the same plan, and the victim has lost
    its K/V for nobody."""
    scheduler = ContinuousBatching(8, 64, first=first, preemption=BY_PRIORITY)
    engine = Engine(ToyModel(), scheduler, PagedKVCache(6, 4), order=Priority())
    run(engine, [of(ask("R", 7, 9), 0), of(ask("L", 9, 3), 5), of(ask("H", 15, 2, at=2.0), 1)])
    for step in engine.trace.steps:
        by_rank = {p.by for p in step.preempted if ("outranks" in dict(step.waiting)[p.request_id])}
        assert by_rank <= set(names(step.admitted))


def test_nobody_is_displaced_if_all_who_could_be_are_not_enough():
    """Fault: victims are taken one by one until there is none left, and then it still does not fit."""
    engine = Engine(ToyModel(), ContinuousBatching(8, 64, preemption=BY_PRIORITY), PagedKVCache(8, 4), order=Priority())
    requests = [of(ask("boss", 16, 4), 0), of(ask("low", 4, 8), 5), of(ask("mid", 16, 4, at=2.0), 1)]
    run(engine, requests)  # low has 2 of 8 blocks, boss 5, and mid needs 4
    assert num_preempted(engine) == 0
    assert token_steps(engine, "mid")[0] == token_steps(engine, "boss")[-1] + 1


def test_as_few_are_displaced_as_it_takes_and_shared_blocks_count_when_their_last_holder_goes():
    """Fault: blocks of a group are counted as free with the first answer that goes, or never."""
    scheduler = ContinuousBatching(8, 64, preemption=BY_PRIORITY)
    engine = Engine(ToyModel(), scheduler, PagedKVCache(8, 4), order=Priority())
    group, urgent = of(ask("g", 16, 4, n=2), 5), of(ask("H", 20, 2, at=2.0), 0)
    check_solo([urgent], run_checked(engine, [group, urgent], fcfs=False)[1:])
    (step,) = (step for step in engine.trace.steps if "H" in names(step.admitted))
    assert set(names(step.preempted)) == {"g#0", "g#1"}  # 4 of their blocks are shared: one alone gives back one


def test_a_plan_looks_up_once_what_a_request_holds_however_many_are_displaced(monkeypatch):
    """Fault: a victim rule that compares all candidates sends every one of them to the cache again for every victim."""
    scheduler = ContinuousBatching(16, 64, preemption=Recompute(most_blocks))
    engine = Engine(ToyModel(), scheduler, PagedKVCache(12, 4))
    for i in range(12):
        engine.submit(ask(f"r{i}", 4, 8))
    engine.step()  # now all of them have a full block, and need another one at the same time
    asked, num_held = [], engine.kv.num_held
    monkeypatch.setattr(engine.kv, "num_held", lambda request: asked.append(request) or num_held(request))
    plan = scheduler.plan(engine.queue, engine.active, engine.kv, engine.clock.now())
    assert len(plan.preemptions) == 6
    assert len(asked) == len(set(asked)) == 12


def test_the_thrash_guard_says_what_happened():
    """Fault: "1 preempted" in an iteration in which nobody was."""
    engine = Engine(ToyModel(), ContinuousBatching(1, 64, preemption=BY_PRIORITY), PagedKVCache(8, 4))
    run(engine, [of(ask("n1", 2, 2), 1), of(ask("n2", 2, 2), 0), of(ask("n3", 2, 2), 1)])
    for step in engine.trace.steps:
        for _, reason in step.waiting:
            if reason.startswith("thrash guard: ") and "preempted" in reason:
                assert f"{len(step.preempted)} preempted" in reason


@pytest.mark.parametrize("way", [Recompute, Swap])
def test_a_victim_rule_may_choose_only_whom_the_newcomer_outranks(way):
    """Fault: the rule is checked where memory runs out, and not where somebody is outranked."""
    boss = []
    policy = way(victim=lambda candidates, memory: boss[0], displaces=by_priority)
    engine = Engine(ToyModel(), ContinuousBatching(2, 64, preemption=policy), PagedKVCache(16, 4), order=Priority())
    engine.submit(of(ask("boss", 4, 8), 0))
    engine.submit(of(ask("low", 4, 8), 5))
    engine.step()
    boss.append(engine.active[0])
    engine.submit(of(ask("mid", 4, 4, at=None), 2))
    with pytest.raises(PlanError, match="chose boss, which is no candidate: those are the requests low"):
        engine.step()
    check_invariants(engine, fcfs=False)


# ---------------------------------------------------------------- admission


@pytest.mark.parametrize("share", [0.01, 0.25, 1.0])
def test_nothing_is_kept_free_where_nobody_grows(share):
    """Watermark. Fault: one of a hundred slots is never used, for requests that have all they will ever need."""
    engine = Engine(ToyModel(), ContinuousBatching(256, 2048, admission=Watermark(share)), ContiguousKVCache(100, 8))
    requests = [ask(f"r{i}", 2, 6) for i in range(100)]
    run(engine, requests)
    assert len(engine.trace.steps[0].members) == 100


@pytest.mark.parametrize("predictor", [Oracle({"a": 2.0}), Noisy(), Noisy(sigma=12.0), Noisy(sigma=1e6)], ids=repr)
def test_every_predictor_serves_every_policy_that_takes_one(predictor):
    """Fault: a predictor that cannot be a key of a dict, or whose number is too large for an array."""
    requests = [ask(name, 4, 20) for name in "abcdefg"]
    for scheduler, order in (
        (ContinuousBatching(8, 64, admission=Forecast(predictor)), None),
        (ContinuousBatching(8, 64, preemption=Recompute(displaces=ByTokensLeft(predictor))), ShortestFirst(predictor)),
    ):
        run(Engine(ToyModel(), scheduler, PagedKVCache(24, 4), order=order), requests)


def test_the_number_of_tokens_may_be_any_kind_of_integer():
    """Fault: numpy's 4 is not 4."""

    class Counting(Optimistic):
        def tokens(self, request, size):
            return np.int64(size)

    run(Engine(ToyModel(), ContinuousBatching(4, 64, admission=Counting()), PagedKVCache(4, 4)), [ask("a", 4, 2)])


# ---------------------------------------------------------------- what is no policy, or loses requests


NO_POLICIES = {
    "a class": (Fair, "is the class Fair, not an object of it: write Fair"),
    "a name": ("fair", "is 'fair': names are for the command line; give an object such as"),
    "another kind": (Never(), r"must be derived from \w+, such as \w+\(\); got Never\(\)"),
}


@pytest.mark.parametrize("order, says", NO_POLICIES.values(), ids=NO_POLICIES)
def test_what_is_no_order_is_refused_by_the_engine(order, says):
    """Fault: an AttributeError about the engine's innards."""
    with pytest.raises(TypeError, match=f"order {says}"):
        Engine(ToyModel(), ContinuousBatching(), PagedKVCache(8), order=order)


@pytest.mark.parametrize("kind", [ContinuousBatching, ChunkedPrefill])
@pytest.mark.parametrize("name", ["admission", "preemption"])
@pytest.mark.parametrize("policy, says", NO_POLICIES.values(), ids=NO_POLICIES)
def test_what_is_no_policy_is_refused_by_the_scheduler(kind, name, policy, says):
    """Fault: a class that nobody has called is found out at the first preemption, hours later."""
    if name == "preemption" and policy == Never():
        policy, says = Optimistic(), says.replace("Never", "Optimistic")
    with pytest.raises(TypeError, match=f"{name} {says}"):
        kind(**{name: policy})


@pytest.mark.parametrize("rule", ["newest", True, ByTokensLeft, None], ids=str)
def test_a_victim_rule_that_is_no_function_is_refused(rule):
    """Fault: found out when memory runs out."""
    with pytest.raises(TypeError, match="victim must be a function such as newest"):
        Recompute(victim=rule)
    if rule is not None:
        with pytest.raises(TypeError, match="displaces must be a function such as by_priority"):
            Swap(displaces=rule)


@pytest.mark.parametrize("answer", [True, None, 3])
def test_an_objection_has_to_be_a_reason(answer):
    """Fault: a request waits because of "True"."""

    class Shy(Optimistic):
        def objection(self, request, num_tokens, draft):
            return answer

    engine = Engine(ToyModel(), ContinuousBatching(2, 64, admission=Shy()), PagedKVCache(8, 4))
    with pytest.raises(PlanError, match=rf"Shy\(\) objects {answer}: give the reason as a text"):
        engine.run([ask("a", 2, 2)])


def test_a_policy_need_not_be_a_dataclass():
    """Fault: only dataclasses have a repr, so that the plain class that README shows cannot be put into an engine."""

    class Plain(AdmissionPolicy):
        def __init__(self, most):
            self.most = most

        def tokens(self, request, size):
            return request.num_tokens

        def objection(self, request, num_tokens, draft):
            return f"{self.most} run" if len(draft.running) >= self.most else ""

    class Bare(Plain):
        def __init__(self):
            Plain.__init__(self, 1)

    for policy, said in ((Plain(1), "Plain(most=1)"), (Bare(), "Bare(most=1)")):
        engine = Engine(ToyModel(), ContinuousBatching(4, 64, admission=policy), PagedKVCache(8, 4))
        run(engine, [ask("a", 2, 3), ask("b", 2, 3)])
        assert said in engine.trace.meta["scheduler"] and token_steps(engine, "b")[0] == 4


@pytest.mark.parametrize("part", ["cache", "order"])
def test_two_engines_do_not_share_a_cache_or_an_order(part):
    """Fault: found out, if at all, when both have requests."""
    kv, order = PagedKVCache(8, 4), Fair()
    Engine(ToyModel(), ContinuousBatching(), kv if part == "cache" else PagedKVCache(8, 4), order=order)
    with pytest.raises(ValueError, match="is or was used by another engine"):
        Engine(ToyModel(), ContinuousBatching(), kv, order=Fair() if part == "cache" else order)


def test_a_key_that_is_no_number_is_refused_when_the_request_comes():
    """Fault: NaN has no place in any order, so that a later look-up finds, and removes, somebody else."""
    engine = Engine(
        ToyModel(),
        ContinuousBatching(1, 64),
        PagedKVCache(16, 4),
        order=ShortestFirst(lambda r: math.nan if r.request_id == "r3" else 5 - r.rank),
    )
    requests = [ask(f"r{i}", 2, 2, at=None) for i in range(3)]
    for request in requests:
        engine.submit(request)
    with pytest.raises(ValueError, match="gives r3 the key nan"):
        engine.submit(ask("r3", 2, 2, at=None))
    run(engine, [])
    check_solo(requests, [engine.results[request.request_id] for request in requests])
    assert engine.results["r3"].finish_reason == "rejected"


def test_an_order_that_fails_when_a_victim_comes_back_to_it_loses_nobody():
    """Fault: the victim is neither waiting nor active nor ended, and the engine says that it is idle."""

    class Forgetful(Order):
        def key(self, request):
            if request.generated:
                raise RuntimeError("boom")
            return request.rank

    engine = Engine(ToyModel(), ContinuousBatching(4, 64), PagedKVCache(4, 4), order=Forgetful())
    requests = [ask("a", 8, 8), ask("b", 8, 8)]
    for request in requests:
        engine.submit(request)
    with pytest.raises(RuntimeError, match="boom"):
        while engine.step() is not None:
            pass
    while engine.step() is not None:
        pass
    check_drained(engine)
    check_solo(requests[:1], [engine.results["a"]])
    assert engine.results["b"].finish_reason == "abort" and "boom" in engine.results["b"].error


def test_an_order_that_loses_a_request_is_found_out():
    """Fault: ``run`` returns None in place of a result."""

    class Hole(Order):
        def add(self, request):
            self.used = True

    engine = Engine(ToyModel(), ContinuousBatching(4, 64), PagedKVCache(16, 4), order=Hole())
    with pytest.raises(EngineStalled, match=r"Hole\(\) has lost a: neither waiting nor active"):
        engine.run([ask("a", 2, 2)])


@pytest.mark.parametrize("scheduler", [StaticBatching(2), ContinuousBatching(2, 64)], ids=["static", "continuous"])
def test_an_order_that_names_nobody_is_a_stall(scheduler):
    """Fault: a static batch of nobody is formed."""

    class Silent(Order):
        def walk(self, draft, now):
            return iter(())

    engine = Engine(ToyModel(), scheduler, ContiguousKVCache(2, 16), order=Silent())
    with pytest.raises(EngineStalled, match="the head is a"):
        engine.run([ask("a", 2, 2)])


def test_a_deadlock_of_running_requests_is_told_from_their_side():
    """Never. Fault: the error speaks of a waiting request, which waits because of those that are stuck."""
    engine = Engine(ToyModel(), ContinuousBatching(2, 64, preemption=Never()), PagedKVCache(4, 4))
    with pytest.raises(EngineStalled, match="a is active and stuck: blocks: needs 1 blocks, 0 free"):
        engine.run([ask("a", 8, 8), ask("b", 8, 8), ask("w", 8, 2)])


# ---------------------------------------------------------------- clients and groups


def test_coming_back_from_a_preemption_is_not_a_turn():
    """RoundRobin. Fault: a client whose request was preempted is passed over as if it had been served again."""
    engine = Engine(ToyModel(), ContinuousBatching(2, 64), PagedKVCache(5, 4), order=RoundRobin())
    requests = [replace(ask(f"{c}{i}", 4, 8), client=c) for i in range(2) for c in "xy"]
    run(engine, requests)
    assert num_preempted(engine)
    first = [a.request_id for step in engine.trace.steps for a in step.admitted if not a.resumed]
    assert first == ["x0", "y0", "x1", "y1"]


def test_counters_of_clients_without_live_requests_are_sums_alone():
    """Fair. Fault: a dict for each client that was ever served, or weights with which nobody is ever charged."""
    order = Fair()
    engine = Engine(ToyModel(), ContinuousBatching(4, 64), PagedKVCache(16, 4), order=order)
    run(engine, [replace(ask(f"r{i}", 2, 2), client=f"c{i}") for i in range(9)])
    assert not order._served and not order._queues and not order._index
    with pytest.raises(ValueError, match="both 0"):
        Fair(input_weight=0, output_weight=0)


@pytest.mark.parametrize("victim", [newest, most_blocks])
def test_answers_of_one_request_can_be_joined_again_in_the_table(victim):
    """Fault: three rows of a request with three answers, and nothing that says so."""
    scheduler = ContinuousBatching(8, 64, preemption=Recompute(victim))
    engine = Engine(ToyModel(), scheduler, PagedKVCache(8, 4))
    run_checked(engine, [ask("g", 6, 6, n=3), ask("a", 3, 3)])
    table = metrics.requests_table(engine.trace)
    assert table["group"].fillna("").tolist() == ["g", "g", "g", ""]
    assert table.groupby("group")["num_generated"].sum()["g"] == 18
