"""Latency numbers: what they mean, what is left out of them, and that nothing unmeasured becomes 0."""

import math
import random
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from helpers import CONFIGURATIONS, ScriptedModel, ask, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from minibatch import ChunkedPrefill, ContinuousBatching, Engine, PagedKVCache, ToyModel, Trace
from minibatch.accounting import work_table
from minibatch.clock import VirtualClock
from minibatch.metrics import LATENCIES, gaps, goodput, latencies, makespan, requests_table, split, steps_table, summary
from minibatch.policies import Recompute, Swap
from minibatch.prefix_cache import PrefixCachedKVCache
from minibatch.trace import Timeline

pytestmark = pytest.mark.filterwarnings("error")


def timeline(name, arrival=0.0, tokens=(), reason="length", *, scheduled=None, finish=None, num_prompt=4, **facts):
    """A request that emitted ``tokens`` at these times; scheduled one second before the first, finished at the last."""
    if tokens:
        scheduled = tokens[0] - 1 if scheduled is None else scheduled
        finish = tokens[-1] if finish is None and reason is not None else finish
    facts = {"client": "x", "priority": 0, "max_new_tokens": 16} | facts
    return Timeline(
        request_id=name,
        num_prompt=num_prompt,
        arrival=arrival,
        scheduled=scheduled,
        token_times=list(tokens),
        finish=finish,
        finish_reason=reason,
        **facts,
    )


def row(trace, request_id):
    return requests_table(trace).set_index("request_id").loc[request_id]


def four_of_me_07():
    """TTFT .1, .2, .9, .1 and TPOT .01, .09, .01, undefined, in a run of 2 seconds."""
    a = timeline("a", 0.0, [0.1, 0.11], scheduled=0.0)
    b = timeline("b", 0.0, [0.2, 0.29], scheduled=0.0)
    c = timeline("c", 0.0, [0.9, 0.91], scheduled=0.0)
    d = timeline("d", 1.9, [2.0], scheduled=1.9)
    return Trace(timelines=[a, b, c, d])


# ---------------------------------------------------------------- definitions


def test_me_01_gaps_between_tokens_leave_the_first_token_out():
    """ME-01. Fault: TTFT is counted as the first gap, or the last-token time starts as the arrival."""
    a = timeline("a", 0.0, [5.0, 6.0, 7.0, 9.0])
    b = timeline("b", 0.0, [5.0])
    trace = Trace(timelines=[a, b])
    assert gaps(a).tolist() == [1.0, 1.0, 2.0]
    assert row(trace, "a")[["ttft", "tpot", "max_tbt", "e2e"]].tolist() == [5.0, pytest.approx(4 / 3), 2.0, 9.0]
    assert gaps(b).tolist() == []
    assert row(trace, "b")["ttft"] == 5.0
    assert math.isnan(row(trace, "b")["tpot"]) and math.isnan(row(trace, "b")["max_tbt"])
    assert (row(trace, "a")["first_token"], row(trace, "a")["last_token"]) == (5.0, 9.0)
    numbers = summary(trace)
    assert numbers["tbt_mean"] == numbers["tpot_mean"] == pytest.approx(4 / 3)  # b has no say in either
    assert numbers["queueing_delay_mean"] == 4.0


def test_a_preemption_is_inside_the_gap_that_it_makes():
    trace = Trace(timelines=[timeline("a", 0.0, [1.0, 2.0, 9.0, 10.0], num_preemptions=1)])
    assert latencies(trace)["tbt"].tolist() == [1.0, 7.0, 1.0]
    assert (row(trace, "a")["max_tbt"], summary(trace)["preemptions"]) == (7.0, 1)


def test_tbt_is_pooled_over_gaps_and_tpot_counts_every_request_once():
    a, b = timeline("a", 0.0, [1.0, 2.0, 3.0, 4.0]), timeline("b", 0.0, [1.0, 6.0])
    numbers = summary(Trace(timelines=[a, b]))
    assert numbers["tbt_mean"] == (1 + 1 + 1 + 5) / 4
    assert numbers["tpot_mean"] == (1 + 5) / 2


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_me_01_times_of_a_run_are_in_order(configuration):
    """ME-01. arrival <= scheduled <= first <= last <= finish, and the latencies are differences of these."""
    table = requests_table(run(configuration))
    assert len(table) == 14 and table["finish_reason"].eq("length").all()
    times = table[["arrival", "scheduled", "first_token", "last_token", "finish"]].to_numpy()
    assert (np.diff(times, axis=1) >= 0).all()
    assert (table["queueing_delay"] >= 0).all() and (table["ttft"] >= table["queueing_delay"] + 1).all()
    one = table["num_generated"] == 1
    assert one.any() and table["tpot"].isna().eq(one).all()
    rest = table[~one]
    mean_gap = (rest["last_token"] - rest["first_token"]) / (rest["num_generated"] - 1)
    assert np.allclose(rest["tpot"], mean_gap) and (rest["max_tbt"] >= rest["tpot"] - 1e-9).all()


def run(configuration, **options):
    """14 requests, some of one token, that arrive over time and do not all fit."""
    rng = random.Random(5)
    requests = [ask(f"r{i}", rng.randint(1, 8), rng.choice([1, 2, 5, 8]), at=0.4 * i) for i in range(14)]
    engine = make_engine(configuration, **options)
    engine.run([replace(r, client="ab"[i % 2], priority=i % 3) for i, r in enumerate(requests)])
    return engine.trace


# ---------------------------------------------------------------- what is averaged


def test_me_03_only_completed_requests_are_averaged():
    """ME-03. Fault: 'not measured' is stored as 0.0, and the failed requests pull every mean down."""
    a = timeline("A", 0.0, [1.0, 2.0, 3.0, 4.0, 5.0])
    b = timeline("B", 0.0, reason="abort", scheduled=0.0, finish=0.5)
    c = timeline("C", 0.0, reason="rejected", finish=0.0)
    trace = Trace(timelines=[a, b, c])
    numbers = summary(trace)
    assert latencies(trace)["ttft"].tolist() == [1.0]
    assert [numbers[key] for key in ("completed", "aborted", "rejected", "unfinished")] == [1, 1, 1, 0]
    assert [numbers[f"ttft_{statistic}"] for statistic in ("mean", "p50", "p99", "max")] == [1.0] * 4
    assert math.isnan(row(trace, "B")["ttft"]) and row(trace, "B")["queueing_delay"] == 0.0
    assert math.isnan(row(trace, "C")["scheduled"]) and math.isnan(row(trace, "C")["queueing_delay"])


def test_me_03_nothing_measured_is_nan_without_a_warning():
    """ME-03, all refused. Then no request at all."""
    refused = Trace(timelines=[timeline(name, reason="rejected", finish=0.0) for name in "ABC"])
    for trace, rejected in ((refused, 3), (Trace(), 0)):
        numbers = summary(trace)
        assert (numbers["completed"], numbers["rejected"], numbers["generated_tokens"]) == (0, rejected, 0)
        averages = [numbers[f"{name}_{statistic}"] for name in LATENCIES for statistic in ("mean", "p50", "p99", "max")]
        assert all(math.isnan(x) for x in [*averages, numbers["makespan"], numbers["throughput"]])
        assert all(len(values) == 0 for values in latencies(trace).values())
        assert math.isnan(goodput(trace, ttft=1.0)["rate"])


def test_me_03_zero_is_a_value():
    """ME-03. A first token at virtual time 0.0, and a request that is over at 0.0, are kept."""
    trace = Trace(timelines=[timeline("a", 0.0, [0.0], scheduled=0.0)])
    assert row(trace, "a")[["scheduled", "first_token", "finish", "ttft", "e2e"]].tolist() == [0.0] * 5
    assert latencies(trace)["ttft"].tolist() == [0.0]
    assert makespan(trace) == 0.0
    assert math.isnan(summary(trace)["throughput"])  # a token in no time at all is no rate
    later = Trace(timelines=[timeline("b", 0.0, reason=None, scheduled=0.0), *trace.timelines])
    assert makespan(later) == 0.0 and summary(later)["unfinished"] == 1


def test_me_05_ttft_counts_from_the_planned_arrival():
    """ME-05. Ten arrivals at 0, 1 .. 9; the first iteration keeps the server busy for 3 seconds."""
    engine = Engine(
        ToyModel(),
        ContinuousBatching(),
        PagedKVCache(64, 4),
        clock=VirtualClock(lambda plan: 3.0 if plan.chunks[0].request.label == "r0" else 0.5),
    )
    engine.run([ask(f"r{i}", 3, 1, at=float(i)) for i in range(10)])
    table = requests_table(engine.trace)
    assert table["arrival"].tolist() == list(range(10))
    assert table["queueing_delay"].tolist() == [0, 2, 1, 0, 0, 0, 0, 0, 0, 0]  # r1 and r2 found the server busy
    assert table["ttft"].tolist() == [3, 2.5, 1.5, *[0.5] * 7]


def test_st_02_a_finished_row_of_a_static_batch_is_counted():
    """ST-02. Fault: one row's stop ends the batch, or rows without a request keep it running."""
    first, second = ask("R1", 3, 6, stop_token_ids=(7,)), ask("R2", 3, 6)
    scripts = {tuple(first.prompt): [5, 7, 5, 5, 5, 5], tuple(second.prompt): [5] * 6}
    engine = make_engine("static", ScriptedModel(scripts))
    r1, r2 = engine.run([first, second])
    assert (r1.tokens, r1.finish_reason) == ((5, 7), "stop")
    assert (r2.tokens, r2.finish_reason) == ((5,) * 6, "length")
    numbers, work = summary(engine.trace), work_table(engine.trace)
    assert (numbers["iterations"], numbers["generated_tokens"]) == (6, 8)
    assert (work["executed_rows"] - work["useful_rows"]).to_dict() == {"R1": 4, "R2": 0}
    assert work["dead_padding"].to_dict() == {"R1": 4, "R2": 0}
    assert steps_table(engine.trace)["num_tokens"].tolist() == [6, 2, 2, 2, 2, 2]  # two slots stay empty, for nothing


# ---------------------------------------------------------------- rates and goodput


def test_throughput_is_all_generated_tokens_over_the_makespan():
    a = timeline("a", 2.0, [4.0, 5.0])
    b = timeline("b", 3.0, [6.0, 7.0, 8.0], reason="abort", finish=9.0)
    refused = timeline("c", 0.0, reason="rejected", finish=0.0)  # neither lengthens the run nor counts
    running = timeline("d", 4.0, [12.0], reason=None)
    numbers = summary(Trace(timelines=[refused, a, b, running]))
    assert numbers["makespan"] == 12.0 - 2.0
    assert (numbers["generated_tokens"], numbers["throughput"]) == (6, 0.6)
    assert (numbers["prompt_tokens"], numbers["request_throughput"]) == (12, 0.1)
    assert numbers["unfinished"] == 1


def test_iterations_are_unknown_without_step_reports():
    trace = run("chunked")
    assert summary(trace)["iterations"] == len(trace.steps) > 0
    assert math.isnan(summary(Trace(timelines=trace.timelines))["iterations"])
    assert summary(Trace())["iterations"] == 0


def test_me_07_goodput_is_decided_request_by_request():
    """ME-07. Fault: the per-request TPOT holds a running average over all requests."""
    trace = four_of_me_07()
    assert makespan(trace) == 2.0
    assert requests_table(trace)["ttft"].tolist() == pytest.approx([0.1, 0.2, 0.9, 0.1])
    assert requests_table(trace)["tpot"].tolist() == pytest.approx([0.01, 0.09, 0.01, math.nan], nan_ok=True)
    assert goodput(trace, ttft=0.5, tpot=0.05) == {"good": 2, "rate": 1.0, "share": 0.5}
    assert goodput(trace)["good"] == 4
    assert goodput(trace, e2e=0.2)["good"] == 2
    assert goodput(trace, max_tbt=0.05, queueing_delay=0.0)["good"] == 3


@pytest.mark.parametrize("objective", [{"tppt": 0.5}, {"tbt": 0.5}, {"ttft": -0.1}, {"tpot": math.nan}])
def test_me_07_objectives_are_checked(objective):
    with pytest.raises(ValueError, match=next(iter(objective))):
        goodput(four_of_me_07(), **objective)


def test_refusing_a_request_does_not_improve_goodput():
    trace = four_of_me_07()
    trace.timelines += [timeline("e", reason="rejected", finish=0.0), timeline("f", 0.0, [0.1], "abort", scheduled=0.0)]
    assert goodput(trace, ttft=0.5, tpot=0.05) == {"good": 2, "rate": 1.0, "share": 2 / 6}


# ---------------------------------------------------------------- groups


def test_split_by_client_and_priority_adds_up_to_the_whole():
    trace = run("paged")
    whole = summary(trace)
    for by in ("client", "priority"):
        groups = split(trace, by)
        assert groups.index.name == by
        for key in ("completed", "generated_tokens", "prompt_tokens", "throughput", "preemptions"):
            assert groups[key].sum() == pytest.approx(whole[key]), key
        assert (groups["makespan"] == whole["makespan"]).all()
    clients = split(trace, "client")
    assert clients.index.tolist() == ["a", "b"] and split(trace, "priority").index.tolist() == [0, 1, 2]
    only_a = Trace(timelines=[t for t in trace.timelines if t.client == "a"])
    for name in LATENCIES:
        assert clients.loc["a", f"{name}_p99"] == summary(only_a)[f"{name}_p99"]


def test_split_by_length_puts_an_edge_into_the_upper_class():
    lengths = (1, 9, 10, 99, 100, 500)
    trace = Trace(timelines=[timeline(f"r{n}", 0.0, [1.0, 2.0], num_prompt=n) for n in lengths])
    groups = split(trace, "prompt_length", edges=(10, 100))
    assert groups["completed"].to_dict() == {"<10": 2, "10-99": 2, ">=100": 2}
    groups = split(trace, "output_length", edges=(2, 3))
    assert groups["completed"].to_dict() == {"<2": 0, "2-2": 6, ">=3": 0}
    assert math.isnan(groups.loc["<2", "ttft_mean"])


@pytest.mark.parametrize("by, edges", [("length", ()), ("prompt_length", ()), ("output_length", (5, 5))])
def test_split_refuses_what_it_does_not_know(by, edges):
    with pytest.raises(ValueError, match=r"by must be|edges"):
        split(Trace(), by, edges)


# ---------------------------------------------------------------- tables


def test_tables_have_one_row_each_and_the_types_of_a_full_table_when_empty():
    trace = run("static")
    steps, requests = trace.to_pandas()
    assert len(steps) == len(trace.steps) and len(requests) == len(trace.timelines)
    empty_steps, empty_requests = Trace().to_pandas()
    assert empty_steps.dtypes.equals(steps.dtypes) and empty_requests.dtypes.equals(requests.dtypes)
    assert steps["token_budget"].isna().all()  # a static batch has none, and that is not 0
    parts = steps[["prefill", "decode", "recomputed", "padding"]].sum(axis=1)
    pd.testing.assert_series_equal(steps["num_tokens"], parts, check_names=False)
    rows = steps[["kv_filled", "kv_reserved", "kv_fragmentation", "kv_free"]].sum(axis=1)
    assert (rows == steps["kv_capacity"]).all()
    assert (steps["padding"] >= steps["dead_padding"]).all() and steps["dead_padding"].any()
    assert steps["arrived"].sum() == steps["admitted"].sum() == steps["finished"].sum() == len(requests)
    assert (steps["duration"] == 1).all()


def test_cached_and_swapped_tokens_are_the_same_in_steps_requests_and_summary():
    """Fault: what a prefix cache and swapping moved is counted in one table and not in another, or twice."""
    rng = random.Random(3)
    prompts = [[*range(8), *(rng.randrange(100) for _ in range(rng.randint(2, 9)))] for _ in range(12)]
    for preemption in (Swap(), Recompute()):
        engine = Engine(ToyModel(), ChunkedPrefill(8, 4, preemption=preemption), PrefixCachedKVCache(10, 4))
        engine.run([ask(f"r{i}", prompt, rng.randint(2, 12), at=0.7 * i) for i, prompt in enumerate(prompts)])
        steps, requests, numbers = steps_table(engine.trace), requests_table(engine.trace), summary(engine.trace)
        assert steps["cached"].sum() == numbers["cached_tokens"] + numbers["recached_tokens"] > 0
        assert requests["num_cached"].sum() == numbers["cached_tokens"] > 0
        assert requests["num_recached"].sum() == numbers["recached_tokens"]
        assert steps["swapped_out"].sum() == steps["swapped_in"].sum() == numbers["swapped_tokens"]
        assert requests["num_swapped"].sum() == numbers["swapped_tokens"]
        assert (numbers["swapped_tokens"] > 0) == isinstance(preemption, Swap) == (numbers["recached_tokens"] == 0)
        assert ((steps["swapped_out"] - steps["swapped_in"]).cumsum() == steps["kv_host"]).all()


def test_forked_answers_are_counted_where_they_leave_and_share_their_prompt():
    """Fault: the prompt of n answers is counted as computed n times, or nobody forked."""
    engine = Engine(ToyModel(), ContinuousBatching(6, 64), PagedKVCache(20, 4))
    engine.run([ask("a", 6, 3, n=3, temperature=1.0), ask("b", 5, 3, at=1.0)])
    steps, numbers = steps_table(engine.trace), summary(engine.trace)
    assert steps["forked"].tolist() == [2, 0, 0, 0] and steps["copied_rows"].sum() == 4  # 2 rows of 2 shared blocks
    assert numbers["prompt_tokens"] == 6 * 3 + 5 and numbers["cached_tokens"] == 6 * 2
    assert steps["prefill"].sum() == 6 + 5 and numbers["completed"] == 4


def test_a_trace_read_from_a_file_gives_the_same_numbers(tmp_path):
    trace = run("paged", num_blocks=8)
    assert summary(trace)["preemptions"] > 0
    trace.save(tmp_path / "run.jsonl")
    for mine, theirs in zip(trace.to_pandas(), Trace.load(tmp_path / "run.jsonl").to_pandas(), strict=True):
        pd.testing.assert_frame_equal(mine, theirs)


# ---------------------------------------------------------------- any timelines


@st.composite
def timelines(draw):
    """A request of any end, whose times are in order."""
    name = draw(st.uuids()).hex
    step = st.floats(0, 10)
    arrival = draw(step)
    scheduled = arrival + draw(step)
    tokens = np.cumsum([scheduled, *draw(st.lists(step, max_size=6))])[1:].tolist()
    reason = draw(st.sampled_from(["stop", "length", "abort", "rejected", None]))
    if reason == "rejected":
        return timeline(name, arrival, reason=reason, finish=arrival)
    if reason in ("stop", "length") and not tokens:
        tokens = [scheduled]
    finish = None if reason is None else (tokens or [scheduled])[-1]
    return timeline(
        name, arrival, tokens, reason, scheduled=scheduled, finish=finish, client=draw(st.sampled_from("ab"))
    )


@given(st.lists(timelines(), max_size=8))
@settings(max_examples=60, deadline=None)
def test_any_run_has_consistent_numbers(many):
    trace = Trace(timelines=many)
    numbers, values = summary(trace), latencies(trace)
    ends = ("completed", "aborted", "rejected", "unfinished")
    assert sum(numbers[key] for key in ends) == len(many)
    for name, sample in values.items():
        assert (sample >= 0).all()
        if len(sample):
            assert numbers[f"{name}_p50"] == np.percentile(sample, 50)
            assert numbers[f"{name}_p50"] <= numbers[f"{name}_p99"] <= numbers[f"{name}_max"] == sample.max()
        else:
            assert all(math.isnan(numbers[f"{name}_{statistic}"]) for statistic in ("mean", "p50", "p99", "max"))
    completed = [t for t in many if t.finish_reason in ("stop", "length")]
    assert len(values["ttft"]) == len(values["e2e"]) == numbers["completed"] == len(completed)
    assert len(values["tbt"]) == sum(len(t.token_times) - 1 for t in completed)
    assert values["tbt"].sum() == pytest.approx(sum(t.token_times[-1] - t.token_times[0] for t in completed))
    assert (values["queueing_delay"] <= values["ttft"]).all() and (values["ttft"] <= values["e2e"]).all()
    groups = split(trace, "client")
    for key in (*ends, "generated_tokens"):
        assert groups[key].sum() == numbers[key]
    assert goodput(trace, ttft=math.inf)["good"] == len(completed)
