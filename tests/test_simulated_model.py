"""The simulated model: a run without logits is the run of a model that says the same tokens.

The oracle is a toy model that reads its script through the cache: told to say what the simulated model says (the
numbers that follow the prompt, and 0 at the end), it must give the same trace, step by step, and the same results.
"""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from helpers import (
    CONFIGURATIONS,
    ScriptedModel,
    ask,
    check_drained,
    check_invariants,
    make_engine,
    names,
    run_checked,
    timeline,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_engine_properties import ORDERS, SLOT, make_cache, make_request, make_scheduler, picks

from minibatch import (
    ChunkedPrefill,
    ContinuousBatching,
    Engine,
    PagedKVCache,
    Request,
    SamplingParams,
    ToyModel,
)
from minibatch.contents import join
from minibatch.models.simulated_model import END, SimulatedModel
from minibatch.plan import Plan
from minibatch.policies import Optimistic, ReserveMaximum
from minibatch.prefix_cache import PrefixCachedKVCache
from minibatch.request import InvalidParams, InvalidPrompt, NeverFits, RequestState, Result
from minibatch.trace import StepReport

QUICK = settings(
    max_examples=70, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


def second(plan: Plan) -> float:
    return 1.0


def run(engine: Engine, requests: Sequence[Request]) -> list[Result]:
    """With every invariant checked; what a computing model reads is poisoned, too."""
    if not engine.model.simulated:
        return run_checked(engine, requests, fcfs=False)
    results = engine.run(requests, lambda report: check_invariants(engine, report, fcfs=False))
    check_drained(engine)
    return results


def play(parts: Any, requests: Sequence[Request], model: Any) -> Engine:
    scheduler, cache, order = deepcopy(parts)  # a cache and an order belong to one engine
    engine = Engine(model, scheduler, cache, order=order, seed=0)
    run(engine, requests)
    return engine


def says(request: Request) -> list[int]:
    """What the simulated model says to a request, written out."""
    first, end = request.prompt[-1] + 1, request.output_length
    if end is None:
        return list(range(first, first + 2 * SLOT))
    return [*range(first, first + end - 1), END, *range(END + 1, 2 * SLOT)]


# ---------------------------------------------------------------- the same as a model that computes


@st.composite
def plays(draw: Any) -> tuple[Any, list[Request]]:
    """Equal prompts have equal answers, for the toy knows requests by their prompts alone."""
    pick = picks(draw)
    parts = make_scheduler(pick), make_cache(pick), ORDERS[pick(list(ORDERS))]()
    ends: dict[tuple[int, ...], int | None] = {}
    requests = []
    for number in range(pick(range(1, 9))):
        request = make_request(pick, number, pick([None, 0.0, 0.5, 2.0, 7.0]))
        end = ends.setdefault(tuple(request.prompt), pick([None, *range(1, SLOT // 2 + 3)]))
        params = replace(request.params, ignore_eos=pick([False, False, True]))
        requests.append(replace(request, params=params, output_length=end))
    return parts, requests


@pytest.mark.slow
@QUICK
@given(plays())
def test_a_simulated_run_is_that_of_a_model_which_says_the_same(both):
    """Fault: anybody decides otherwise because nothing is computed: another plan, end, token, time or reason."""
    parts, requests = both
    simulated = play(parts, requests, SimulatedModel(second))
    scripts = {tuple(request.prompt): says(request) for request in requests}
    plain = [replace(request, output_length=None) for request in requests]
    computed = play(parts, plain, ScriptedModel(scripts, vocab_size=128, eos_token_id=END))
    assert simulated.trace.steps == computed.trace.steps
    assert simulated.trace.timelines == computed.trace.timelines
    assert simulated.results == computed.results


def in_lengths(step: StepReport) -> StepReport:
    """Without the tokens themselves."""
    members = tuple(replace(member, emitted=member.emitted is not None) for member in step.members)
    return replace(step, members=members, forked=tuple(replace(f, emitted=f.emitted is not None) for f in step.forked))


@st.composite
def lengths(draw: Any) -> tuple[Any, list[Request]]:
    """Prompts begin alike, but each ends in numbers of its own, which its answer goes on with."""
    pick = picks(draw)
    parts = make_scheduler(pick), make_cache(pick), ORDERS[pick(list(ORDERS))]()
    requests = []
    for number in range(pick(range(1, 9))):
        request = make_request(pick, number, pick([None, 0.0, 1.5, 6.0]))
        own = pick(range(1, len(request.prompt) + 1))
        prompt = [*range(len(request.prompt) - own), *(32 * (number + 1) + i for i in range(own))]
        params = SamplingParams(max_tokens=request.params.max_tokens, n=request.params.n)
        requests.append(replace(request, prompt=prompt, params=params))
    return parts, requests


@pytest.mark.slow
@QUICK
@given(lengths())
def test_the_schedule_is_that_of_the_toy_with_answers_of_the_same_length(both):
    """Fault: members, admissions, preemptions, waiting reasons or the cache depend on which tokens there are."""
    parts, requests = both
    simulated = play(parts, requests, SimulatedModel(second))
    computed = play(parts, requests, ToyModel(512))
    assert [in_lengths(s) for s in simulated.trace.steps] == [in_lengths(s) for s in computed.trace.steps]
    assert simulated.trace.timelines == computed.trace.timelines


# ---------------------------------------------------------------- nobody sees the end before it comes


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_until_the_first_answer_ends_nobody_knows_that_it_will(configuration, seed):
    """Fault: a plan, a reservation or a check at the door uses ``output_length``."""
    rng = Random(seed)
    requests = [ask(f"q{i}", range(100 * i + 1, 100 * i + rng.randrange(2, 9)), 8, at=i / 2) for i in range(7)]
    with_ends = [replace(request, output_length=rng.randrange(3, 8)) for request in requests]
    (blind, seen) = (make_engine(configuration, SimulatedModel(second), num_blocks=9) for _ in range(2))
    run(blind, requests)
    run(seen, with_ends)
    first = min(step.index for step in seen.trace.steps if step.finished)
    assert first >= 2 and seen.trace.steps[:first] == blind.trace.steps[:first]
    last, same = seen.trace.steps[first], blind.trace.steps[first]
    assert (last.kv, last.waiting, names(last.members)) == (same.kv, same.waiting, names(same.members))
    assert seen.trace.steps[first + 1 :] != blind.trace.steps[first + 1 :]


def test_what_is_reserved_is_the_maximum_and_not_what_will_come():
    """Fault: ``ReserveMaximum`` reserves the true length, so that what it wastes is not seen."""
    scheduler = ContinuousBatching(4, 64, admission=ReserveMaximum())
    engine = Engine(SimulatedModel(second), scheduler, PagedKVCache(8, 4))
    run(engine, [replace(ask(f"q{i}", range(1, 5), 13), output_length=2) for i in range(3)])
    first = engine.trace.steps[0]
    assert first.kv.reserved == 2 * 12 and len(first.members) == 2  # 4 + 13 - 1 tokens each; the third does not fit
    assert first.waiting == (("q2", "blocks: needs 4 blocks, 8 free, 8 promised"),)
    with pytest.raises(NeverFits, match="needs 9 blocks"):
        engine.submit(replace(ask("long", range(1, 5), 30), output_length=2))


def run_one(request: Request, max_model_len: int | None = None) -> tuple[str, tuple[int, ...]]:
    engine = Engine(SimulatedModel(second, max_model_len), ChunkedPrefill(4, 2), PagedKVCache(16, 4))
    (result,) = engine.run([request])
    check_drained(engine)
    assert result.error is None, result.error
    assert result.timeline.max_new_tokens == timeline(engine, result.request_id).max_new_tokens
    return result.finish_reason, result.tokens


ENDS = {  # max_tokens, output_length, more -> reason, tokens after a prompt that ends in 11
    "before": (9, 3, {}, "stop", (12, 13, END)),
    "at once": (9, 1, {}, "stop", (END,)),
    "with the last token": (3, 3, {}, "stop", (12, 13, END)),  # as of a model whose last token ends the sequence
    "after": (3, 4, {}, "length", (12, 13, 14)),
    "never": (3, None, {}, "length", (12, 13, 14)),
    "ignored": (5, 2, {"ignore_eos": True}, "length", (12, END, 1, 2, 3)),
    "not before min_tokens": (9, 6, {"min_tokens": 5}, "stop", (12, 13, 14, 15, 16, END)),
}


@pytest.mark.parametrize("case", ENDS)
def test_when_an_answer_ends_and_why(case):
    """Fault: the end comes a token early or late, or is called by the wrong name."""
    most, end, more, reason, tokens = ENDS[case]
    request = replace(ask("a", range(8, 12), most, at=None, **more), output_length=end)
    assert run_one(request) == (reason, tokens)


def test_the_context_cuts_first():
    """Fault: an answer outgrows ``max_model_len`` because its length is given."""
    request = replace(ask("a", range(8, 12), 9, at=None), output_length=6)
    assert run_one(request, 12) == ("stop", (12, 13, 14, 15, 16, END))
    assert run_one(request, 9) == ("length", (12, 13, 14, 15, 16))
    assert run_one(replace(request, params=SamplingParams(max_tokens=None)), 7) == ("length", (12, 13, 14))
    assert run_one(replace(request, params=SamplingParams(max_tokens=None))) == ("stop", (12, 13, 14, 15, 16, END))


def test_each_of_several_answers_ends_after_as_many_tokens():
    """Fault: only the answer that computes the prompt knows the end."""
    engine = make_engine("chunked", SimulatedModel(second))
    (result,) = run(engine, [replace(ask("a", range(8, 12), 9, n=3), output_length=3)])
    assert [sample.tokens for sample in result.samples] == [(12, 13, END)] * 3
    assert [sample.finish_reason for sample in result.samples] == ["stop"] * 3


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("length", [0, -1, True, 1.5, 2.0, "3", math.nan])
def test_a_length_that_is_none_is_refused(length):
    engine = make_engine("paged", SimulatedModel(second))
    with pytest.raises(InvalidParams, match="output_length must be an integer of at least 1, got"):
        engine.submit(replace(ask("a", range(1, 5)), output_length=length))
    (result,) = engine.run([replace(ask("a", range(1, 5)), output_length=length)])
    assert result.finish_reason == "rejected" and result.error.startswith("InvalidParams: output_length")
    check_drained(engine)


def test_a_length_below_min_tokens_is_refused():
    engine = make_engine("paged", SimulatedModel(second))
    with pytest.raises(InvalidParams, match=r"output_length must be an integer of at least \d, got 2"):
        engine.submit(replace(ask("a", range(1, 5), min_tokens=3), output_length=2))


@pytest.mark.parametrize("length", [1, 3, 10**9])
def test_a_model_that_computes_ends_its_answers_itself(length):
    """Fault: the length is taken and then ignored, and a comparison compares different work."""
    with pytest.raises(InvalidParams, match=f"output_length {length} is for simulated models"):
        make_engine("paged").submit(replace(ask("a", [1, 2, 3]), output_length=length))


@pytest.mark.slow  # for torch alone
def test_a_transformers_model_refuses_it_too():
    pytest.importorskip("torch")
    from tiny_models import tiny_model

    from minibatch.models.transformers_model import TransformersModel

    engine = make_engine("paged", TransformersModel(tiny_model("llama")))
    with pytest.raises(InvalidParams, match="output_length 3 is for simulated models"):
        engine.submit(replace(ask("a", [1, 2, 3]), output_length=3))


@pytest.mark.parametrize(
    "params",
    [{"logprobs": 0}, {"logprobs": 5}, {"prompt_logprobs": 0}, {"stop_token_ids": (13,)}, {"logit_bias": {3: 1.0}}],
)
def test_what_needs_logits_or_ids_is_refused_where_there_are_none(params):
    """Fault: empty log-probabilities are handed out as if they had been asked for in vain; a number that happens to be
    a stop id ends a simulated answer."""
    engine = make_engine("paged", SimulatedModel(second))
    with pytest.raises(InvalidParams, match=f"{next(iter(params))} cannot be had"):
        engine.submit(ask("a", 3, **params))


@pytest.mark.parametrize("seconds", [-1.0, -1e-9, math.nan, math.inf, None, "1", True])
def test_time_that_does_not_pass_forwards_is_refused(seconds):
    """Fault: times run backwards or become NaN, which no arrival is ever before, and the run does not end."""
    prices = iter([1.0, seconds])
    engine = make_engine("paged", SimulatedModel(lambda plan: next(prices, 1.0)))
    for request in (ask("a", 3, 4), ask("b", 3, 4, at=9.0)):
        engine.submit(request)
    engine.step()
    with pytest.raises(ValueError, match=r"the duration of an iteration must lie in \[0, inf\), got"):
        engine.step()
    assert engine.clock.now() == 1.0
    while engine.step() is not None:  # the iteration is done again
        pass
    check_drained(engine)
    assert engine.trace.timelines[0].token_times == [1.0, 2.0, 3.0, 4.0]


def test_a_prompt_that_cannot_be_counted_is_refused():
    """Fault: an OverflowError of len() ends the whole run."""
    (result,) = make_engine("paged", SimulatedModel(second)).run([replace(ask("a", 1), prompt=range(2**63 + 5))])
    assert result.finish_reason == "rejected" and "more tokens than can be counted" in result.error


def test_and_no_text():
    """Fault: a stop string never matches, because there is no tokenizer, and the request runs on."""
    with pytest.raises(InvalidParams, match="need a tokenizer"):
        make_engine("paged", SimulatedModel(second)).submit(ask("a", range(1, 5), stop="x"))


# ---------------------------------------------------------------- long prompts


LONG = 10_000_000
LONG_PROMPTS = {
    "one range": range(7, 7 + LONG),
    "joined": join([range(LONG, LONG + LONG // 2), range(7 + LONG // 2, 7 + LONG)]),
}


@pytest.mark.parametrize("kind", LONG_PROMPTS)
@pytest.mark.parametrize("configuration", ["paged", "chunked"])
def test_ten_million_tokens_are_never_built(configuration, kind):
    """Fault: the door, the state, a plan or the record makes a list of the prompt: 80 MB and more."""
    size, prompt = LONG, LONG_PROMPTS[kind]
    cache = PagedKVCache(1024, 1 << 14)
    scheduler = ContinuousBatching(4, 2 * size) if configuration == "paged" else ChunkedPrefill(1 << 20, 4)
    tracemalloc.start()
    engine = Engine(SimulatedModel(second), scheduler, cache, record_steps=False)
    request = Request(prompt, SamplingParams(max_tokens=9), "long", output_length=4)
    (result,) = engine.run([request])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result.tokens == (size + 7, size + 8, size + 9, END) and result.timeline.num_prompt == size
    assert sum(line.prefill for line in engine.trace.light) == size
    assert peak < 3e6, f"{peak / 1e6:.1f} MB"


BAD_RANGES = {
    "begins too low": (range(-1, 5), "prompt token 0 is -1"),
    "begins too high": (range(300, 100, -1), "prompt token 0 is 300"),
    "ends too high": (range(250, 258), "prompt token 7 is 257"),
    "ends too low": (range(5, -3, -2), "prompt token 3 is -1"),
    "is far too long": (range(10**12), "prompt token 999999999999 is 999999999999"),
    "is empty": (range(5, 5), "the prompt is empty"),
    "joined, begins too high": (join([range(3, 6), range(256, 258), range(9)]), "prompt token 3 is 256"),
    "joined, ends too high": (join([range(3, 6), range(250, 258), range(9)]), "prompt token 10 is 257"),
    "joined, begins too low": (join([range(3, 6), range(9), range(-2, 1)]), "prompt token 12 is -2"),
}


@pytest.mark.parametrize("case", BAD_RANGES)
def test_a_range_is_as_good_as_its_ends(case):
    """Fault: a range passes unread. Its ends are its lowest and highest numbers, whichever way it counts."""
    prompt, words = BAD_RANGES[case]
    with pytest.raises(InvalidPrompt, match=words):
        make_engine("paged").submit(Request(prompt))


READ = [
    *(range(4, 15), range(30, 3, -4), range(255, 256), range(0, 1), range(6, 256, 50)),
    *(join([range(4, 9), range(40, 41), range(2, 7)]), join([range(0, 1), range(0, 1), range(0, 1)])),
]


@pytest.mark.parametrize("kind", [PagedKVCache, PrefixCachedKVCache])
@pytest.mark.parametrize("prompt", READ)
def test_a_model_that_computes_reads_a_range_as_the_list_of_its_numbers(kind, prompt):
    """Fault: a slice of a range is cut or counted otherwise than that of a list."""

    def tokens_of(prompt: Sequence[int]) -> tuple[Any, Any]:
        engine = Engine(ToyModel(), ChunkedPrefill(5, 2, admission=Optimistic()), kind(8, 3))
        results = run(engine, [ask("a", prompt, 5), ask("b", prompt, 7, at=1.0)])
        return engine.trace.steps, [result.tokens for result in results]

    assert tokens_of(prompt) == tokens_of(list(prompt))


# ---------------------------------------------------------------- names of tokens are enough for a prefix cache


def cached(*prompts: tuple[Sequence[int], int]) -> list[int]:
    """Of prompts and output lengths that come one after the other: how many blocks of 4 each has found."""
    engine = Engine(SimulatedModel(second), ChunkedPrefill(64, 4), PrefixCachedKVCache(64, 4))
    requests = [
        replace(ask(f"q{i}", prompt, 99, at=100.0 * i), output_length=end) for i, (prompt, end) in enumerate(prompts)
    ]
    run(engine, requests)
    found = [timeline(engine, request.request_id).num_cached for request in requests]
    assert all(number % 4 == 0 for number in found)
    return [number // 4 for number in found]


def test_the_same_range_is_found_and_another_is_not():
    """Fault: contents are compared by length or by their beginning alone."""
    assert cached((range(100, 113), 1), (range(100, 113), 1)) == [0, 3]
    assert cached((range(100, 112), 1), (range(100, 112), 1)) == [0, 2]  # one token has to be computed
    assert cached((range(100, 113), 1), (range(500, 513), 1)) == [0, 0]
    assert cached((range(100, 113), 1), (range(101, 114), 1)) == [0, 0]
    common = range(1000, 1010)  # two blocks and a half
    assert cached((join([common, range(100, 107)]), 1), (join([common, range(200, 207)]), 1)) == [0, 2]
    assert cached((join([common, range(100, 107)]), 1), ([*common, *range(100, 107)], 1)) == [0, 4]
    assert cached((range(100, 120), 1), (range(100, 110), 1), (range(100, 130), 1)) == [0, 2, 5]


def test_the_next_turn_finds_the_answer_that_it_contains():
    """Fault: the numbers of an answer are not those of the next turn's prompt, so only the old prompt is found.

    By hand: the first turn has 6 + 11 = 17 tokens, the last of which is the end and is never computed: 16 computed
    tokens, 4 blocks. The next prompt repeats 6 + 10 of them, then comes the end, then new words.
    """
    first, answer = range(100, 106), [*range(106, 116), END]
    assert cached((first, 11), ([*first, *answer, *range(500, 503)], 1)) == [0, 4]
    # An answer that the limit cut has no end; its last number is not computed either: 6 + 11 - 1 = 16.
    assert cached((first, None), ([*first, *range(106, 106 + 99)], 1)) == [0, (6 + 99 - 1) // 4]
    # With an answer of a token less, 15 are computed, and the fourth block is not full.
    assert cached((first, 10), ([*first, *range(106, 115), END, *range(500, 504)], 1)) == [0, 3]
    # A next turn without the answer finds the old prompt alone; so does one whose answer was another.
    assert cached((first, 11), ([*first, *range(500, 520)], 1)) == [0, 1]
    assert cached((first, 11), ([*first, 106, 107, 9, 109, *range(500, 520)], 1)) == [0, 2]


# ---------------------------------------------------------------- time


def test_duration_sees_every_plan_once_and_time_is_their_sum():
    """Fault: an iteration costs nothing or twice, or is priced when its requests have already moved on."""
    seen: list[tuple[tuple[tuple[str, int, int], ...], float]] = []

    def price(plan: Plan) -> float:
        assert all(start == chunk.num_computed for chunk, start, _ in plan.chunks), "not as it was planned"
        assert all(stop <= request.num_tokens for request, _, stop in plan.chunks)
        seen.append((tuple((r.label, start, stop) for r, start, stop in plan.chunks), 0.5 + plan.num_tokens))
        return seen[-1][1]

    engine = make_engine("chunked", SimulatedModel(price), num_blocks=6)
    requests = [replace(ask(f"q{i}", range(100 * i + 1, 100 * i + 8), 9, at=0.0), output_length=5) for i in range(4)]
    run(engine, requests)
    assert any(step.preempted for step in engine.trace.steps)
    plans = [tuple((m.request_id, m.start, m.stop) for m in step.members) for step in engine.trace.steps]
    assert [plan for plan, _ in seen] == plans
    now = 0.0
    for step, (_, took) in zip(engine.trace.steps, seen, strict=True):
        assert (step.start, step.end) == (now, now + took)
        now += took
    assert engine.clock.now() == now == max(t.finish for t in engine.trace.timelines)


def test_a_price_that_fails_leaves_the_iteration_to_be_done_again():
    """Fault: tokens are counted as computed though the iteration has no end."""
    requests = [replace(ask(f"q{i}", range(100 * i + 1, 100 * i + 8), 9), output_length=5) for i in range(4)]
    smooth = make_engine("chunked", SimulatedModel(second), num_blocks=6)
    run(smooth, requests)
    calls: list[Plan] = []

    def flaky(plan: Plan) -> float:
        calls.append(plan)
        if len(calls) % 3 == 1:
            raise ValueError("no price")
        return 1.0

    engine = make_engine("chunked", SimulatedModel(flaky), num_blocks=6)
    for request in requests:
        engine.submit(request)
    while True:
        try:
            if engine.step() is None:
                break
        except ValueError as error:
            assert str(error) == "no price"
    assert engine.results == smooth.results
    assert [s.members for s in engine.trace.steps] == [s.members for s in smooth.trace.steps]
    check_drained(engine)


def test_a_simulated_model_says_what_it_is():
    """Fault: a trace of a simulation looks like one of a toy, or as if it had been measured."""

    class Card:
        name, kv_bytes_per_token, max_model_len = "a card", 7, 40

        def __call__(self, plan: Plan) -> float:
            return 0.125

    model = SimulatedModel(Card())
    engine = make_engine("paged", model)
    run(engine, [ask("a", range(1, 5), None)])
    assert engine.trace.simulated and engine.trace.meta["model"] == "simulated a card"
    assert (engine.trace.meta["kv_bytes_per_token"], engine.trace.meta["max_model_len"]) == (7, 40)
    assert timeline(engine, "a").max_new_tokens == 36 and engine.trace.steps[0].end == 0.125
    assert SimulatedModel(Card(), 20).max_model_len == 20 and SimulatedModel(second).max_model_len is None
    assert make_engine("paged", SimulatedModel(second)).max_model_len is None


def test_nothing_of_a_request_is_shared_with_the_next_engine():
    """Fault: a range or a count is changed by the run, so that the second simulation of a workload is another."""
    requests = [replace(ask(f"q{i}", range(100 * i + 1, 100 * i + 8), 9), output_length=5) for i in range(4)]
    kept = deepcopy(requests)
    one, two = (make_engine("chunked", SimulatedModel(second), num_blocks=6) for _ in range(2))
    run(one, requests)
    run(two, requests)
    assert requests == kept and one.trace.steps == two.trace.steps and one.results == two.results
    assert RequestState.__slots__ and all(type(t) is int for r in one.results.values() for t in r.tokens)


def test_a_trusted_scheduler_makes_the_same_run():
    """Fault: the check of plans changes something, or is left out where nobody has said so."""
    requests = [ask(name, size, 6, at=at) for name, size, at in (("a", 9, 0.0), ("b", 5, 1.0), ("c", 12, 2.0))]
    traces = []
    for check_plans in (True, False):
        engine = make_engine("chunked", SimulatedModel(second), num_blocks=7, check_plans=check_plans)
        engine.run(requests)
        traces.append(engine.trace)
    assert traces[0].steps == traces[1].steps and traces[0].timelines == traces[1].timelines
