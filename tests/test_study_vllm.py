"""The vLLM study: a buddy allocator against brute force, and the shares and verdicts against hand-made numbers."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from helpers import ask, run_checked
from hypothesis import given, settings
from hypothesis import strategies as st

from minibatch import ContinuousBatching, Engine, ToyModel
from minibatch.policies import Priority, Recompute, ReserveMaximum, by_priority
from minibatch.request import NeverFits
from minibatch.studies import Study, vllm
from minibatch.studies.buddy import Buddies, BuddyKVCache, Maximum, PowerOfTwo, oracle, order_of
from minibatch.trace import StepCounts, Trace

# ---------------------------------------------------------------- the allocator


def owned(num_rows, taken):
    """Brute force: for each row, whether it is taken. Fails if two chunks share one, or one sticks out."""
    rows = [False] * num_rows
    for start, order in taken:
        for row in range(start, start + (1 << order)):
            assert not rows[row], f"row {row} has two owners"
            rows[row] = True
    return rows


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 90), st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.integers(0, 20)), max_size=40))
def test_chunks_never_overlap_nothing_is_lost_and_what_is_there_is_found(num_rows, moves):
    """Fault: a split gives a half away twice, a merge joins chunks that are no buddies, a free chunk is not found
    though it is there, or rows get lost. A chunk of 2^k rows is there if and only if 2^k rows in a row are free that
    begin at a multiple of 2^k."""
    buddies, taken = Buddies(num_rows), []
    fresh = Buddies(num_rows).free
    for take, order, which in moves:
        if take:
            rows = owned(num_rows, taken)
            size = 1 << order
            there = any(not any(rows[a : a + size]) for a in range(0, num_rows - size + 1, size))
            start = buddies.take(order)
            assert (start is not None) == there
            if start is not None:
                taken.append((start, order))
        elif taken:
            buddies.put_back(*taken.pop(which % len(taken)))
        free = [(a, k) for k, chunks in enumerate(buddies.free) for a in chunks]
        assert all(owned(num_rows, taken + free)), "a row is neither taken nor free"
        assert buddies.num_free == num_rows - sum(1 << order for _, order in taken)
        assert buddies.largest == max((1 << order for _, order in free), default=0)
    for chunk in taken:
        buddies.put_back(*chunk)
    assert buddies.free == fresh, "what is free again is not in one piece again"


def test_a_chunk_is_halved_until_it_fits_and_becomes_whole_again():
    """By hand, 16 rows. Fault: the wrong half is kept."""
    buddies = Buddies(16)
    assert [buddies.take(1), buddies.take(2), buddies.take(1), buddies.take(3)] == [0, 4, 2, 8]
    assert buddies.take(0) is None
    buddies.put_back(0, 1)
    buddies.put_back(4, 2)
    assert buddies.free == [set(), {0}, {4}, set(), set()]  # 2 to 3 is in between
    buddies.put_back(2, 1)
    buddies.put_back(8, 3)
    assert buddies.free[4] == {0}


def test_the_memory_of_the_paper_has_seven_chunks_of_its_context():
    """Fault: a number of rows that is no power of two is cut down to one. 15,700 is 8192 + 4096 + 2048 + ..."""
    buddies = Buddies(15_700)
    assert sum(buddies.take(11) is not None for _ in range(9)) == 7
    assert buddies.num_free == 15_700 - 7 * 2048


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 1023, 1024, 1025])
def test_the_order_is_that_of_the_smallest_power_that_is_enough(rows):
    """Fault: an exact power of two gets twice what it needs."""
    assert 1 << order_of(rows) == min(2**k for k in range(12) if 2**k >= rows)


# ---------------------------------------------------------------- the same as a cache of the engine

RULES = [oracle, PowerOfTwo(24), Maximum(24)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("admission", [{}, {"admission": ReserveMaximum()}])
def test_the_engine_runs_on_it_and_every_token_is_right(rule, admission):
    """Fault: two requests get the same rows, a chunk is not given back, or a plan promises one that is not there."""
    requests = [ask(f"q{i}", 1 + 5 * i % 11, 1 + 7 * i % 12, at=float(i // 3)) for i in range(24)]
    engine = Engine(ToyModel(), ContinuousBatching(6, 64, **admission), BuddyKVCache(54, rule))
    run_checked(engine, requests)
    assert engine.kv.buddies.free == Buddies(54).free


@pytest.mark.parametrize("rule", RULES)
def test_urgent_requests_displace_others_from_their_chunks(rule):
    """Fault: a draft gives a victim's rows back without joining them, so that a chunk that would be there is missed."""
    requests = [
        replace(ask(f"q{i}", 1 + 5 * i % 11, 1 + 7 * i % 12, at=float(i)), priority=-i if i % 3 else 0)
        for i in range(18)
    ]
    scheduler = ContinuousBatching(6, 64, preemption=Recompute(displaces=by_priority))
    engine = Engine(ToyModel(), scheduler, BuddyKVCache(40, rule), order=Priority())
    run_checked(engine, requests, fcfs=False)
    assert sum(len(step.preempted) for step in engine.trace.steps) > 3


def test_what_the_rules_ask_for():
    """By hand: a prompt of 5 and an answer of 25 tokens, of which 24 are cached. Fault: an answer of 25 does not get
    32, a reservation exceeds the context, or less is reserved than will be filled."""
    sizes, held = {}, {}
    for rule in (oracle, PowerOfTwo(64), PowerOfTwo(34), Maximum(64), Maximum(3)):
        engine = Engine(ToyModel(), ContinuousBatching(), BuddyKVCache(192, rule))
        engine.submit(ask("a", 5, 25))
        engine.step()
        sizes[rule], held[rule] = engine.kv.rule(engine.active[0]), engine.kv.num_held(engine.active[0])
    assert list(sizes.values()) == [29, 37, 34, 64, 3]
    assert list(held.values()) == [32, 64, 64, 64, 32]


def test_a_snapshot_tells_what_will_be_filled_from_what_is_lost():
    """By hand: 5 of 29 rows filled after the first iteration, 24 to come, 3 lost to rounding, 160 of 192 free."""
    engine = Engine(ToyModel(), ContinuousBatching(), BuddyKVCache(192, oracle))
    engine.submit(ask("a", 5, 25))
    kv = engine.step().kv
    assert (kv.filled, kv.reserved, kv.fragmentation, kv.free) == (5, 24, 3, 160)


def test_what_could_never_fit_is_refused():
    """Fault: a request longer than the largest chunk waits for ever; 40 rows are 32 + 8."""
    engine = Engine(ToyModel(), ContinuousBatching(), BuddyKVCache(40, oracle))
    with pytest.raises(NeverFits, match="needs 39 rows in one chunk, the largest has 32"):
        engine.submit(ask("a", 20, 20))
    with pytest.raises(ValueError, match="num_rows must be an integer of at least 1, got 0"):
        BuddyKVCache(0)


def test_why_a_request_waits_names_the_pieces():
    """Fault: the reason speaks of free rows, of which there are enough."""
    engine = Engine(ToyModel(), ContinuousBatching(), BuddyKVCache(40, oracle))
    for name in ("a", "b"):
        engine.submit(ask(name, 10, 8))
    assert engine.step().waiting == (("b", "rows: needs a chunk of 32, of 8 free the largest has 8"),)


# ---------------------------------------------------------------- the study


def step(index, seconds, num_seqs, waiting, filled, reserved=0, fragmentation=0, decode=0):
    """An iteration of a trace, with what the study reads."""
    zeros = dict.fromkeys(StepCounts._fields, 0)
    return StepCounts(**{
        **zeros, "index": index, "start": index, "end": index + seconds, "num_seqs": num_seqs, "decode": decode,
        "num_waiting": waiting, "kv_filled": filled, "kv_reserved": reserved, "kv_fragmentation": fragmentation,
        "kv_capacity": vllm.SLOTS,
    })  # fmt: skip


def test_means_are_over_time_while_somebody_waits_after_the_warm_up():
    """By hand. Fault: means over iterations, the drain counts, or the warm-up does. Ten seconds with somebody waiting:
    what begins before 1.5 s is left out."""
    steps = [step(0, 1, 99, 5, 99), step(1, 1, 99, 5, 99)]  # warm-up
    steps += [step(i, 1, 4, 5, 1570, 785, 157, decode=4) for i in range(2, 8)]
    steps += [step(8, 2, 8, 1, 7850, 0, 0, decode=8), step(10, 1, 50, 0, 15_700)]  # then the drain
    means = vllm.steady(Trace(light=steps))
    assert means.batch == pytest.approx((6 * 4 + 2 * 8) / 8)
    assert means.filled == pytest.approx((6 * 0.1 + 2 * 0.5) / 8)
    assert (means.reserved, means.fragmentation) == pytest.approx((6 * 0.05 / 8, 6 * 0.01 / 8))
    assert means.filled + means.reserved + means.fragmentation + means.free == pytest.approx(1.0)
    assert means.waste == pytest.approx((6 * 157 / 8) / means.batch)
    assert means.rate == pytest.approx((6 * 4 + 8) / 8)
    with pytest.raises(ValueError, match="nobody waits in any of 1 iterations"):
        vllm.steady(Trace(light=[step(0, 1, 1, 0, 1)]))


def test_lengths_fit_the_context_and_have_the_means_of_the_paper():
    """Fault: pairs above the context are cut, which would keep their prompts whole and spoil the mean; or a longer
    list is another one."""
    pairs = vllm.lengths(20_000, 1)
    assert pairs.min() >= 1 and pairs.sum(axis=1).max() <= 2048
    # rejection takes what is beyond 2,048, about 0.5 % of the pairs
    assert pairs.mean(axis=0) == pytest.approx([161.31, 337.99], rel=0.04)
    assert np.array_equal(vllm.lengths(50, 1), pairs[:50])
    assert not np.array_equal(vllm.lengths(50, 2), pairs[:50])


def test_the_maximum_holds_as_many_as_there_are_chunks_and_a_run_repeats_itself():
    """Fault: hidden state between runs. Seven chunks of 2,048 rows, whatever the lengths."""
    first, second = (vllm.measure("Orca (Max)", 40, 3) for _ in range(2))
    assert first == second
    assert first.batch == pytest.approx(7.0)
    assert first.free == pytest.approx(1 - 7 * 2048 / 15_700)


@pytest.mark.parametrize("size", [1, 4, 32])
def test_the_waste_of_a_block_is_half_of_it(size):
    """Oracle: (B - 1)/2 rows a sequence. Fault: rows are counted that are held but will be filled, or a block too much
    is held."""
    assert vllm.measure(f"blocks of {size}", 80, 0).waste == pytest.approx((size - 1) / 2, abs=0.05 * size)


def table(**changes):
    rows = {
        name: {"batch": batch, "filled": filled, "reserved": 0.1, "batch ±": 0.1, "rate": batch, "recomputed": 0.4}
        for name, (batch, filled, _) in vllm.PUBLISHED.items()
    }
    frame = pd.DataFrame.from_dict(rows, orient="index")
    for column, value in changes.items():
        frame.loc[vllm.PAGED, column] = value
    return frame


def test_a_verdict_is_computed_from_the_numbers():
    """Fault: a verdict that cannot fail."""
    assert vllm.memory_claim(vllm.PAGED, table()).holds
    assert not vllm.memory_claim(vllm.PAGED, table(batch=34.0)).holds
    assert not vllm.memory_claim(vllm.PAGED, table(filled=0.92)).holds
    assert vllm.throughput_claim(vllm.ORACLE, table()).holds  # 30.42 / 13.62
    assert not vllm.throughput_claim(vllm.ORACLE, table(rate=20.0)).holds
    assert not vllm.throughput_claim(vllm.MAX, table(rate=60.0)).holds
    blocks = pd.DataFrame({"waste": [0.0, 7.5, 300.0]}, index=[1, 16, 256])
    assert vllm.waste_claim(blocks).holds  # 256 is not judged
    assert not vllm.waste_claim(blocks.assign(waste=[0.0, 9.0, 127.5])).holds


def test_the_interval_is_students():
    """By hand: 1, 2, 3 have a standard deviation of 1; t is 4.303 for two degrees of freedom. Fault: the interval of
    one run."""
    runs = [vllm.Means(batch, 0.1 * batch, 0, 0, 0, 0, 0, 0) for batch in (1.0, 2.0, 3.0)]
    row = vllm.summarise(["x"], [runs]).loc["x"]
    assert row["batch"] == 2.0
    assert row["batch ±"] == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)


@pytest.mark.slow
def test_the_study_runs():
    """Fault: a part of it is missing, or the table's shares do not add up to the memory."""
    study = vllm.run(quick=True, progress=False)
    assert isinstance(study, Study)
    assert len(study.claims) == 8 and study.claims[-1].holds is None
    assert study.differences and study.figure is not None and "simulated" in study.describe()
    for frame in study.tables.values():
        total = frame[["filled", "reserved", "fragmentation", "free"]].sum(axis=1)
        assert np.allclose(total, 1.0)
    assert list(study.tables["Paged memory, by rows a block"].index) == [1, 4, 16, 64, 256]


def test_another_seed_is_another_run_and_the_same_seed_the_same():
    """Fault: the seed does not arrive, or something else does."""
    numbers = [vllm.measure(vllm.ORACLE, 40, seed) for seed in (0, 0, 1)]
    assert numbers[0] == numbers[1] != numbers[2]
