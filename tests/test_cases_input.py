"""Inputs that break or hang other engines, each beside normal requests, under all four configurations."""

import gc
from itertools import islice

import pytest
from helpers import (
    CONFIGURATIONS,
    ask,
    check_drained,
    check_invariants,
    check_solo,
    chunk_sizes,
    drive,
    make_engine,
    num_rejected,
    read,
    run_checked,
    solo,
    timeline,
    token_steps,
)

from minibatch import Request, SamplingParams, ToyModel
from minibatch.request import DuplicateRequest, InvalidParams, InvalidPrompt, NeverFits, PromptTooLong, QueueFull

pytestmark = pytest.mark.parametrize("configuration", CONFIGURATIONS)


def neighbours():
    return [ask("n1", 5, 6), ask("n2", 3, 8), ask("n3", 7, 2)]


def check_refused_beside_neighbours(configuration, bad, error, *fragments):
    """The bad request comes back as rejected, with its numbers; the others never notice it."""
    first, *rest = neighbours()
    requests = [first, bad, *rest]
    engine = make_engine(configuration)
    results = run_checked(engine, requests)
    assert [result.finish_reason for result in results] == ["length", "rejected", "length", "length"]
    assert results[1].error.startswith(error.__name__)
    for fragment in fragments:
        assert fragment in results[1].error
    assert results[1].tokens == () and results[1].request_id == "bad"
    check_solo(requests, results, cut=["bad"])
    assert num_rejected(engine) == 1
    without = make_engine(configuration)
    run_checked(without, neighbours())
    assert [s.members for s in without.trace.steps] == [s.members for s in engine.trace.steps]


# ---------------------------------------------------------------- the six inputs


def test_an_empty_prompt_beside_normal_ones(configuration):
    """Fault: [] reaches the model as a row of zero tokens, and there is nothing to sample from."""
    check_refused_beside_neighbours(configuration, ask("bad", []), InvalidPrompt, "empty")


def test_one_request_larger_than_the_cache(configuration):
    """Fault: it waits at the head of the queue for memory that does not exist, and everybody behind it waits too."""
    numbers = ("72 rows", "slot has 16") if configuration in ("static", "continuous") else ("18 blocks", "pool has 16")
    check_refused_beside_neighbours(configuration, ask("bad", 70, 3), NeverFits, *numbers)


def test_a_prompt_that_fits_with_an_output_that_cannot(configuration):
    """Fault: only the prompt is checked; memory runs out when nobody is left to preempt."""
    numbers = ("69 rows", "slot has 16") if configuration in ("static", "continuous") else ("18 blocks", "pool has 16")
    check_refused_beside_neighbours(configuration, ask("bad", 10, 60), NeverFits, "prompt 10", "60 new", *numbers)


def test_the_same_id_twice_in_one_run(configuration):
    """Fault: the second takes the place of the first in a dictionary, and one of them never ends."""
    requests = [*neighbours(), ask("n2", 6, 5), ask("n4", 2, 2)]
    engine = make_engine(configuration)
    results = run_checked(engine, requests)
    assert [r.finish_reason for r in results] == ["length", "length", "length", "rejected", "length"]
    assert results[3].request_id == "n2" and "DuplicateRequest" in results[3].error and "'n2'" in results[3].error
    del requests[3]
    check_solo(requests, [*results[:3], results[4]])
    assert engine.results["n2"] is results[1]
    assert timeline(engine, "n2~2").finish_reason == "rejected"


def test_the_same_id_twice_by_submit(configuration):
    """Fault: a refused duplicate disturbs the request whose id it wanted."""
    engine = make_engine(configuration)
    requests = neighbours()
    for request in requests:
        engine.submit(request)
    refusals = []

    def again():
        with pytest.raises(DuplicateRequest, match="'n1'"):
            engine.submit(ask("n1", 2, 2, at=None))
        refusals.append(1)

    drive(engine, {1: again, 2: again, 4: again})
    check_solo(requests, [engine.results[r.request_id] for r in requests])
    assert num_rejected(engine) == len(refusals) == 3


def cancel(configuration, before, victim, *, max_num_seqs=4, others=None, **options):
    """Runs the victim beside others, aborts it before step ``before``; returns engine and reports."""
    engine = make_engine(configuration, max_num_seqs=max_num_seqs, **options)
    others = neighbours() if others is None else others
    for request in [*others[:1], victim, *others[1:]]:
        engine.submit(request)

    def abort():
        assert engine.abort(victim.request_id)
        assert engine.results[victim.request_id].finish_reason == "abort"
        assert not engine.abort(victim.request_id)
        assert not engine.abort("nobody")

    reports = drive(engine, {before: abort})
    names = [*others, victim]
    check_solo(names, [engine.results[r.request_id] for r in names], cut=[victim.request_id])
    assert sum(label == victim.request_id for s in reports for label, _ in s.finished) <= 1
    return engine, reports


def test_cancel_before_the_first_step(configuration):
    """Fault: an aborted request stays in the queue and is run all the same."""
    engine, _ = cancel(configuration, 1, ask("v", 6, 6))
    assert chunk_sizes(engine, "v") == []


def test_cancel_a_waiting_request(configuration):
    """Fault: only running requests can be aborted."""
    engine, reports = cancel(configuration, 3, ask("v", 6, 6), max_num_seqs=1)
    assert chunk_sizes(engine, "v") == []
    assert ("v", "abort") in reports[2].finished
    assert timeline(engine, "v").scheduled is None and timeline(engine, "v").finish == 2.0


def test_cancel_a_running_request(configuration):
    """Fault: its blocks, slot or place leak, or its row goes on computing."""
    engine, reports = cancel(configuration, 4, ask("v", 6, 6), token_budget=16)
    emitted = engine.results["v"].tokens
    assert len(emitted) == len(token_steps(engine, "v")) > 0
    assert max(token_steps(engine, "v")) < 4
    holders = {h.request_id for h in reports[3].kv.holdings}
    if configuration == "static":  # nobody leaves a rectangle: the row goes on as padding, its slot stays taken
        assert "v" in holders and ("v", True) in {(p.request_id, p.dead) for p in reports[3].padding}
    else:
        assert "v" not in holders


def test_cancel_in_the_middle_of_a_prefill(configuration):
    """Fault: a request without any token yet cannot be aborted, or its computed blocks are lost."""
    engine, _ = cancel(configuration, 3, ask("v", 13, 3), token_budget=4, others=[ask("n1", 2, 8)])
    assert chunk_sizes(engine, "v") == ([2, 3] if configuration == "chunked" else [13, 1])
    assert len(engine.results["v"].tokens) == (0 if configuration == "chunked" else 2)


def test_cancel_a_request_that_has_not_arrived(configuration):
    """Fault: the engine still waits for it, or the abort is forgotten and it runs when its time comes."""
    engine, reports = cancel(configuration, 2, ask("v", 6, 6, at=500.0))
    assert chunk_sizes(engine, "v") == [] and not any("v" in s.arrived for s in reports)
    assert engine.clock.now() < 100


def test_a_request_aborted_before_its_arrival_does_not_end_before_it(configuration):
    """Fault: arrival <= finish does not hold, so that a latency is negative."""
    engine = make_engine(configuration)
    engine.submit(ask("v", 6, 6, at=500.0))
    assert engine.abort("v")
    assert timeline(engine, "v").finish >= timeline(engine, "v").arrival


def test_cancel_everybody(configuration):
    """Fault: a batch of only aborted requests keeps its memory, or the engine says it has stalled."""
    engine = make_engine(configuration)
    for request in neighbours():
        engine.submit(request)
    engine.step()
    for request in neighbours():
        assert engine.abort(request.request_id)
        check_invariants(engine)
    check_drained(engine)
    late = ask("late", 4, 4)
    check_solo([late], run_checked(engine, [late]))


def test_cancel_from_the_callback_of_run(configuration):
    """Fault: the list of requests changes while somebody goes through it."""
    engine = make_engine(configuration)
    requests = [*neighbours(), ask("v", 4, 9)]

    def on_step(report):
        check_invariants(engine, report)
        if report.index == 2:
            assert engine.abort("v")
            check_invariants(engine)

    results = engine.run(requests, on_step)
    check_drained(engine)
    check_solo(requests, results, cut=["v"])
    assert [r.finish_reason for r in results] == ["length", "length", "length", "abort"]


@pytest.mark.parametrize("where", ["waiting", "running", "not arrived"])
def test_cancel_and_submit_the_same_id_before_the_same_step(configuration, where):
    """Fault: the abort is applied late, to the new request; or the new one gets tokens or memory of the old."""
    engine = make_engine(configuration, max_num_seqs=1 if where == "waiting" else 4)
    others = [ask("n1", 5, 6), ask("n2", 3, 8)]
    old, new = ask("x", 6, 9, at=90.0 if where == "not arrived" else 0.0), ask("x", 4, 5, at=None)
    for request in [others[0], old, others[1]]:
        engine.submit(request)
    seen = {}

    def swap():
        assert engine.abort("x")
        seen["old"] = engine.results["x"]
        assert engine.submit(new) == "x"

    drive(engine, {3: swap})
    check_solo([*others, new], [engine.results[r.request_id] for r in [*others, new]])
    check_solo([old], [seen["old"]], cut=["x"])
    assert (len(seen["old"].tokens) > 0) == (where == "running")
    assert timeline(engine, "x").finish_reason == "abort" and timeline(engine, "x~2").finish_reason == "length"
    assert len(engine.results) == 3


def test_iterating_over_results_while_running(configuration):
    """Fault: results appear before they are final, change afterwards, or are reported twice."""
    engine = make_engine(configuration)
    requests = [*neighbours(), ask("late", 2, 3, at=6.0)]
    seen = {}

    def on_step(report):
        check_invariants(engine, report)
        for request_id, result in engine.results.items():
            assert seen.setdefault(request_id, result) is result
        assert sorted(seen) == sorted({label for s in engine.trace.steps for label, _ in s.finished})

    results = engine.run(requests, on_step)
    assert [seen[r.request_id] for r in requests] == results
    check_solo(requests, results)


def test_stepping_the_engine_while_going_through_its_results(configuration):
    """Fault: a reader of the results who turns the crank meets a collection that changes under him."""
    engine = make_engine(configuration)
    requests = neighbours()
    for request in requests:
        engine.submit(request)
    while not engine.results:
        engine.step()
    for request_id in list(engine.results):
        assert engine.results[request_id].finish_reason == "length"
        engine.step()
    drive(engine)
    check_solo(requests, [engine.results[r.request_id] for r in requests])


def test_streams_read_in_turns_and_one_inside_the_other(configuration):
    """Fault: a stream that turns the crank swallows or repeats the tokens of the other streams."""
    engine = make_engine(configuration)
    requests = neighbours()
    streams = [engine.stream(request) for request in requests]
    got = [[next(streams[0])], [], []]
    for delta in islice(streams[1], 100):
        got[1].append(delta)
        got[2] += [d for d in [next(streams[2], None)] if d]
    got[2] += read(streams[2])
    got[0] += read(streams[0])
    check_drained(engine)
    for request, deltas, stream in zip(requests, got, streams, strict=True):
        assert tuple(token for delta in deltas for token in delta.tokens) == solo(request) == stream.result.tokens
        assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["length"]
        assert "".join(d.text for d in deltas) == stream.result.text
        assert list(stream) == []


# ---------------------------------------------------------------- cases


def test_bi_01_an_id_can_be_used_again_once_its_request_has_ended(configuration):
    """BI-01. Fault: ids are never given back, or a second life of an id mixes with the first."""
    engine = make_engine(configuration)
    first, second = ask("x", 5, 4), ask("x", 7, 3)
    assert engine.submit(first) == "x"
    engine.step()
    with pytest.raises(DuplicateRequest):
        engine.submit(second)
    drive(engine)
    old = engine.results["x"]
    assert engine.submit(second) == "x"
    drive(engine)
    check_solo([first, second], [old, engine.results["x"]])
    assert [t.request_id for t in engine.trace.timelines] == ["x", "x~2", "x~3"]
    assert [t.finish_reason for t in engine.trace.timelines] == ["length", "rejected", "length"]


def test_bi_01_ids_that_the_engine_makes_never_collide_with_those_of_users(configuration):
    """BI-01. Fault: a counter and a user's id meet in the same dictionary."""
    engine = make_engine(configuration)
    prompts = [[i + 1, i + 2] for i in range(6)]
    names = ["r1", None, "r3", None, "r1~3", None]
    requests = [Request(p, SamplingParams(max_tokens=3), n) for p, n in zip(prompts, names, strict=True)]
    results = run_checked(engine, requests)
    assert len({result.request_id for result in results}) == 6
    assert [r.request_id for r, n in zip(results, names, strict=True) if n] == ["r1", "r3", "r1~3"]
    check_solo(requests, results)


BAD_TOKENS = [
    (InvalidPrompt, "100", ask("bad", [100])),
    (InvalidPrompt, "-1", ask("bad", [-1])),
    (InvalidPrompt, str(2**40), ask("bad", [2**40])),
    (InvalidPrompt, "3.5", ask("bad", [3.5])),
    (InvalidPrompt, "True", ask("bad", [True])),
    (InvalidParams, "100", ask("bad", [1], stop_token_ids=(100,))),
    (InvalidParams, "-1", ask("bad", [1], stop_token_ids=(-1,))),
    (InvalidParams, "100", ask("bad", [1], logit_bias={100: 1})),
]


def test_bi_03_a_token_that_does_not_exist_is_refused_and_harms_nobody(configuration):
    """BI-03. Fault: only the upper bound is tested, or the check is in the loop, where it ends everybody."""
    engine = make_engine(configuration, ToyModel(vocab_size=100))
    good = neighbours()
    for request in good:
        engine.submit(request)

    def bad():
        for error, value, request in BAD_TOKENS:
            with pytest.raises(error) as refusal:
                engine.submit(request)
            assert value in str(refusal.value)
            assert "0 to 99" in str(refusal.value) or "not an integer" in str(refusal.value)

    drive(engine, {1: bad, 3: bad})
    last = ask("next", 4, 4)
    results = run_checked(engine, [last])
    check_solo([*good, last], [*(engine.results[r.request_id] for r in good), *results], ToyModel(vocab_size=100))
    assert num_rejected(engine) == 2 * len(BAD_TOKENS)


def test_bi_05_prompts_at_the_context_limit(configuration):
    """BI-05. Fault: an off-by-one leaves a token that can never be scheduled, and the engine loops."""
    engine = make_engine(configuration, slot_size=32, max_model_len=16)
    requests = [ask("P15", 15, 10), ask("P16", 16, 1), ask("P17", 17, 1), ask("n", 3, 4)]
    results = run_checked(engine, requests)
    assert [r.finish_reason for r in results] == ["length", "rejected", "rejected", "length"]
    assert len(results[0].tokens) == 1
    assert results[0].tokens == solo(requests[0], max_model_len=16)
    for result, number in ((results[1], "16"), (results[2], "17")):
        assert result.error.startswith("PromptTooLong") and f"prompt {number}" in result.error and "16" in result.error
    check_solo(requests[3:], results[3:])


def test_bi_05_generation_without_a_limit_ends_where_the_memory_of_one_request_does(configuration):
    """BI-05. Fault: the share of a slot is not known at the door: a context shift that loops, or no end at all."""
    engine = make_engine(configuration, num_slots=10, slot_size=204, num_blocks=51, token_limit=2048, token_budget=512)
    limit = 204  # rows that one request can have
    requests = [ask("big", 300, 10), ask("endless", 190, None), ask("n", 5, 9)]
    results = run_checked(engine, requests)
    assert [r.finish_reason for r in results] == ["rejected", "length", "length"]
    assert "204" in results[0].error or "78 blocks" in results[0].error
    assert len(results[1].tokens) == limit - 190 + 1
    check_solo([ask("endless", 190, limit - 190 + 1), requests[2]], results[1:])


def test_bi_05_no_limit_on_the_output_is_not_a_reason_to_refuse(configuration):
    """BI-05. Fault: max_tokens None asks for the whole cache, which no iteration could recompute, so it never runs."""
    engine = make_engine(configuration, token_limit=32)  # one request could have 64 rows of the paged cache
    requests = [ask("endless", 5, None), ask("n", 3, 4)]
    results = run_checked(engine, requests)
    assert [r.finish_reason for r in results] == ["length", "length"], results[0].error
    assert len(results[0].tokens) >= 12


def test_bi_07_leaving_a_stream_after_two_tokens_ends_the_request(configuration):
    """BI-07. Fault: the client has gone, and generation goes on to the limit."""
    engine = make_engine(configuration)
    other = ask("other", 5, 9)
    engine.submit(other)
    for number, _delta in enumerate(engine.stream(ask("v", 4, 12)), start=1):
        if number == 2:
            break
    gc.collect()  # where the loop's iterator is not dropped at once
    assert engine.results["v"].finish_reason == "abort"
    assert len(engine.results["v"].tokens) == 2
    check_invariants(engine)
    drive(engine)
    assert len(token_steps(engine, "v")) == 2 and sum(chunk_sizes(engine, "v")) == 5
    check_solo([other], [engine.results["other"]])


def test_bi_07_closing_a_stream_before_its_first_token(configuration):
    """BI-07. Fault: the leave is noticed when a token is delivered, and so not before the first one."""
    engine = make_engine(configuration, token_budget=3)
    other = ask("other", 2, 9)
    engine.submit(other)
    stream = engine.stream(ask("v", 15, 2))
    engine.step()
    engine.step()
    free = engine.kv.num_free
    computed = sum(chunk_sizes(engine, "v"))
    stream.close()
    stream.close()
    assert list(stream) == []
    assert engine.results["v"].finish_reason in ("abort", "length")
    if configuration == "chunked":
        assert engine.results["v"].tokens == () and engine.kv.num_free > free
    drive(engine)
    assert sum(chunk_sizes(engine, "v")) == computed
    check_solo([other], [engine.results["other"]])


@pytest.mark.parametrize("how", ["drop", "with"])
def test_bi_07_dropping_a_stream_without_closing_it(configuration, how):
    """BI-07. Fault: a stream that nobody can read any more keeps its request running."""
    engine = make_engine(configuration)
    request = ask("v", 4, 12)
    if how == "with":
        with engine.stream(request) as stream:
            next(stream)
    else:
        stream = engine.stream(request)
        next(stream)
    del stream
    gc.collect()
    assert engine.results["v"].finish_reason == "abort" and len(engine.results["v"].tokens) == 1
    check_drained(engine)


def test_bi_07_a_stream_whose_request_is_aborted_elsewhere_ends_with_that_reason(configuration):
    """BI-07. Fault: the reader waits for a token that will never come."""
    engine = make_engine(configuration)
    stream = engine.stream(ask("v", 4, 12))
    first = next(stream)
    engine.abort("v")
    (last,) = read(stream)
    assert (last.tokens, last.text, last.finish_reason) == ((), "", "abort") or last.finish_reason == "abort"
    assert first.tokens + last.tokens == stream.result.tokens and len(stream.result.tokens) == 1
    check_drained(engine)


def test_bi_07_a_finished_stream_that_is_closed_or_dropped_keeps_its_result(configuration):
    """BI-07. Fault: closing aborts a later request that uses the id again."""
    engine = make_engine(configuration)
    stream = engine.stream(ask("x", 4, 2))
    tokens = tuple(t for d in read(stream) for t in d.tokens)
    engine.submit(ask("x", 5, 5))
    stream.close()
    del stream
    gc.collect()
    drive(engine)
    assert tokens == solo(ask("x", 4, 2))
    check_solo([ask("x", 5, 5)], [engine.results["x"]])


def test_bi_09_a_burst_cannot_pass_the_queue_limit(configuration):
    """BI-09. Fault: check and reservation are two moments, so that everybody of a burst finds a free place."""
    engine = make_engine(configuration, max_num_seqs=1, max_queue=2)
    outcomes = []

    def submit(*names):
        for name in names:
            try:
                outcomes.append((engine.submit(ask(name, 3, 2, at=None)), True))
            except QueueFull as error:
                assert "2 requests wait already" in str(error) and "max_queue is 2" in str(error)
                outcomes.append((name, False))

    submit("a", "b", "c", "d", "e")
    assert outcomes == [("a", True), ("b", True), ("c", False), ("d", False), ("e", False)]
    engine.step()  # a runs, and does not wait any more: one place is free
    check_invariants(engine)
    submit("f", "g")
    assert engine.abort("f")  # another one
    submit("h", "i")
    assert outcomes[5:] == [("f", True), ("g", False), ("h", True), ("i", False)]
    drive(engine)
    assert {name for name, result in engine.results.items() if result.finish_reason == "length"} == {"a", "b", "h"}
    assert num_rejected(engine) == 5
    check_solo([ask(name, 3, 2) for name in "abh"], [engine.results[name] for name in "abh"])


def test_bi_09_arrivals_on_the_clock_find_the_queue_full_too(configuration):
    """BI-09. Fault: the limit holds for submit, and not for what arrives later; or a refusal costs a step."""
    engine = make_engine(configuration, max_num_seqs=1, max_queue=2)
    requests = [ask(name, 3, 4, at=0.0) for name in "abcde"] + [ask("late", 3, 2, at=30.0)]
    results = run_checked(engine, requests)
    assert [r.finish_reason for r in results] == ["length", "length", "rejected", "rejected", "rejected", "length"]
    assert all("QueueFull" in r.error and "max_queue is 2" in r.error for r in results[2:5])
    check_solo(requests, results, cut="cde")
    assert len(engine.trace.steps) == 4 + 4 + 2


class Collects(ToyModel):
    """The garbage collector may run at any time; here it does in every forward."""

    def forward(self, plan, kv, store):
        gc.collect()
        return super().forward(plan, kv, store)


@pytest.mark.slow
def test_bi_07_a_stream_that_is_collected_in_the_middle_of_a_step(configuration):
    """BI-07. Fault: the abort of a dropped stream takes effect between the plan and its commit, and breaks both."""
    engine = make_engine(configuration, Collects(), token_budget=32)
    requests = neighbours()
    for request in requests:
        engine.submit(request)
    stream = engine.stream(ask("v", 4, 12))
    engine.step()
    cycle = [stream]
    cycle.append(cycle)
    del stream, cycle  # now only the collector can find it
    while engine.step() is not None:
        pass
    assert engine.results["v"].finish_reason == "abort" and len(engine.results["v"].tokens) <= 2
    check_drained(engine)
    check_solo([*requests, ask("v", 4, 12)], [engine.results[r] for r in ("n1", "n2", "n3", "v")], cut=["v"])


# ---------------------------------------------------------------- neighbours


class FailsOnce(ToyModel):
    """Its third forward runs out of memory, or whatever else may happen to a device."""

    calls = 0

    def forward(self, plan, kv, store):
        self.calls += 1
        if self.calls == 3:
            raise MemoryError("once")
        return super().forward(plan, kv, store)


def test_a_forward_that_fails_can_be_repeated(configuration):
    """Fault: half a committed iteration: tokens counted as computed that are not, or memory lost."""
    engine = make_engine(configuration, FailsOnce())
    requests = neighbours()
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.step()
    with pytest.raises(MemoryError):
        engine.step()
    drive(engine)
    check_solo(requests, [engine.results[r.request_id] for r in requests])


def test_a_refused_request_does_not_change_what_its_neighbours_draw(configuration):
    """Fault: the seed of an unseeded request comes from a generator that refused requests advance, too."""
    hot = [ask(name, 4, 8, temperature=1.0) for name in "ab"]

    def tokens(requests):
        return [r.tokens for r in run_checked(make_engine(configuration, seed=3), requests) if r.tokens]

    undisturbed = tokens(hot)
    for bad in (ask("bad", []), ask("bad", 70, 3), ask("bad", [2**40])):
        assert tokens([bad, *hot]) == undisturbed


def test_a_prompt_at_the_context_limit_is_refused_with_both_numbers(configuration):
    """Fault: a refusal that says only that something is too long."""
    engine = make_engine(configuration, ToyModel(max_model_len=8))
    with pytest.raises(PromptTooLong, match=r"prompt 8 .* 8 tokens"):
        engine.submit(ask("a", 8, 1))
    check_solo([ask("b", 7, 5)], run_checked(engine, [ask("b", 7, 5)]), ToyModel(max_model_len=8))
