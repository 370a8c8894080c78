"""The prefix cache: what is found, when it can be found, what is forgotten first, and that nothing wrong is ever found.

check_invariants reads every block that can be found, after every step: its rows must hold the tokens of its chain.
"""

from dataclasses import replace

import pytest
from helpers import (
    ScriptedModel,
    ask,
    check_drained,
    check_invariants,
    check_solo,
    chunk_sizes,
    drive,
    names,
    poison_unused_rows,
    run_checked,
    timeline,
    token_steps,
)

from minibatch import (
    ChunkedPrefill,
    ContinuousBatching,
    Engine,
    PagedKVCache,
    Request,
    SamplingParams,
    StaticBatching,
    ToyModel,
)
from minibatch.policies import FCFS, LongestPrefix, Optimistic, Priority, Recompute, ReserveMaximum, by_priority
from minibatch.prefix_cache import PrefixCache, PrefixCachedKVCache, block_hash

BLOCK = 4
SCHEDULERS = {
    "paged": lambda: ContinuousBatching(8, 64),
    "chunked": lambda: ChunkedPrefill(64, 8),
    "chunked, small budget": lambda: ChunkedPrefill(5, 8),
}
COMMON = list(range(10, 42))  # 8 blocks

every_scheduler = pytest.mark.parametrize("scheduler", SCHEDULERS)


def make(num_blocks, scheduler="paged", model=None, hash_function=None, **options):
    """An engine with a prefix cache."""
    kv = PrefixCachedKVCache(num_blocks, BLOCK)
    if hash_function is not None:
        kv.pool = PrefixCache(num_blocks, hash_function)
    scheduler = SCHEDULERS[scheduler]() if isinstance(scheduler, str) else scheduler
    return Engine(model or ToyModel(), scheduler, kv, **options)


def salted(request_id, prompt, salt, max_tokens=2, at=None):
    return Request(prompt, SamplingParams(max_tokens=max_tokens), request_id, at, cache_salt=salt)


def run_in_turn(engine, requests):
    """One after the other, each alone; how many prompt tokens of each were cached."""
    for request in requests:
        check_solo([request], run_checked(engine, [request]))
    return [timeline(engine, request.request_id).num_cached for request in requests]


def known_prefixes(engine):
    """The tokens of every block that the pool knows, by block."""
    return {known.block: known.tokens for known in engine.kv.pool.known()}


def references(engine, blocks):
    return {engine.kv.pool.references[block] for block in blocks}


def state_of(engine, label):
    (found,) = (state for state in [*engine.active, *engine.queue] if state.label == label)
    return found


# ---------------------------------------------------------------- KV-01: something is always computed


@every_scheduler
@pytest.mark.parametrize(
    "num_prompt, cached", [(1, 0), (3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12)]
)
def test_kv_01_an_identical_prompt_computes_at_least_its_last_token(scheduler, num_prompt, cached):
    """KV-01. Fault: all blocks of a prompt are found, nothing is left to compute, and there are no logits to sample.

    The policy here: the last block is computed again, so 4 of 8 tokens are cached and not 7.
    """
    engine = make(16, scheduler)
    prompt = COMMON[:num_prompt]
    requests = [ask(name, prompt, 3, at=None) for name in "AB"]
    assert run_in_turn(engine, requests) == [0, cached]
    assert engine.results["B"].tokens == engine.results["A"].tokens
    assert sum(chunk_sizes(engine, "B")) == num_prompt - cached + 2


@every_scheduler
@pytest.mark.parametrize("num_prompt", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("max_tokens", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("more", [1, 2, 4])
def test_kv_01_the_next_turn_finds_prompt_and_answer_but_not_the_token_that_was_never_fed_back(
    scheduler, num_prompt, max_tokens, more
):
    """Fault: generated tokens are not cached, or the last one is taken for computed because it is known."""
    engine = make(16, scheduler)
    first = ask("first", COMMON[:num_prompt], max_tokens, at=None)
    run_in_turn(engine, [first])
    history = [*first.prompt, *engine.results["first"].tokens]
    then = ask("then", [*history, *range(200, 200 + more)], 2, at=None)
    computed, wanted = num_prompt + max_tokens - 1, num_prompt + max_tokens + more - 1
    assert run_in_turn(engine, [then]) == [min(computed // BLOCK, wanted // BLOCK) * BLOCK]


@pytest.mark.parametrize("scheduler", ["paged", "chunked"])
def test_kv_01_prompt_logprobs_find_nothing_because_every_position_is_needed(scheduler):
    """Fault: a cached prefix has no logits, and the log-probabilities of the prompt are short or shifted."""
    engine = make(16, scheduler)
    plain, scored = ask("plain", COMMON[:9], 2, at=None), ask("scored", COMMON[:9], 2, at=None, prompt_logprobs=2)
    assert run_in_turn(engine, [plain, scored]) == [0, 0]
    (alone,) = Engine(ToyModel(), ContinuousBatching(), PagedKVCache(16, BLOCK)).run([scored])
    assert engine.results["scored"].prompt_logprobs == alone.prompt_logprobs
    assert len(alone.prompt_logprobs) == 9


# ---------------------------------------------------------------- KV-03: nothing old is found


@every_scheduler
def test_kv_03_a_block_that_was_overwritten_is_not_found_any_more(scheduler):
    """KV-03. Fault: the hash of a reused block stays in the map, and its next owner's data is taken for the prefix."""
    engine = make(2, scheduler)
    a, b = ask("A", [1, 2, 3, 4, 5], 1, at=None), ask("B", list(range(11, 18)), 1, at=None)
    c = ask("C", a.prompt, 1, at=None)
    assert run_in_turn(engine, [a, b, c]) == [0, 0, 0]
    assert list(known_prefixes(engine).values()) == [(1, 2, 3, 4)]


@pytest.mark.parametrize("scheduler", ["paged", "chunked"])
def test_kv_03_a_block_that_a_decode_took_over_is_not_found_either(scheduler):
    """KV-03. Fault: the same, where the block is reused because a running request grows."""
    engine = make(3, scheduler)
    a, b = ask("A", [1, 2, 3, 4, 5], 1, at=0.0), ask("B", [21, 22, 23], 9, at=1.0)
    c = ask("C", [1, 2, 3, 4, 9], 1, at=8.0)  # B holds all 3 blocks from step 8 on
    requests = [a, b, c]
    check_solo(requests, run_checked(engine, requests))
    assert len(engine.trace.steps[8].kv.holdings[0].units) == 3
    assert engine.trace.steps[8].waiting == (("C", "blocks: needs 2 blocks, 0 free"),)
    assert token_steps(engine, "B") == list(range(2, 11))
    assert token_steps(engine, "C") == [11]
    assert timeline(engine, "C").num_cached == 0


@pytest.mark.parametrize("scheduler", ["paged", "chunked"])
def test_a_prefix_that_is_found_but_cannot_be_used_yet_is_neither_pinned_nor_kept(scheduler):
    """Fault: the look-up of a request that then has to wait takes its blocks away from those who run, or it remembers
    the hit and comes back to blocks that hold other data by then."""
    engine = make(3, scheduler)
    requests = [ask("A", [1, 2, 3, 4, 5], 1), ask("B", [21, 22, 23], 9, at=1.0), ask("C", [1, 2, 3, 4, 9], 1, at=4.0)]
    check_solo(requests, run_checked(engine, requests))
    hit = engine.trace.steps[4]  # B holds 2 blocks; the third is the one that C finds, and C needs one more
    assert (hit.waiting, hit.kv.cached) == ((("C", "blocks: needs 2 blocks, 1 free"),), BLOCK)
    assert token_steps(engine, "B") == list(range(2, 11))
    assert timeline(engine, "B").num_preemptions == 0
    assert timeline(engine, "C").num_cached == 0 and token_steps(engine, "C") == [11]


@every_scheduler
@pytest.mark.parametrize("num_blocks", [4, 5, 6, 8])
def test_kv_03_prefixes_that_come_and_go_are_never_mixed_up(scheduler, num_blocks):
    """Fault: somewhere in a long life of hits and evictions a block is found that holds something else."""
    engine = make(num_blocks, scheduler)
    prompts = [COMMON[:9], COMMON[8:17], COMMON[:13], [*COMMON[:8], 1], [*COMMON[:4], 2, 3, 4, 5, 6], COMMON[4:9]]
    requests = [
        ask(f"r{i}", prompts[(i * i + i // 5) % 6], 1 + i % 4 if i % 3 else 1, at=2.0 * (i // 3)) for i in range(40)
    ]
    check_solo(requests, run_checked(engine, requests))
    cached = sum(t.num_cached for t in engine.trace.timelines)
    assert 0 < cached < sum(t.num_prompt for t in engine.trace.timelines)


# ---------------------------------------------------------------- bad hash functions, collisions, orphans


def constant(parent, tokens, salt):
    return 7


def of_the_parent_only(parent, tokens, salt):
    return parent + 1


def of_the_tokens_only(parent, tokens, salt):
    return sum(tokens)


def of_the_salt_only(parent, tokens, salt):
    return len(str(salt))


def of_one_bit(parent, tokens, salt):
    return tokens[-1] % 2


HASHES = [constant, of_the_parent_only, of_the_tokens_only, of_the_salt_only, of_one_bit]


def mixture():
    """Prompts that begin alike, with and without a salt, and repeat; some are permutations of others."""
    prompts = [COMMON[:9], COMMON[:17], [*COMMON[:8], 1, 2, 3, 4, 5], [*COMMON[4:8], *COMMON[:4], 9], COMMON[8:17]]
    return [salted(f"r{i}", prompts[i * 3 % 5], [None, None, "x"][i // 5 % 3], 1 + i % 3, 1.5 * i) for i in range(30)]


def hits(engine):
    return sum(t.num_cached for t in engine.trace.timelines)


@pytest.mark.parametrize("scheduler", ["paged", "chunked, small budget"])
@pytest.mark.parametrize("num_blocks", [6, 24])
@pytest.mark.parametrize("hash_function", HASHES)
def test_kv_03_a_hash_function_that_collides_costs_hits_and_nothing_else(hash_function, num_blocks, scheduler):
    """Fault: two prefixes with the same hash are taken for each other, because only hashes are compared."""
    good, bad = make(num_blocks, scheduler), make(num_blocks, scheduler, hash_function=hash_function)
    requests = mixture()
    for engine in (good, bad):
        check_solo(requests, run_checked(engine, requests))
    assert hits(bad) <= hits(good)
    assert hits(good) > 0


def test_kv_03_no_token_sequence_is_found_under_another_parent_or_salt_of_the_same_hash():
    """Fault: the comparison after the hash forgets the salt, the parent or the tokens."""
    for hash_function in HASHES:
        pool = PrefixCache(8, hash_function)
        root = pool.remember(pool.take(), None, (1, 2), None)
        assert pool.find(None, (1, 2), None) is root
        for parent, tokens, salt in [
            (None, (1, 3), None),
            (None, (1, 2), "x"),
            (None, (1, 2), ""),
            (root, (1, 2), None),
        ]:
            assert pool.find(parent, tokens, salt) is None


def collide_in_the_middle(parent, tokens, salt):
    """Of the blocks of a chain, the second ones have the same hash, whatever their tokens."""
    return 1000 if parent == sum(COMMON[:4]) else sum(tokens)


def test_kv_03_after_a_collision_in_the_middle_the_rest_of_the_chain_is_not_found_under_the_wrong_parent():
    """Fault: the block that lost the collision is skipped, and its successors are remembered behind the winner; or,
    when the winner has been evicted, they are found behind whatever came in its place."""
    engine = make(8, hash_function=collide_in_the_middle)
    winner = ask("winner", COMMON[:13], 1, at=None)  # 3 full blocks
    loser = ask("loser", [*COMMON[:4], 90, 91, 92, 93, *COMMON[8:13]], 1, at=None)  # differs in the second
    again = [ask(f"loser {i}", loser.prompt, 1, at=None) for i in range(2)]
    assert run_in_turn(engine, [winner, loser]) == [0, 4]
    assert sorted(known_prefixes(engine).values()) == [tuple(COMMON[i : i + 4]) for i in (0, 4, 8)]
    assert run_in_turn(engine, [again[0]]) == [4]
    flood = ask("flood", list(range(100, 125)), 1, at=None)  # 7 blocks: evicts the tail of winner, and its middle
    assert run_in_turn(engine, [flood]) == [0]
    assert tuple(COMMON[:4]) in known_prefixes(engine).values()
    assert tuple(COMMON[4:8]) not in known_prefixes(engine).values()
    back = ask("winner again", winner.prompt, 1, at=None)
    assert run_in_turn(engine, [again[1], back]) == [4, 4]  # now the loser has the hash, and the winner has lost it
    assert run_in_turn(engine, [ask("loser, last", loser.prompt, 1, at=None)]) == [12]


def test_kv_03_children_of_an_evicted_block_are_not_found_and_give_way_to_new_ones():
    """Fault: a block is found by its own tokens though the block before it is gone, or it keeps the place in the map
    of those that are computed anew, which then can never be found."""
    engine = make(8)
    twins = [ask("A", COMMON[:5], 1), ask("B", [*COMMON[:8], 1], 8)]  # A's first block is the one that is remembered
    flood = [ask("flood", list(range(100, 117)), 1, at=1.0)]  # evicts it while B's second block hangs on it
    check_solo(twins + flood, run_checked(engine, twins + flood))
    assert tuple(COMMON[:4]) not in known_prefixes(engine).values()
    assert tuple(COMMON[4:8]) in known_prefixes(engine).values()
    later = [ask(f"later {i}", [*COMMON[:8], 1], 1, at=None) for i in range(2)]
    assert run_in_turn(engine, later) == [0, 8]


# ---------------------------------------------------------------- KV-05: shared blocks count once


def sharers():
    return [ask("A", [*COMMON, 1], 7), ask("B", [*COMMON, 2, 3, 4, 5, 6], 3, at=2.0)]


@pytest.mark.parametrize("scheduler", ["paged", "chunked"])
def test_kv_05_a_request_that_shares_a_prefix_needs_only_its_new_blocks(scheduler):
    """KV-05. Fault: the admission check counts blocks that are shared with a running request as if they were new."""
    engine, seen = make(13, scheduler), {}
    a, b = sharers()

    def look(step):
        def record():
            shared = engine.kv.units(state_of(engine, "A"))[:8]
            others = engine.kv.units(state_of(engine, "A"))[8:]
            seen[step] = references(engine, shared), references(engine, others)

        return record

    for request in (a, b):
        engine.submit(request)
    reports = drive(engine, {step: look(step) for step in range(2, 8)})
    check_solo([a, b], [engine.results[name] for name in "AB"])
    assert token_steps(engine, "A") == list(range(1, 8)) and token_steps(engine, "B") == [3, 4, 5]
    assert [(x.request_id, x.cached) for x in reports[2].admitted] == [("B", 32)]
    held = {h.request_id: h.units for h in reports[2].kv.holdings}
    assert held["B"][:8] == held["A"][:8] and len(set(held["B"]) - set(held["A"])) == 2
    assert max(13 - (r.kv.free + r.kv.cached) // BLOCK for r in reports) == 12
    assert [seen[step][0] for step in range(2, 8)] == [{1}, {1}, {2}, {2}, {1}, {1}]  # before step 4: shared
    assert all(own == {1} for _, own in seen.values())


@pytest.mark.parametrize("scheduler", ["paged", "chunked"])
def test_kv_05_shared_blocks_stay_when_the_one_who_computed_them_leaves_first(scheduler):
    """Fault: the blocks go with their first owner, though another request still points to them."""
    engine = make(13, scheduler)
    requests = [ask("A", [*COMMON, 1], 3), ask("B", [*COMMON, 2, 3, 4, 5, 6], 7, at=1.0)]
    check_solo(requests, run_checked(engine, requests))
    assert timeline(engine, "B").num_cached == 32 and timeline(engine, "A").finish < timeline(engine, "B").finish


@pytest.mark.parametrize("scheduler", ["paged", "chunked"])
def test_kv_05_aborting_one_of_two_who_share_leaves_the_other_unharmed(scheduler):
    """Fault: an abort frees blocks that a neighbour reads."""
    for gone, stays in ("AB", "BA"):
        engine = make(13, scheduler)
        requests = sharers()
        for request in requests:
            engine.submit(request)
        drive(engine, {4: lambda engine=engine, gone=gone: engine.abort(gone)})
        results = [engine.results[request.request_id] for request in requests]
        check_solo(requests, results, cut=(gone,))
        assert engine.results[stays].finish_reason == "length"


@pytest.mark.parametrize("scheduler", ["paged", "chunked"])
def test_kv_05_a_request_that_waits_for_memory_says_how_many_new_blocks_it_needs(scheduler):
    """Fault: the reason, or the check behind it, counts shared blocks again."""
    engine = make(10, scheduler)
    requests = [ask("A", [*COMMON, 1], 4), ask("B", [*COMMON, 2, 3, 4, 5, 6], 3, at=2.0)]
    check_solo(requests, run_checked(engine, requests))
    assert engine.trace.steps[2].waiting == (("B", "blocks: needs 2 blocks, 1 free"),)
    assert token_steps(engine, "B") == [5, 6, 7]
    assert timeline(engine, "B").num_cached == 32


def warm(num_blocks, *prompts, scheduler="paged"):
    """An engine whose cache knows these prompts, the first of them the least recently used."""
    engine = make(num_blocks, scheduler)
    run_in_turn(engine, [ask(f"warm {i}", prompt, 1, at=None) for i, prompt in enumerate(prompts)])
    return engine


@pytest.mark.parametrize("scheduler", ["paged", "chunked"])
@pytest.mark.parametrize("order", ["new first", "hit first"])
def test_kv_05_idle_blocks_are_not_promised_twice_in_one_plan(order, scheduler):
    """Fault: a prefix that nobody holds counts as free for one request and as a hit for the next of the same plan."""
    engine = warm(4, COMMON[:9], scheduler=scheduler)  # 2 blocks can be found, 2 have no content
    new, hit = ask("new", list(range(100, 109)), 1, at=None), ask("hit", COMMON[:9], 1, at=None)
    requests = [new, hit] if order == "new first" else [hit, new]
    check_solo(requests, run_checked(engine, requests))
    first, second = engine.trace.steps[-2:]
    assert (names(first.admitted), names(second.admitted)) == ((requests[0].request_id,), (requests[1].request_id,))
    (reason,) = (reason for _, reason in first.waiting)
    assert reason == "blocks: needs 3 blocks, 4 free, 3 promised"
    assert timeline(engine, "hit").num_cached == (4 if order == "new first" else 8)


@pytest.mark.parametrize("scheduler", ["paged", "chunked"])
def test_kv_05_a_newcomer_never_evicts_what_another_of_the_same_plan_has_found(scheduler):
    """Fault: the first of a plan takes its blocks before the second has taken what it found. What that found is the
    least recently used, so it is evicted under its hands, and there would have been others to take."""
    engine = warm(6, COMMON[:9], COMMON[16:25], scheduler=scheduler)
    new, hit = ask("new", list(range(100, 109)), 1, at=None), ask("hit", COMMON[:9], 1, at=None)
    check_solo([new, hit], run_checked(engine, [new, hit]))
    assert names(engine.trace.steps[-1].admitted) == ("new", "hit")
    assert timeline(engine, "hit").num_cached == 8
    assert not set(map(tuple, (COMMON[16:20], COMMON[20:24]))) & set(known_prefixes(engine).values())


@pytest.mark.parametrize("scheduler", ["paged", "chunked"])
def test_kv_05_a_running_request_that_grows_never_evicts_what_a_newcomer_has_found(scheduler):
    """Fault: the same with a decode that takes a block in the iteration in which the prefix is found."""
    engine = make(6, scheduler)
    requests = [
        ask("warm", COMMON[:9], 1),
        ask("old", list(range(100, 104)), 5, at=1.0),
        ask("hit", COMMON[:9], 1, at=2.0),
    ]
    check_solo(requests, run_checked(engine, requests))
    step = engine.trace.steps[2]
    assert (names(step.admitted), step.cached) == (("hit",), 8)
    assert {m.request_id: (m.start, m.stop) for m in step.members} == {"old": (4, 5), "hit": (8, 9)}


@pytest.mark.parametrize("scheduler", ["paged", "chunked"])
def test_kv_05_a_victims_blocks_are_free_only_as_far_as_nobody_else_points_to_them(scheduler):
    """Fault: displacing one who shares its prefix is counted as if all its blocks came back."""
    engine = make(11, scheduler)
    requests = [ask("A", [*COMMON, 1], 12), ask("B", [*COMMON, 2], 12, at=1.0)]  # 8 shared, and 3 each in the end
    check_solo(requests, run_checked(engine, requests))
    (step,) = (s for s in engine.trace.steps if s.preempted)
    assert names(step.preempted) == ("B",)
    assert (
        len(step.kv.holdings[0].units) == 10 and step.kv.free + step.kv.cached == BLOCK
    )  # B's own block, and none of the shared
    assert engine.trace.steps[step.index + 1].waiting == (("B", "blocks: needs 2 blocks, 1 free"),)
    assert timeline(engine, "B").num_recached == 32


@pytest.mark.parametrize("scheduler", [ContinuousBatching, ChunkedPrefill])
@pytest.mark.parametrize("num_prompt, displaced", [(4, ()), (5, ("B",)), (9, ())])
def test_kv_05_nobody_is_displaced_for_blocks_that_would_stay_with_others(num_prompt, displaced, scheduler):
    """Fault: the same for an urgent newcomer: it displaces one who shares, and then the blocks are not there."""
    preemption = Recompute(displaces=by_priority)
    engine = make(11, scheduler(max_num_seqs=8, preemption=preemption), order=Priority())
    a, b = ask("A", [*COMMON, 1], 4), replace(ask("B", [*COMMON, 2], 6, at=1.0), priority=1)
    check_solo([a, b], run_checked(engine, [a, b, ask("C", num_prompt, 1, at=2.0)], fcfs=False)[:2])
    third = engine.trace.steps[2]  # A and B share 8 blocks and have one each; one is free
    assert names(third.preempted) == displaced
    assert names(third.admitted) == (() if num_prompt == 9 else ("C",))


# ---------------------------------------------------------------- KV-07: what is forgotten first


@every_scheduler
def test_kv_07_of_one_request_the_tail_is_evicted_before_the_head(scheduler):
    """KV-07. Fault: all blocks of a request are equally old, and the head goes first: the rest cannot be found."""
    engine = make(4, scheduler)
    a, b = ask("A", COMMON[:13], 1, at=None), ask("B", list(range(100, 105)), 1, at=None)
    assert run_in_turn(engine, [a, b, ask("C", a.prompt, 1, at=None)]) == [0, 0, 8]


@every_scheduler
@pytest.mark.parametrize("needed, cached", [(1, 12), (2, 8), (3, 4), (4, 0)])
def test_kv_07_blocks_are_evicted_one_by_one_from_the_end(scheduler, needed, cached):
    """Fault: too much is evicted, or in an order that makes what is left worthless."""
    engine = make(4, scheduler)
    a, b = ask("A", COMMON[:13], 1, at=None), ask("B", list(range(100, 100 + BLOCK * needed)), 1, at=None)
    assert run_in_turn(engine, [a, b]) == [0, 0]
    c = ask("C", [*COMMON[:12], 77], 1, at=None)
    assert run_in_turn(engine, [c]) == [cached]


def test_kv_07_between_requests_the_one_idle_longest_is_evicted_first():
    """Fault: eviction in order of computation, or of block number, instead of last use."""
    x, y, z = COMMON[:9], COMMON[9:18], COMMON[18:27]
    engine = warm(9, x, y, z, x)  # x is used again: y is now the oldest
    run_in_turn(engine, [ask("new", list(range(100, 117)), 1, at=None)])  # 5 blocks: 3 without content, 2 of y
    assert run_in_turn(engine, [ask("x", x, 1, at=None), ask("z", z, 1, at=None)]) == [8, 8]
    assert run_in_turn(engine, [ask("y", y, 1, at=None)]) == [0]


def test_kv_07_blocks_without_content_are_taken_before_any_that_can_be_found():
    """Fault: the free list is a plain queue, and a prefix is evicted while an empty block lies behind it."""
    engine = warm(8, COMMON[:9], COMMON[9:18])  # 4 can be found; the partial blocks and 2 others hold nothing
    run_in_turn(engine, [ask("new", list(range(100, 116)), 1, at=None)])  # 4 blocks
    assert engine.kv.num_cached == 8  # all that could be found, and the new ones
    assert run_in_turn(engine, [ask("a", COMMON[:9], 1, at=None)]) == [8]


def test_kv_07_a_block_that_is_held_is_never_evicted():
    """Fault: a shared block is idle as soon as its first owner has ended."""
    engine = make(5)
    requests = [ask("A", COMMON[:9], 1), ask("B", COMMON[:9], 6, at=1.0), ask("new", list(range(100, 107)), 2, at=2.0)]
    check_solo(requests, run_checked(engine, requests))
    assert timeline(engine, "B").num_cached == 8


def test_kv_07_the_snapshot_counts_what_can_be_found_apart_from_what_is_free():
    """Fault: cached rows are reported as used memory, or as memory that holds nothing."""
    engine = warm(6, COMMON[:9])
    (engine.submit(ask("B", [5], 2, at=None)), engine.step())
    kv = engine.trace.steps[-1].kv
    assert (kv.filled, kv.fragmentation, kv.reserved, kv.cached, kv.free) == (1, 3, 0, 8, 12)
    drive(engine)


# ---------------------------------------------------------------- KV-09: found when computed, not before


def twins(at):
    return [ask("A", [*COMMON[:16], 50], 2), ask("B", [*COMMON[:16], 60], 2, at=at)]


@pytest.mark.parametrize("at, cached", [(0.0, 0), (1.0, 8), (2.0, 16), (9.0, 16)])
def test_kv_09_a_block_can_be_found_once_it_has_been_computed(at, cached):
    """KV-09. Fault: the hash is registered when the block is allocated, and a twin attends to rows nobody wrote."""
    engine = make(16, ChunkedPrefill(16, 4, max_chunk=8))
    requests = twins(at)
    check_solo(requests, run_checked(engine, requests))
    assert timeline(engine, "B").num_cached == cached
    assert [s.cached for s in engine.trace.steps if "B" in names(s.admitted)] == [cached]


@every_scheduler
def test_kv_09_twins_of_one_plan_compute_both_and_a_third_finds_what_they_left(scheduler):
    """Fault: the second of two equal prompts is admitted on the promise of the first, or evicts it from the map."""
    engine = make(24, scheduler)
    requests = [ask(name, [*COMMON[:16], 50], 2) for name in "AB"]
    third = ask("third", [*COMMON[:16], 50], 2, at=9.0)
    check_solo([*requests, third], run_checked(engine, [*requests, third]))
    assert timeline(engine, "B").num_cached == (12 if "small" in scheduler else 0)  # B begins when A has computed 15
    assert timeline(engine, "third").num_cached == 16
    assert sorted(known_prefixes(engine).values()) == [tuple(COMMON[i : i + 4]) for i in range(0, 16, 4)]


class Failing(ToyModel):
    """Raises in its k-th call, before or after it has written what it should."""

    def __init__(self, call, writes):
        super().__init__()
        self.left, self.writes = call, writes

    def forward(self, plan, kv, store):
        self.left -= 1
        if self.left or self.writes:
            logits = super().forward(plan, kv, store)
        if not self.left:
            raise OSError("the device is gone")
        return logits


@pytest.mark.parametrize("writes", [True, False], ids=["rows written", "nothing written"])
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("scheduler", ["paged", "chunked, small budget"])
def test_kv_09_a_forward_that_fails_publishes_nothing(scheduler, call, writes):
    """Fault: blocks can be found from the planning on, and stay findable when the iteration did not happen."""
    engine = make(16, scheduler, Failing(call, writes))
    first = ask("first", COMMON[:9], 4, at=None)
    engine.submit(first)
    for _ in range(call - 1):
        engine.step()
    before = known_prefixes(engine)
    with pytest.raises(OSError):
        engine.step()
    check_invariants(engine)
    assert known_prefixes(engine) == before
    engine.abort("first")
    poison_unused_rows(engine)
    again = ask("again", COMMON[:9], 4, at=None)
    assert run_in_turn(engine, [again]) == [len(before) * BLOCK]


def test_kv_09_a_forward_that_fails_can_be_tried_again():
    """Fault: a request that was admitted by the failed iteration with a prefix loses or repeats it."""
    engine = make(16, model=Failing(2, writes=True))
    run_in_turn(engine, [ask("first", COMMON[:9], 1, at=None)])
    again = ask("again", COMMON[:9], 4, at=None)
    engine.submit(again)
    with pytest.raises(OSError):
        engine.step()
    while engine.step() is not None:
        check_invariants(engine)
    check_drained(engine)
    check_solo([again], [engine.results["again"]])
    assert timeline(engine, "again").num_cached == 8 and sum(chunk_sizes(engine, "again")) == 1 + 3


# ---------------------------------------------------------------- KV-11: salts


SALTS = ["a", "b", None, "", "None", "a\0"]


@every_scheduler
def test_kv_11_requests_of_different_salts_never_share_a_block(scheduler):
    """KV-11. Fault: the salt is left out of the key, or None, "" and "None" are the same to it."""
    engine = make(32, scheduler)
    first = [salted(f"first {salt!r}", COMMON[:9], salt) for salt in SALTS]
    second = [salted(f"second {salt!r}", COMMON[:9], salt) for salt in SALTS]
    assert run_in_turn(engine, first) == [0] * len(SALTS)
    assert run_in_turn(engine, second) == [8] * len(SALTS)


@pytest.mark.parametrize("hash_function", [*HASHES, block_hash])
def test_kv_11_a_hash_that_ignores_the_salt_shares_nothing_either(hash_function):
    """Fault: the salt is part of the hash only, and a collision is a leak between tenants."""
    engine = make(32, hash_function=hash_function)
    prompts = [salted(f"r{i}", COMMON[:9], salt) for i, salt in enumerate(SALTS)]
    assert run_in_turn(engine, prompts) == [0] * len(SALTS)


def test_kv_11_salts_do_not_share_even_side_by_side_or_behind_a_shared_block():
    """Fault: only the first block of a chain is salted, and the next ones are found behind an equal parent."""
    engine = make(32)
    requests = [salted(f"{salt} {i}", COMMON[:17], salt, 3, at=float(i)) for i in range(4) for salt in ("x", "y")]
    check_solo(requests, run_checked(engine, requests))
    for step in engine.trace.steps:
        units = {salt: set() for salt in "xy"}
        for holding in step.kv.holdings:
            units[holding.request_id[0]].update(holding.units)
        assert not units["x"] & units["y"]
    assert [timeline(engine, r.request_id).num_cached for r in requests] == [0, 0, 16, 16, 16, 16, 16, 16]


@pytest.mark.parametrize("other, recached, back", [("x", 12, 6), ("y", 8, 13), (None, 8, 13)])
def test_kv_11_a_preempted_request_finds_blocks_of_its_own_salt_only(other, recached, back):
    """Fault: on the way back from a preemption the salt is forgotten, and the text of another tenant is found."""
    engine = make(7)
    requests = [salted("A", COMMON[:9], "x", 12, at=0.0), salted("B", COMMON[:9], other, 12, at=0.0)]
    check_solo(requests, run_checked(engine, requests))
    preempted = timeline(engine, "B")  # holds 12 tokens and needs a fourth block, as does A
    assert (preempted.num_preemptions, preempted.num_recached) == (1, recached)
    assert token_steps(engine, "B")[4] == back  # with the same salt, as soon as there is one block: A has the others


def test_kv_11_the_answers_to_one_prompt_share_within_their_salt():
    """Fault: forked answers publish what they compute under no salt, or under that of another request."""
    engine = make(32)
    params = SamplingParams(max_tokens=6, n=3, temperature=1.0, seed=5)
    for salt in ("x", "y"):
        (result,) = run_checked(engine, [Request(COMMON[:9], params, f"group {salt}", cache_salt=salt)])
        turns = [[*COMMON[:9], *sample.tokens] for sample in result.samples]
        other = [salted(f"other {salt} {i}", turn, "other" + salt) for i, turn in enumerate(turns)]
        same = [salted(f"same {salt} {i}", turn, salt) for i, turn in enumerate(turns)]
        assert run_in_turn(engine, other)[0] == 0
        assert run_in_turn(engine, same) == [12, 12, 12]
    assert [timeline(engine, f"group {salt}#0").num_cached for salt in "xy"] == [0, 0]


@pytest.mark.parametrize("ends", [{}, {0: 3}, {1: 3}, {0: 6, 1: 2}])
def test_every_chain_that_can_be_found_is_the_text_of_one_answer(ends):
    """Fault: forked answers share the list of their blocks, and one hangs its blocks behind those of another: the
    blocks are right and the prefix is not."""
    prompt, texts = COMMON[:6], [[100 + 10 * i + k for k in range(10)] for i in range(3)]

    class Answers(ToyModel):
        def forward(self, plan, kv, store):
            logits, row = super().forward(plan, kv, store), 0
            for chunk in plan.chunks:
                row += chunk.num_logits
                index, length = int(chunk.request.request_id[-1]), len(chunk.request.generated)
                if chunk.samples and not chunk.forks:
                    logits[row - 1, texts[index][length] if length < ends.get(index, 99) else 255] += 1000.0
            return logits

    engine = make(32, model=Answers(eos_token_id=255))
    request = Request(prompt, SamplingParams(max_tokens=10, n=3, temperature=1.0, seed=1), "a")
    (result,) = run_checked(engine, [request])
    answers = [(*prompt, *sample.tokens) for sample in result.samples]
    paths = []
    for known in engine.kv.pool.known():
        path = known.tokens
        while (known := known.parent) is not None:
            path = known.tokens + path
        paths.append(path)
        assert any(answer[: len(path)] == path for answer in answers)
    full = [answer[: (len(answer) - 1) // BLOCK * BLOCK] for answer in answers]
    assert set(full) <= set(paths)


# ---------------------------------------------------------------- SC-01: back from a preemption


@pytest.mark.parametrize("scheduler", ["paged", "chunked"])
def test_sc_01_a_preempted_request_comes_back_to_what_is_left_of_its_own_blocks(scheduler):
    """SC-01. Fault: the number of tokens to schedule is taken before the prefix is looked up, and indices run over."""
    engine = make(6, scheduler)
    requests = [ask("A", 8, 12), ask("B", 8, 12)]
    check_solo(requests, run_checked(engine, requests))
    assert timeline(engine, "A").num_preemptions == 0
    assert token_steps(engine, "A") == list(range(1, 13))
    assert token_steps(engine, "B") == [*range(1, 6), *range(13, 20)]
    (lost,) = (p for s in engine.trace.steps for p in s.preempted)
    assert (lost.request_id, lost.num_tokens, lost.swapped) == ("B", 12, False)  # 13 tokens, the newest not computed
    back = engine.trace.steps[12]
    assert [(x.request_id, x.cached, x.resumed) for x in back.admitted] == [("B", 4, True)]
    (member,) = back.members
    assert (member.start, member.stop, member.recomputed, member.decode) == (4, 13, 8, 1)
    assert timeline(engine, "B").num_cached == 0 and timeline(engine, "B").num_recached == 4


@pytest.mark.parametrize("num_blocks", [5, 6, 7, 8])
@pytest.mark.parametrize("num_prompt", [3, 4, 5, 8])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_sc_01_whatever_is_left_of_it_the_rest_is_computed_once(scheduler, num_prompt, num_blocks):
    """Fault: at another boundary, or in the middle of a chunked recomputation, a position is skipped or repeated."""
    engine = make(num_blocks, scheduler)
    requests = [ask(name, num_prompt, 20 - num_prompt) for name in "ABC"]
    check_solo(requests, run_checked(engine, requests))
    assert timeline(engine, "A").num_preemptions == 0
    for request in requests:
        known = timeline(engine, request.request_id)
        executed = sum(chunk_sizes(engine, request.request_id))
        lost = sum(p.num_tokens for s in engine.trace.steps for p in s.preempted if p.request_id == request.request_id)
        assert executed + known.num_recached == 19 + lost


@pytest.mark.parametrize("scheduler", ["paged", "chunked"])
def test_sc_01_what_it_computes_again_can_be_found_again(scheduler):
    """Fault: it still knows the chain of its first stay, whose blocks are gone, and publishes nothing or orphans."""
    engine = make(5, scheduler)
    requests = [ask("A", 8, 12), ask("B", 8, 6)]
    check_solo(requests, run_checked(engine, requests))
    assert timeline(engine, "B").num_preemptions == 1 and timeline(engine, "B").num_recached == 0
    turn = ask("turn", [*requests[1].prompt, *engine.results["B"].tokens], 1, at=None)
    assert run_in_turn(engine, [turn]) == [12]


def test_sc_01_two_who_share_a_prefix_and_one_is_preempted():
    """Fault: the victim's shared blocks are freed under its neighbour, or are not found though they are still held."""
    engine = make(7)
    requests = [ask("A", COMMON[:9], 12), ask("B", COMMON[:9], 12, at=1.0)]
    check_solo(requests, run_checked(engine, requests))
    assert timeline(engine, "B").num_cached == 8
    assert timeline(engine, "B").num_preemptions == 1 and timeline(engine, "B").num_recached >= 8


# ---------------------------------------------------------------- with other policies


@pytest.mark.parametrize("scheduler", [ContinuousBatching, ChunkedPrefill])
def test_reserving_the_maximum_sets_aside_only_what_is_not_found(scheduler):
    """Fault: the reservation counts the prefix twice, or forgets that pinning it takes it from the free blocks."""
    engine = make(6, scheduler(max_num_seqs=4, admission=ReserveMaximum()))
    requests = [ask("A", COMMON[:9], 4), ask("B", COMMON[:9], 4, at=1.0)]  # 3 blocks each, 2 of them shared
    check_solo(requests, run_checked(engine, requests))
    assert [(s.kv.free + s.kv.cached) // BLOCK for s in engine.trace.steps] == [3, 2, 2, 2, 3]
    assert token_steps(engine, "B") == [2, 3, 4, 5]


def test_a_static_batch_finds_what_earlier_batches_have_computed_and_pads_what_is_left():
    """Fault: a member's row is padded as if its cached tokens were computed, or it is formed for its whole prompt."""
    engine = make(16, StaticBatching(2))
    requests = [ask("warm", COMMON[:9], 1), ask("hit", COMMON[:11], 2, at=1.0), ask("new", 5, 2, at=1.0)]
    check_solo(requests, run_checked(engine, requests))
    assert [(a.request_id, a.cached) for a in engine.trace.steps[1].admitted] == [("hit", 8), ("new", 0)]
    assert [(p.request_id, p.num_tokens, p.dead) for p in engine.trace.steps[1].padding] == [("hit", 2, False)]


@pytest.mark.parametrize("ends_first", [0, 1])
def test_a_block_that_a_dead_and_a_live_member_share_is_filled(ends_first):
    """Fault: rows that a live request reads are not among the filled ones, because a dead one holds them too."""
    engine = make(16, StaticBatching(2))
    requests = [ask("warm", COMMON[:9], 1)]
    requests += [ask(f"m{i}", COMMON[:9], 1 if i == ends_first else 3, at=1.0) for i in range(2)]
    check_solo(requests, run_checked(engine, requests))
    kv = engine.trace.steps[3].kv  # both are 9 tokens long and share 8 of them; the live one has computed 2 more
    assert (kv.filled, kv.reserved, kv.fragmentation) == (11, 4, 1)


def test_a_longest_prefix_first_queue_changes_the_order_and_no_token():
    """Fault: a look-up for ordering touches the eviction order, so that asking changes what is found."""
    prompts = [COMMON[:9], list(range(100, 109)), [*COMMON[:8], 3], list(range(110, 119)), [*COMMON[:8], 4]]
    served = {}
    for order in (FCFS(), LongestPrefix()):
        engine = make(4, ContinuousBatching(1, 64), order=order)
        requests = [ask(f"r{i}", prompt, 1) for i, prompt in enumerate(prompts)]
        check_solo(requests, run_checked(engine, requests, fcfs=isinstance(order, FCFS)))
        served[repr(order)] = [s.members[0].request_id for s in engine.trace.steps], hits(engine)
    assert served["FCFS()"] == (["r0", "r1", "r2", "r3", "r4"], 8)
    assert served["LongestPrefix(window=16)"] == (["r0", "r2", "r4", "r1", "r3"], 16)


@pytest.mark.parametrize("num_blocks", [4, 6])
def test_optimistic_admission_in_the_middle_of_a_prompt_finds_its_first_pieces_again(num_blocks):
    """Fault: a prompt that is preempted half-way comes back with pieces that it never computed, or without any."""
    engine = make(num_blocks, ChunkedPrefill(4, 4, admission=Optimistic()))
    requests = [ask("old", 4, 9), ask("long", 16, 1)]
    check_solo(requests, run_checked(engine, requests))
    known = timeline(engine, "long")
    assert known.num_preemptions >= 1
    assert sum(chunk_sizes(engine, "long")) >= 16 - known.num_recached


def test_eos_in_the_middle_of_a_block_leaves_only_full_blocks_to_be_found():
    """Fault: the block in which a request ended early is remembered as full."""
    prompt = COMMON[:6]
    model = ScriptedModel({tuple(prompt): [200, 201, 255]}, eos_token_id=255)
    engine = make(8, model=model)
    (result,) = run_checked(engine, [ask("A", prompt, 9, at=None)])
    assert result.tokens == (200, 201, 255)
    assert list(known_prefixes(engine).values()) == [tuple(COMMON[:4]), (*COMMON[4:6], 200, 201)]


class Forgetful(PrefixCache):
    """Finds a block by its own tokens, after whatever came before it."""

    def find(self, parent, tokens, salt):
        same = (known for known in self.known() if known.tokens == tokens and known.salt == salt)
        return next(same, None)


def test_the_toy_finds_out_a_cache_that_forgets_what_came_before_a_block():
    """Fault: an oracle that cannot see it. The tokens of the block are right, what they were computed after is not."""
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 0], [9, 9, 9, 9, 3, 3, 3, 3, 0], [9, 9, 9, 9, 5, 6, 7, 8, 0]]
    requests = [ask(f"r{i}", prompt, 3, at=float(9 * i)) for i, prompt in enumerate(prompts)]
    for pool, found in ((PrefixCache, 4), (Forgetful, 8)):
        engine = make(16)
        engine.kv.pool = pool(16)
        results = engine.run(requests)
        assert timeline(engine, "r2").num_cached == found
        alone = [make(16).run([request])[0].tokens for request in requests]
        same = [result.tokens == tokens for result, tokens in zip(results, alone, strict=True)]
        assert same == [True, True, pool is PrefixCache]
