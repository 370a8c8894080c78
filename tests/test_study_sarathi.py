"""The Sarathi-Serve study: percentiles, stalls and verdicts, against hand-made traces and the cost model's own sums."""

import numpy as np
import pandas as pd
import pytest

from minibatch.capacity import Capacity
from minibatch.cost_model import Counts
from minibatch.studies import Study, sarathi
from minibatch.studies.sarathi import BUDGETS, CHUNKED, CONTEXT, COST, DECODES, FIRST, MIXED, SMALL_BATCH
from minibatch.trace import Timeline, Trace


def test_the_same_requests_come_at_every_rate():
    """Fault: two rates differ in more than the rate, so that the search is led by luck."""
    slow, fast = (sarathi.workload(30, rate, 5) for rate in (1.0, 4.0))
    assert [len(r.prompt) for r in slow.requests] == [len(r.prompt) for r in fast.requests]
    assert slow.output_lengths == fast.output_lengths
    times = np.array([[r.arrival_time for r in w.requests] for w in (slow, fast)])
    assert times[0] == pytest.approx(4 * times[1])


def test_lengths_have_the_published_percentiles_and_the_limit():
    """Fault: the cut moves the percentiles, or a request exceeds 8,192 tokens."""
    requests = sarathi.workload(6000, 1.0, 0).requests
    prompts = np.array([len(request.prompt) for request in requests])
    outputs = np.array([request.output_length for request in requests])
    assert np.percentile(prompts, [50, 90]) == pytest.approx([1730, 5696], rel=0.06)
    assert np.percentile(outputs, [50, 90]) == pytest.approx([415, 834], rel=0.06)
    assert (prompts + outputs).max() == 8192


def timeline(name, arrival, scheduled, times):
    return Timeline(name, "c", 0, 5, len(times), arrival, scheduled, times, finish=times[-1], finish_reason="length")


def test_latency_is_of_gaps_and_of_the_wait_for_the_first_iteration():
    """By hand. Fault: the first token counts as a gap, or the delay is the time to the first token."""
    steady = [timeline(f"r{i}", 0.0, 1.0, [3.0 + 0.01 * k for k in range(100)]) for i in range(3)]
    late = timeline("late", 0.0, 9.0, [20.0, 21.0])
    found = sarathi.latency(Trace(timelines=[*steady, late]))
    assert found.delay == 1.0
    assert found.tbt == pytest.approx(0.01)  # 1 gap of 298 is more than the P99
    assert found.within("strict")
    assert not sarathi.latency(Trace(timelines=[late])).within("relaxed")
    assert not sarathi.Latency(0.2, 0.0).within("strict")
    assert sarathi.Latency(0.2, 2.0).within("relaxed")
    assert not sarathi.Latency(0.01, 2.1).within("strict")


@pytest.mark.parametrize("prompt", [0, 2048])
def test_a_stall_is_the_duration_of_the_iteration_with_the_prompt(prompt):
    """Oracle: the cost model, asked for that iteration: the window hides all but 4,096 keys of each decode, and nothing
    of a prompt of 2,048. Fault: a gap before everybody decodes counts, or the prompt does not share the iteration."""
    read, pairs = DECODES * CONTEXT + prompt, DECODES * CONTEXT + prompt * (prompt + 1) / 2
    tokens = DECODES + prompt
    expected = COST.seconds(Counts(tokens, DECODES + (prompt > 0), read, tokens, pairs))
    assert sarathi.stall(MIXED, prompt) == pytest.approx(expected, rel=1e-6)


def test_chunks_bound_the_stall():
    """Fault: the budget does not bound an iteration. 480 tokens of a prompt beside 32 decodes, at most."""
    chunk = BUDGETS["strict"] - DECODES
    most = Counts(BUDGETS["strict"], DECODES + 1, DECODES * CONTEXT + 2048, BUDGETS["strict"],
                  DECODES * CONTEXT + chunk * 2048)  # fmt: skip
    assert sarathi.stall(CHUNKED, 2048) <= COST.seconds(most)


def test_who_does_not_cut_can_take_the_longest_prompt_beside_a_full_batch():
    """Fault: the longest prompt waits until nobody decodes any more."""
    for name in (FIRST, MIXED):
        assert sarathi.scheduler(name, "strict").token_budget >= 8192 + 127
    assert sarathi.scheduler(SMALL_BATCH, "strict").max_num_seqs == 32


def capacities(**rates):
    """Searches that found these, (strict, relaxed) a seed."""
    names = {"first": FIRST, "mixed": MIXED, "chunked": CHUNKED, "small": SMALL_BATCH}
    return {
        names[key]: [{"strict": Capacity(a, 1.05 * a), "relaxed": Capacity(b, 1.05 * b)} for a, b in pairs]
        for key, pairs in rates.items()
    }


def test_a_verdict_is_computed_from_the_numbers():
    """Fault: a verdict that cannot fail; one seed in which it fails is lost in the mean."""
    first, chunked = [(1.0, 2.0), (1.1, 2.0)], [(3.0, 3.0), (3.3, 3.0)]
    more, size = sarathi.gain_claims(capacities(first=first, chunked=chunked))
    assert more.holds and size.holds
    more, size = sarathi.gain_claims(capacities(first=first, chunked=[(6.0, 3.0), (1.0, 3.0)]))
    assert not more.holds and size.holds  # 6.0 and 0.91
    assert not sarathi.gain_claims(capacities(first=first, chunked=[(3.0, 1.9), (3.3, 3.0)]))[0].holds
    assert not sarathi.gain_claims(capacities(first=first, chunked=[(2.0, 3.0), (2.2, 3.0)]))[1].holds
    assert sarathi.batch_claim(capacities(first=first, small=[(0.9, 1.0), (1.1, 1.0)])).holds
    assert not sarathi.batch_claim(capacities(first=first, small=[(0.5, 1.0), (1.1, 1.0)])).holds
    stalls = pd.DataFrame({MIXED: [2.0, 25.0], CHUNKED: [2.0, 2.0]}, index=[512, 8192])
    assert sarathi.stall_claim(stalls).holds
    assert not sarathi.stall_claim(stalls.assign(**{MIXED: [2.0, 10.0]})).holds
    assert not sarathi.stall_claim(stalls.assign(**{CHUNKED: [2.0, 6.0]})).holds


def test_a_search_that_left_its_range_is_marked():
    """Fault: the end of the range looks like a capacity."""
    found = {FIRST: [{"strict": Capacity(0.0, 0.5), "relaxed": Capacity(6.0, float("inf"))}]}
    table = sarathi.capacity_table(found)
    assert list(table["mean"]) == [0.5, 6.0]
    assert not table["in range"].any()


def test_a_run_repeats_itself_and_another_seed_is_another_run():
    """Fault: numbers depend on more than the seed, or not on the seed."""
    numbers = [sarathi.latency(sarathi.served(FIRST, "strict", 30, 2.0, seed)) for seed in (0, 0, 1)]
    assert numbers[0] == numbers[1] != numbers[2]


@pytest.mark.slow
def test_the_study_runs():
    """Fault: a part of it is missing."""
    study = sarathi.run(quick=True, progress=False)
    assert isinstance(study, Study)
    assert len(study.claims) == 4
    assert study.differences and study.figure is not None and "simulated" in study.describe()
    assert len(study.tables) == 3
    table = study.tables["Capacity, requests/s"]
    assert len(table) == 7 and (table["mean"] > 0).all()
    assert (table["low"] <= table["mean"]).all() and (table["mean"] <= table["high"]).all()
