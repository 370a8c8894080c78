"""Everything that is refused: by which error, with which numbers; and that nobody else notices.

Also wrong plans: a scheduler that asks for the impossible is stopped by name, before anything has run.
"""

import json
import math
import pickle

import numpy as np
import pytest
from helpers import CONFIGURATIONS, ask, check_invariants, check_solo, drive, make_engine, num_rejected, run_checked

from minibatch import (
    ChunkedPrefill,
    ContiguousKVCache,
    ContinuousBatching,
    Engine,
    PagedKVCache,
    Request,
    SamplingParams,
    StaticBatching,
    ToyModel,
    Trace,
)
from minibatch.plan import Admission, Chunk, Padding, Plan, PlanError, Preemption, Waiting
from minibatch.request import (
    DuplicateRequest,
    EngineStalled,
    InvalidParams,
    InvalidPrompt,
    NeverFits,
    PromptTooLong,
    QueueFull,
    RequestRefused,
)

NAN, INF = math.nan, math.inf

# ---------------------------------------------------------------- sampling parameters

BAD_PARAMS = [
    *[("max_tokens", v) for v in (0, -1, 1.5, "4", True, NAN)],
    *[("min_tokens", v) for v in (-1, 0.5, "0", False, None)],
    *[("temperature", v) for v in (-0.1, NAN, INF, -INF, "hot", True, None, 1j, 10**400)],
    *[("top_k", v) for v in (-2, 1.0, "3", True, None)],
    *[("top_p", v) for v in (0.0, -0.1, 1.1, NAN, "0.9", True, None)],
    *[("min_p", v) for v in (-0.1, 1.1, NAN, "0", False)],
    *[("repetition_penalty", v) for v in (0.0, -1.0, NAN, INF, "1", True)],
    *[("presence_penalty", v) for v in (-2.1, 2.1, NAN, "0", True)],
    *[("frequency_penalty", v) for v in (-2.1, 2.1, NAN, "0", True)],
    *[("logprobs", v) for v in (-1, 1.0, True, "2")],
    *[("prompt_logprobs", v) for v in (-1, 1.0, True, "2")],
    *[("seed", v) for v in (-1, 1.5, "1", True)],
    *[("logit_bias", v) for v in ({1: NAN}, {1: INF}, {1: "x"}, {1: None}, {1: True}, {1: 10**400}, 3, "x", [1, 2])],
    *[("stop", v) for v in ("", [""], ["a", ""], [5], [None], [b"a"], 5)],
    *[("stop_token_ids", v) for v in (5, 1.5)],
    *[("ignore_eos", v) for v in ("no", 2, None)],
    *[("include_stop_str_in_output", v) for v in ("no", 2, None)],
    *[("skip_special_tokens", v) for v in ("no", 2, None)],
]


@pytest.mark.parametrize(("field", "value"), BAD_PARAMS, ids=[f"{f} {repr(v)[:12]}" for f, v in BAD_PARAMS])
def test_a_sampling_parameter_out_of_range_is_refused_by_name_and_value(field, value):
    """Fault: a value that means nothing is accepted, and found in the middle of a run, where it harms others."""
    with pytest.raises(InvalidParams) as refusal:
        SamplingParams(**{field: value})
    shown = next(iter(value.values())) if isinstance(value, dict) else value
    assert field in str(refusal.value)
    assert repr(shown) in str(refusal.value) or isinstance(value, (list, int))


def test_min_tokens_above_max_tokens_is_refused_with_both():
    """Fault: a request that may not stop before the place where it must."""
    with pytest.raises(InvalidParams, match="min_tokens 5 is above max_tokens 4"):
        SamplingParams(max_tokens=4, min_tokens=5)
    assert SamplingParams(max_tokens=4, min_tokens=4).min_tokens == 4
    assert SamplingParams(max_tokens=None, min_tokens=10**6).max_tokens is None


def test_values_at_the_edge_of_their_range_are_taken():
    """Fault: an off-by-one in a range, or an integer refused where a float is meant."""
    edges = {
        "max_tokens": (1, None),
        "temperature": (0, 0.0, 5e-324, 1e6),
        "top_k": (-1, 0, 1, 10**9),
        "top_p": (1, 1.0, 5e-324),
        "min_p": (0, 0.0, 1, 1.0),
        "repetition_penalty": (5e-324, 1, 2.0),
        "presence_penalty": (-2, 2, 0),
        "frequency_penalty": (-2.0, 2.0),
        "logit_bias": ({}, None, {0: -1e300}, {0: 5}),
        "stop": ((), None, "a", ["a", "b"]),
        "stop_token_ids": ((), None, [1, 2]),
        "seed": (0, 2**70, None),
        "logprobs": (0, 1, None),
    }
    for field, values in edges.items():
        for value in values:
            SamplingParams(**{field: value})
    params = SamplingParams(stop="ab", stop_token_ids=[1], logit_bias=None)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("ab",), (1,), {})


# ---------------------------------------------------------------- requests

VOCABULARY = 100


def model(**options):
    return ToyModel(vocab_size=VOCABULARY, **options)


def bad_request(**changes):
    return Request(**{"prompt": [1, 2, 3], "params": SamplingParams(max_tokens=3), "request_id": "bad", **changes})


def wants(**params):
    return bad_request(params=SamplingParams(**{"max_tokens": 3, **params}))


CONTIGUOUS, PAGED = ("static", "continuous"), ("paged", "chunked")

# what is wrong: (request, error, what the message must contain, engine options, configurations)
REFUSED = {
    "no prompt": (bad_request(prompt=[]), InvalidPrompt, ["empty"], {}, CONFIGURATIONS),
    "an empty array": (bad_request(prompt=np.zeros(0, dtype=int)), InvalidPrompt, ["empty"], {}, CONFIGURATIONS),
    "text": (bad_request(prompt="hi"), InvalidPrompt, ["text"], {}, CONFIGURATIONS),
    "bytes": (bad_request(prompt=b"hi"), InvalidPrompt, ["text"], {}, CONFIGURATIONS),
    "None": (bad_request(prompt=None), InvalidPrompt, ["None"], {}, CONFIGURATIONS),
    "a number": (bad_request(prompt=7), InvalidPrompt, ["7"], {}, CONFIGURATIONS),
    "a generator": (bad_request(prompt=iter([1])), InvalidPrompt, ["sequence"], {}, CONFIGURATIONS),
    "a nested list": (bad_request(prompt=[[1, 2]]), InvalidPrompt, ["[1, 2]", "token 0"], {}, CONFIGURATIONS),
    "a matrix": (bad_request(prompt=np.ones((2, 2), int)), InvalidPrompt, ["token 0"], {}, CONFIGURATIONS),
    "a float": (bad_request(prompt=[1, 2.0]), InvalidPrompt, ["token 1", "2.0"], {}, CONFIGURATIONS),
    "NaN": (bad_request(prompt=[NAN]), InvalidPrompt, ["nan"], {}, CONFIGURATIONS),
    "a bool": (bad_request(prompt=[True]), InvalidPrompt, ["True"], {}, CONFIGURATIONS),
    "a numpy bool": (bad_request(prompt=np.array([True])), InvalidPrompt, ["True"], {}, CONFIGURATIONS),
    "a string": (bad_request(prompt=[1, "2"]), InvalidPrompt, ["token 1", "'2'"], {}, CONFIGURATIONS),
    "no token": (bad_request(prompt=[None]), InvalidPrompt, ["None"], {}, CONFIGURATIONS),
    "id 100": (bad_request(prompt=[99, 100]), InvalidPrompt, ["token 1", "100", "0 to 99"], {}, CONFIGURATIONS),
    "id -1": (bad_request(prompt=[-1]), InvalidPrompt, ["-1", "0 to 99"], {}, CONFIGURATIONS),
    "id 2**70": (bad_request(prompt=[2**70]), InvalidPrompt, [str(2**70), "0 to 99"], {}, CONFIGURATIONS),
    "params None": (bad_request(params=None), InvalidParams, ["None"], {}, CONFIGURATIONS),
    "params a dict": (bad_request(params={"max_tokens": 3}), InvalidParams, ["max_tokens"], {}, CONFIGURATIONS),
    "stop id 100": (wants(stop_token_ids=[100]), InvalidParams, ["stop_token_ids", "100", "99"], {}, CONFIGURATIONS),
    "stop id -1": (wants(stop_token_ids=[-1]), InvalidParams, ["stop_token_ids", "-1", "99"], {}, CONFIGURATIONS),
    "stop id True": (wants(stop_token_ids=[True]), InvalidParams, ["stop_token_ids", "True"], {}, CONFIGURATIONS),
    "stop id text": (wants(stop_token_ids="ab"), InvalidParams, ["stop_token_ids", "'a'"], {}, CONFIGURATIONS),
    "bias on 100": (wants(logit_bias={100: 1}), InvalidParams, ["logit_bias", "100", "99"], {}, CONFIGURATIONS),
    "bias on -1": (wants(logit_bias={-1: 1}), InvalidParams, ["logit_bias", "-1", "99"], {}, CONFIGURATIONS),
    "bias on '1'": (wants(logit_bias={"1": 1}), InvalidParams, ["logit_bias", "'1'"], {}, CONFIGURATIONS),
    "stop string": (wants(stop="x"), InvalidParams, ["tokenizer", "'x'"], {}, CONFIGURATIONS),
    "id a number": (bad_request(request_id=7), InvalidParams, ["request_id", "7"], {}, CONFIGURATIONS),
    "id bytes": (bad_request(request_id=b"x"), InvalidParams, ["request_id", "b'x'"], {}, CONFIGURATIONS),
    "id a list": (bad_request(request_id=["x"]), InvalidParams, ["request_id", "['x']"], {}, CONFIGURATIONS),
    "arrives at -1": (bad_request(arrival_time=-1.0), InvalidParams, ["arrival_time", "-1.0"], {}, CONFIGURATIONS),
    "arrives at NaN": (bad_request(arrival_time=NAN), InvalidParams, ["arrival_time", "nan"], {}, CONFIGURATIONS),
    "arrives never": (bad_request(arrival_time=INF), InvalidParams, ["arrival_time", "inf"], {}, CONFIGURATIONS),
    "arrives at True": (bad_request(arrival_time=True), InvalidParams, ["arrival_time", "True"], {}, CONFIGURATIONS),
    "arrives soon": (bad_request(arrival_time="soon"), InvalidParams, ["arrival_time", "'soon'"], {}, CONFIGURATIONS),
    "priority text": (bad_request(priority="high"), InvalidParams, ["priority", "'high'"], {}, CONFIGURATIONS),
    "priority NaN": (bad_request(priority=NAN), InvalidParams, ["priority", "nan"], {}, CONFIGURATIONS),
    "client a set": (bad_request(client={1}), InvalidParams, ["client", "{1}"], {}, CONFIGURATIONS),
    "arrives at 1j": (bad_request(arrival_time=1j), InvalidParams, ["arrival_time", "1j"], {}, CONFIGURATIONS),
    "at the context": (ask("bad", 12, 1), PromptTooLong, ["12"], {"max_model_len": 12}, CONFIGURATIONS),
    "over the context": (ask("bad", 13, 1), PromptTooLong, ["13", "12"], {"max_model_len": 12}, CONFIGURATIONS),
    "a slot too short": (ask("bad", 10, 8), NeverFits, ["10", "8 new", "17 rows", "slot has 16"], {}, CONTIGUOUS),
    "endless, too long": (ask("bad", 17, None), NeverFits, ["prompt 17", "16 tokens"], {}, CONTIGUOUS),
    "a pool too small": (ask("bad", 60, 6), NeverFits, ["60", "6 new", "17 blocks of 4", "has 16"], {}, PAGED),
    "endless, no room": (ask("bad", 65, None), NeverFits, ["prompt 65", "64 tokens"], {}, PAGED),
    "over the limit": (ask("bad", 13, 2), PromptTooLong, ["13", "is 12"], {"token_limit": 12}, ("continuous", "paged")),
    "recomputation": (ask("bad", 12, 2), PromptTooLong, ["12 + 2", "13", "is 12"], {"token_limit": 12}, ("paged",)),
}
TABLE = [(name, configuration) for name, row in REFUSED.items() for configuration in row[4]]


@pytest.mark.parametrize(("name", "configuration"), TABLE)
def test_a_request_that_cannot_run_is_refused_and_leaves_no_trace_but_one_line(name, configuration):
    """Fault: a bad request is accepted, or refused without its numbers, or leaves something behind in the engine."""
    request, error, fragments, options, _ = REFUSED[name]
    engine = make_engine(configuration, model(), **options)
    before = pickle.dumps((engine.queue, engine.active, engine.kv))
    with pytest.raises(error) as refusal:
        engine.submit(request)
    assert isinstance(refusal.value, RequestRefused)
    for fragment in fragments:
        assert fragment in str(refusal.value)
    assert pickle.dumps((engine.queue, engine.active, engine.kv)) == before
    assert engine.step() is None and not engine.abort("bad")
    assert num_rejected(engine) == 1 and len(engine.trace.timelines) == 1

    good = ask("good", 6, 5, at=None)
    results = run_checked(engine, [good])
    check_solo([good], results, model())
    assert results[0].finish_reason == "length" and num_rejected(engine) == 1


@pytest.mark.parametrize(("name", "configuration"), [(n, c) for n, c in TABLE if c == REFUSED[n][4][-1]])
def test_a_refused_request_among_others_is_one_rejected_result_and_the_trace_can_be_saved(
    name, configuration, tmp_path
):
    """Fault: ``run`` raises for one bad request; or its odd values make the whole trace unreadable."""
    request, error, fragments, options, _ = REFUSED[name]
    engine = make_engine(configuration, model(), **options)
    requests = [ask("first", 5, 4), request, ask("last", 7, 3)]
    results = run_checked(engine, requests)
    assert [r.finish_reason for r in results] == ["length", "rejected", "length"]
    assert results[1].error.startswith(error.__name__) and all(f in results[1].error for f in fragments)
    assert isinstance(results[1].request_id, str)
    check_solo(requests[::2], results[::2], model())
    assert num_rejected(engine) == 1
    for line in engine.trace.timelines:
        assert isinstance(line.arrival, (int, float)) and math.isfinite(line.arrival)
    engine.trace.save(tmp_path / "run.jsonl")
    for line in (tmp_path / "run.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert Trace.load(tmp_path / "run.jsonl").steps == engine.trace.steps


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_a_duplicate_and_a_full_queue_are_refused_too(configuration):
    """Fault: the two refusals that depend on others disturb those others."""
    engine = make_engine(configuration, max_num_seqs=1, max_queue=2)
    good = [ask("a", 5, 4, at=None), ask("b", 3, 4, at=None)]
    engine.submit(good[0])
    with pytest.raises(DuplicateRequest, match="'a'"):
        engine.submit(ask("a", 3, 2, at=None))
    engine.submit(good[1])
    with pytest.raises(QueueFull, match="2 requests wait already, max_queue is 2"):
        engine.submit(ask("c", 3, 2, at=None))
    drive(engine)
    check_solo(good, [engine.results["a"], engine.results["b"]])
    assert num_rejected(engine) == 2


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_prompts_that_are_unusual_but_right_are_taken(configuration):
    """Fault: a check that is too strict for numpy integers, ranges and tuples; or a prompt changed from outside."""
    engine = make_engine(configuration)
    mine = [5, 6, 7]
    prompts = {"list": mine, "tuple": (5, 6, 7), "range": range(5, 8), "array": np.array([5, 6, 7]), "edge": [0, 255]}
    for name, prompt in prompts.items():
        engine.submit(Request(prompt, SamplingParams(max_tokens=4), name))
    mine.clear()  # the caller's list is the caller's
    drive(engine)
    assert len({engine.results[name].tokens for name in ("list", "tuple", "range", "array")}) == 1
    check_solo([ask("x", [5, 6, 7]), ask("y", [0, 255])], [engine.results["list"], engine.results["edge"]])


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_more_logprobs_than_there_are_tokens_harm_nobody(configuration):
    """Fault: a number that is right by itself is too large for this model, and found out in the middle of a run."""
    engine = make_engine(configuration, model())
    many = ask("many", [1, 2], 3, logprobs=1000, prompt_logprobs=1000)
    results = run_checked(engine, [ask("n", 4, 5), many])
    check_solo([ask("n", 4, 5)], results[:1], model())
    assert results[1].finish_reason == "rejected" or len(results[1].logprobs[0].top) == VOCABULARY


# ---------------------------------------------------------------- constructors

BAD_SIZES = [
    (lambda: StaticBatching(0), "0"),
    (lambda: StaticBatching(-1), "-1"),
    (lambda: StaticBatching(4, max_wait=-1.0), "-1.0"),
    (lambda: ContinuousBatching(0), "0"),
    (lambda: ContinuousBatching(4, 0), "got 0"),
    (lambda: ContinuousBatching(4, -3), "-3"),
    (lambda: ContinuousBatching(4, 8, "decode-first"), "'decode-first'"),
    (lambda: ContinuousBatching(4, 8, first="both"), "'both'"),
    (lambda: ChunkedPrefill(0), "0"),
    (lambda: ChunkedPrefill(8, 0), "0"),
    (lambda: ChunkedPrefill(8, 4, 0), "got 0"),
    (lambda: ChunkedPrefill(8, 4, -1), "-1"),
    (lambda: ContiguousKVCache(0, 4), "got 0"),
    (lambda: ContiguousKVCache(4, 0), "got 0"),
    (lambda: PagedKVCache(0, 4), "got 0"),
    (lambda: PagedKVCache(4, 0), "got 0"),
    (lambda: PagedKVCache(-1), "got -1"),
    (lambda: make_engine("paged", max_queue=-1), "-1"),
    (lambda: make_engine("paged", max_model_len=0), "0"),
    (lambda: make_engine("paged", max_model_len=-5), "-5"),
    (lambda: make_engine("paged", max_model_len=1), "1"),  # no prompt could ever leave room for a token
]


@pytest.mark.parametrize("number", range(len(BAD_SIZES)))
def test_a_size_that_allows_nothing_is_refused_when_it_is_given(number):
    """Fault: a configuration that can run no request is found out when the first one waits for ever."""
    build, fragment = BAD_SIZES[number]
    with pytest.raises(ValueError) as refusal:
        build()
    assert fragment in str(refusal.value)


ODD_SIZES = [
    lambda: StaticBatching(2.5),
    lambda: StaticBatching(2, max_wait=NAN),
    lambda: StaticBatching("2"),
    lambda: ContinuousBatching(2.5),
    lambda: ContinuousBatching(2, 8.5),
    lambda: ChunkedPrefill(2.5),
    lambda: ChunkedPrefill(8, NAN),
    lambda: ChunkedPrefill(8, 4, 1.5),
    lambda: ContiguousKVCache(2.5, 4),
    lambda: PagedKVCache(4, 2.5),
    lambda: make_engine("paged", max_queue=1.5),
    lambda: make_engine("paged", max_model_len=8.5),
    lambda: make_engine("paged", max_model_len=NAN),
]


@pytest.mark.parametrize("number", range(len(ODD_SIZES)))
def test_a_size_that_is_no_whole_number_is_refused_when_it_is_given(number):
    """Fault: half a slot: ``len(batch) == 2.5`` never holds, so a batch has no limit at all."""
    with pytest.raises((ValueError, TypeError)):
        ODD_SIZES[number]()


# ---------------------------------------------------------------- wrong plans


class Wrong:
    """A scheduler that plans what it is told, until it is ``mended``; then it is continuous batching."""

    def __init__(self, wrong_plan, good=None):
        self.wrong_plan, self.good, self.mended = wrong_plan, good or ContinuousBatching(4, 16), False

    def __getattr__(self, name):
        return getattr(self.__dict__["good"], name)

    def plan(self, queue, active, kv, now):
        return self.good.plan(queue, active, kv, now) if self.mended else self.wrong_plan(list(queue), list(active), kv)


def stranger():
    """A request of another engine, waiting there."""
    engine = make_engine("paged")
    engine.submit(ask("stranger", 3, 4))
    engine.submit(ask("now", 3, 4, at=None))
    return next(iter(engine.queue))


def displace(victim, by, *chunks):
    return Plan(chunks, preemptions=(Preemption(victim, by),))


def active_stranger():
    engine = make_engine("paged")
    engine.submit(ask("stranger", 3, 4))
    engine.step()
    return engine.active[0]


def whole(request):
    return Chunk(request, request.num_computed, request.num_tokens)


# In each: w waits (6 tokens), a is active (4 + 1 tokens in 1 of 8 blocks), and far has not arrived yet.
# name: (plan from (w, a, far), what the message must contain)
WRONG_PLANS = {
    "a stranger is admitted": (
        lambda w, a, far: Plan((whole(s := stranger()),), admissions=(Admission(s, 3),)),
        "stranger",
    ),
    "an active stranger": (lambda w, a, far: Plan((whole(active_stranger()),)), "stranger"),
    "a stranger is preempted": (
        lambda w, a, far: displace(active_stranger(), a, whole(a)),
        "stranger",
    ),
    "an early admission": (lambda w, a, far: Plan((Chunk(far, 0, 3),), admissions=(Admission(far, 3),)), "far"),
    "a chunk of a waiting one": (lambda w, a, far: Plan((whole(w),)), "a chunk of w, which is not active"),
    "two chunks": (lambda w, a, far: Plan((whole(a), whole(a))), "two chunks of a"),
    "over the budget": (
        lambda w, a, far: Plan((whole(a),), padding=(Padding(a, 16, True),)),
        "17 tokens in an iteration of at most 16",
    ),
    "negative padding": (
        lambda w, a, far: Plan((whole(a),), padding=(Padding(a, 20, True), Padding(a, -20, True))),
        "-20",
    ),
    "an empty chunk": (lambda w, a, far: Plan((Chunk(a, 4, 4),)), "tokens 4:4 of a"),
    "a chunk backwards": (lambda w, a, far: Plan((Chunk(a, 4, 3),)), "tokens 4:3 of a"),
    "a chunk too early": (lambda w, a, far: Plan((Chunk(a, 0, 5),)), "tokens 0:5 of a, but 4 of its 5"),
    "a chunk with a gap": (lambda w, a, far: Plan((Chunk(w, 2, 6),), admissions=(Admission(w, 6),)), "tokens 2:6 of w"),
    "tokens that do not exist": (lambda w, a, far: Plan((Chunk(a, 4, 6),)), "tokens 4:6 of a, but 4 of its 5"),
    "blocks that do not exist": (
        lambda w, a, far: Plan((whole(w),), admissions=(Admission(w, 40),)),
        "needs 10 blocks, 7 free",
    ),
    "blocks promised twice": (
        lambda w, a, far: Plan((whole(w), whole(a)), admissions=(Admission(w, 28),)),
        "tokens 4:5 of a, but it needs 1 blocks, 7 free, 7 promised",
    ),
    "preempts a waiting one": (
        lambda w, a, far: displace(w, a, whole(a)),
        "preempt w, which is waiting",
    ),
    "preempts without saying for whom": (lambda w, a, far: Plan((whole(a),), preemptions=(a,)), "not a Preemption"),
    "preempts twice": (
        lambda w, a, far: Plan(
            (whole(w),), admissions=(Admission(w, 6),), preemptions=(Preemption(a, w), Preemption(a, w))
        ),
        " a",
    ),
    "admits twice": (lambda w, a, far: Plan((whole(w),), admissions=(Admission(w, 6), Admission(w, 6))), " w"),
    "admits an active one": (
        lambda w, a, far: Plan((whole(a),), admissions=(Admission(a, 4),)),
        "admit a, which is active",
    ),
    "computes its victim": (
        lambda w, a, far: displace(a, w, whole(a)),
        "a chunk of a, which is not active",
    ),
}


@pytest.mark.parametrize("name", WRONG_PLANS)
def test_a_wrong_plan_is_refused_by_name_before_anything_has_run(name):
    """Fault: the engine carries out half of an impossible plan, and the damage shows up somewhere else."""
    make_plan, fragment = WRONG_PLANS[name]

    def wrong_plan(queue, active, kv):
        far = engine.life.live["far"]  # a scheduler is never told about it
        return make_plan(queue[0], active[0], far)

    engine = Engine(ToyModel(), Wrong(wrong_plan), PagedKVCache(8, 4))
    requests = [ask("a", 4, 4, at=None), ask("far", 3, 4, at=50.0), ask("w", 6, 4, at=None)]
    engine.scheduler.mended = True
    engine.submit(requests[0])
    engine.submit(requests[1])
    engine.step()
    engine.submit(requests[2])
    engine.scheduler.mended = False

    calls = []
    forward, engine.model.forward = engine.model.forward, lambda *a: calls.append(a) or forward(*a)
    before = pickle.dumps((engine.queue, engine.active, engine.kv, engine.trace, engine.store))
    with pytest.raises(PlanError) as refusal:
        engine.step()
    assert "Wrong" in str(refusal.value) and fragment in str(refusal.value)
    assert pickle.dumps((engine.queue, engine.active, engine.kv, engine.trace, engine.store)) == before
    assert not calls
    engine.scheduler.mended = True
    check_invariants(engine)
    drive(engine)
    check_solo(requests, [engine.results[r.request_id] for r in requests])


def test_a_chunk_of_a_finished_member_of_a_static_batch_is_a_wrong_plan():
    """Fault: a dead row of a batch is computed as if it lived."""
    scheduler = Wrong(lambda queue, active, kv: Plan(tuple(whole(r) for r in active)), StaticBatching(2))
    engine = Engine(ToyModel(), scheduler, ContiguousKVCache(2, 16))
    scheduler.mended = True
    requests = [ask("short", 3, 1), ask("long", 3, 4)]
    for request in requests:
        engine.submit(request)
    engine.step()
    scheduler.mended = False
    with pytest.raises(PlanError, match="Wrong planned a chunk of short, which is not active"):
        engine.step()
    scheduler.mended = True
    drive(engine)
    check_solo(requests, [engine.results[r.request_id] for r in requests])


STALLS = {
    "nothing": (lambda queue, active, kv: Plan(rest="I am on strike"), "I am on strike"),
    "no reason": (lambda queue, active, kv: Plan(), "no reason given"),
    "a reason for the head": (lambda queue, active, kv: Plan(waiting=(Waiting(queue[0], "too big"),)), "too big"),
    "wakes in the past": (lambda queue, active, kv: Plan(wake_at=0.0, rest="soon"), "soon"),
    "wakes at no time": (lambda queue, active, kv: Plan(wake_at=NAN, rest="NaN"), "NaN"),
}


@pytest.mark.parametrize("name", STALLS)
def test_a_scheduler_that_plans_nothing_is_a_stall_that_names_it_and_the_head_of_the_queue(name):
    """Fault: with work pending and nothing planned, the loop spins for ever or says that it is done."""
    plan, fragment = STALLS[name]

    class Counts:  # a virtual clock that does not let the engine wait for ever
        kind, waits = "virtual", 0

        def now(self):
            return 1.0

        def wait_until(self, when):
            self.waits += 1
            assert self.waits < 10, "waits again and again for a time that does not come"

        def advance(self, plan):
            pass

    engine = Engine(ToyModel(), Wrong(plan), PagedKVCache(8, 4), clock=Counts())
    engine.submit(ask("head", 3, 4, at=None))
    engine.submit(ask("behind", 3, 4, at=None))
    before = pickle.dumps((engine.queue, engine.active, engine.kv, engine.trace))
    with pytest.raises(EngineStalled) as stall:
        engine.step()
    for part in ("Wrong", "2 waiting", "head is head", fragment):
        assert part in str(stall.value)
    assert pickle.dumps((engine.queue, engine.active, engine.kv, engine.trace)) == before


def test_a_stall_with_active_requests_names_one_of_them():
    """Fault: the error about a stall is itself an error, because the queue is empty."""
    scheduler = Wrong(lambda queue, active, kv: Plan())
    engine = Engine(ToyModel(), scheduler, PagedKVCache(8, 4))
    engine.submit(ask("a", 3, 4))
    scheduler.mended = True
    engine.step()
    scheduler.mended = False
    with pytest.raises(EngineStalled, match=r"Wrong planned nothing with 0 waiting and 1 active; the head is a"):
        engine.step()
    scheduler.mended = True
    drive(engine)
    check_solo([ask("a", 3, 4)], [engine.results["a"]])
