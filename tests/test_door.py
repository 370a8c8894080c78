"""Behind the door nothing that one request brings along may harm another."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from helpers import CONFIGURATIONS, ask, check_solo, make_engine, run_checked

from minibatch import ContiguousKVCache, Engine, PagedKVCache, Request, SamplingParams, StaticBatching, ToyModel, Trace
from minibatch.clock import VirtualClock
from minibatch.metrics import makespan

ODD = {
    "numpy seed": {"temperature": 1.0, "seed": np.int64(5)},
    "fraction": {"temperature": Fraction(1, 2), "seed": 1},
    "numpy numbers": {"max_tokens": np.int64(4), "top_k": np.int32(3), "min_p": np.float32(0.1), "temperature": 1},
}


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("odd", ODD)
def test_numbers_of_other_types_are_numbers(odd, configuration, tmp_path):
    """Fault: an accepted value fails in the middle of an iteration, for everybody, in every iteration."""
    engine = make_engine(configuration)
    odd_one = Request([1, 2], SamplingParams(**{"max_tokens": 4, **ODD[odd]}), "odd", arrival_time=np.arange(3)[1])
    good = ask("good", 3, 5)
    results = run_checked(engine, [good, odd_one])
    check_solo([good], results[:1])
    assert results[1].finish_reason == "length"
    engine.trace.save(tmp_path / "x.jsonl")
    assert Trace.load(tmp_path / "x.jsonl") == engine.trace


def test_an_end_of_sequence_beyond_the_vocabulary_is_no_end():
    engine = make_engine("paged", ToyModel(eos_token_id=300))
    (result,) = engine.run([ask("a", 3, 4, min_tokens=2)])
    assert result.error is None and len(result.tokens) == 4


def test_params_that_change_after_submission_change_nothing():
    params = SamplingParams(max_tokens=4, logit_bias={5: 1.0})
    engine = make_engine("paged")
    engine.submit(Request([1, 2], params, "a"))
    params.logit_bias[9999] = 1.0
    while engine.step() is not None:
        pass
    assert engine.results["a"].error is None


def test_a_cache_that_is_in_use_is_not_shared():
    """Fault: a notebook cell is run again with the cache of the engine before, whose requests still hold blocks."""
    kv = PagedKVCache(8, 4)
    engine = Engine(ToyModel(), StaticBatching(2), kv)
    engine.submit(ask("a", 3, 4))
    engine.step()
    with pytest.raises(ValueError, match="used by another engine"):
        Engine(ToyModel(), StaticBatching(2), kv)
    while engine.step() is not None:
        pass
    with pytest.raises(ValueError, match="is or was used"):  # nor later: a prefix cache would find another store's rows
        Engine(ToyModel(), StaticBatching(2), kv)


def test_a_static_batch_does_not_wait_for_others_when_the_cache_can_take_nobody_else():
    engine = Engine(ToyModel(), StaticBatching(8, max_wait=50.0), ContiguousKVCache(2, 16))
    run_checked(engine, [ask("a", 3, 4), ask("b", 3, 4)])
    assert [timeline.scheduled for timeline in engine.trace.timelines] == [0.0, 0.0]


def test_who_never_ran_does_not_stretch_the_run():
    """Fault: a request that was aborted long before its arrival makes the throughput of the others look like none."""
    engine = make_engine("paged")
    engine.submit(ask("a", 3, 2))
    engine.submit(ask("later", 3, 2, at=1000.0))
    engine.abort("later")
    while engine.step() is not None:
        pass
    assert makespan(engine.trace) == 2.0


def test_an_iteration_that_failed_leaves_its_events_to_the_next_report():
    """Fault: the model raises, the caller goes on, and the trace has no word of who was admitted or preempted."""
    engine = make_engine("paged", num_blocks=4)
    forward, calls = engine.model.forward, []

    def flaky(*arguments):
        calls.append(1)
        if len(calls) % 2:
            raise RuntimeError("out of luck")
        return forward(*arguments)

    engine.model.forward = flaky
    requests = [ask("old", 4, 9), ask("new", 4, 9)]
    for request in requests:
        engine.submit(request)
    while True:
        try:
            if engine.step() is None:
                break
        except RuntimeError as error:
            assert str(error) == "out of luck"
    check_solo(requests, [engine.results["old"], engine.results["new"]])
    preemptions = sum(timeline.num_preemptions for timeline in engine.trace.timelines)
    assert preemptions == sum(len(step.preempted) for step in engine.trace.steps) > 0
    assert sum(len(step.admitted) for step in engine.trace.steps) == 2 + preemptions


def test_a_real_clock_survives_a_far_future(monkeypatch):
    from minibatch import clock

    naps = []

    def nap(seconds):
        naps.append(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(clock.time, "sleep", nap)
    with pytest.raises(KeyboardInterrupt):
        clock.RealClock().wait_until(1e300)
    assert naps == [3600.0] and VirtualClock().kind == "virtual"
