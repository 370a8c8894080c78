"""Where work and memory went: hand-computed sums, and conservation on every kind of engine."""

import math
import random
from dataclasses import fields, replace

import pytest
from helpers import CONFIGURATIONS, ask, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from minibatch import ChunkedPrefill, Engine, ToyModel, Trace
from minibatch.accounting import Work, memory, work, work_table
from minibatch.kv_cache import KVSnapshot
from minibatch.metrics import requests_table, steps_table
from minibatch.policies import Swap
from minibatch.prefix_cache import PrefixCachedKVCache
from minibatch.trace import Member, PadRow, StepReport, Timeline

pytestmark = pytest.mark.filterwarnings("error")


def abc():
    """The three requests of 18, 73 and 141 tokens."""
    return [ask(name, 4, length) for name, length in (("A", 18), ("B", 73), ("C", 141))]


def step(index, *, members=(), padding=(), kv=(64, 0, 0, 0), duration=1.0, start=None):
    """An iteration by hand; ``kv`` is (capacity, filled, reserved, fragmentation)."""
    capacity, filled, reserved, fragmentation = kv
    start = float(index) if start is None else start
    return StepReport(
        index=index,
        start=start,
        end=start + duration,
        members=tuple(members),
        padding=tuple(padding),
        arrived=(),
        admitted=(),
        preempted=(),
        finished=(),
        waiting=(),
        num_waiting=0,
        rest="",
        token_budget=None,
        kv=KVSnapshot(
            capacity, filled, reserved, fragmentation, capacity - filled - reserved - fragmentation, holdings=()
        ),
    )


def test_three_requests_in_a_static_batch_waste_nearly_half_of_their_rows():
    engine = make_engine("static", slot_size=160)
    engine.run(abc())
    done = work(engine.trace)
    assert len(engine.trace.steps) == 141
    assert (done.useful_rows, done.executed_rows) == (232, 423)
    assert done.useful_row_share == 232 / 423
    assert (done.prefill, done.decode, done.recomputed, done.left_padding) == (12, 17 + 72 + 140, 0, 0)
    assert done.dead_padding == 423 - 232
    assert done.executed == 12 + 229 + 191
    assert done.useful_share == 241 / 432
    wasted = work_table(engine.trace).eval("executed_rows - useful_rows")
    assert wasted.to_dict() == {"A": 141 - 18, "B": 141 - 73, "C": 0}


def test_the_same_three_under_continuous_batching_waste_nothing():
    engine = make_engine("continuous", slot_size=160)
    engine.run(abc())
    done = work(engine.trace)
    assert (done.useful_rows, done.executed_rows, done.useful_share) == (232, 232, 1.0)


def test_left_pads_share_the_row_of_their_prompt():
    engine = make_engine("static", slot_size=160)
    engine.run([ask("a", 2, 3), ask("b", 7, 1)])
    done = work_table(engine.trace)
    columns = ["prefill", "decode", "left_padding", "dead_padding", "useful_rows", "executed_rows"]
    assert done.loc["a", columns].tolist() == [2, 2, 5, 0, 3, 3]
    assert done.loc["b", columns].tolist() == [7, 0, 0, 2, 1, 3]


def test_kinds_and_rows_by_hand():
    """The last chunk of a recomputation is useful for its one new token; a chunk of old tokens only is not."""
    trace = Trace(
        steps=[
            step(0, members=[Member("a", 0, 4, 4, 0, 0, 7), Member("b", 0, 2, 2, 0, 0, 7)]),
            step(1, members=[Member("a", 4, 5, 0, 1, 0, 7)], padding=[PadRow("b", 1, True)]),
            step(2, members=[Member("a", 0, 3, 0, 0, 3, None)]),
            step(3, members=[Member("a", 3, 6, 0, 1, 2, 7)]),
        ]
    )
    trace.timelines = [Timeline(name, "x", 0, 4, 4, 0.0) for name in "ab"]
    done = work(trace)
    assert done == Work(6, 2, 5, 0, 1, useful_rows=4, executed_rows=6)
    assert (done.executed, done.useful_share) == (14, 8 / 14)


def test_memory_is_weighted_by_time():
    """10 of 100 rows for 1 s, then 80 for 3 s; the idle time between them is left out."""
    trace = Trace(
        steps=[
            step(0, kv=(100, 10, 40, 2), duration=1.0, start=0.0),
            step(1, kv=(100, 80, 0, 10), duration=3.0, start=7.0),
        ]
    )
    used = memory(trace)
    assert (used.capacity, used.peak_filled) == (100, 0.8)
    assert used.mean_filled == pytest.approx((10 * 1 + 80 * 3) / 400)
    assert used.mean_reserved == pytest.approx(40 / 400)
    assert used.mean_fragmentation == pytest.approx((2 * 1 + 10 * 3) / 400)
    assert used.mean_free == pytest.approx((48 + 30) / 400)


def test_what_is_kept_for_a_prefix_cache_is_a_part_of_its_own():
    """Fault: rows that nobody holds and a prefix cache may still find count as filled, or as simply free."""
    trace = Trace(steps=[step(0, kv=(100, 10, 40, 2)), step(1, kv=(100, 20, 0, 0))])
    trace.steps[1] = replace(trace.steps[1], kv=replace(trace.steps[1].kv, cached=30, free=50))
    used = memory(trace)
    assert (used.mean_cached, used.mean_free) == pytest.approx((0.15, 0.49))
    assert used.mean_filled + used.mean_reserved + used.mean_fragmentation == pytest.approx(0.36)


def test_tokens_from_a_prefix_cache_and_swapped_ones_are_computed_once_or_not_at_all():
    """Fault: found tokens count as prefill, or a swap as recomputation."""
    rng = random.Random(3)
    prompts = [[*range(8), *(rng.randrange(100) for _ in range(rng.randint(2, 9)))] for _ in range(12)]
    engine = Engine(ToyModel(), ChunkedPrefill(8, 4, preemption=Swap()), PrefixCachedKVCache(10, 4))
    engine.run([ask(f"r{i}", prompt, rng.randint(2, 12), at=0.7 * i) for i, prompt in enumerate(prompts)])
    done, ends = work_table(engine.trace), requests_table(engine.trace).set_index("request_id")
    assert (done["prefill"] + ends["num_cached"] == ends["num_prompt"]).all() and (ends["num_cached"] > 0).sum() > 5
    assert (done["decode"] == ends["num_generated"] - 1).all()
    assert done["recomputed"].sum() == 0 and ends["num_swapped"].sum() > 8
    used = memory(engine.trace)
    parts = ("filled", "reserved", "fragmentation", "cached", "free")
    assert sum(getattr(used, f"mean_{part}") for part in parts) == pytest.approx(1) and used.mean_cached > 0


def test_reserving_the_maximum_costs_memory_and_paging_gives_it_back():
    requests = [ask(f"r{i}", 3, 12) for i in range(4)]
    shares = {}
    for configuration in ("continuous", "paged"):
        engine = make_engine(configuration)
        engine.run(requests)
        shares[configuration] = memory(engine.trace)
    assert shares["continuous"].mean_filled == shares["paged"].mean_filled  # the same tokens at the same times
    assert shares["continuous"].mean_reserved > 0.3 and shares["paged"].mean_reserved == 0.0
    assert shares["paged"].mean_fragmentation < 0.15  # at most 3 of 4 rows of each last block


def test_nothing_executed_is_nan_and_not_measured_is_not_zero():
    assert work(Trace()).executed == 0
    assert math.isnan(work(Trace()).useful_share) and math.isnan(work(Trace()).useful_row_share)
    assert math.isnan(memory(Trace()).mean_filled) and memory(Trace()).preemptions == 0
    engine = make_engine("paged")
    engine.run([ask("a", 3, 3)])
    short = Trace(timelines=engine.trace.timelines)  # as a long simulation keeps it
    assert all(math.isnan(getattr(work(short), field.name)) for field in fields(Work))
    assert math.isnan(work(short).useful_share) and math.isnan(memory(short).peak_filled)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=12, deadline=None)
def test_nothing_is_lost(configuration, seed):
    """Tokens: each prompt token is prefill once and each fed-back token decode once. Rows: all are somewhere."""
    rng = random.Random(seed)
    requests = [ask(f"r{i}", rng.randint(1, 8), rng.randint(1, 8), at=rng.random() * 6) for i in range(8)]
    engine = make_engine(configuration, num_blocks=rng.randint(4, 12), token_budget=rng.randint(1, 9))
    engine.run([replace(r, client=rng.choice("ab")) for r in requests])
    trace = engine.trace
    done, table, steps, used = work(trace), work_table(trace), steps_table(trace), memory(trace)
    ends = requests_table(trace).set_index("request_id")
    assert (table["prefill"] == ends["num_prompt"]).all()
    assert (table["decode"] == ends["num_generated"] - 1).all()  # the last token is never computed
    assert (table["recomputed"] > 0).sum() <= (ends["num_preemptions"] > 0).sum()
    assert done.executed == steps["num_tokens"].sum()
    assert done.left_padding + done.dead_padding == steps["padding"].sum()
    assert done.dead_padding == steps["dead_padding"].sum()
    assert done.executed_rows == sum(len({r.request_id for r in (*s.members, *s.padding)}) for s in trace.steps)
    assert used.mean_filled + used.mean_reserved + used.mean_fragmentation + used.mean_free == pytest.approx(1)
    assert used.preemptions == steps["preempted"].sum() == ends["num_preemptions"].sum()
    assert 0 < used.mean_filled <= used.peak_filled <= 1
    if configuration != "static":
        assert done.left_padding == done.dead_padding == 0
