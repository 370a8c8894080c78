"""Workloads: lazy prompts against plain lists, builders against what they promise, closed loops in a real engine."""

from __future__ import annotations

import json
import math
import pickle
import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minibatch import ContinuousBatching, Engine, PagedKVCache, PrefixCachedKVCache, Request, SamplingParams
from minibatch.arrival_processes import AllAtOnce, Evenly, Gamma, OnOff, Poisson
from minibatch.closed_loop import closed_loop, conversations
from minibatch.contents import MOST, ROOM, Joined, join, own, shared
from minibatch.distributions import Exponential, Fixed, Uniform
from minibatch.models.simulated_model import SimulatedModel
from minibatch.open_loop import Client, clients, from_lengths, from_trace, shared_prefix, synthetic
from minibatch.policies.predictors import Oracle
from minibatch.request import Result
from minibatch.trace import Timeline, Trace
from minibatch.workloads import FollowUp, Workload

# ---------------------------------------------------------------- prompts

several_pieces = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 6)).map(lambda t: range(t[0], t[0] + t[1])), min_size=1, max_size=8
).filter(any)


@given(several_pieces, st.data())
@settings(max_examples=300, deadline=None)
def test_a_joined_prompt_is_the_list_that_it_stands_for(pieces, data):
    """Every index, and any slice. Fault: off by one where two pieces meet, or at a negative index."""
    prompt, plain = join(pieces), [token for piece in pieces for token in piece]
    assert len(prompt) == len(plain) and list(prompt) == plain
    assert [prompt[i] for i in range(-len(plain), len(plain))] == plain * 2
    for outside in (len(plain), -len(plain) - 1):
        with pytest.raises(IndexError):
            prompt[outside]
    bound = st.none() | st.integers(-60, 60)
    cut = slice(data.draw(bound), data.draw(bound), data.draw(st.sampled_from([None, 1, 2, -1, -3])))
    assert list(prompt[cut]) == plain[cut]
    again = pickle.loads(pickle.dumps(prompt))
    assert again == prompt and hash(again) == hash(prompt) and list(again) == plain


@given(several_pieces, several_pieces)
@settings(max_examples=300, deadline=None)
def test_equal_contents_are_equal_prompts(some, others):
    """Whatever the cuts. Fault: a saved workload that is not the one that is loaded."""
    assert (join(some) == join(others)) == (list(join(some)) == list(join(others)))
    cut = [part for piece in some for part in (piece[:2], piece[2:])]
    assert join(cut) == join(some)


def test_a_prompt_needs_tokens_that_count_up():
    with pytest.raises(ValueError, match="at least one token"):
        join([range(3, 3)])
    with pytest.raises(ValueError, match=r"range\(9, 3, -1\)"):
        join([range(9, 3, -1)])


def test_contents_do_not_touch():
    """Fault: a prefix cache finds by accident what somebody else has."""
    for kind in (own, shared):
        for index in (0, 1, MOST - 1):
            content = kind(index, ROOM - 1)
            assert kind(index, 5) == content[:5]
            assert index == 0 or kind(index - 1, ROOM - 1).stop <= content.start
    assert own(MOST - 1, ROOM - 1).stop <= shared(0, 1).start
    assert shared(MOST - 1, ROOM - 1).stop < 2**61 - 1  # beyond, hash(n) == hash(n - (2**61 - 1))
    for index, length in ((-1, 1), (MOST, 1), (0, ROOM), (0, -1)):
        with pytest.raises(ValueError, match=f"content {index} of {length} tokens"):
            own(index, length)


def test_a_million_tokens_take_no_room():
    """Fault: a prompt that is written out, here 80 GB."""
    tracemalloc.start()
    try:
        workload = synthetic(10_000, Poisson(3.0), Fixed(1_000_000), Exponential(128, 1536, reject=True))
        long = shared_prefix(1000, 3, 1_000_000, AllAtOnce(), Fixed(1_000_000), Fixed(8))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(workload) == 10_000 and len(long.requests[0].prompt) == 2_000_000
    assert peak < 16 * 2**20


# ---------------------------------------------------------------- open loops


def lengths_of(workload):
    return [(len(r.prompt), r.output_length) for r in workload.every_request]


def times_of(workload):
    return [r.arrival_time for r in workload.requests]


def draw(n=200, arrivals=None, seed=3, prompts=None, outputs=None, **options):
    return synthetic(
        n, arrivals or Poisson(4.0), prompts or Uniform(32, 512), outputs or Exponential(60), seed, **options
    )


def test_a_workload_is_a_function_of_its_seed():
    assert draw() == draw() and draw() != draw(seed=4)
    assert draw().requests[17].request_id == "r17"


def test_one_thing_can_be_changed_with_all_else_left_alone():
    """Fault: one generator for all columns, so that another rate gives other lengths (no common random numbers)."""
    base = draw()
    assert draw(50).requests == base.requests[:50]
    faster = draw(arrivals=Poisson(8.0))
    assert lengths_of(faster) == lengths_of(base)
    assert np.allclose(np.array(times_of(faster)) * 2, times_of(base))
    assert lengths_of(draw(arrivals=Gamma(4.0, 3.0))) == lengths_of(base)
    longer = draw(outputs=Fixed(7))
    assert times_of(longer) == times_of(base)
    assert [p for p, _ in lengths_of(longer)] == [p for p, _ in lengths_of(base)]
    assert abs(np.corrcoef(np.array(lengths_of(draw(2000, prompts=Exponential(60)))).T)[0, 1]) < 0.12


def test_schedulers_see_the_limit_and_the_oracle_the_length():
    """Fault: output lengths visible to every policy, or an oracle that promises more than the limit allows."""
    exact, limited = draw(), draw(max_tokens=64)
    assert all(r.params.max_tokens == r.output_length for r in exact.requests)
    assert {r.params.max_tokens for r in limited.requests} == {64}
    assert [min(o, 64) for _, o in lengths_of(exact)] == [o for _, o in lengths_of(limited)]
    assert max(o for _, o in lengths_of(exact)) > 64
    assert limited.output_lengths == {r.request_id: r.output_length for r in limited.requests}
    by_hand = Request([1], SamplingParams(max_tokens=5), "x", 0.0, output_length=9)
    assert Workload([by_hand]).output_lengths == {"x": 5}
    assert Workload([replace(by_hand, output_length=None)]).output_lengths == {"x": 5}
    assert Workload([replace(by_hand, params=SamplingParams(max_tokens=None))]).output_lengths == {"x": 9}
    assert "max_tokens 64" in limited.description and "poisson:4" in limited.description


def test_nothing_is_shared_by_accident():
    """Answers included: the token after a prompt is nobody else's."""
    for workload in (draw(outputs=Fixed(100)), closed_loop(20, 10, Uniform(1, 99), Fixed(100))):
        seen = Counter()
        for request in workload.every_request:
            seen.update([request.prompt[0] // ROOM, (request.prompt[-1] + 100) // ROOM])
        assert set(seen.values()) == {2} and len(seen) == 200


def test_members_of_a_group_share_its_prefix_and_nothing_else():
    """Fault: groups that overlap, or members that are equal beyond the prefix."""
    workload = shared_prefix(300, 4, 100, Poisson(2.0), Uniform(1, 50), Fixed(5), seed=1)
    groups = Counter(tuple(r.prompt[:100]) for r in workload.requests)
    assert len(groups) == 4 and min(groups.values()) > 45
    first_tokens = [r.prompt[100] for r in workload.requests]
    prefixes = {token for prefix in groups for token in prefix}
    assert len(prefixes) == 400 and len(set(first_tokens)) == 300 and not prefixes & set(first_tokens)
    alone = synthetic(300, Poisson(2.0), Uniform(1, 50), Fixed(5), seed=1)
    assert [(p - 100, o) for p, o in lengths_of(workload)] == lengths_of(alone)
    assert shared_prefix(40, 4, 100, Poisson(2.0), Uniform(1, 50), Fixed(5), seed=1).requests == workload.requests[:40]


def vtc(name, per_minute, **options):
    return Client(name, Evenly(per_minute / 60), Fixed(256), Fixed(256), **options)


def test_two_clients_of_the_fairness_suite():
    """VTC: 90 and 180 requests a minute. Fault: n or duration ignored, clients unsorted, ids used twice."""
    workload = clients([vtc("slow", 90, duration=60.0), vtc("fast", 180, duration=60.0, priority=-1)])
    assert Counter(r.client for r in workload.requests) == {"slow": 90, "fast": 180}
    assert times_of(workload) == sorted(times_of(workload))
    assert [r.request_id for r in workload.requests] == [f"r{i}" for i in range(270)]
    assert {r.priority for r in workload.requests if r.client == "fast"} == {-1}
    assert [r.client for r in workload.requests[:3]] == ["slow", "fast", "fast"]


def test_a_client_has_its_own_time():
    """Fault: start added before the duration is cut, or on/off counted from 0 instead of the client's start."""
    bursty = Client("b", OnOff(10.0, 5.0, 15.0), Fixed(8), Fixed(8), start=100.0, duration=200.0)
    workload = clients([bursty, vtc("a", 60, start=30.0, n=5)], seed=2)
    mine = np.array([r.arrival_time for r in workload.requests if r.client == "b"])
    assert ((mine >= 100) & (mine < 300)).all() and ((mine - 100) % 20 <= 5 + 1e-9).all()
    assert abs(len(mine) - 500) < 5 * math.sqrt(500)
    assert [r.arrival_time for r in workload.requests if r.client == "a"] == [30, 31, 32, 33, 34]


def test_a_client_does_what_it_did_when_others_come():
    def of(workload, name):
        return [(r.arrival_time, len(r.prompt), r.output_length) for r in workload.requests if r.client == name]

    one = Client("one", Poisson(3.0), Uniform(1, 99), Uniform(1, 99), duration=50.0)
    alone, together = clients([one], seed=5), clients([one, replace(one, name="two")], seed=5)
    assert of(together, "one") == of(alone, "one") != of(together, "two")
    longer = clients([replace(one, duration=80.0)], seed=5)
    assert of(longer, "one")[: len(alone)] == of(alone, "one")


def test_clients_that_make_no_sense():
    with pytest.raises(ValueError, match="'x' would never stop"):
        vtc("x", 60)
    with pytest.raises(ValueError, match="'x' would never stop"):
        Client("x", AllAtOnce(), Fixed(1), Fixed(1), duration=5.0)
    with pytest.raises(ValueError, match="the same name"):
        clients([vtc("x", 60, n=1), vtc("x", 60, n=1)])


def test_pairs_of_lengths_stay_pairs():
    """Fault: columns drawn apart, or a row taken twice."""
    pairs = np.array([[i + 1, 1000 - i] for i in range(500)])
    workload = from_lengths(pairs, Poisson(4.0), seed=1, n=200)
    assert all(p + o == 1001 for p, o in lengths_of(workload)) and len({p for p, _ in lengths_of(workload)}) == 200
    assert lengths_of(from_lengths(pairs, Evenly(1.0), seed=1, n=50)) == lengths_of(workload)[:50]
    assert sorted(lengths_of(from_lengths(pairs, Evenly(1.0)))) == [tuple(row) for row in pairs.tolist()]
    with pytest.raises(ValueError, match="501 requests need as many rows of lengths, and there are 500"):
        from_lengths(pairs, Poisson(4.0), n=501)


# ---------------------------------------------------------------- other workloads made of one


def test_another_rate_stretches_the_times_and_nothing_else():
    base = draw()
    faster = base.at_rate(2 * base.rate)
    assert math.isclose(faster.rate, 2 * base.rate) and math.isclose(faster.duration * 2, base.duration)
    assert lengths_of(faster) == lengths_of(base) and "at " in faster.description
    assert np.allclose(np.array(times_of(faster)) * 2, times_of(base))
    with pytest.raises(ValueError, match="200 requests at one time have no rate"):
        draw(arrivals=AllAtOnce()).at_rate(3.0)


def test_parts_of_a_workload():
    """Fault: an end counted twice when a day is cut into hours, or times that do not start again at 0."""
    base = draw(arrivals=Evenly(2.0))
    hours = [base.slice(start, start + 20) for start in range(0, 100, 20)]
    assert sum(map(len, hours)) == len(base) and times_of(hours[1]) == times_of(hours[0])
    assert [r.request_id for r in hours[1].requests][:2] == ["r40", "r41"]
    assert base.head(7).requests == base.requests[:7]
    some, more = base.sample(30, seed=1), base.sample(60, seed=1)
    assert all(r in more.requests for r in some.requests) and all(r in base.requests for r in more.requests)
    assert len(some) == 30 and len({r.request_id for r in more.requests}) == 60
    assert times_of(more) == sorted(times_of(more)) and "60 of 200" in more.description
    assert base.sample(60, seed=2) != more
    with pytest.raises(ValueError, match="a sample of 201 needs as many arrivals, and there are 200"):
        base.sample(201, seed=0)


def test_parts_keep_what_follows():
    """Fault: follow-ups of requests that are not there, or only the first one kept."""
    base = conversations(10, 3, Evenly(1.0), Fixed(5), Fixed(5), think_time=1.0)
    part = base.slice(2.0, 4.0)
    assert [r.request_id for r in part.requests] == ["c2.0", "c3.0"]
    assert set(part.follow_ups) == {"c2.0", "c2.1", "c3.0", "c3.1"}
    assert base.at_rate(5.0).follow_ups == base.follow_ups


def test_a_summary():
    requests = [Request(range(n), SamplingParams(max_tokens=9), f"r{n}", float(n), output_length=n) for n in (1, 2, 6)]
    assert Workload(requests, "three").summary() == {
        "requests": 3,
        "follow_ups": 0,
        "duration": 5.0,
        "rate": 0.4,
        "prompt_median": 2.0,
        "prompt_p90": 5.2,
        "prompt_tokens": 9,
        "output_median": 2.0,
        "output_p90": 5.2,
        "output_tokens": 9,
        "total_tokens": 18,
    }
    assert Workload(()).summary()["rate"] is None and Workload(()).summary()["prompt_p90"] is None
    assert Workload(requests, "three", 7).meta == {"workload": "three", "seed": 7}


def test_a_workload_that_cannot_be():
    request = Request([1], request_id="a", arrival_time=1.0)
    with pytest.raises(ValueError, match="this one has none"):
        Workload([replace(request, request_id=None)])
    with pytest.raises(ValueError, match="two requests of a workload have the id 'a'"):
        Workload([request], follow_ups={"a": FollowUp(request)})
    with pytest.raises(ValueError, match=r"b arrives at 0.5, the one before it at 1.0"):
        Workload([request, replace(request, request_id="b", arrival_time=0.5)])
    with pytest.raises(ValueError, match="a arrives at None"):
        Workload([replace(request, arrival_time=None)])
    with pytest.raises(ValueError, match="b follows 'x', which is not in this workload"):
        Workload([request], follow_ups={"x": FollowUp(replace(request, request_id="b"))})
    with pytest.raises(ValueError, match="delay must lie in"):
        Workload([request], follow_ups={"a": FollowUp(replace(request, request_id="b"), -1.0)})
    with pytest.raises(ValueError, match="arrival_time"):
        Workload([replace(request, arrival_time=math.nan)])


# ---------------------------------------------------------------- closed loops, without an engine


def ended(request, at, reason="stop"):
    timeline = Timeline(request.request_id, request.client, 0, len(request.prompt), 1, request.arrival_time, finish=at)
    return Result(request.request_id, reason, timeline=timeline)


def test_a_client_asks_again_when_it_has_its_answer_and_has_thought():
    """Fault: a think time that counts from the arrival, or a next request that depends on which run asks."""
    workload = closed_loop(3, 4, Uniform(1, 50), Uniform(1, 50), think_time=2.0, seed=1)
    assert [r.request_id for r in workload.requests] == ["c0.0", "c1.0", "c2.0"]
    assert len(workload) == 12 and times_of(workload) == [0, 0, 0]
    request, at = workload.requests[1], 0.0
    for turn in range(1, 4):
        at += 10.0
        (following,) = workload.next(ended(request, at))
        assert (following,) == workload.next(ended(request, at))  # and again: nothing has been used up
        assert following.request_id == f"c1.{turn}" and following.client == "c1"
        assert following.arrival_time == at + workload.follow_ups[request.request_id].delay > at
        request = following
    assert workload.next(ended(request, at)) == ()
    delays = [f.delay for f in closed_loop(50, 50, Fixed(1), Fixed(1), think_time=2.0).follow_ups.values()]
    assert abs(np.mean(delays) - 2) < 5 * 2 / math.sqrt(len(delays))


def test_who_comes_after_a_refusal():
    """A client of a closed loop goes on; in a conversation there is no answer to reply to.

    Fault: a loop that dries up, or a history with an answer that was never given.
    """
    loop = closed_loop(1, 2, Fixed(1), Fixed(1))
    talk = conversations(1, 2, AllAtOnce(), Fixed(1), Fixed(1))
    for reason, after_loop, after_talk in (
        ("stop", 1, 1),
        ("length", 1, 1),
        ("rejected", 1, 0),
        ("abort", 1, 0),
    ):
        assert len(loop.next(ended(loop.requests[0], 3.0, reason))) == after_loop
        assert len(talk.next(ended(talk.requests[0], 3.0, reason))) == after_talk


def test_more_clients_or_turns_leave_the_others_as_they_are():
    """Prefix stability, in both directions."""

    def of(workload, client):
        return [
            (len(r.prompt), r.output_length) for r in workload.every_request if r.request_id.startswith(f"c{client}.")
        ]

    few, many = (closed_loop(n, 5, Uniform(1, 99), Uniform(1, 99), seed=3) for n in (3, 30))
    assert all(of(few, i) == of(many, i) for i in range(3))
    longer = closed_loop(3, 9, Uniform(1, 99), Uniform(1, 99), seed=3)
    assert all(of(longer, i)[:5] == of(few, i) for i in range(3))
    few, many = (conversations(n, Uniform(1, 5), Poisson(1), Uniform(1, 99), Uniform(1, 99), seed=3) for n in (3, 30))
    assert few.requests == many.requests[:3] and few == replace(many.head(3), description=few.description)


def test_a_turn_begins_with_all_that_was_said():
    """The prompt of a turn is prompt and answer of the turn before, then new words; the system prompt is everybody's.

    Fault: a history without the answer, or with another conversation's.
    """
    workload = conversations(
        6, Uniform(1, 5), Poisson(1.0), Uniform(3, 9), Uniform(2, 70), system_prompt=20, seed=1, max_tokens=50
    )
    turns = {r.request_id: r for r in workload.every_request}
    assert len({tuple(r.prompt[:20]) for r in turns.values()}) == 1
    assert len({r.prompt[20] for r in workload.requests}) == 6
    assert len({r.prompt[-1] for r in turns.values()}) == len(turns)  # the new words are new
    assert max(r.output_length for r in turns.values()) == 50
    for request_id, follow in workload.follow_ups.items():
        before = list(turns[request_id].prompt)
        answer = [before[-1] + 1 + i for i in range(turns[request_id].output_length)]
        prompt = list(follow.request.prompt)
        assert prompt[: len(before) + len(answer)] == before + answer
        assert 3 <= len(prompt) - len(before) - len(answer) <= 9
        assert follow.request.arrival_time is None and follow.needs_answer


# ---------------------------------------------------------------- in an engine


def simulate(workload, scheduler=None, kv=None, check=None, **options):
    """One second an iteration."""
    engine = Engine(
        SimulatedModel(lambda plan: 1.0),
        scheduler or ContinuousBatching(64, 4096),
        kv or PagedKVCache(2000, 16),
        meta=workload.meta,
        **options,
    )
    on_step = None if check is None else lambda report: check(engine, report)
    return engine, engine.run(workload.requests, on_step, workload.next)


def in_flight(timelines):
    """The most requests between arrival and end at one time; an end makes room for an arrival at the same moment."""
    events = sorted([(t.finish, -1) for t in timelines] + [(t.arrival, 1) for t in timelines])
    return int(np.max(np.cumsum([change for _, change in events])))


@pytest.mark.parametrize("think_time", [0.0, 5.0])
def test_a_closed_loop_never_has_more_in_the_system_than_clients(think_time):
    """Fault: the next request sent with the answer still to come."""
    workload = closed_loop(5, 6, Uniform(1, 40), Uniform(1, 30), think_time=think_time, seed=2)
    engine, results = simulate(workload, ContinuousBatching(2, 64))
    timelines = engine.trace.timelines
    assert len(results) == 30 and {r.finish_reason for r in results} == {"stop"}
    assert in_flight(timelines) <= 5
    by_id = {t.request_id: t for t in timelines}
    for request_id, follow in workload.follow_ups.items():
        assert by_id[follow.request.request_id].arrival == by_id[request_id].finish + follow.delay
    if not think_time:  # then all five are always there, but for the end
        assert in_flight(timelines) == 5


@pytest.mark.parametrize(
    "workload",
    [
        synthetic(40, Poisson(0.5), Uniform(1, 80), Uniform(1, 30), seed=4, max_tokens=30),
        shared_prefix(40, 2, 48, Poisson(0.5), Uniform(1, 40), Uniform(1, 30), seed=4),
        closed_loop(4, 10, Uniform(1, 40), Uniform(1, 30), think_time=3.0, seed=4),
        conversations(8, Uniform(1, 5), Poisson(0.2), Uniform(1, 40), Uniform(1, 30), think_time=3.0, seed=4),
    ],
    ids=["synthetic", "shared prefix", "closed loop", "conversations"],
)
def test_every_run_of_a_workload_is_the_same(workload):
    """All requests come, with the promised lengths, and a second engine sees exactly the same.

    Fault: state of a closed loop that leaks from one run into the next.
    """
    before = pickle.dumps(workload)
    first, results = simulate(workload)
    second, _ = simulate(workload)
    assert first.trace == second.trace and pickle.dumps(workload) == before
    assert {r.request_id: len(r.tokens) for r in results} == workload.output_lengths
    assert len(results) == len(workload) and first.trace.meta["workload"] == workload.description


def test_a_conversation_finds_all_that_was_said_in_the_prefix_cache():
    """With one conversation and room for all: each turn hits every full block of what has been computed.

    Fault: prompts whose history is not what the model said.
    """
    workload = conversations(1, 6, AllAtOnce(), Uniform(5, 40), Uniform(2, 40), system_prompt=50, seed=3)
    kv = PrefixCachedKVCache(500, 4)
    engine, results = simulate(workload, kv=kv)
    assert len(results) == 6
    for before, after in pairwise(engine.trace.timelines):
        computed = before.num_prompt + len(before.token_times) - 1  # the last token is never fed back
        assert after.num_cached == min(computed, after.num_prompt - 1) // 4 * 4 > 0


def test_only_shared_content_is_found():
    """Fault: accidental hits, or a shared prefix that is not found."""
    for workload, hits in (
        (synthetic(20, Evenly(0.01), Fixed(64), Fixed(40)), {0}),
        (shared_prefix(20, 1, 64, Evenly(0.01), Fixed(30), Fixed(40)), {0, 64}),
    ):
        engine, _ = simulate(workload, kv=PrefixCachedKVCache(4000, 16))
        cached = [t.num_cached for t in engine.trace.timelines]
        assert set(cached) == hits and cached.count(0) == (20 if hits == {0} else 1)


def test_an_oracle_knows_the_lengths():
    workload = synthetic(5, AllAtOnce(), Fixed(4), Uniform(1, 30), max_tokens=100)
    oracle = Oracle(workload.output_lengths)
    for request in workload.requests:
        seen = SimpleNamespace(request_id=request.request_id, max_new_tokens=request.params.max_tokens)
        assert oracle(seen) == request.output_length < 100


# ---------------------------------------------------------------- from a trace


def test_a_replay_asks_for_what_the_run_had():
    """Simulated again with the same parts, it is the same run. Fault: a time, length, client or limit that is lost."""
    workload = synthetic(30, Poisson(0.4), Uniform(1, 80), Uniform(1, 30), seed=4, max_tokens=50, client="me")
    first, _ = simulate(workload)
    replay = from_trace(first.trace)
    assert replay.requests == workload.requests
    second, _ = simulate(replay)
    assert second.trace.timelines == first.trace.timelines
    assert workload.description in replay.description


def test_a_replay_of_clients_and_of_what_emitted_nothing(tmp_path):
    """From a file, sorted by arrival. Fault: a refused request replayed, or one aborted half-way taken for complete."""
    timelines = [
        Timeline("late", "x", 2, 10, 50, 3.0, 3.0, [4.0, 5.0], finish=5.0, finish_reason="abort"),
        Timeline("no", "x", 0, 10, 50, 1.0, finish=1.0, finish_reason="rejected"),
        Timeline("early", "y", -1, 7, 9, 2.0, 2.0, [2.5], finish=2.5, finish_reason="stop"),
    ]
    path = tmp_path / "run.jsonl"
    Trace({"workload": "lab"}, timelines=timelines).save(path)
    replay = from_trace(Trace.load(path))
    seen = [
        (r.request_id, r.client, r.priority, len(r.prompt), r.output_length, r.params.max_tokens, r.arrival_time)
        for r in replay.requests
    ]
    assert seen == [("early", "y", -1, 7, 1, 9, 2.0), ("late", "x", 2, 10, 2, 50, 3.0)]
    assert replay.description == "replay of lab, without 1 request that emitted nothing"


# ---------------------------------------------------------------- files

plain_prompts = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=5)
some_params = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 99),
    temperature=st.sampled_from([0.0, 0.1, 1.5]),
    seed=st.none() | st.integers(0, 2**63),
    stop=st.sampled_from([(), ("end", "ü")]),
    stop_token_ids=st.sampled_from([(), (3, 4)]),
    logit_bias=st.sampled_from([{}, {3: 0.5, 10: -1.0}]),
    ignore_eos=st.booleans(),
)
some_requests = st.builds(
    Request,
    prompt=plain_prompts | several_pieces.map(join),
    params=some_params,
    priority=st.integers(-3, 3),
    client=st.sampled_from(["default", "y", "ü\n"]),
    cache_salt=st.none() | st.just("salt"),
    output_length=st.none() | st.integers(1, 99),
)


@given(
    st.lists(some_requests, max_size=6),
    st.lists(st.tuples(some_requests, st.floats(0, 1e9), st.booleans()), max_size=4),
    st.lists(st.floats(0, 1e9), min_size=6, max_size=6),
    st.text(max_size=20),
    st.none() | st.integers(0, 2**70),
)
@settings(max_examples=150, deadline=None)
def test_a_saved_workload_is_loaded_as_an_equal_one(tmp_path_factory, requests, follow_ups, times, description, seed):
    """Fault: a field that is not written, a time that is rounded, a prompt that is written out."""
    requests = [
        replace(r, request_id=f"r{i}", arrival_time=time)
        for i, (r, time) in enumerate(zip(requests, sorted(times), strict=False))
    ]
    chain, last = {}, "r0"
    for i, (request, delay, needs_answer) in enumerate(follow_ups if requests else ()):
        chain[last] = FollowUp(replace(request, request_id=f"f{i}"), delay, needs_answer)
        last = f"f{i}"
    workload = Workload(requests, description, seed, chain)
    path = tmp_path_factory.getbasetemp() / "workload.jsonl"
    workload.save(path)
    assert Workload.load(path) == workload
    assert len(path.read_text(encoding="utf-8").split("\n")) == len(workload) + 2


def test_a_million_tokens_are_a_short_line(tmp_path):
    path = tmp_path / "w.jsonl"
    workload = conversations(3, 2, Poisson(1.0), Fixed(1_000_000), Fixed(10**6), system_prompt=10**6)
    workload.save(path)
    assert Workload.load(path) == workload
    assert path.stat().st_size < 4096


HEADER = {"workload": {"format": 1, "description": "d", "seed": None}}
GOOD = {"request": {"request_id": "a", "arrival_time": 1.0, "pieces": [[5, 9]], "output_length": 3}}


def changed(**values):
    return {"request": {**GOOD["request"], **values}}


@pytest.mark.parametrize(
    "line, what",
    [
        ("{", "Expecting"),
        ("[]", ""),
        ("{}", ""),
        ({"requests": {}}, "unknown kind 'requests'"),
        (HEADER, "unknown kind 'workload'"),
        ({"request": {"request_id": "b", "arrival_time": 2.0}}, "pieces"),
        (changed(request_id=None), "has none"),
        (changed(output_length=0), "output_length"),
        (changed(arrival_time="soon"), "arrival_time"),
        (changed(arrival_time=math.inf), "arrival_time"),
        (changed(pieces=[[5, 5]]), "at least one token"),
        (changed(pieces=[[5.5, 9]]), "float"),
        (changed(colour="red"), "colour"),
        (changed(params={"max_tokens": 0}), "max_tokens"),
        ({"follow_up": {"after": "a", "request": {"request_id": "b", "pieces": [[1, 2]]}, "dela": 3}}, "dela"),
    ],
)
def test_a_line_that_is_no_workloads_is_named(tmp_path, line, what):
    path = tmp_path / "w.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_text(f"{json.dumps(HEADER)}\n{json.dumps(GOOD)}\n{text}\n")
    with pytest.raises(ValueError, match=f"w.jsonl:3 is not a line of a minibatch workload: .*{what}"):
        Workload.load(path)


@pytest.mark.parametrize(
    "lines, what",
    [
        ([], "has no header line"),
        ([GOOD], "w.jsonl:1 is not a line .* header of workload format 1"),
        ([{"workload": {"format": 2, "description": "", "seed": None}}], "w.jsonl:1 .* format 1"),
        ([{"meta": {"format": 2}}], "w.jsonl:1 .* format 1"),
        ([HEADER, GOOD, GOOD], "w.jsonl is not a minibatch workload: two requests .* 'a'"),
        (
            [HEADER, {"follow_up": {"after": "x", "request": {"request_id": "b", "pieces": [[1, 2]]}}}],
            "b follows 'x'",
        ),
    ],
)
def test_a_file_that_is_no_workload_is_named(tmp_path, lines, what):
    path = tmp_path / "w.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=what):
        Workload.load(path)


def test_joined_is_what_a_conversation_has():
    """Fault: tests of Joined that no prompt is made of."""
    workload = conversations(1, 2, AllAtOnce(), Fixed(3), Fixed(4))
    (follow,) = workload.follow_ups.values()
    assert isinstance(workload.requests[0].prompt, range) and isinstance(follow.request.prompt, Joined)


@pytest.mark.parametrize("parts", [(), (range(5, 5),), (range(3), range(5, 5))])
def test_a_joined_prompt_has_a_token_in_every_piece(parts):
    """Fault: an IndexError at the first look, in the middle of a run."""
    with pytest.raises(ValueError, match="at least one token"):
        Joined(parts)
