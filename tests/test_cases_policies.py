"""Policies against what went wrong elsewhere: heads of line, livelocks, priorities, fairness, starved decodes."""

from collections import Counter
from dataclasses import replace
from itertools import groupby, pairwise

import pytest
from helpers import (
    ScriptedModel,
    ask,
    check_solo,
    drive,
    make_engine,
    names,
    run_checked,
    timeline,
    token_steps,
)

from minibatch import ChunkedPrefill, ContiguousKVCache, ContinuousBatching, Engine, PagedKVCache, ToyModel
from minibatch.policies import (
    FCFS,
    ByTokensLeft,
    Fair,
    Optimistic,
    Priority,
    Recompute,
    ReserveMaximum,
    RoundRobin,
    ShortestFirst,
    Swap,
    Watermark,
    by_priority,
    least_progress_lost,
    lowest_priority,
    most_blocks,
    newest,
)
from minibatch.prefix_cache import PrefixCachedKVCache
from minibatch.request import NeverFits

BLOCK = 4
VICTIMS = [newest, lowest_priority, most_blocks, least_progress_lost]
WAYS = [Recompute, Swap]


def of(request, priority=0, client="default"):
    return replace(request, priority=priority, client=client)


def scheduler(kind, max_num_seqs=8, tokens=64, **policies):
    return {"paged": ContinuousBatching, "chunked": ChunkedPrefill}[kind](
        **{"paged": {"max_num_batched_tokens": tokens}, "chunked": {"token_budget": tokens}}[kind],
        max_num_seqs=max_num_seqs,
        **policies,
    )


def blocks(number):
    return PagedKVCache(number, BLOCK)


def make(kind="paged", num_blocks=16, order=None, max_num_seqs=8, tokens=64, **policies):
    return Engine(ToyModel(), scheduler(kind, max_num_seqs, tokens, **policies), blocks(num_blocks), order=order)


def run(engine, requests):
    """Runs to the end in any order, with the invariants after every step; tokens are those of solo runs."""
    check_solo(requests, run_checked(engine, requests, fcfs=False))


def preemptions(engine):
    return {t.request_id: t.num_preemptions for t in engine.trace.timelines if t.num_preemptions}


both = pytest.mark.parametrize("kind", ["paged", "chunked"])


# ---------------------------------------------------------------- SC-05: heavy and light


def heavy_and_light(num_light=2, every_step=0):
    requests = [ask("R0", 20, 12), ask("H", 24, 4, at=1.0)]
    requests += [ask(f"L{i}", 3, 1, at=1.0) for i in range(1, 1 + num_light)]
    return requests + [ask(f"S{i}", 3, 1, at=float(i)) for i in range(2, 2 + every_step)]


@both
@pytest.mark.parametrize("every_step", [0, 30])
def test_sc_05_light_requests_pass_a_heavy_one_that_does_not_fit_and_do_not_delay_it(kind, every_step):
    """SC-05. Fault: light requests wait behind one that has to wait for memory anyway; or, with skipping, an endless
    stream of them keeps the memory busy that it waits for."""
    engine = make(kind, 10, FCFS(lookahead=16))
    requests = heavy_and_light(every_step=every_step)
    run(engine, requests)
    assert token_steps(engine, "R0") == list(range(1, 13))
    assert [token_steps(engine, name) for name in ("L1", "L2")] == [[2], [2]]
    assert token_steps(engine, "H") == [13, 14, 15, 16]
    for i in range(2, 2 + every_step):
        assert token_steps(engine, f"S{i}") == [i + 1]
    assert engine.trace.meta["order"] == "FCFS(lookahead=16)"
    second = engine.trace.steps[1]
    assert second.waiting == (("H", "blocks: needs 6 blocks, 5 free, 1 promised"),)


@both
def test_sc_05_the_policy_and_the_reasons_of_those_who_are_behind_are_in_the_trace(kind):
    """SC-05. Fault: nobody can see why a request that would fit does not run."""
    engine = make(kind, 10)
    run(engine, heavy_and_light(num_light=5))
    assert engine.trace.meta["order"] == "FCFS()"
    assert "Watermark(share=0.01, whole_prompt=True)" in engine.trace.meta["scheduler"]
    assert "Recompute(victim=newest, displaces=None)" in engine.trace.meta["scheduler"]
    assert engine.trace.steps[1].rest == "behind H: 5 more"


@both
@pytest.mark.parametrize("lookahead, passed", [(0, 0), (1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_sc_05_as_many_are_asked_behind_the_head_as_the_lookahead_says(kind, lookahead, passed):
    """Fault: one request more or less is asked than the policy says, or only those who do not fit are counted."""
    engine = make(kind, 10, FCFS(lookahead=lookahead))
    requests = [ask("R0", 20, 12)]
    for i in range(5):  # heavy and light ones take turns
        requests += [ask(f"H{i}", 24, 1, at=1.0), ask(f"L{i}", 3, 1, at=1.0)]
    run(engine, requests)
    second = engine.trace.steps[1]
    assert names(second.admitted) == tuple(f"L{i}" for i in range(passed))
    assert len(second.waiting) + len(second.admitted) == 1 + lookahead
    assert second.rest == f"behind H0: {9 - lookahead} more"


@both
@pytest.mark.parametrize("patience", [float("inf"), 6.0])
def test_sc_05_light_requests_that_overlap_starve_a_heavy_one_unless_patience_ends_it(kind, patience):
    """SC-05. Fault: skipping without a bound. Light requests that overlap in time leave no moment in which the heavy
    one fits, though each is small."""
    engine = make(kind, 8, FCFS(lookahead=16, patience=patience))
    requests = [ask("H", 28, 2, at=4.0), *(ask(f"L{i}", 3, 4, at=float(i)) for i in range(40))]
    run(engine, requests)
    # H needs 7 of the 8 blocks. Without patience it waits for the last light one, which runs in steps 40 to 43;
    # with it, the last that may pass is L10, 6 s after the arrival of H, which runs in steps 11 to 14.
    assert token_steps(engine, "H")[0] == (44 if patience == float("inf") else 15)


# ---------------------------------------------------------------- SC-07: somebody can always finish


@both
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_sc_07_whatever_the_victim_rule_the_oldest_is_never_preempted_and_all_end(victim, way, kind):
    """SC-07. Fault: a rule that may pick anybody picks the one who was about to end, then the next, for ever."""
    engine = make(kind, 8, preemption=way(victim=victim))
    requests = [ask(f"R{i}", 4, 16) for i in range(1, 5)]
    run(engine, requests)
    counts = [timeline(engine, r.request_id).num_preemptions for r in requests]
    ends = [timeline(engine, r.request_id).finish for r in requests]
    assert (counts, len(engine.trace.steps)) == (([0, 1, 2, 1], 36) if victim is most_blocks else ([0, 1, 1, 2], 33))
    assert ends == sorted(set(ends)) and ends[0] == 16.0
    with pytest.raises(NeverFits, match="needs 5 blocks of 4, the pool has 4"):
        make(kind, 4, preemption=way(victim=victim)).submit(requests[0])


@both
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_sc_07_the_most_urgent_of_the_running_is_never_displaced_for_memory(victim, way, kind):
    """Fault: age protects, urgency does not; or the other way round among equals."""
    engine = make(kind, 8, Priority(), preemption=way(victim=victim))
    requests = [of(ask(f"R{i}", 4, 16), priority) for i, priority in enumerate([2, 1, 0, 1])]
    run(engine, requests)
    assert timeline(engine, "R2").num_preemptions == 0 and timeline(engine, "R2").finish == 16.0
    first = [timeline(engine, name) for name in ("R1", "R3")]  # equals: the one that came first
    assert first[0].finish < first[1].finish
    for step in engine.trace.steps:
        for change in step.preempted:
            assert change.request_id != "R2" and change.num_tokens > 0


@both
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("num_blocks", [5, 6, 7, 9, 11])
def test_sc_07_every_victim_rule_survives_every_shortage(victim, way, kind, num_blocks):
    """Fault: a victim that was planned, admitted in this plan or is the one that needs room leaves something behind."""
    engine = make(kind, num_blocks, max_num_seqs=4, tokens=20, preemption=way(victim=victim))
    run(engine, [ask(f"r{i}", 1 + 3 * i % 7, 4 + 5 * i % 9, at=float(i // 2)) for i in range(8)])
    assert timeline(engine, "r0").num_preemptions == 0


def test_sc_07_shorter_remaining_and_seniority_do_not_displace_each_other_in_turns():
    """SC-07. Fault: two rules of displacement that disagree about who is first: the older takes blocks from the
    shorter, the shorter takes the place of the older, and both lose what they had computed."""
    preemption = Recompute(displaces=ByTokensLeft())
    scheduler = ChunkedPrefill(7, 4, max_chunk=2, admission=Watermark(whole_prompt=False), preemption=preemption)
    engine = Engine(ToyModel(), scheduler, PagedKVCache(7, 1))
    requests = [ask("old", 1, 7), ask("short", 4, 2)]
    for request in requests:
        engine.submit(request)
    drive(engine, most=100, fcfs=False)
    check_solo(requests, [engine.results[r.request_id] for r in requests])


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("num_blocks", [8, 10, 14])
def test_sc_07_shorter_remaining_first_ends_where_prompts_are_admitted_whole(victim, num_blocks):
    """Fault: the same, where whoever runs gets a token in every iteration, and so always gets on."""
    preemption = Recompute(victim=victim, displaces=ByTokensLeft())
    engine = make("paged", num_blocks, ShortestFirst(), max_num_seqs=2, preemption=preemption)
    run(engine, [ask(f"r{i}", 1 + 5 * i % 9, 1 + 7 * i % 12, at=float(i // 2)) for i in range(12)])
    assert preemptions(engine)


# ---------------------------------------------------------------- SC-09: the most urgent one displaces a planned one


@both
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_sc_09_a_request_that_was_planned_first_is_rolled_back_for_a_more_urgent_one(victim, way, kind):
    """SC-09. Fault: the victim stays in the plan of the iteration in which it lost its blocks, and crashes the forward.

    The senior is the most urgent one, so the rule lowest_priority is not even needed: H is protected by all of them.
    """
    engine = make(kind, 5, Priority(), preemption=way(victim=victim))
    run(engine, [of(ask("L", 8, 4), 5), of(ask("H", 8, 4, at=1.0), 0)])
    third = engine.trace.steps[2]
    assert [(m.request_id, m.stop - m.start) for m in third.members] == [("H", 1)]
    assert [(p.request_id, p.by) for p in third.preempted] == [("L", "H")]
    assert third.waiting == (("L", "preempted: H needs its blocks"),)
    assert names(third.kv.holdings) == ("H",)
    assert (token_steps(engine, "L"), token_steps(engine, "H")) == ([1, 2, 6, 7], [2, 3, 4, 5])


@pytest.mark.parametrize("way", WAYS)
def test_sc_09_a_request_that_was_admitted_by_the_same_plan_simply_stays_in_the_queue(way):
    """Fault: the admission stays in the plan without its blocks, or one that never ran is reported as preempted."""
    engine = Engine(ToyModel(), ContinuousBatching(8, 64, first="prefill", preemption=way()), blocks(3))
    requests = [ask("A", 4, 6), ask("B", 8, 1, at=1.0), ask("C", 1, 1, at=1.0)]
    check_solo(requests, run_checked(engine, requests))
    second, third = engine.trace.steps[1:3]
    assert (names(second.members), second.admitted, second.preempted) == (("A",), (), ())
    assert second.waiting[0] == ("B", "not admitted: A needs its blocks")
    assert third.waiting == (("B", "blocks: needs 2 blocks, 1 free"),)
    assert not preemptions(engine)
    assert token_steps(engine, "A") == [1, 2, 3, 4, 5, 6] and token_steps(engine, "B") == [7]


# ---------------------------------------------------------------- SC-11: who may displace whom


def three():
    return [of(ask("A", 3, 10), 1), of(ask("B", 3, 10, at=1.0), 1), of(ask("C", 3, 2, at=3.0), 0)]


CACHES = {"paged": lambda: blocks(16), "contiguous": lambda: ContiguousKVCache(2, 16)}


@both
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", CACHES)
def test_sc_11_a_strictly_more_urgent_request_takes_the_place_and_gives_it_back(cache, way, kind):
    """SC-11. Fault: an urgent request waits for a slot behind lower ones; or equals displace each other in turns."""
    engine = Engine(
        ToyModel(), scheduler(kind, 1, preemption=way(displaces=by_priority)), CACHES[cache](), order=Priority()
    )
    run(engine, three())
    assert token_steps(engine, "C") == [4, 5]
    assert token_steps(engine, "A") == [1, 2, 3, *range(6, 13)]
    assert token_steps(engine, "B") == list(range(13, 23))
    assert preemptions(engine) == {"A": 1}
    assert engine.trace.steps[3].waiting == (
        ("A", "preempted: C outranks it"),
        ("B", "thrash guard: 1 preempted in this iteration"),
    )
    assert timeline(engine, "A").runs == [[0.0, 3.0], [5.0, 12.0]]


@both
@pytest.mark.parametrize("cache", CACHES)
def test_sc_11_without_displacement_the_urgent_one_is_first_after_the_running_one(cache, kind):
    """SC-11. Fault: a priority queue that displaces though nobody asked for it, or serves B before C."""
    engine = Engine(ToyModel(), scheduler(kind, 1), CACHES[cache](), order=Priority())
    run(engine, three())
    assert [token_steps(engine, name)[0] for name in "ACB"] == [1, 11, 13]
    assert not preemptions(engine)


@both
@pytest.mark.parametrize("num_blocks", [5, 16])
def test_sc_11_equals_never_displace_each_other(kind, num_blocks):
    """SC-11. Fault: the comparison includes the arrival, so that whoever comes back looks earlier than who runs."""
    engine = make(kind, num_blocks, Priority(), 2, preemption=Recompute(displaces=by_priority))
    run(engine, [of(ask(f"r{i}", 4, 5, at=float(i // 3)), 1) for i in range(9)])
    outranked = [reason for step in engine.trace.steps for _, reason in step.waiting if "outranks" in reason]
    assert not outranked
    starts = [timeline(engine, f"r{i}").scheduled for i in range(9)]
    assert starts == sorted(starts)


@both
def test_sc_11_each_level_displaces_only_the_levels_below(kind):
    """Fault: the preempted ones do not come back in the order of their urgency, or displace on their way back."""
    engine = make(kind, 16, Priority(), 1, preemption=Recompute(displaces=by_priority))
    run(engine, [of(ask(f"p{p}", 3, 4, at=float(4 - p)), p) for p in (4, 3, 2, 1, 0)])
    assert [token_steps(engine, f"p{p}") for p in range(5)] == [
        [5, 6, 7, 8],
        [4, 9, 10, 11],
        [3, 12, 13, 14],
        [2, 15, 16, 17],
        [1, 18, 19, 20],
    ]
    assert preemptions(engine) == {f"p{p}": 1 for p in (1, 2, 3, 4)}


@both
def test_sc_11_memory_is_a_reason_to_displace_as_places_are_and_takes_as_many_as_it_needs(kind):
    """Fault: an urgent request displaces for a slot and waits for blocks; or more are displaced than it needs."""
    engine = make(kind, 6, Priority(), preemption=Recompute(displaces=by_priority))
    low = [of(ask(f"low{i}", 7, 4), 1 + i) for i in range(3)]  # 2 blocks each
    run(engine, [*low, of(ask("high", 12, 1, at=1.0), 0)])
    second = engine.trace.steps[1]
    assert names(second.members) == ("low0", "high")
    assert [(p.request_id, p.by) for p in second.preempted] == [("low2", "high"), ("low1", "high")]
    assert timeline(engine, "low0").num_preemptions == 0


@both
def test_sc_11_nobody_is_displaced_for_a_request_that_would_not_fit_even_then(kind):
    """Fault: some lose their place, and the urgent one still waits."""
    engine = make(kind, 6, Priority(), preemption=Recompute(displaces=by_priority))
    requests = [of(ask("same", 13, 3), 0), of(ask("low", 4, 3), 1), of(ask("high", 10, 1, at=1.0), 0)]
    run(engine, requests)
    assert not preemptions(engine)
    assert engine.trace.steps[1].waiting == (("high", "blocks: needs 3 blocks, 1 free, 1 promised"),)
    assert token_steps(engine, "high") == [4]


@pytest.mark.parametrize("victim, first", [(newest, "new"), (lowest_priority, "low"), (most_blocks, "long")])
def test_sc_11_of_those_that_it_outranks_the_victim_rule_picks(victim, first):
    """Fault: displacement has a rule of its own, and the configured one is not asked."""
    engine = make("paged", 16, Priority(), 4, preemption=Recompute(victim=victim, displaces=by_priority))
    requests = [
        of(ask("same", 3, 9), 0),
        of(ask("low", 3, 9), 3),
        of(ask("long", 9, 9), 2),
        of(ask("new", 4, 9, at=1.0), 1),
        of(ask("high", 3, 2, at=4.0), 0),
    ]
    run(engine, requests)
    assert [(p.request_id, p.by) for p in engine.trace.steps[4].preempted] == [(first, "high")]


def test_a_group_displaced_before_its_prompt_is_computed_gives_back_all_its_places():
    """Fault: a request with several answers counts as one when it leaves, and the batch stays too small."""
    engine = make("chunked", 16, Priority(), 3, tokens=4, preemption=Recompute(displaces=by_priority))
    group = of(ask("group", 10, 3, n=3), 1)
    high = [of(ask(f"high{i}", 2, 3, at=1.0), 0) for i in range(3)]
    results = run_checked(engine, [group, *high], fcfs=False)
    check_solo(high, results[1:])
    assert names(engine.trace.steps[1].preempted) == ("group#0",)
    assert [names(step.admitted) for step in engine.trace.steps[1:3]] == [("high0",), ("high1", "high2")]
    assert [sample.tokens for sample in results[0].samples] == [results[0].tokens] * 3
    assert len(results[0].tokens) == 3


@pytest.mark.parametrize("n, displaced", [(1, 1), (2, 1), (3, 1), (4, 0)])
def test_a_group_that_displaces_a_group_gets_as_many_places_as_that_gives_back(n, displaced):
    """Fault: places are counted by requests: two answers would not fit where three have left, or four would."""
    engine = make("chunked", 16, Priority(), 4, tokens=4, preemption=Recompute(displaces=by_priority))
    same, low, high = of(ask("same", 2, 8), 0), of(ask("low", 10, 2, n=3), 1), of(ask("high", 3, 2, at=1.0, n=n), 0)
    results = run_checked(engine, [same, low, high], fcfs=False)
    assert len(preemptions(engine)) == displaced
    assert all(len(sample.tokens) == 2 for result in results[1:] for sample in result.samples)


# ---------------------------------------------------------------- SC-15: fair shares


def clients(engine):
    """The clients in the order of their admissions, as (client, how many in a row)."""
    admitted = [timeline(engine, label).client for step in engine.trace.steps for label in names(step.admitted)]
    return [(client, len(list(group))) for client, group in groupby(admitted)]


def burst(client, number, at=0.0, prompt=10, new=10):
    return [of(ask(f"{client}{i}", prompt, new, at=at), client=client) for i in range(number)]


def fair_engine(order, max_num_seqs=1, **options):
    return Engine(ToyModel(), scheduler("paged", max_num_seqs, **options), blocks(16 * max_num_seqs), order=order)


def test_sc_15_a_client_that_comes_back_is_lifted_to_the_others():
    """SC-15. Fault: a counter that stood still while its client was idle is worth a long monopoly."""
    order = Fair()
    order.settled["X"] = 1000.0
    engine = fair_engine(order)
    run(engine, [*burst("X", 60), *burst("Y", 50, at=0.5)])  # X is backlogged when Y comes
    rows = clients(engine)
    assert max(number for _, number in rows[:-1]) <= 2
    assert Counter(client for client, _ in rows[:100]) == {"X": 50, "Y": 50}
    assert order.counter("Y") == 1012.0 + 50 * 30  # to the counter of X, which by then has had a prompt and a token


def test_sc_15_without_the_lift_it_is_served_alone_until_it_has_caught_up():
    """SC-15. Fault: the baseline of the comparison is not what it says."""
    order = Fair(lift=False)
    order.settled["X"] = 1000.0
    engine = fair_engine(order)
    run(engine, [*burst("Y", 50), *burst("X", 50)])
    assert clients(engine)[:3] == [("Y", 34), ("X", 1), ("Y", 1)]  # 34 * 30 is the first multiple above 1000
    assert order.counter("Y") == 50 * 30 and order.counter("X") == 1000.0 + 50 * 30


@pytest.mark.parametrize(
    "lift, rows", [(True, [("X", 34), ("Y", 1), ("X", 1), ("Y", 1)]), (False, [("X", 34), ("Y", 34), ("X", 1)])]
)
def test_sc_15_the_same_with_a_counter_that_was_really_earned(lift, rows):
    """SC-15. Fault: served tokens and lifts are kept apart, and only one of them is compared."""
    engine = fair_engine(Fair(lift=lift))
    run(engine, [*burst("X", 40), *burst("Y", 36, at=335.0)])  # X has had 33 of 30, and the prompt and 5 tokens of one
    assert clients(engine)[: len(rows)] == rows


def test_sc_15_a_client_is_lifted_only_when_it_had_no_request_waiting():
    """SC-15. Fault: every arrival lifts, so that a client with many small requests never gets its due."""
    order = Fair()
    engine = fair_engine(order)
    engine.submit(of(ask("y0", 10, 10, at=None), client="Y"))
    for request in burst("X", 3, at=None):
        engine.submit(request)
    order.settled["X"] = 500.0
    engine.submit(of(ask("y1", 10, 10, at=None), client="Y"))
    assert order.counter("Y") == 0.0
    for name in ("y0", "y1"):
        engine.abort(name)
    engine.submit(of(ask("y2", 10, 10, at=None), client="Y"))
    assert order.counter("Y") == 500.0
    drive(engine, fcfs=False)


def test_sc_15_a_preempted_request_that_waits_again_lifts_nobody():
    """Fault: the return to the queue is taken for a return from idleness."""
    order = Fair()
    order.settled["X"] = 500.0
    engine = make("paged", 16, order, 1, preemption=Recompute(displaces=by_priority))
    run(engine, [of(ask("y", 10, 10), 1, "Y"), *(of(ask(f"x{i}", 10, 10, at=2.0), 0, "X") for i in range(3))])
    assert preemptions(engine) == {"y": 1}
    assert token_steps(engine, "y")[:3] == [1, 2, 33]
    assert order.counter("Y") == 30


def test_sc_15_a_lift_never_lowers_a_counter():
    """SC-15. Fault: the counter is set to the minimum of the others, though it was above."""
    order = Fair()
    order.settled |= {"X": 5.0, "Y": 700.0}
    engine = fair_engine(order)
    run(engine, [*burst("X", 3), *burst("Y", 3)])
    assert (order.counter("X"), order.counter("Y")) == (95.0, 790.0)
    assert clients(engine) == [("X", 3), ("Y", 3)]


def test_sc_15_a_client_that_comes_back_to_an_empty_queue_is_lifted_to_the_last_that_left_it():
    """Fault: when nobody waits there is no minimum, so the one who returns then keeps its old counter."""
    order = Fair()
    engine = fair_engine(order)
    run(engine, [*burst("X", 4), of(ask("Y0", 10, 10, at=35.0), client="Y")])
    assert order.counter("Y") == 3 * 30 + 10 + 2 * 5 + 30  # X had that much when Y came


def test_sc_15_admissions_of_one_plan_count_each_other():
    """SC-15. Fault: counters change only after the iteration, so that one plan fills all places from one client."""
    engine = fair_engine(Fair(), 4)
    run(engine, [*burst("X", 8), *burst("Y", 8)])
    first = Counter(name[0] for name in names(engine.trace.steps[0].admitted))
    assert first == {"X": 2, "Y": 2}


def test_sc_15_twice_the_weight_is_twice_the_service():
    """Fault: a weight that multiplies the counter instead of dividing it, or is left out of the lift."""
    order = Fair({"X": 2.0})
    engine = fair_engine(order)
    run(engine, [*burst("X", 40), *burst("Y", 20)])
    served = [client for client, number in clients(engine) for _ in range(number)][:30]
    assert Counter(served) == {"X": 20, "Y": 10}


def test_sc_15_a_client_of_twice_the_weight_is_lifted_to_twice_the_service():
    """Fault: the lift compares services and forgets the weights."""
    order = Fair({"Y": 2.0})
    order.settled["X"] = 1000.0
    engine = fair_engine(order)
    run(engine, [*burst("X", 9), *burst("Y", 9)])
    assert order.counter("Y") == 2 * 1000.0 + 9 * 30
    assert Counter(client for client, number in clients(engine) for _ in range(number)) == {"X": 9, "Y": 9}


def test_sc_15_round_robin_counts_requests_and_not_tokens():
    """Fault: the baseline is fair in tokens, or serves a client twice while another waits."""
    engine = fair_engine(RoundRobin())
    run(engine, [*burst("X", 5, prompt=20, new=20), *burst("Y", 5, prompt=2, new=2), *burst("Z", 5)])
    assert [client for client, _ in clients(engine)] == list("XYZ") * 5


# ---------------------------------------------------------------- SC-17: exact charges


def ends_after(num_tokens, prompt):
    """A model that says so many tokens after this prompt and then ends, whatever the limit."""
    return ScriptedModel({tuple(prompt): [*range(100, 99 + num_tokens), 255]}, eos_token_id=255)


def costly():
    """P=10, G limit 100, real output 10."""
    return of(ask("c", 10, 100), 1, "c")


@both
def test_sc_17_a_request_is_charged_its_prompt_and_what_it_really_generated(kind):
    """SC-17. Fault: the limit of 100 is charged and never corrected, or the two weights differ between the places."""
    order, request = Fair(), costly()
    engine = Engine(ends_after(10, request.prompt), scheduler(kind, tokens=128), blocks(32), order=order)
    (result,) = run_checked(engine, [request])
    assert len(result.tokens) == 10
    assert order.counter("c") == 10 + 2 * 10


@both
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", [1.0, 4.0, 9.0])
def test_sc_17_a_preemption_in_the_middle_charges_nothing_twice(at, way, kind):
    """SC-17. Fault: the prompt is charged again at the second admission, or the recomputed tokens as new ones."""
    order, request = Fair(), costly()
    policies = {"preemption": way(displaces=by_priority)}
    engine = Engine(ends_after(10, request.prompt), scheduler(kind, 1, 128, **policies), blocks(32), order=order)
    run_checked(engine, [request, of(ask("u", 5, 3, at=at), 0, "u")], fcfs=False)
    assert preemptions(engine) == {"c": 1}
    assert len(engine.results["c"].tokens) == 10
    assert order.counter("c") == 30
    assert order.counter("u") - 5 - 2 * 3 in (0, 10 + 2 * at)  # lifted, perhaps, to what c had


@pytest.mark.parametrize("way", WAYS)
def test_sc_17_nor_does_one_in_the_middle_of_a_cut_prompt_or_for_lack_of_memory(way):
    """Fault: charges that follow the chunks instead of the request."""
    order = Fair()
    engine = make("chunked", 5, order, 4, tokens=4, admission=Optimistic(), preemption=way())
    requests = [of(ask("a", 4, 10), client="a"), of(ask("c", 16, 2), client="c"), of(ask("b", 3, 4), client="b")]
    run(engine, requests)
    assert preemptions(engine).get("c")
    charged = {request.client: len(request.prompt) + 2 * request.params.max_tokens for request in requests}
    assert {client: order.counter(client) for client in charged} == charged


@both
def test_sc_17_a_request_that_is_aborted_while_it_waits_costs_nothing_and_leaves_nothing(kind):
    """SC-17. Fault: the charge is made at arrival, or the aborted one stays somewhere in the fair queue."""
    order = Fair()
    engine = make(kind, 16, order, 1)
    for name in ("first", "waits"):
        engine.submit(of(ask(name, 10, 3, at=None), client=name))
    engine.step()
    engine.abort("waits")
    drive(engine, fcfs=False)
    assert (order.counter("first"), order.counter("waits") - order.settled.get("waits", 0.0)) == (16, 0)
    assert order.settled.get("waits", 0.0) == 0.0
    assert len(order) == 0 and not order._queues and not order._index and not any(order._served.values())


@pytest.mark.parametrize("steps, cost", [(1, 4), (2, 8), (3, 10 + 2), (4, 10 + 4)])
def test_sc_17_an_abort_in_the_middle_of_a_cut_prompt_charges_what_was_computed(steps, cost):
    """SC-17. Fault: the whole prompt is charged, though most of it never ran; or nothing, though some of it did."""
    order = Fair()
    engine = make("chunked", 16, order, tokens=4)
    engine.submit(of(ask("c", 10, 10, at=None), client="c"))
    for _ in range(steps):
        engine.step()
    assert order.counter("c") == 10 + 2 * max(steps - 2, 0)  # charged at admission, corrected at the end
    engine.abort("c")
    assert order.counter("c") == cost
    drive(engine)


@pytest.mark.parametrize("way", WAYS)
def test_sc_17_an_abort_after_a_preemption_charges_what_had_been_computed(way):
    """SC-17. Fault: the preempted one has nothing computed any more, so it had it for nothing."""
    order = Fair()
    engine = make("chunked", 16, order, 1, tokens=4, preemption=way(displaces=by_priority))
    engine.submit(of(ask("c", 10, 10, at=None), 1, "c"))
    engine.step(), engine.step()
    engine.submit(of(ask("u", 3, 3, at=None), 0, "u"))
    engine.step()
    assert preemptions(engine) == {"c": 1}
    engine.abort("c")
    assert order.counter("c") == 8
    drive(engine, fcfs=False)


@pytest.mark.parametrize("num_prompt, computed", [(9, 1), (10, 2), (12, 4), (13, 1)])
def test_sc_17_cached_prompt_tokens_are_free_and_never_all_of_them(num_prompt, computed):
    """SC-17. Fault: a prompt that is found in the cache costs nothing at all, and its client never advances.

    The rule here: cached tokens are free. At least one is always computed, and every answer costs.
    """
    order = Fair()
    engine = Engine(ToyModel(), scheduler("paged"), PrefixCachedKVCache(32, BLOCK), order=order)
    prompt = list(range(num_prompt))
    run(engine, [of(ask("w", prompt, 1), client="w"), of(ask("c", prompt, 10, at=3.0), client="c")])
    lifted = num_prompt + 2
    assert order.counter("c") == lifted + computed + 2 * 10


def test_sc_17_what_a_preempted_request_finds_again_does_not_lower_its_charge():
    """Fault: the cached tokens of the second admission are taken off the price of the first."""
    order = Fair()
    preemption = Recompute(displaces=by_priority)
    engine = Engine(
        ToyModel(), scheduler("paged", 1, preemption=preemption), PrefixCachedKVCache(32, BLOCK), order=order
    )
    run(engine, [of(ask("c", 10, 10), 1, "c"), of(ask("u", 3, 3, at=4.0), 0, "u")])
    assert timeline(engine, "c").num_recached > 0
    assert order.counter("c") == 30


@pytest.mark.parametrize("way", WAYS)
def test_sc_17_what_was_cached_at_first_stays_free_after_a_preemption(way):
    """Fault: the request is charged for the prefix that it found, because it lost it later."""
    order = Fair(lift=False)
    scheduler_ = scheduler("paged", 1, preemption=way(displaces=by_priority))
    engine = Engine(ToyModel(), scheduler_, PrefixCachedKVCache(32, BLOCK), order=order)
    prompt = list(range(10))
    requests = [of(ask("w", prompt, 1), 0, "w"), of(ask("c", prompt, 10, at=1.0), 1, "c")]
    run(engine, [*requests, of(ask("u", 3, 3, at=4.0), 0, "u")])
    assert preemptions(engine) == {"c": 1} and timeline(engine, "c").num_cached == 8
    assert order.counter("c") == 2 + 2 * 10


def test_sc_17_a_request_that_is_refused_costs_nothing():
    """Fault: a full queue charges whom it turns away."""
    order = Fair()
    engine = Engine(ToyModel(), scheduler("paged", 1), blocks(16), order=order, max_queue=1)
    run_checked(engine, [of(ask(f"r{i}", 10, 10), client=f"r{i}") for i in range(4)], fcfs=False)
    assert [timeline(engine, f"r{i}").finish_reason for i in range(4)] == ["length", "rejected", "rejected", "rejected"]
    assert [order.counter(f"r{i}") for i in range(4)] == [30, 0, 0, 0]


@pytest.mark.parametrize("answers, cost", [(1, 30), (2, 50), (3, 70)])
def test_sc_17_several_answers_pay_the_prompt_once(answers, cost):
    """SC-17. Fault: each answer pays the prompt that only the first one computed."""
    order = Fair()
    run_checked(make("paged", 32, order), [of(ask("c", 10, 10, n=answers), client="c")])
    assert order.counter("c") == cost


@pytest.mark.parametrize(
    "step, who, cost",
    [
        (1, "c", 4),  # 4 of the 10 prompt tokens
        (1, "c#1", 10 + 2 * (10 + 10)),
        (1, "c#0", 4),  # without the first one nobody computes the prompt
        (3, "c", 10 + 2 * 3),  # one token each
        (3, "c#0", 10 + 2 * (1 + 10 + 10)),
        (3, "c#2", 10 + 2 * (1 + 10 + 10)),
    ],
)
def test_sc_17_answers_that_are_aborted_pay_what_was_computed_for_them(step, who, cost):
    """Fault: an answer that never began is charged, or the prompt is charged to the one that is aborted last."""
    order = Fair()
    engine = make("chunked", 32, order, tokens=4)
    engine.submit(of(ask("c", 10, 10, at=None, n=3), client="c"))
    drive(engine, {step + 1: lambda: engine.abort(who)})
    assert order.counter("c") == cost


def test_sc_17_other_weights_are_the_same_in_the_estimate_and_in_the_history():
    """SC-17. Fault: two places define the cost, and one of them keeps the default."""
    order = Fair(input_weight=3.0, output_weight=0.5)
    engine = fair_engine(order)
    run(engine, [*burst("X", 4), *burst("Y", 4)])
    assert order.counter("X") == order.counter("Y") == 4 * (3 * 10 + 0.5 * 10)
    assert [client for client, _ in clients(engine)] == list("XYXYXYXY")


@pytest.mark.parametrize("input_weight, first", [(0.0, "XXXX"), (1.0, "XYXY")])
def test_sc_17_so_they_are_within_one_plan(input_weight, first):
    """SC-17. Fault: what a plan adds to a counter is not what the admission will charge. Where prompts are free, an
    admission changes nothing, and of equal clients the one that came first goes on."""
    engine = fair_engine(Fair(input_weight=input_weight), 4)
    run(engine, [*burst("X", 6), *burst("Y", 6)])
    assert "".join(label[0] for label in names(engine.trace.steps[0].admitted)) == first


# ---------------------------------------------------------------- starved decodes


def flood(number=20):
    """One that decodes, and from the next step on, one prompt a step that fills a budget of 8."""
    return [ask("a", 3, 6), *(ask(f"f{i}", 8, 1, at=float(i)) for i in range(1, 1 + number))]


def gaps(engine, label="a"):
    return [later - earlier for earlier, later in pairwise(token_steps(engine, label))]


@pytest.mark.parametrize(
    "phase_order, first", [("prefill-first", "decode"), ("prefill-first", "prefill"), ("mixed", "prefill")]
)
def test_prefill_first_lets_prompts_starve_those_who_decode(phase_order, first):
    """Fault: a phase order that is not what it says: while budget-filling prompts arrive, nobody may decode."""
    engine = Engine(ToyModel(), ContinuousBatching(4, 8, phase_order, first), blocks(16))
    run(engine, flood())
    assert gaps(engine) == [21, 1, 1, 1, 1]


def test_decodes_first_without_cutting_lets_those_who_decode_starve_the_prompts():
    """Fault: a prompt that needs the whole budget is cut or squeezed in, though this scheduler does not cut."""
    engine = make_engine("paged", token_limit=8)
    run(engine, flood())
    assert gaps(engine) == [1] * 5
    assert token_steps(engine, "f1") == [7]


@pytest.mark.parametrize("num_decoding", [1, 3])
def test_chunked_prefill_starves_nobody(num_decoding):
    """Fault: a generation stall: the time between two tokens depends on the prompts that arrive in between."""
    engine = make_engine("chunked", token_budget=8, num_blocks=32)
    requests = [*(ask(f"a{i}", 3, 6) for i in range(num_decoding - 1)), *flood()]
    run(engine, requests)
    for request in requests[:num_decoding]:
        assert max(gaps(engine, request.request_id)) == 1
    assert token_steps(engine, "f1")[0] <= 4


def test_the_bound_of_the_paper_is_exceeded_by_the_token_that_is_not_cached_yet():
    """Fair. Fault: a bound is taken over from a paper that counts differently. A request that fills the cache of 8
    tokens with 1 + 7 of them has generated 8: it is charged 1 + 2 * 8, and the paper's ``max(1 * 1, 2 * 8)`` is 16."""
    order = Fair()
    scheduler = ContinuousBatching(4, 64, admission=ReserveMaximum())
    engine = Engine(ToyModel(), scheduler, PagedKVCache(8, 1), order=order)
    for name in ("a1", "b1", "a2", "b2"):
        engine.submit(of(ask(name, 1, 8), client=name[0]))
    lead = 0.0
    while engine.step() is not None:
        if {request.client for request in order} == {"a", "b"}:
            lead = max(lead, abs(order.counter("a") - order.counter("b")))
    assert lead == 17.0
