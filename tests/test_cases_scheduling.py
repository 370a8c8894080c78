"""Who runs in which iteration: static batches, FCFS, preemption, arrivals in time, and plans that change nothing."""

import pickle

import pytest
from helpers import (
    CONFIGURATIONS,
    ScriptedModel,
    ask,
    check_solo,
    drive,
    make_engine,
    names,
    num_rejected,
    run_checked,
    timeline,
    token_steps,
)

from minibatch import (
    ChunkedPrefill,
    ContiguousKVCache,
    ContinuousBatching,
    Engine,
    PagedKVCache,
    StaticBatching,
    ToyModel,
)
from minibatch.clock import VirtualClock
from minibatch.request import NeverFits

# ---------------------------------------------------------------- static batches


def test_st_02_a_finished_row_ends_alone_and_the_others_go_on():
    """ST-02. Fault: one stop ends the whole batch, pads are returned as output, or empty slots lengthen the run."""
    r1, r2 = ask("R1", 3, 6), ask("R2", 3, 6)
    model = ScriptedModel({tuple(r1.prompt): [7, 255], tuple(r2.prompt): [1, 2, 3, 4, 5, 6]}, eos_token_id=255)
    engine = make_engine("static", model)
    results = run_checked(engine, [r1, r2])
    assert [result.tokens for result in results] == [(7, 255), (1, 2, 3, 4, 5, 6)]
    assert [result.finish_reason for result in results] == ["stop", "length"]
    assert len(engine.trace.steps) == 6
    assert sum(len(result.tokens) for result in results) == 8
    assert [step.padded for step in engine.trace.steps] == [0, 0, 1, 1, 1, 1]
    assert all(pad.request_id == "R1" and pad.dead for step in engine.trace.steps for pad in step.padding)
    assert timeline(engine, "R1").finish == 2.0 and timeline(engine, "R2").finish == 6.0


def test_a_static_batch_pads_to_its_longest_prompt_and_keeps_dead_slots_to_the_end():
    """Fault: padding that is asserted and not executed, or slots that are free before the batch ends."""
    engine = make_engine("static")
    requests = [ask("a", 2, 1), ask("b", 6, 3), ask("c", 5, 2, at=1.0)]
    check_solo(requests, run_checked(engine, requests))
    assert [step.num_tokens for step in engine.trace.steps] == [12, 2, 2, 5, 1]
    assert [step.padded for step in engine.trace.steps] == [4, 1, 1, 0, 0]
    assert [step.kv.free // 16 for step in engine.trace.steps] == [2, 2, 2, 3, 3]
    assert token_steps(engine, "c") == [4, 5]


def test_a_static_batch_waits_for_its_formation_window_or_until_it_is_full():
    """Fault: the window is counted from the newest arrival, is missed for ever, or holds back a full batch."""
    cases = [
        (2, [0.0, 3.0], 3.0),  # full
        (2, [0.0, 3.0, 4.0], 3.0),
        (2, [0.0], 5.0),  # has waited long enough
        (2, [0.0, 7.0], 5.0),
        (3, [0.0, 3.0], 5.0),
        (3, [1.0, 3.0, 6.0], 6.0),
    ]
    for batch_size, arrivals, start in cases:
        scheduler = StaticBatching(batch_size, max_wait=5.0)
        engine = Engine(ToyModel(), scheduler, ContiguousKVCache(batch_size, 16))
        requests = [ask(f"r{i}", 3, 4, at=at) for i, at in enumerate(arrivals)]
        check_solo(requests, run_checked(engine, requests))
        assert engine.trace.steps[0].start == start


def test_a_static_batch_on_blocks_reserves_what_its_members_may_need_and_never_preempts():
    """Fault: a batch that nobody can leave takes blocks as it grows, and finds none."""
    engine = Engine(ToyModel(), StaticBatching(4), PagedKVCache(6, 4))
    requests = [ask("a", 3, 6), ask("b", 5, 8), ask("c", 2, 2)]
    check_solo(requests, run_checked(engine, requests))
    assert [step.kv.free // 4 for step in engine.trace.steps] == [0] * 8  # 2 + 3 + 1 blocks from the first step on
    assert token_steps(engine, "c") == [1, 2]


@pytest.mark.parametrize("mode", ["static", "continuous", "paged", "chunked"])
def test_sc_13_a_newcomer_joins_at_the_next_step_or_waits_for_the_whole_batch(mode):
    """SC-13. Fault: "continuous" batching that admits nobody until the current batch is done."""
    requests = [ask("R1", 2, 50), ask("R2", 2, 2, at=4.0)]
    engine = make_engine(mode, slot_size=64)
    check_solo(requests, run_checked(engine, requests))
    assert token_steps(engine, "R1") == list(range(1, 51))
    assert token_steps(engine, "R2") == ([51, 52] if mode == "static" else [5, 6])


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("configuration", ["paged", "chunked"])
@pytest.mark.parametrize("with_neighbour", [False, True])
def test_sc_03_a_request_that_would_outgrow_the_pool_is_refused_at_the_door(configuration, with_neighbour):
    """SC-03. Fault: the prompt fits, prompt + output does not, and the engine dies or loops half-way."""
    engine = make_engine(configuration, num_blocks=2, block_size=4)
    neighbours = [ask("Q", 2, 2)] if with_neighbour else []
    requests = [ask("R", 7, 8), *neighbours]
    results = run_checked(engine, requests)
    assert results[0].finish_reason == "rejected"
    assert "NeverFits" in results[0].error and "needs 4 blocks" in results[0].error and "pool has 2" in results[0].error
    check_solo(neighbours, results[1:])
    assert num_rejected(engine) == 1


@pytest.mark.parametrize("configuration", ["paged", "chunked"])
def test_sc_05_strict_fcfs_lets_nobody_overtake_a_request_that_does_not_fit(configuration):
    """SC-05. Fault: a heavy request is starved by light ones (or the policy is not visible in the trace)."""
    engine = make_engine(configuration, num_blocks=10, block_size=4, token_budget=64, max_num_seqs=8)
    requests = [ask("R0", 20, 12), ask("H", 24, 4, at=1.0), ask("L1", 3, 1, at=1.0), ask("L2", 3, 1, at=1.0)]
    check_solo(requests, run_checked(engine, requests))
    assert token_steps(engine, "R0") == list(range(1, 13))
    assert [token_steps(engine, name)[0] for name in ("H", "L1", "L2")] == [13, 13, 13]
    second = engine.trace.steps[1]
    assert second.waiting == (("H", "blocks: needs 6 blocks, 5 free, 1 promised"),)
    assert (second.rest, second.num_waiting) == ("behind H: 2 more", 3)


@pytest.mark.parametrize("configuration", ["paged", "chunked"])
def test_sc_07_the_oldest_always_finishes_when_everybody_needs_one_more_block(configuration):
    """SC-07. Fault: no victim rule: a deadlock, or evict, requeue, evict for ever."""
    engine = make_engine(configuration, num_blocks=8, block_size=4, token_budget=64)
    requests = [ask(f"R{i}", 4, 16) for i in range(1, 5)]
    check_solo(requests, run_checked(engine, requests))
    assert [timeline(engine, r.request_id).num_preemptions for r in requests] == [0, 1, 1, 2]
    assert len(engine.trace.steps) == 33
    ends = [timeline(engine, r.request_id).finish for r in requests]
    assert ends == sorted(set(ends))
    with pytest.raises(NeverFits, match="needs 5 blocks of 4, the pool has 4"):
        make_engine(configuration, num_blocks=4).submit(requests[0])


@pytest.mark.parametrize("first", ["decode", "prefill"])
@pytest.mark.parametrize("phase_order", ["mixed", "prefill-first"])
@pytest.mark.parametrize("token_limit", [20, 64])
@pytest.mark.parametrize("num_blocks", [5, 6, 7, 8, 12])
def test_every_phase_order_survives_every_shortage_of_blocks(phase_order, first, token_limit, num_blocks):
    """Fault: an order of phases in which a displaced request keeps its chunk, budget or blocks, or nobody gets on."""
    scheduler = ContinuousBatching(4, token_limit, phase_order, first)
    engine = Engine(ToyModel(), scheduler, PagedKVCache(num_blocks, 4))
    requests = [ask(f"r{i}", 1 + 3 * i % 7, 4 + 5 * i % 9, at=float(i // 2)) for i in range(8)]
    check_solo(requests, run_checked(engine, requests))


@pytest.mark.parametrize("max_chunk", [None, 2])
@pytest.mark.parametrize("token_budget", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("num_blocks", [4, 5, 7, 12])
def test_chunked_prefill_survives_every_shortage_of_blocks(token_budget, num_blocks, max_chunk):
    """Fault: a request displaced in the middle of its prompt resumes at the wrong place, or its budget is lost."""
    engine = Engine(ToyModel(), ChunkedPrefill(token_budget, 4, max_chunk), PagedKVCache(num_blocks, 4))
    requests = [ask(f"r{i}", 1 + 3 * i % 7, 4 + 5 * i % 7, at=float(i // 2)) for i in range(8)]
    check_solo(requests, run_checked(engine, requests))


def test_a_victim_gives_back_budget_and_blocks_and_comes_back_before_later_arrivals():
    """Fault: the preempted request goes to the tail of the queue, or keeps what it no longer uses."""
    engine = make_engine("paged", num_blocks=4, block_size=4)
    requests = [ask("old", 4, 9), ask("new", 4, 9), ask("late", 2, 2, at=3.0)]
    check_solo(requests, run_checked(engine, requests))
    (step,) = (s for s in engine.trace.steps if s.preempted)
    assert (step.index + 1, names(step.preempted)) == (6, ("new",))  # both have 8 rows and need a third block
    assert [m.request_id for m in step.members] == ["old"]
    assert step.waiting == (
        ("new", "preempted: old needs its blocks"),
        ("late", "thrash guard: 1 preempted in this iteration"),
    )
    assert step.kv.free == 4
    assert token_steps(engine, "old") == list(range(1, 10))
    assert token_steps(engine, "new") == [1, 2, 3, 4, 5, 10, 11, 12, 13]
    assert token_steps(engine, "late") == [10, 11]
    back = next(m for m in engine.trace.steps[9].members if m.request_id == "new")
    assert (back.start, back.stop, back.recomputed, back.decode) == (0, 9, 8, 1)


def test_the_budget_of_a_victim_that_was_already_planned_goes_to_others_of_the_same_step():
    """Fault: a victim keeps its place in the plan, or the tokens it will not compute are nobody's."""
    engine = Engine(ToyModel(), ContinuousBatching(8, 4, first="prefill"), PagedKVCache(6, 3))
    requests = [ask(f"R{i}", 1, 4) for i in range(1, 7)]
    check_solo(requests, run_checked(engine, requests))
    step = engine.trace.steps[
        3
    ]  # R5 and R6 went without in step 3, so they are asked first; then R1 and R2 need blocks
    assert names(step.preempted) == ("R6", "R5")
    assert [m.request_id for m in step.members] == ["R1", "R2", "R3", "R4"]


@pytest.mark.parametrize("configuration", ["paged", "chunked"])
def test_a_preempted_request_is_never_refused_for_a_full_queue(configuration):
    """Fault: a request that the engine itself put back into the queue finds it full, and is lost."""
    engine = make_engine(configuration, max_queue=1, num_blocks=4)
    requests = [ask("a", 4, 9), ask("b", 4, 9, at=1.0), ask("c", 3, 4, at=2.0)]
    results = run_checked(engine, requests)
    assert [result.finish_reason for result in results] == ["length"] * 3
    check_solo(requests, results)
    assert max(step.num_waiting for step in engine.trace.steps) == 2


def test_a_request_preempted_in_the_middle_of_its_prompt_recomputes_only_what_it_had():
    """Fault: prompt tokens that were never computed are counted as recomputation, or lost ones as new."""
    engine = make_engine("chunked", num_blocks=7, block_size=4, token_budget=5)
    requests = [ask("old", 4, 10), ask("new", 18, 2)]
    check_solo(requests, run_checked(engine, requests))
    preempted = timeline(engine, "new").num_preemptions
    assert preempted
    executed = {kind: sum(getattr(s, kind) for s in engine.trace.steps) for kind in ("prefill", "decode", "recomputed")}
    assert (executed["prefill"], executed["decode"]) == (22, 10)
    assert executed["recomputed"] == 17  # of 18: old took a third block when one token was still to come


# ---------------------------------------------------------------- time


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_me_05_arrivals_are_on_time_though_a_step_is_running(configuration):
    """ME-05. Fault: waiting in the client is left out of TTFT, because a request counts from when it was noticed."""
    clock = VirtualClock(
        lambda plan: 3.0 if any(c.request.label == "r0" and c.start == 0 for c in plan.chunks) else 0.1
    )
    engine = make_engine(configuration, clock=clock, max_num_seqs=16, num_slots=16)
    requests = [ask(f"r{i}", 2, 2, at=float(i)) for i in range(10)]
    results = run_checked(engine, requests)
    check_solo(requests, results)
    assert [result.timeline.arrival for result in results] == [float(i) for i in range(10)]
    wait = [result.timeline.scheduled - result.timeline.arrival for result in results]
    start = 3.1 if configuration == "static" else 3.0  # the batch of r0 has a second iteration
    assert wait == pytest.approx([0.0, start - 1, start - 2, start - 3, *[0.0] * 6])
    ttft = [result.timeline.token_times[0] - result.timeline.arrival for result in results]
    assert ttft == pytest.approx([3.0, *[w + 0.1 for w in wait[1:]]])
    assert engine.trace.steps[1].arrived == ("r1", "r2", "r3") or configuration == "static"


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_an_idle_engine_jumps_to_the_next_arrival(configuration):
    """Fault: an engine with nothing to do stops though a request is still to come, or counts empty iterations."""
    engine = make_engine(configuration)
    requests = [ask("a", 3, 2, at=2.5), ask("b", 3, 2, at=1000.0)]
    check_solo(requests, run_checked(engine, requests))
    assert [step.start for step in engine.trace.steps] == [2.5, 3.5, 1000.0, 1001.0]


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_requests_that_arrive_together_keep_the_order_of_their_submission(configuration):
    """Fault: arrivals at the same time are ordered by id or at random."""
    engine = make_engine(configuration, max_num_seqs=1)
    requests = [ask(name, 3, 1, at=1.0) for name in "zaymb"]
    run_checked(engine, requests)
    assert [step.members[0].request_id for step in engine.trace.steps] == list("zaymb")


# ---------------------------------------------------------------- planning is pure


class PlansTwice:
    """A scheduler that lets another one plan twice, and asserts that this gave the same and changed nothing."""

    def __init__(self, scheduler):
        self.scheduler, self.num_plans, self.num_preemptions = scheduler, 0, 0

    def __getattr__(self, name):
        return getattr(self.__dict__["scheduler"], name)

    def plan(self, queue, active, kv, now):
        before = pickle.dumps((self.scheduler, queue, active, kv, now))
        first = self.scheduler.plan(queue, active, kv, now)
        assert self.scheduler.plan(queue, active, kv, now) == first
        assert pickle.dumps((self.scheduler, queue, active, kv, now)) == before
        self.num_plans += 1
        self.num_preemptions += len(first.preemptions)
        return first


SCHEDULERS = {
    "static": lambda: StaticBatching(3),
    "static, waits": lambda: StaticBatching(3, max_wait=2.0),
    "mixed": lambda: ContinuousBatching(4, 32),
    "mixed, prefill first": lambda: ContinuousBatching(4, 32, first="prefill"),
    "prefill-first": lambda: ContinuousBatching(4, 32, "prefill-first"),
    "chunked": lambda: ChunkedPrefill(6, 4),
    "chunked, capped": lambda: ChunkedPrefill(6, 4, max_chunk=2),
}


@pytest.mark.parametrize("roomy", [True, False], ids=["roomy", "short of memory"])
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "contiguous"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_planning_twice_gives_the_same_plan_and_changes_nothing(name, paged, roomy):
    """Fault: a plan that allocates, reorders the queue, or depends on how often it was made."""
    scheduler = PlansTwice(SCHEDULERS[name]())
    kv = PagedKVCache(40 if roomy else 6, 4) if paged else ContiguousKVCache(4 if roomy else 2, 24)
    engine = Engine(ToyModel(), scheduler, kv)
    requests = [ask(f"r{i}", 1 + 3 * i % 8, 3 + 5 * i % 11, at=float(i // 2)) for i in range(9)]
    for request in requests:
        engine.submit(request)
    reports = drive(engine)
    check_solo(requests, [engine.results[r.request_id] for r in requests])
    assert scheduler.num_plans >= len(reports) > 0
    assert (scheduler.num_preemptions > 0) == (paged and not roomy and not name.startswith("static"))


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_the_same_requests_give_the_same_trace(configuration):
    """Fault: order that depends on sets, hashes or memory addresses."""

    def run():
        engine = make_engine(configuration, num_blocks=5)
        for i in range(6):
            engine.submit(ask(f"r{i}", 2 + i, 5, at=float(i // 3)))
        return drive(engine)

    assert run() == run()
