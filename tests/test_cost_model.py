"""The cost model: units and closed forms by hand, what must never get cheaper, and the same answer before and after the
engine has applied a plan."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ask, run_checked
from hypothesis import given, settings
from hypothesis import strategies as st

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
)
from minibatch.clock import VirtualClock
from minibatch.cost_model import REDUCE_LATENCY, CostModel, Counts
from minibatch.gpus import GPU, GPUS, Efficiency, smooth_max
from minibatch.model_shapes import MODELS
from minibatch.models.simulated_model import SimulatedModel
from minibatch.plan import Admission, Chunk, Padding, Plan, Preemption
from minibatch.policies import Optimistic, Recompute, Swap
from minibatch.prefix_cache import PrefixCachedKVCache

steady = settings(deadline=None, derandomize=True)
IDEAL = Efficiency(1.0, 1.0, 100.0)  # the roofline: peaks are reached, and the longer time counts
LLAMA, MISTRAL, A100 = MODELS["llama-2-7b"], MODELS["mistral-7b"], GPUS["a100-80"]
ROOFLINE = CostModel(LLAMA, A100, efficiency=IDEAL, overhead=0.0)
COST = CostModel(LLAMA, A100)


def request(num_prompt=4, num_tokens=None, num_computed=0, prompt_logprobs=None, high_water=0):
    """What a cost model looks at in a request."""
    return SimpleNamespace(
        num_prompt=num_prompt,
        num_tokens=num_prompt if num_tokens is None else num_tokens,
        num_computed=num_computed,
        high_water=high_water,
        params=SamplingParams(prompt_logprobs=prompt_logprobs),
    )


def decodes(number, context):
    """A plan: so many requests, each with its newest token to compute after ``context - 1`` others."""
    return Plan(tuple(Chunk(request(1, context), context - 1, context) for _ in range(number)))


def prefill(start, stop, num_prompt=None):
    return Plan((Chunk(request(num_prompt or stop), start, stop),))


# ---------------------------------------------------------------- GPUs and the smooth maximum


def test_ridge_points():
    """Fault: a peak with sparsity, or an A10's for an A10G: the ratio is off by two."""
    published = {"a100-40": 201, "a100-80": 153, "h100": 295, "h200": 206, "a40": 215, "l4": 403}
    assert {name: round(GPUS[name].ridge) for name in published} == published
    assert round(GPUS["a10g"].ridge) == 117
    assert round(GPUS["rtx-4090"].ridge) == 164


@steady
@given(st.floats(0, 1e3), st.floats(0, 1e3), st.floats(1, 100))
def test_smooth_max_lies_between_maximum_and_sum(read, compute, sharpness):
    """Fault: a norm of the wrong exponent."""
    value = smooth_max(read, compute, sharpness)
    assert max(read, compute) <= value * (1 + 1e-9) + 1e-290  # below that, nothing
    assert value <= (read + compute) * (1 + 1e-9) + 1e-290
    assert smooth_max(read, compute, 1.0) == pytest.approx(read + compute)


def test_bad_gpus_and_efficiencies():
    """Fault: a rate of 0 is found as a division by it, a share in percent as a time of nothing."""
    with pytest.raises(ValueError, match=r"A100-80GB: bandwidth .* got 0"):
        replace(A100, bandwidth=0)
    with pytest.raises(ValueError, match=r"compute must lie in \(0, 2\], got 70"):
        Efficiency(compute=70)
    with pytest.raises(ValueError, match=r"sharpness must lie in \[1, 100\], got 0.5"):
        Efficiency(sharpness=0.5)


# ---------------------------------------------------------------- closed forms


def test_a_decode_reads_every_weight_once():
    """Fault: a factor of 2 in bytes, an embedding table that is read, a head that is not. Numbers by hand:
    32 (4 x 4096^2 + 3 x 4096 x 11008) and 32000 x 4096 weights of two bytes at 2,039 GB/s; K/V of 512 KiB a token."""
    parts = ROOFLINE.parts(Counts.of(decodes(1, 100)))
    assert parts.linear == pytest.approx(6_476_005_376 * 2 / 2039e9)
    assert parts.head == pytest.approx(131_072_000 * 2 / 2039e9)
    assert parts.attention == pytest.approx((100 + 1) * 524_288 / 2039e9)
    assert parts.communication == parts.swap == parts.overhead == 0
    assert ROOFLINE(decodes(1, 100)) == sum(parts)
    assert COST(decodes(1, 1)) > COST.model.num_layers * COST.model.layer_parameters * 2 / A100.bandwidth


def test_a_long_prefill_is_arithmetic():
    """Fault: one operation for a multiply and add, scores of the future, one of the two products of attention."""
    parts = ROOFLINE.parts(Counts.of(prefill(0, 4096)))
    assert parts.linear == pytest.approx(2 * 6_476_005_376 * 4096 / 312e12)
    assert parts.attention == pytest.approx(4 * 32 * 4096 * (4096 * 4097 // 2) / 312e12)
    assert parts.head == pytest.approx(131_072_000 * 2 / 2039e9)  # one position: reading is longer
    slow = replace(ROOFLINE, efficiency=Efficiency(1.0, 0.5, 100.0))
    assert slow.parts(Counts.of(prefill(0, 4096))).linear == pytest.approx(2 * parts.linear)


def test_at_the_ridge_reading_and_computing_take_equally_long():
    """Fault: the smooth maximum is not applied to the pair of one kind of work."""
    counts = Counts(tokens=A100.ridge, logits=0, kv_read=0, kv_written=0, attended=0)
    read = ROOFLINE.parts(counts._replace(tokens=1)).linear
    assert ROOFLINE.parts(counts).linear == pytest.approx(read, rel=0.01)
    added = replace(ROOFLINE, efficiency=Efficiency(1.0, 1.0, 1.0))
    assert added.parts(counts).linear == pytest.approx(2 * read)


def test_memory_of_opt_13b_on_an_a100():
    """Fault: GB for GiB, a share of what is left instead of all. vLLM, SOSP 2023, table 1: 15.7 K slots."""
    assert CostModel(MODELS["opt-13b"], GPUS["a100-40"]).kv_tokens() == pytest.approx(15_700, rel=0.01)


def test_a_decode_step_of_sarathi():
    """Fault: a term that is far off. Its strict limit of 0.1 s is five times a step of 32 requests at 4k (OSDI 2024,
    section 5); the limit is rounded, so is this."""
    assert CostModel(MISTRAL, A100)(decodes(32, 4096)) == pytest.approx(0.1 / 5, rel=0.2)


def test_weights_that_do_not_fit():
    """Fault: negative room for K/V is passed on to a cache."""
    with pytest.raises(ValueError, match=r"Llama-2-70B on A100-80GB: the weights take 138.0 GB of 77.3 GB \(0.9 of"):
        CostModel(MODELS["llama-2-70b"], A100).kv_tokens()
    assert CostModel(MODELS["llama-2-70b"], A100, 4).kv_tokens() > 0
    with pytest.raises(ValueError, match=r"share must lie in \(0, 1\], got 90"):
        COST.kv_tokens(90)


# ---------------------------------------------------------------- what a plan counts


@steady
@given(st.integers(0, 40), st.integers(1, 40), st.none() | st.integers(1, 50))
def test_counts_of_a_chunk_are_those_of_its_attention_mask(start, length, window):
    """Fault: off by one in a triangle or at the edge of a window. The oracle goes through all pairs."""
    stop = start + length
    seen = [range(max(0, i + 1 - (window or stop)), i + 1) for i in range(start, stop)]
    counts = Counts.of(prefill(start, stop, num_prompt=stop + 1), window)
    assert counts.attended == sum(len(keys) for keys in seen)
    assert counts.kv_read == len(set().union(*seen))
    assert counts.kv_written == counts.tokens == length
    assert counts.logits == 0  # one token of the prompt is left


def test_padding_pays_what_it_computes():
    """Fault: pads attend, left pads pay the head, dead rows do not."""
    plan, pads = prefill(0, 10), request()
    bare = Counts.of(plan)
    left = Counts.of(replace(plan, padding=(Padding(pads, 7, dead=False),)))
    dead = Counts.of(replace(plan, padding=(Padding(pads, 1, dead=True), Padding(pads, 1, dead=True))))
    assert left == bare._replace(tokens=17)
    assert dead == bare._replace(tokens=12, logits=3)


def test_logits_of_a_scored_prompt():
    """Fault: a scored prompt pays the head for one position; or twice, when it is computed again."""
    first = Plan((Chunk(request(10, prompt_logprobs=0), 0, 6),))
    last = Plan((Chunk(request(10, prompt_logprobs=0, high_water=6), 6, 10),))
    again = Plan((Chunk(request(10, 12, prompt_logprobs=0, high_water=11), 0, 12),))
    assert [Counts.of(plan).logits for plan in (first, last, again)] == [6, 4, 1]


def test_swaps_move_what_was_computed():
    """Fault: a victim that is recomputed pays the link; a prefix hit counts as swapped in; one layer's K/V is moved."""
    victim, back, hit = request(8, 9, num_computed=8), request(5, 7, num_computed=6), request(9, num_computed=4)
    plan = Plan(
        chunks=(Chunk(back, 6, 7), Chunk(hit, 4, 9)),
        preemptions=(Preemption(victim, back, swap=True), Preemption(request(num_computed=3), back)),
        admissions=(Admission(back, 7), Admission(hit, 9, cached=4), Admission(request(), 4)),
    )
    assert Counts.of(plan).swapped == 8 + 6
    assert ROOFLINE.parts(Counts.of(plan)).swap == pytest.approx(14 * 524_288 / 32e9)
    assert COST.parts(Counts.of(plan)).swap == pytest.approx(14 * 524_288 / (32e9 * A100.efficiency.bandwidth))


def test_sliding_window_bounds_a_decode():
    """Fault: the window is not passed on to the counts."""
    cost = CostModel(MISTRAL, A100)
    assert cost(decodes(8, 4096)) < cost(decodes(8, 4097)) * (1 + 1e-9)
    assert cost(decodes(8, 5000)) == cost(decodes(8, 30_000))
    assert cost(prefill(0, 20_000)) < CostModel(replace(MISTRAL, sliding_window=None), A100)(prefill(0, 20_000))


# ---------------------------------------------------------------- several GPUs, overheads, names


def test_tensor_parallel_by_hand():
    """Fault: a ring sends the message once, one all-reduce a layer, the latency is forgotten or divided."""
    one, eight = (replace(ROOFLINE, model=MODELS["llama-2-70b"], tensor_parallel=n) for n in (1, 8))
    counts = Counts.of(decodes(32, 500))
    alone, shared = one.parts(counts), eight.parts(counts)
    assert [a / b for a, b in zip(alone[:3], shared[:3], strict=True)] == pytest.approx([8, 8, 8])
    ring = 2 * 7 / 8 * 32 * 8192 * 2 / 300e9
    assert shared.communication == pytest.approx(2 * 80 * (REDUCE_LATENCY + ring))
    assert alone.communication == 0
    assert eight.kv_tokens() > 8 * COST.kv_tokens()  # 77 GB of weights are read from eight memories, K/V are fewer
    assert eight.kv_bytes_per_token == one.kv_bytes_per_token == 327_680


def test_overheads():
    """Fault: an overhead a row that is charged by iteration."""
    cost = replace(ROOFLINE, overhead=0.5, row_overhead=0.25)
    assert cost.parts(Counts.of(decodes(3, 10))).overhead == 0.5 + 3 * 0.25


def test_names():
    """Fault: a report that does not say what was simulated."""
    assert COST.name == "Llama-2-7B on A100-80GB"
    assert CostModel(MODELS["llama-2-70b"], GPUS["a40"], 8).name == "Llama-2-70B on 8 x A40"
    model = SimulatedModel(CostModel(MODELS["opt-13b"], A100))
    assert (model.name, model.max_model_len) == ("simulated OPT-13B on A100-80GB", 2048)
    assert model.kv_bytes_per_token == 819_200


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tensor_parallel", 0, "tensor_parallel must be an integer of at least 1, got 0"),
        ("tensor_parallel", 3, "3 GPUs cannot share the 32 K/V heads of Llama-2-7B"),
        ("bytes_per_value", 0.5, "bytes_per_value must be an integer of at least 1, got 0.5"),
        ("overhead", -1e-3, r"overhead must lie in \[0, inf\), got -0.001"),
        ("row_overhead", math.nan, r"row_overhead must lie in \[0, inf\), got nan"),
    ],
)
def test_bad_numbers(field, value, message):
    """Fault: a wrong number is found later, as a wrong time."""
    with pytest.raises(ValueError, match=message):
        replace(COST, **{field: value})


# ---------------------------------------------------------------- never cheaper

chunks = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 300)), min_size=1, max_size=6)
costs = st.builds(
    CostModel,
    st.sampled_from([LLAMA, MISTRAL, MODELS["smollm2-135m"]]),
    st.sampled_from(list(GPUS.values())),
    efficiency=st.builds(Efficiency, st.floats(0.1, 1), st.floats(0.1, 1), st.floats(1, 20)),
    overhead=st.floats(0, 0.01),
)


def plan_of(spans):
    return Plan(tuple(Chunk(request(start + length), start, start + length) for start, length in spans))


def at_most(less, more):
    return less <= more * (1 + 1e-9)


@steady
@given(costs, chunks, st.integers(1, 500), st.integers(1, 500))
def test_more_work_never_takes_less_time(cost, spans, more, context):
    """Fault: a sign, a window that forgets keys, a cap on the wrong side."""
    (start, length), *others = spans
    now = cost(plan_of(spans))
    assert at_most(now, cost(plan_of([(start, length + more), *others])))  # more tokens
    assert at_most(now, cost(plan_of([(start + context, length), *others])))  # a longer context
    assert at_most(now, cost(plan_of([*spans, (context, more)])))  # another request
    assert at_most(now, cost(replace(plan_of(spans), padding=(Padding(request(), more, dead=False),))))
    victim = Preemption(request(num_computed=more), request(), swap=True)
    assert at_most(now, cost(replace(plan_of(spans), preemptions=(victim,))))


@steady
@given(costs, chunks, st.floats(0.1, 1), st.sampled_from(["flops", "bandwidth", "link", "host_link"]))
def test_a_slower_gpu_never_takes_less_time(cost, spans, share, rate):
    """Fault: a rate is multiplied with instead of divided by."""
    slower = replace(cost, gpu=replace(cost.gpu, **{rate: share * getattr(cost.gpu, rate)}))
    assert at_most(cost(plan_of(spans)), slower(plan_of(spans)))


@steady
@given(costs, chunks, st.sampled_from([2, 4, 8]))
def test_more_gpus_never_compute_longer(cost, spans, parallel):
    """Fault: weights or K/V that every GPU reads whole; communication that costs nothing."""
    if cost.model.num_kv_heads % parallel:
        return
    counts = Counts.of(plan_of(spans), cost.model.sliding_window)
    one, many = cost.parts(counts), replace(cost, tensor_parallel=parallel).parts(counts)
    assert all(at_most(b, a) for a, b in zip(one[:3], many[:3], strict=True))
    assert many.communication > one.communication == 0


@pytest.mark.slow
@steady
@given(costs, st.lists(chunks, min_size=2, max_size=5))
def test_many_iterations_at_once(cost, plans):
    """Fault: arrays take another path than numbers; fitting would then fit something else."""
    counts = [Counts.of(plan_of(spans), cost.model.sliding_window) for spans in plans]
    together = cost.seconds(Counts(*np.array(counts, dtype=float).T))
    assert together == pytest.approx([cost.seconds(one) for one in counts])


def test_iterations_that_sample_nothing_skip_the_head():
    """Fault: the head's weights are read in every iteration, or not at all in an array."""
    silent, sampling = Counts.of(prefill(0, 4, num_prompt=9)), Counts.of(prefill(0, 4))
    assert ROOFLINE.parts(silent).head == 0
    both = ROOFLINE.parts(Counts(*np.array([silent, sampling], dtype=float).T)).head
    assert both == pytest.approx([0, ROOFLINE.parts(sampling).head])


# ---------------------------------------------------------------- with the engine

SCHEDULERS = {
    "static": lambda: (StaticBatching(3), ContiguousKVCache(3, 64)),
    "recompute": lambda: (ContinuousBatching(4, 64, admission=Optimistic()), PagedKVCache(7, 4)),
    "swap": lambda: (ContinuousBatching(4, 64, admission=Optimistic(), preemption=Swap()), PagedKVCache(7, 4)),
    "prefix, swap": lambda: (
        ChunkedPrefill(6, 4, admission=Optimistic(), preemption=Swap()),
        PrefixCachedKVCache(7, 4),
    ),
    "prefix": lambda: (ChunkedPrefill(6, 4, admission=Optimistic(), preemption=Recompute()), PrefixCachedKVCache(7, 4)),
}
WINDOW = 6


def watched(name):
    """An engine, and its iterations as counted at planning and at ``clock.advance``."""
    scheduler, kv = SCHEDULERS[name]()
    before, after = [], []

    class Watching(type(scheduler)):
        def plan(self, *arguments):
            plan = super().plan(*arguments)
            if plan.chunks:
                before.append(Counts.of(plan, WINDOW))
            return plan

    def duration(plan):
        after.append(Counts.of(plan, WINDOW))
        return 1.0

    fields = {name: getattr(scheduler, name) for name in scheduler.__dataclass_fields__}
    return Engine(ToyModel(), Watching(**fields), kv, clock=VirtualClock(duration)), before, after


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_plan_costs_the_same_before_and_after_it_is_applied(name):
    """Fault: the cost looks at something that the engine has changed by then (num_computed of a victim or of a prefix
    hit, a status, what the cache holds); or the trace tells another story than the plan."""
    engine, before, after = watched(name)
    shared = list(range(8))
    requests = [ask(i, shared + [10 + n, 20 + n][: n % 3], 10 - 2 * n, at=float(n)) for n, i in enumerate("abcd")]
    run_checked(engine, requests)
    steps = engine.trace.steps
    assert before == after == [Counts.of_step(step, WINDOW) for step in steps]
    swapped, displaced = sum(step.swapped_in for step in steps), sum(len(step.preempted) for step in steps)
    assert (swapped > 0) == ("swap" in name)
    assert (displaced > 0) == (name != "static") == (not any(pad.dead for step in steps for pad in step.padding))
    assert (sum(step.cached for step in steps) > 0) == ("prefix" in name)


def test_a_scored_prompt_costs_the_same_before_and_after():
    """Fault: asking the chunk after the forward, when its prompt has been scored."""
    engine, before, after = watched("recompute")
    engine.run([ask("a", 8, 3, prompt_logprobs=1), ask("b", 6, 2)])
    assert before == after
    assert before[0].logits == 8 + 1


def test_several_answers_to_one_prompt():
    """Fault: each answer pays the head for the same logits."""
    engine, before, after = watched("recompute")
    engine.run([ask("a", 4, 3, n=3)])
    assert before == after == [Counts.of_step(step, WINDOW) for step in engine.trace.steps]
    assert [counts.logits for counts in before] == [1, 3, 3]


def test_the_clock_of_a_simulation_is_the_cost_model():
    """Fault: the time of a simulated run is not the sum of its iterations'."""
    model = SimulatedModel(COST)
    engine = Engine(model, ChunkedPrefill(128, 8), PagedKVCache(COST.kv_tokens() // 16, 16))
    requests = [
        Request(range(1000 * n, 1000 * n + 50 * n), SamplingParams(max_tokens=20), f"{n}", 0.0, output_length=5 + n)
        for n in range(1, 9)
    ]
    results = engine.run(requests)
    assert [len(result.tokens) for result in results] == [5 + n for n in range(1, 9)]
    expected = [COST.seconds(Counts.of_step(step)) for step in engine.trace.steps]
    assert [step.end - step.start for step in engine.trace.steps] == pytest.approx(expected)
    assert engine.clock.now() == pytest.approx(sum(expected))


def test_a_gpu_of_ones_own():
    """Fault: a GPU that is not in the table cannot be used."""
    mine = GPU("mine", 1e12, 1e11, 1e10, 1e10, 1e10)
    assert CostModel(MODELS["qwen3-0.6b"], mine).name == "Qwen3-0.6B on mine"
    assert mine.ridge == 10
