"""Blocks, rows and boundaries: what a request holds, at which moment, and what is one token too many."""

import numpy as np
import pytest
from helpers import (
    CONFIGURATIONS,
    ask,
    cacheless,
    check_solo,
    chunk_sizes,
    drive,
    make_engine,
    names,
    run_checked,
    solo,
)

from minibatch import ContiguousKVCache, ContinuousBatching, Engine, PagedKVCache, Request, SamplingParams, ToyModel
from minibatch.request import NeverFits

BLOCK = 4
AROUND_A_BLOCK = (BLOCK - 1, BLOCK, BLOCK + 1)


class Spy(ToyModel):
    """Writes down, at every model call, how many units the request holds and how many tokens the call completes."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, plan, kv, store):
        self.calls += [(len(kv.units(chunk.request)), chunk.stop) for chunk in plan.chunks]
        return super().forward(plan, kv, store)


@pytest.mark.parametrize("configuration", ["paged", "chunked"])
@pytest.mark.parametrize("num_prompt", [3, 4, 5, 7, 8, 9])
def test_kv_13_a_block_is_taken_when_its_first_token_is_computed(configuration, num_prompt):
    """KV-13. Fault: "length" counts the token just sampled, and the table is a block short or long at a boundary."""
    model = Spy()
    engine = make_engine(configuration, model, token_budget=16)
    requests = [ask("a", num_prompt, 6)]
    check_solo(requests, run_checked(engine, requests))
    assert [stop for _, stop in model.calls] == list(range(num_prompt, num_prompt + 6))
    for num_blocks, stop in model.calls:
        assert num_blocks == -(-stop // BLOCK)
        assert (stop - 1) // BLOCK < num_blocks
    expected = {3: [1, 1, 2], 4: [1, 2], 8: [2, 3]}.get(num_prompt, [])
    assert [num_blocks for num_blocks, _ in model.calls][: len(expected)] == expected


@pytest.mark.parametrize("num_prompt", [1, *AROUND_A_BLOCK, 20])
def test_solo_is_what_the_toy_says_without_any_cache(num_prompt):
    """Fault: a translation error that hits the solo run in the same way, so that the oracle agrees with the bug."""
    request = ask("a", num_prompt, 9)
    assert solo(request) == cacheless(request)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("num_prompt", AROUND_A_BLOCK)
@pytest.mark.parametrize("max_tokens", AROUND_A_BLOCK)
def test_prompt_and_output_around_a_block_boundary(configuration, num_prompt, max_tokens):
    """Fault: one row too few or too many when prompt, output or their sum ends exactly with a block."""
    requests = [ask(name, num_prompt, max_tokens) for name in "abc"]
    results = run_checked(make_engine(configuration), requests)
    check_solo(requests, results)
    assert [result.tokens for result in results] == [cacheless(request) for request in requests]


@pytest.mark.parametrize("num_prompt", [*AROUND_A_BLOCK, 11, 12, 13])
@pytest.mark.parametrize("budget", AROUND_A_BLOCK)
def test_chunks_around_a_block_boundary(num_prompt, budget):
    """Fault: a chunk that ends in the middle of a block starts the next one in a new block, or twice in the old."""
    engine = make_engine("chunked", token_budget=budget)
    requests = [ask("a", num_prompt, 3), ask("b", num_prompt, 3)]
    results = run_checked(engine, requests)
    assert [result.tokens for result in results] == [cacheless(request) for request in requests]
    assert sum(chunk_sizes(engine, "a")) == num_prompt + 2
    assert max(chunk_sizes(engine, "a")) == min(budget, num_prompt)


@pytest.mark.parametrize("configuration", ["paged", "chunked"])
@pytest.mark.parametrize("num_prompt", AROUND_A_BLOCK)
@pytest.mark.parametrize("max_tokens", [1, *AROUND_A_BLOCK])
def test_a_pool_of_exactly_enough_blocks_runs_and_one_block_less_is_refused(configuration, num_prompt, max_tokens):
    """Fault: the last generated token is counted as cached (refuses what fits), or the need is rounded down."""
    request = ask("a", num_prompt, max_tokens)
    need = -(-(num_prompt + max_tokens - 1) // BLOCK)
    check_solo([request], run_checked(make_engine(configuration, num_blocks=need), [request]))
    if need > 1:
        with pytest.raises(NeverFits, match=f"needs {need} blocks of {BLOCK}, the pool has {need - 1}"):
            make_engine(configuration, num_blocks=need - 1).submit(request)


@pytest.mark.parametrize("configuration", ["static", "continuous"])
@pytest.mark.parametrize("num_prompt", AROUND_A_BLOCK)
def test_a_slot_of_exactly_enough_rows_runs_and_one_row_less_is_refused(configuration, num_prompt):
    """Fault: the slot is compared with P + G instead of P + G - 1, or with P alone."""
    request = ask("a", num_prompt, 5)
    need = num_prompt + 5 - 1
    check_solo([request], run_checked(make_engine(configuration, slot_size=need), [request]))
    with pytest.raises(NeverFits, match=f"needs {need} rows, a slot has {need - 1}"):
        make_engine(configuration, slot_size=need - 1).submit(request)


@pytest.mark.parametrize("configuration", ["paged", "chunked"])
def test_two_requests_share_a_pool_that_is_exactly_enough_for_both(configuration):
    """Fault: a spare block is wanted, so that requests that fit together are run one after the other or preempted."""
    requests = [ask("a", 4, 5), ask("b", 5, 4)]
    engine = make_engine(configuration, num_blocks=4)
    check_solo(requests, run_checked(engine, requests))
    assert len(engine.trace.steps) == 5
    assert not any(step.preempted for step in engine.trace.steps)
    assert max(4 - step.kv.free // BLOCK for step in engine.trace.steps) == 4


@pytest.mark.parametrize("configuration", ["paged", "chunked"])
def test_a_pool_one_block_short_for_both_preempts_and_changes_no_token(configuration):
    """Fault: out of blocks in the middle of a run, a block is given to two requests or a token is lost."""
    requests = [ask("a", 4, 5), ask("b", 5, 4)]
    engine = make_engine(configuration, num_blocks=3)
    check_solo(requests, run_checked(engine, requests))
    assert all(names(step.preempted) in ((), ("b",)) for step in engine.trace.steps)


@pytest.mark.parametrize("kv", [ContiguousKVCache(3, 5), PagedKVCache(6, 4)], ids=str)
def test_rows_are_a_bijection_onto_the_units_of_a_request(kv):
    """Fault: the row translation mixes up unit and offset, so that two tokens share a row or a neighbour's is used."""
    states = [submitted(kv, 4) for _ in range(3)]
    for num_tokens in (1, 3, 4, 5):  # the paged tables grow in turns and interleave
        for state in states:
            kv.reserve(state, num_tokens)
    rows = np.concatenate([kv.rows(state, 0, 5) for state in states])
    assert len(set(rows.tolist())) == 15 and rows.min() >= 0 and rows.max() < kv.num_rows
    for state in states:
        units = kv.units(state)
        expected = [units[i // kv.unit_size] * kv.unit_size + i % kv.unit_size for i in range(5)]
        assert kv.rows(state, 0, 5).tolist() == expected
        assert kv.rows(state, 2, 5).tolist() == expected[2:]
    for state in states:
        kv.release(state)
        kv.release(state)  # harmless
        assert kv.units(state) == ()
    assert kv.num_free == kv.num_units


def submitted(kv, num_prompt):
    """A live request, made by an engine on a cache like this one."""
    engine = Engine(ToyModel(), ContinuousBatching(), type(kv)(kv.num_units, kv.unit_size))
    engine.submit(Request(list(range(num_prompt)), SamplingParams(max_tokens=2)))
    return next(iter(engine.queue))


@pytest.mark.parametrize("kv", [ContiguousKVCache(2, 8), PagedKVCache(4, 4)], ids=str)
def test_a_draft_promises_refunds_and_leaves_the_cache_alone(kv):
    """Fault: blocks promised twice in one plan, a victim's blocks not refunded, or planning that allocates."""
    a, b, c = (submitted(kv, 5) for _ in range(3))
    kv.reserve(a, 6)
    held, free = kv.units(a), kv.num_free
    draft = kv.draft()
    assert draft.reserve(a, 8)  # within what it holds
    assert draft.free == free
    assert draft.reserve(b, 8)
    assert draft.free == 0
    assert not draft.reserve(c, 1)
    assert "0 free" not in draft.shortage(c, 1) and "promised" in draft.shortage(c, 1)
    draft.release(b)
    assert draft.free == free and draft.held(b) == 0
    draft.release(a)
    assert draft.free == kv.num_units
    assert draft.reserve(c, 8) and draft.reserve(b, 8)
    assert (kv.units(a), kv.units(b), kv.units(c), kv.num_free) == (held, (), (), free)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_the_snapshot_tells_filled_reserved_and_fragmentation_apart(configuration):
    """Fault: a row is counted twice or not at all, or reserved memory is passed off as free."""
    engine = make_engine(configuration)
    engine.submit(ask("a", 6, 5))  # at most 10 of its 16 rows, or 10 of 12
    first = drive(engine)[0].kv
    kinds = (first.filled, first.reserved, first.fragmentation, first.free)
    assert kinds == ((6, 4, 6, 48) if configuration in ("static", "continuous") else (6, 0, 2, 56))
