"""A, B and C generate for 18, 73 and 141 decode iterations: what static batching wastes, and what using it needs.

The iteration that computes the prompts emits everybody's first token, so each request asks for one token more.
"""

from __future__ import annotations

from helpers import check_solo, run_checked

from minibatch import ContiguousKVCache, ContinuousBatching, Engine, Request, SamplingParams, StaticBatching, ToyModel

DECODES = {"A": 18, "B": 73, "C": 141}
QUEUED = {"D": 60, "E": 90, "F": 30}


def run(scheduler, decodes):
    engine = Engine(ToyModel(), scheduler, ContiguousKVCache(3, 160))
    requests = [Request([1, 2, 3], SamplingParams(max_tokens=n + 1), request_id=name) for name, n in decodes.items()]
    check_solo(requests, run_checked(engine, requests))
    prefill, *decode = engine.trace.steps
    assert prefill.decode == 0 and [m.stop for m in prefill.members] == [3, 3, 3]
    return decode, {t.request_id: t.finish for t in engine.trace.timelines}


def test_a_static_batch_executes_423_row_iterations_of_which_232_are_useful():
    steps, finish = run(StaticBatching(3), DECODES)
    assert len(steps) == 141
    assert sum(step.num_tokens for step in steps) == 423 and sum(step.decode for step in steps) == 232
    assert sum(step.padded for step in steps) == 423 - 232
    assert finish == {"A": 19, "B": 74, "C": 142}


def test_without_a_queue_continuous_batching_takes_the_same_141_iterations():
    """Nothing is wasted, and nothing is gained: the longest request sets the time, and nobody waits for the room."""
    steps, finish = run(ContinuousBatching(3), DECODES)
    assert len(steps) == 141 and sum(step.num_tokens for step in steps) == 232
    assert finish == {"A": 19, "B": 74, "C": 142}


def test_with_a_queue_the_room_that_a_and_b_leave_is_used():
    """D starts when A ends, E when B does, F when D does; the static batch makes all three wait for C."""
    _, static = run(StaticBatching(3), DECODES | QUEUED)
    _, continuous = run(ContinuousBatching(3), DECODES | QUEUED)
    assert static == {"A": 19, "B": 74, "C": 142, "D": 203, "E": 233, "F": 173}
    assert continuous == {"A": 19, "B": 74, "C": 142, "D": 80, "E": 165, "F": 111}
