"""A scenario in plain values, a grid of them, intervals over seeds, the highest rate: all on small simulations."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from minibatch import metrics
from minibatch.configurations import CONFIGURATIONS
from minibatch.cost_model import CostModel
from minibatch.gpus import GPUS
from minibatch.model_shapes import MODELS
from minibatch.request import NeverFits
from minibatch.scenario import Scenario, numbers
from minibatch.sweep import capacity, grid, mean_and_half_width, seeded, summarise, sustains, sweep, varied
from minibatch.trace import Timeline, Trace

SMALL = Scenario(num_requests=30, prompts="uniform:20,200", outputs="geometric:30,200", arrivals="poisson:20")


@pytest.mark.parametrize("scheduler", CONFIGURATIONS)
def test_every_configuration_completes_the_same_requests(scheduler):
    """Fault: a configuration sees another workload, loses a request, or leaves its numbers out."""
    trace = replace(SMALL, scheduler=scheduler).run()
    found = numbers(trace)
    workload = SMALL.load()
    assert found["completed"] == 30 and found["generated_tokens"] == sum(workload.output_lengths.values())
    assert not trace.steps and trace.num_steps == found["iterations"]
    assert not [name for name, value in found.items() if math.isnan(value)]
    assert trace.meta["scenario"]["scheduler"] == scheduler and trace.simulated


def test_a_full_trace_has_the_numbers_of_a_light_one():
    assert numbers(SMALL.run(record_steps=True)) == numbers(SMALL.run())


def test_the_rate_scales_arrivals_and_leaves_the_lengths():
    """Fault: a rate sweep that also draws other requests; a rate that is forced on every seed's few arrivals."""
    slow, fast = SMALL.load(), replace(SMALL, rate=40.0).load()
    assert fast == replace(SMALL, arrivals="poisson:40").load()
    assert fast.output_lengths == slow.output_lengths
    times = [[r.arrival_time for r in workload.requests] for workload in (slow, fast)]
    assert np.allclose(np.array(times[0]) / 2, times[1])


def test_a_closed_loop_never_has_more_than_its_clients_in_flight():
    trace = replace(SMALL, arrivals="closed:3").run()
    assert max(count.num_seqs + count.num_waiting for count in trace.light) <= 3
    assert len(trace.timelines) == 30


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model": "gpt-5"}, "model must be one of opt-13b"),
        ({"gpu": "tpu"}, "gpu must be one of a100-40"),
        ({"scheduler": "best"}, "scheduler must be one of static"),
        ({"num_requests": 0}, "num_requests must be an integer of at least 1, got 0"),
        ({"rate": -1.0}, "rate must lie in"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"phase_order": "decode-first"}, "phase_order must be one of mixed, prefill-first"),
        ({"order": "nobody"}, "no policy 'nobody'"),
        ({"tensor_parallel": 3}, "cannot share the 32 K/V heads"),
        ({"memory_share": 1.5}, "memory_share must lie in"),
        ({"gpu": "nowhere.json"}, "nowhere.json"),
    ],
)
def test_a_scenario_that_makes_no_sense_is_refused_when_it_is_made(change, message):
    with pytest.raises((ValueError, OSError), match=message):
        replace(SMALL, **change)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"workload": "wikipedia"}, "workload must be synthetic or azure:PATH"),
        ({"workload": "azure:nowhere.csv"}, "there is no file nowhere.csv"),
        ({"prompts": "uniform:5"}, "lengths 'uniform:5'"),
        ({"arrivals": "poisson"}, "arrivals 'poisson'"),
        ({"arrivals": "closed:many"}, "closed:N is N clients"),
        ({"arrivals": "closed:0"}, "closed:N is N clients"),
        ({"arrivals": "closed:3", "rate": 2.0}, "which have no rate of their own"),
        ({"arrivals": "all", "rate": 2.0}, "no rate"),
    ],
)
def test_a_workload_that_cannot_be_had_is_refused_before_anything_runs(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change).load()


def test_files_are_workloads(tmp_path):
    path = tmp_path / "some.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:15:4{i}.6805900,{100 + i},{5 + i}\n" for i in range(8))
    )
    scenario = Scenario(workload=f"azure:{path}", num_requests=6, rate=10.0)
    assert numbers(scenario.run())["generated_tokens"] == sum(5 + i for i in range(6))
    with pytest.raises(ValueError, match="are in the file"):
        replace(scenario, arrivals="poisson:2").load()
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n10,3\n20,4\n")
    assert numbers(Scenario(workload=f"lengths:{lengths}", arrivals="all").run())["generated_tokens"] == 7
    saved = tmp_path / "saved.jsonl"
    SMALL.load().save(saved)
    assert numbers(Scenario(workload=f"saved:{saved}").run()) == numbers(SMALL.run())


def test_a_file_that_has_changed_is_read_again(tmp_path):
    """Fault: a cache of workloads by name only."""
    path = tmp_path / "lengths.csv"
    for output in (3, 5):
        path.write_text(f"num_prefill_tokens,num_decode_tokens\n10,{output}\n")
        assert numbers(Scenario(workload=f"lengths:{path}").run())["generated_tokens"] == output


def test_a_slot_that_the_cache_cannot_hold_is_refused_with_its_numbers():
    with pytest.raises(NeverFits, match="500 tokens, the KV cache has 400"):
        replace(SMALL, scheduler="static", slot_size=500, kv_tokens=400).run()


def test_a_calibrated_cost_model_is_a_gpu(tmp_path):
    path = tmp_path / "here.json"
    cost = CostModel(MODELS["qwen3-0.6b"], GPUS["l4"], overhead=0.01)
    cost.save(path)
    assert CostModel.load(path) == cost
    on_it = replace(SMALL, gpu=str(path), kv_tokens=4000)
    assert numbers(on_it.run()) == numbers(
        replace(SMALL, model="qwen3-0.6b", gpu="l4", overhead=0.01, kv_tokens=4000).run()
    )
    for text in ("", "[]", "{}", json.dumps({"model": 3}), path.read_text().replace("num_layers", "layers")):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"here\.json is not a cost model"):
            CostModel.load(path)


# ---------------------------------------------------------------- sweeps


def test_a_grid_has_every_combination_and_the_last_changes_fastest():
    scenarios = grid(SMALL, rate=[1.0, 2.0], scheduler=["paged", "chunked"])
    assert [(s.rate, s.scheduler) for s in scenarios] == [
        (1.0, "paged"),
        (1.0, "chunked"),
        (2.0, "paged"),
        (2.0, "chunked"),
    ]
    with pytest.raises(ValueError, match="a scenario has no speed"):
        grid(SMALL, speed=[1])


@pytest.mark.slow
def test_a_sweep_is_the_runs_one_after_the_other_whatever_the_number_of_processes():
    """Fault: rows in the order in which they finish; a seed that depends on the process."""
    scenarios = grid(SMALL, token_budget=[64, 256])
    alone, parallel = (sweep(scenarios, seeds=2, jobs=jobs, progress=False) for jobs in (1, 2))
    assert alone.equals(parallel)
    assert alone["seed"].tolist() == [0, 1, 0, 1] and alone["token_budget"].tolist() == [64, 64, 256, 256]
    by_hand = [numbers(replace(s, seed=seed).run()) for s in scenarios for seed in (0, 1)]
    assert [row["e2e_p99"] for row in by_hand] == alone["e2e_p99"].tolist()
    good = sweep(scenarios[:1], objectives={"ttft": 0.05}, jobs=1, progress=False)["good_share"]
    assert good.item() == metrics.goodput(scenarios[0].run(), ttft=0.05)["share"]


def test_the_summary_has_the_mean_and_students_interval():
    rows = sweep(grid(SMALL, scheduler=["paged", "chunked"]), seeds=3, jobs=1, progress=False)
    table = summarise(rows)
    assert varied(table) == ["scheduler"] and table["seeds"].tolist() == [3, 3]
    three = rows["ttft_p50"][:3].to_numpy()
    low, high = stats.t.interval(0.95, 2, three.mean(), stats.sem(three))
    assert table["ttft_p50"][0] == pytest.approx(three.mean())
    assert table["ttft_p50_ci"][0] == pytest.approx((high - low) / 2)


def test_the_interval_covers_the_mean_as_often_as_it_says():
    """Fault: the normal quantile in place of Student's, or the standard deviation in place of that of the mean."""
    draws = np.random.default_rng(0).exponential(size=(4000, 20)).mean(axis=1).reshape(1000, 4)
    covered = [abs(mean - 1) <= half for mean, half in map(mean_and_half_width, draws)]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.025)
    assert math.isnan(mean_and_half_width(np.array([1.0]))[1])


TIGHT = replace(SMALL, kv_tokens=1000, num_requests=None)


@pytest.mark.slow
def test_capacity_is_between_two_rates_of_which_one_is_sustained():
    """Fault: a search that ends at a rate it has not tried, or with other requests than the runs that it stands for."""
    slo = {"ttft_p99": 0.5}
    found = capacity([TIGHT], slo, 1.0, 500.0, seconds=20.0, tolerance=0.1, jobs=1, progress=False)
    below, above = found["capacity"].item(), found["capacity_below"].item()
    assert below < above <= 1.1 * below
    for rate, good in ((below, True), (above, False)):
        assert sustains(replace(TIGHT, rate=rate, num_requests=math.ceil(20 * rate)).run(), slo) is good


@pytest.mark.slow
def test_capacity_does_not_grow_because_a_run_is_short():
    """Fault: a queue that has only begun to grow when the last request comes is taken for a load that is sustained."""
    slo = {"queueing_delay_p50": 2.0}
    found = [
        capacity([TIGHT], slo, 1.0, 100.0, seconds=seconds, jobs=1, progress=False)["capacity"].item()
        for seconds in (20.0, 60.0)
    ]
    assert found[0] == pytest.approx(found[1], rel=0.3)


def test_a_queue_that_grows_is_not_sustained():
    """Fault: only the whole run is looked at, of which the first half was good."""

    def timelines(delays):
        return [
            Timeline(f"r{i}", "x", 0, 1, 1, float(i), i + delay, [i + delay], finish=i + delay, finish_reason="stop")
            for i, delay in enumerate(delays)
        ]

    slo = {"queueing_delay_p50": 2.0}
    assert sustains(Trace({}, timelines=timelines([1, 1, 1, 1])), slo)
    assert not sustains(Trace({}, timelines=timelines([0, 1, 3, 9])), slo)  # P50 of all: 2
    assert sustains(Trace({}, timelines=timelines([1, 1])), {"tbt_p99": 0.1})  # one token: there is no gap


@pytest.mark.parametrize(
    "slo, message",
    [
        ({"speed": 1.0}, "no latency speed: there are queueing_delay_mean"),
        ({"throughput": 100.0}, "no latency throughput"),
        ({"ttft_p99": math.nan}, "ttft_p99 must lie in"),
        ({"ttft_p99": -1.0}, "ttft_p99 must lie in"),
    ],
)
def test_a_bound_that_is_none_is_refused(slo, message):
    with pytest.raises(ValueError, match=message):
        capacity([TIGHT], slo, 1.0, 2.0, jobs=1, progress=False)


def test_a_workload_of_which_some_is_refused_has_no_capacity():
    """Fault: capacity 0, as if the load had been too high."""
    with pytest.raises(ValueError, match="requests are refused at any rate, the first: NeverFits"):
        capacity([replace(TIGHT, kv_tokens=100)], {"ttft_p99": 1.0}, 1.0, 2.0, jobs=1, progress=False)


# ---------------------------------------------------------------- what is run once


def test_no_run_counts_twice(tmp_path):
    """Fault: an interval over runs that are the same, which is too narrow, or none at all for a recorded workload."""
    assert len(grid(SMALL, rate=[4.0, 4.0])) == 1
    assert [s.seed for s in seeded([SMALL, replace(SMALL, seed=1)], 3)] == [0, 1, 2, 3]
    path = tmp_path / "saved.jsonl"
    SMALL.load().save(path)
    assert len(seeded([Scenario(workload=f"saved:{path}")], 5)) == 1


def test_what_a_file_says_cannot_be_said_again(tmp_path):
    """Fault: options that are accepted and not read."""
    path = tmp_path / "saved.jsonl"
    SMALL.load().save(path)
    for change in ({"prompts": "fixed:3"}, {"outputs": "fixed:3"}, {"max_tokens": 5}, {"arrivals": "poisson:3"}):
        with pytest.raises(ValueError, match="these are in the file"):
            replace(Scenario(workload=f"saved:{path}"), **change).load()
    cost = CostModel(MODELS["qwen3-0.6b"], GPUS["l4"])
    cost.save(tmp_path / "here.json")
    here = Scenario(gpu=str(tmp_path / "here.json"))
    assert here.model == "Qwen3-0.6B" and here.cost == cost and replace(here, seed=1).cost == cost
    for change in ({"model": "llama-3-8b"}, {"tensor_parallel": 2}, {"overhead": 0.5}):
        with pytest.raises(ValueError, match=r"here\.json says that already"):
            Scenario(gpu=str(tmp_path / "here.json"), **change)


def test_how_many_tokens_an_iteration_may_have_does_not_depend_on_what_was_drawn():
    """Fault: one long request more changes the scheduler of all others."""
    paged = replace(SMALL, scheduler="paged")
    for change in ({}, {"outputs": "fixed:900"}, {"slot_size": 300}):
        assert "max_num_batched_tokens=4096" in replace(paged, **change).run().meta["scheduler"]
    assert "max_num_batched_tokens=700" in replace(paged, max_num_batched_tokens=700).run().meta["scheduler"]


def test_answers_that_the_context_cuts_are_counted():
    """Fault: an answer that ends early for want of context looks like one that was that short."""
    cut = numbers(replace(SMALL, model="opt-13b", prompts="fixed:2000", outputs="fixed:100", num_requests=3).run())
    assert cut["cut"] == 3 and cut["generated_tokens"] == 3 * 48 and numbers(SMALL.run())["cut"] == 0


def test_a_workload_without_requests_is_refused(tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    with pytest.raises(ValueError, match="no requests"):
        Scenario(workload=f"mooncake:{path}").load()
