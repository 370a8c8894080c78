"""Chunks and the token budget of an iteration."""

from itertools import pairwise

import pytest
from helpers import ask, check_solo, chunk_sizes, drive, make_engine, num_rejected, run_checked, solo, token_steps

from minibatch import ChunkedPrefill, ContiguousKVCache, ContinuousBatching, Engine, PagedKVCache, ToyModel
from minibatch.request import PromptTooLong


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "seeded"])
def test_ch_01_only_the_last_chunk_of_a_prompt_emits_a_token(sampling):
    """CH-01. Fault: a middle chunk is taken for the last one, chunks start again from 0, or draws are used up early."""
    engine = make_engine("chunked", token_budget=4)
    requests = [ask("a", 14, 3, **sampling)]
    results = run_checked(engine, requests)
    assert [s.prefill for s in engine.trace.steps] == [4, 4, 4, 2, 0, 0]
    assert token_steps(engine, "a") == [4, 5, 6]
    members = [m for s in engine.trace.steps for m in s.members]
    assert [(m.start, m.stop) for m in members[:4]] == [(0, 4), (4, 8), (8, 12), (12, 14)]
    assert not any(m.recomputed for m in members)
    assert [len(s.kv.holdings[0].units) for s in engine.trace.steps] == [4] * 6  # the prompt's room, from the start
    assert [s.kv.reserved for s in engine.trace.steps] == [10, 6, 2, 0, 0, 0]
    check_solo(requests, results)
    assert run_checked(make_engine("paged"), requests)[0].tokens == results[0].tokens


def test_a_prompt_that_does_not_fit_whole_is_not_begun():
    """Fault: memory for the first piece is taken for memory for the prompt, which then gets stuck half-way, is
    preempted, begins again, and recomputes for ever what it had."""
    engine = make_engine("chunked", num_blocks=5, block_size=4, token_budget=4)
    requests = [ask("old", 4, 9), ask("long", 16, 2)]  # long needs 4 blocks and gets them when old ends
    check_solo(requests, run_checked(engine, requests))
    assert sum(s.recomputed for s in engine.trace.steps) == 0
    blocked = [reason for s in engine.trace.steps for name, reason in s.waiting if name == "long"]
    assert "blocks: needs 4 blocks, 3 free" in blocked


def five():
    return [ask(f"R{i}", 1, 4) for i in range(1, 6)]


@pytest.mark.parametrize("mode", ["chunked", "continuous"])
def test_ch_03_decode_first_never_runs_more_requests_than_the_budget_serves(mode):
    """CH-03. Fault: the budget is reserved for all slots instead of the decodes there are, or exceeded."""
    engine = make_engine(mode, token_budget=2, token_limit=2, max_num_seqs=8, num_slots=8)
    requests = five()
    check_solo(requests, run_checked(engine, requests))
    assert [token_steps(engine, r.request_id) for r in requests] == [
        [1, 2, 3, 4],
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        [5, 6, 7, 8],
        [9, 10, 11, 12],
    ]
    assert max(len(s.kv.holdings) for s in engine.trace.steps) == 2
    assert max(s.num_tokens for s in engine.trace.steps) == 2


@pytest.mark.parametrize("phase_order", ["mixed", "prefill-first"])
def test_ch_03_prefill_first_lets_decodes_beyond_the_budget_take_turns(phase_order):
    """CH-03. Fault: all five run, two tokens fit, and the same two always get them."""
    scheduler = ContinuousBatching(8, 2, phase_order, first="prefill")
    engine = Engine(ToyModel(), scheduler, ContiguousKVCache(8, 16))
    requests = five()
    check_solo(requests, run_checked(engine, requests))
    assert max(len(s.kv.holdings) for s in engine.trace.steps) == 5
    for request in requests:
        steps = token_steps(engine, request.request_id)
        assert max(b - a for a, b in pairwise(steps)) <= 3  # ceil(5 running / 2 tokens)


def test_ch_03_a_budget_below_the_number_of_slots_is_no_error_and_never_exceeded():
    """CH-03. Fault: max_num_seqs > token_budget is accepted, and then a full batch of decodes breaks the budget."""
    engine = make_engine("chunked", token_budget=2, max_num_seqs=8, num_blocks=40)
    requests = [ask(f"r{i}", 3, 5) for i in range(8)]
    check_solo(requests, run_checked(engine, requests))
    assert max(s.num_tokens for s in engine.trace.steps) == 2


@pytest.mark.parametrize(("cap", "first_l", "first_s"), [(None, 10, 11), (6, 14, 2)])
def test_ch_05_a_cap_on_chunks_lets_a_short_prompt_pass_beside_a_long_one(cap, first_l, first_s):
    """CH-05. Fault: one very long prompt takes the whole budget of every step, and nobody else is admitted."""
    engine = make_engine("chunked", token_budget=8, max_chunk=cap, num_blocks=32)
    requests = [ask("L", 80, 1), ask("S", 2, 1, at=1.0)]
    check_solo(requests, run_checked(engine, requests))
    assert (token_steps(engine, "L"), token_steps(engine, "S")) == ([first_l], [first_s])
    assert max(s.num_tokens for s in engine.trace.steps) <= 8
    assert max(chunk_sizes(engine, "L")) == (cap or 8)


@pytest.mark.parametrize("configuration", ["continuous", "paged"])
def test_ch_07_without_chunking_a_prompt_longer_than_an_iteration_is_refused(configuration):
    """CH-07. Fault: it waits for ever, because no iteration will ever have room for it."""
    engine = make_engine(configuration, token_limit=8, slot_size=32, max_model_len=32)
    requests = [ask("P8", 8, 1), ask("P9", 9, 1), ask("n", 3, 4)]
    results = run_checked(engine, requests)
    assert [result.finish_reason for result in results] == ["length", "rejected", "length"]
    assert "PromptTooLong" in results[1].error and "9" in results[1].error and "is 8" in results[1].error
    check_solo(requests, results, cut=["P9"])
    assert num_rejected(engine) == 1


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_ch_07_what_a_preemption_would_recompute_must_fit_an_iteration_too(max_tokens):
    """CH-07. Fault: prompt 8 fits, but 8 + 2 - 1 tokens in one piece after a preemption never would."""
    paged, continuous = (make_engine(name, token_limit=8) for name in ("paged", "continuous"))
    request = ask("a", 8, max_tokens)
    check_solo([request], run_checked(continuous, [request]))  # never preempted
    if max_tokens == 1:
        check_solo([request], run_checked(paged, [request]))
    else:
        with pytest.raises(PromptTooLong, match=r"9 tokens .* max_num_batched_tokens is 8"):
            paged.submit(request)


def test_ch_07_a_chunk_cap_above_the_budget_is_cut_to_the_budget():
    """CH-07. Fault: two limits that were never compared: chunks of 8 in iterations of 4."""
    engine = make_engine("chunked", token_budget=4, max_chunk=8)
    requests = [ask("a", 10, 1)]
    check_solo(requests, run_checked(engine, requests))
    assert chunk_sizes(engine, "a") == [4, 4, 2]


def test_ch_09_a_free_slot_is_used_as_soon_as_a_long_prefill_leaves_budget():
    """CH-09. Fault: a "batch is full" flag set during the chunks is not cleared before somebody finishes."""
    engine = make_engine("chunked", token_budget=4, max_num_seqs=2, num_blocks=16)
    requests = [ask("R1", 12, 20), ask("R2", 2, 2)]
    check_solo(requests, run_checked(engine, requests))
    assert [s.prefill for s in engine.trace.steps[:4]] == [4, 4, 4, 2]
    assert token_steps(engine, "R1")[0] == 3
    assert token_steps(engine, "R2") == [4, 5]


def test_decodes_go_first_and_prompts_get_what_is_left():
    """Fault: a generation stall: a prompt takes the budget and a running request misses an iteration."""
    engine = make_engine("chunked", token_budget=4, num_blocks=32)
    requests = [ask("a", 3, 12), ask("b", 3, 12), ask("long", 20, 2, at=3.0)]
    check_solo(requests, run_checked(engine, requests))
    assert token_steps(engine, "a") == list(range(1, 13))
    assert token_steps(engine, "b") == list(range(2, 14))  # 1 token of its prompt in step 1, 2 in step 2
    assert chunk_sizes(engine, "long") == [2] * 10 + [1]


@pytest.mark.parametrize("token_budget", range(1, 18))
def test_the_budget_changes_the_chunks_and_no_token(token_budget):
    """Fault: any size of chunk at which a position, a row or the place of the sample is off by one."""
    requests = [ask("a", 13, 4), ask("b", 5, 6), ask("c", 1, 3, at=2.0)]
    for cap in (None, 1, 3):
        engine = Engine(ToyModel(), ChunkedPrefill(token_budget, 3, cap), PagedKVCache(12, 4))
        for request in requests:
            engine.submit(request)
        drive(engine)
        assert {name: result.tokens for name, result in engine.results.items()} == {
            r.request_id: solo(r) for r in requests
        }
