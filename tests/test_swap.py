"""Preemption by swapping: K/V goes to host memory and comes back to other rows; nothing is computed twice."""

import pytest
from helpers import (
    ask,
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
    ContiguousKVCache,
    ContinuousBatching,
    Engine,
    PagedKVCache,
    Request,
    SamplingParams,
    ToyModel,
    metrics,
)
from minibatch.models.toy_model import ToyStore
from minibatch.policies import Optimistic, Priority, Recompute, ReserveMaximum, Swap, by_priority, least_progress_lost
from minibatch.prefix_cache import PrefixCachedKVCache

BLOCK = 4
CACHES = {"paged": PagedKVCache, "prefix": PrefixCachedKVCache}


class SpyStore(ToyStore):
    """Writes down what goes to the host and where it comes back to."""

    def __init__(self, num_rows):
        super().__init__(num_rows)
        self.log = []

    def swap_out(self, key, rows):
        self.log.append(("out", key.label, rows.tolist()))
        super().swap_out(key, rows)

    def swap_in(self, key, rows):
        self.log.append(("in", key.label, rows.tolist()))
        super().swap_in(key, rows)

    def swap_drop(self, key):
        self.log.append(("drop", key.label))
        super().swap_drop(key)


class Spy(ToyModel):
    def allocate(self, num_rows):
        return SpyStore(num_rows)


def make(
    num_blocks=4, kind="paged", cache="paged", *, preemption=None, max_num_seqs=8, tokens=64, order=None, **policies
):
    policies["preemption"] = preemption or Swap()
    scheduler = {
        "paged": lambda: ContinuousBatching(max_num_seqs, tokens, **policies),
        "chunked": lambda: ChunkedPrefill(tokens, max_num_seqs, **policies),
    }[kind]()
    kv = ContiguousKVCache(num_blocks, 32) if cache == "contiguous" else CACHES[cache](num_blocks, BLOCK)
    return Engine(Spy(), scheduler, kv, order=order)


def old_and_new():
    """Both have 8 tokens before step 6, and need a third block each; there are 4."""
    return [ask("old", 4, 9), ask("new", 4, 9)]


def swaps(engine):
    """(step, who, tokens, swapped) of every preemption."""
    return [(s.index + 1, p.request_id, p.num_tokens, p.swapped) for s in engine.trace.steps for p in s.preempted]


both = pytest.mark.parametrize("kind", ["paged", "chunked"])
either = pytest.mark.parametrize("cache", CACHES)


@both
@either
def test_a_swapped_request_keeps_what_it_has_computed_and_comes_back_to_fresh_rows(cache, kind):
    """Fault: tokens are computed again though their K/V came back; or it returns to its old rows, which others have."""
    engine = make(5, kind, cache)
    requests = [*old_and_new(), ask("x", 1, 4)]  # x only shuffles the free list
    check_solo(requests, run_checked(engine, requests))
    assert swaps(engine) == [(6, "new", 8, True)]
    assert token_steps(engine, "new") == [1, 2, 3, 4, 5, 10, 11, 12, 13]
    back = engine.trace.steps[9]
    (member,) = back.members
    assert (member.start, member.stop, member.decode, member.recomputed) == (8, 9, 1, 0)
    assert [(a.request_id, a.cached, a.swapped_in, a.resumed) for a in back.admitted] == [("new", 0, 8, True)]
    assert sum(step.recomputed for step in engine.trace.steps) == 0
    assert sum(chunk_sizes(engine, "new")) == 4 + 8
    (out, before), (into, after) = ((entry[0], entry[2]) for entry in engine.store.log)
    assert (out, into) == ("out", "in")
    assert len(before) == len(after) == 8 and before != after and len(set(after)) == 8
    assert after == [unit * BLOCK + i for unit in back.kv.holdings[0].units[:2] for i in range(BLOCK)]


@both
def test_swapping_gives_the_same_schedule_as_recomputing_and_executes_fewer_tokens(kind):
    """Fault: a swapped request counts its whole text as pending, and waits for a budget that it does not use."""
    runs = {}
    for preemption in (Recompute(), Swap()):
        engine = make(8, kind, preemption=preemption)
        requests = [ask(f"R{i}", 4, 16) for i in range(1, 5)]
        check_solo(requests, run_checked(engine, requests))
        runs[type(preemption)] = engine.trace
    recompute, swap = runs[Recompute], runs[Swap]
    emitted = [[[m.request_id for m in step.members] for step in trace.steps] for trace in (recompute, swap)]
    assert emitted[0] == emitted[1]
    lost = sum(p.num_tokens for step in recompute.steps for p in step.preempted)
    assert sum(step.recomputed for step in recompute.steps) == lost > 0
    assert sum(step.recomputed for step in swap.steps) == 0
    assert sum(step.num_tokens for step in recompute.steps) - sum(step.num_tokens for step in swap.steps) == lost


@either
def test_the_host_is_accounted_apart_from_the_cache(cache):
    """Fault: rows on the host are counted as rows of the cache, or in one snapshot and not in the next."""
    engine = make(cache=cache)
    run_checked(engine, old_and_new())
    assert [step.kv.host for step in engine.trace.steps] == [0] * 5 + [8] * 4 + [0] * 4
    for step in engine.trace.steps:
        kv = step.kv
        assert kv.filled + kv.reserved + kv.fragmentation + kv.cached + kv.free == kv.capacity == 16
    assert [step.swapped_out for step in engine.trace.steps] == [0] * 5 + [8] + [0] * 7
    assert [step.swapped_in for step in engine.trace.steps] == [0] * 9 + [8] + [0] * 3


def test_timelines_and_numbers_say_what_was_copied():
    """Fault: the cost of a swap is nowhere to be seen, or counted in both directions at once."""
    engine = make(8)
    run_checked(engine, [ask(f"R{i}", 4, 16) for i in range(1, 5)])
    copied = {t.request_id: t.num_swapped for t in engine.trace.timelines}
    assert copied == {"R1": 0, "R2": 16, "R3": 8, "R4": 8 + 13}
    numbers = metrics.summary(engine.trace)
    assert numbers["swapped_tokens"] == sum(copied.values()) == sum(step.swapped_out for step in engine.trace.steps)
    assert sum(step.swapped_in for step in engine.trace.steps) == sum(copied.values())
    assert numbers["recached_tokens"] == 0 and numbers["preemptions"] == 4
    table = metrics.steps_table(engine.trace)
    assert (table["swapped_out"].sum(), table["swapped_in"].sum(), table["kv_host"].max()) == (45, 45, 8 + 8 + 16)


def test_while_it_is_on_the_host_it_waits_like_any_other_and_says_for_what():
    """Fault: the need of a swapped request is that of its next token alone, and its rows have no place to go to."""
    engine = make()
    run_checked(engine, old_and_new())
    assert engine.trace.steps[5].waiting == (("new", "preempted: old needs its blocks"),)
    assert engine.trace.steps[6].waiting == (("new", "blocks: needs 3 blocks, 1 free"),)
    assert timeline(engine, "new").runs == [[0.0, 5.0], [9.0, 13.0]]


# ---------------------------------------------------------------- the host is finite


HOST = {
    7: [(6, "R4", 8, False), (6, "R3", 8, False), (14, "R2", 16, False), (25, "R4", 13, False)],
    8: [(6, "R4", 8, True), (6, "R3", 8, False), (14, "R2", 16, False), (25, "R4", 13, False)],
    15: [(6, "R4", 8, True), (6, "R3", 8, False), (14, "R2", 16, False), (25, "R4", 13, True)],
    16: [(6, "R4", 8, True), (6, "R3", 8, True), (14, "R2", 16, False), (25, "R4", 13, True)],
    32: [(6, "R4", 8, True), (6, "R3", 8, True), (14, "R2", 16, True), (25, "R4", 13, True)],
}


@both
@pytest.mark.parametrize("host_tokens", HOST)
def test_a_victim_for_which_the_host_has_no_room_is_recomputed(host_tokens, kind):
    """Fault: the host takes more than it has, or two victims of one plan are promised the same room; or a victim that
    does not fit is lost."""
    engine = make(8, kind, preemption=Swap(host_tokens=host_tokens))
    requests = [ask(f"R{i}", 4, 16) for i in range(1, 5)]
    check_solo(requests, run_checked(engine, requests))
    assert swaps(engine) == HOST[host_tokens]
    assert max(step.kv.host for step in engine.trace.steps) <= host_tokens
    recomputed = sum(tokens for _, _, tokens, swapped in HOST[host_tokens] if not swapped)
    assert sum(step.recomputed for step in engine.trace.steps) == recomputed


@either
@pytest.mark.parametrize("host_tokens", [1, 5, 9, 16, 1000])
@pytest.mark.parametrize("num_blocks", [5, 6, 7, 9])
@pytest.mark.parametrize("tokens", [3, 64])
def test_swapping_survives_every_shortage_of_blocks_and_host(tokens, num_blocks, host_tokens, cache):
    """Fault: some mixture of swapped and recomputed victims, cut prompts and prefixes ends in the wrong rows."""
    for first in ("decode", "prefill"):
        kind = "chunked" if tokens == 3 else "paged"
        engine = make(num_blocks, kind, cache, preemption=Swap(host_tokens=host_tokens), tokens=tokens)
        if kind == "paged":
            scheduler = ContinuousBatching(4, 64, "mixed", first, preemption=Swap(host_tokens=host_tokens))
            engine = Engine(Spy(), scheduler, CACHES[cache](num_blocks, BLOCK))
        requests = [ask(f"r{i}", 1 + 3 * i % 7, 4 + 5 * i % 9, at=float(i // 2)) for i in range(8)]
        check_solo(requests, run_checked(engine, requests))
        assert max(step.kv.host for step in engine.trace.steps) <= host_tokens


@pytest.mark.parametrize("host_tokens", [0, -1, 1.5, True, None])
def test_a_host_without_room_is_refused(host_tokens):
    """Fault: a swap that can hold nothing is accepted, and silently recomputes."""
    with pytest.raises(ValueError, match="host_tokens"):
        Swap(host_tokens=host_tokens)


def test_the_room_of_one_who_came_back_or_was_aborted_can_be_used_again():
    """Fault: the host fills up over time, and swapping turns into recomputing."""
    engine = make(4, preemption=Swap(host_tokens=8))
    requests = [ask(name, 4, 9, at=float(12 * (i // 2))) for i, name in enumerate("abcdef")]
    for request in requests:
        engine.submit(request)
    drive(engine, {8: lambda: engine.abort("b")})
    check_solo(requests, [engine.results[r.request_id] for r in requests], cut=("b",))
    assert [swapped for *_, swapped in swaps(engine)] == [True] * len(swaps(engine))
    assert len(swaps(engine)) >= 3


# ---------------------------------------------------------------- aborts and failures


@both
@either
@pytest.mark.parametrize("step", [7, 8, 9])
def test_an_abort_while_it_is_swapped_out_frees_the_host(step, cache, kind):
    """Fault: the rows of a request that will never come back stay on the host, or are written into somebody's block."""
    engine = make(kind=kind, cache=cache)
    requests = old_and_new()
    for request in requests:
        engine.submit(request)
    drive(engine, {step: lambda: engine.abort("new")})
    check_solo(requests, [engine.results[r.request_id] for r in requests], cut=("new",))
    assert len(engine.results["new"].tokens) == 5
    assert [entry[0] for entry in engine.store.log] == ["out", "drop"]
    assert [s.kv.host for s in engine.trace.steps] == [0] * 5 + [8] * (step - 6) + [0] * (10 - step)
    assert timeline(engine, "new").num_swapped == 8


def test_an_abort_after_it_came_back_drops_nothing_twice():
    """Fault: the host rows of a request that has them back are dropped at its end: an error, or those of another."""
    engine = make()
    requests = old_and_new()
    for request in requests:
        engine.submit(request)
    drive(engine, {11: lambda: engine.abort("new")})
    assert [entry[0] for entry in engine.store.log] == ["out", "in"]
    check_solo(requests, [engine.results[r.request_id] for r in requests], cut=("new",))


class FailsOnce(Spy):
    """Raises in the first forward in which somebody is back from the host (or in which somebody left for it)."""

    def __init__(self, when):
        super().__init__()
        self.when, self.failed = when, False

    def forward(self, plan, kv, store):
        if not self.failed and any(entry[0] == self.when for entry in store.log):
            self.failed = True
            raise OSError("the device is gone")
        return super().forward(plan, kv, store)


@either
@pytest.mark.parametrize("when", ["out", "in"])
def test_an_iteration_that_fails_after_a_swap_can_be_tried_again(when, cache):
    """Fault: the K/V was copied and the iteration did not happen: it is copied again, from rows of others."""
    kv = CACHES[cache](4, BLOCK)
    engine = Engine(FailsOnce(when), ContinuousBatching(8, 64, preemption=Swap()), kv)
    requests = old_and_new()
    for request in requests:
        engine.submit(request)
    failures = 0
    while True:
        poison_unused_rows(engine)
        try:
            report = engine.step()
        except OSError:
            failures += 1
            continue
        if report is None:
            break
        check_invariants(engine, report)
    assert failures == 1
    check_solo(requests, [engine.results[r.request_id] for r in requests])
    assert [entry[0] for entry in engine.store.log] == ["out", "in"]
    assert swaps(engine) == [(6, "new", 8, True)]
    assert [(a.request_id, a.swapped_in) for s in engine.trace.steps for a in s.admitted if a.resumed] == [("new", 8)]


# ---------------------------------------------------------------- in the middle of a prompt


@either
def test_a_prompt_that_is_swapped_out_half_way_goes_on_where_it_was(cache):
    """Fault: a cut prompt begins again after a swap, or its rest is taken for a decode."""
    engine = make(5, "chunked", cache, tokens=5, admission=Optimistic())
    requests = [ask("old", 4, 9), ask("long", 16, 2)]
    check_solo(requests, run_checked(engine, requests))
    assert swaps(engine) == [(4, "long", 9, True)]
    assert chunk_sizes(engine, "long") == [1, 4, 4, 5, 2, 1]
    assert sum(step.recomputed for step in engine.trace.steps) == 0
    back = engine.trace.steps[9]
    assert [(m.request_id, m.start, m.stop, m.prefill) for m in back.members] == [("long", 9, 14, 5)]
    assert timeline(engine, "long").scheduled == 0.0 and token_steps(engine, "long") == [11, 12]


@pytest.mark.parametrize("cache", CACHES)
def test_seeded_draws_and_logprobs_do_not_notice_a_swap(cache):
    """Fault: the random stream or the scores of a prompt start again when a request comes back."""
    params = {"temperature": 1.0, "seed": 3, "logprobs": 2, "prompt_logprobs": 1}
    engine = make(cache=cache)
    requests = [ask("old", 4, 9), ask("new", 4, 9, **params)]
    results = run_checked(engine, requests)
    check_solo(requests, results)
    alone = Engine(ToyModel(), ContinuousBatching(), PagedKVCache(8, BLOCK)).run([requests[1]])[0]
    assert swaps(engine)
    assert (results[1].logprobs, results[1].prompt_logprobs) == (alone.logprobs, alone.prompt_logprobs)


# ---------------------------------------------------------------- with a prefix cache


def test_a_swapped_request_looks_nothing_up_and_can_be_found_again_itself():
    """Fault: it adopts a prefix beside the rows that it brings back, or what it brings back is never known again."""
    engine = make(4, cache="prefix")
    requests = old_and_new()
    check_solo(requests, run_checked(engine, requests))
    assert timeline(engine, "new").num_recached == 0 and timeline(engine, "new").num_swapped == 8
    history = [*requests[1].prompt, *engine.results["new"].tokens]
    turn = ask("turn", [*history, 1], 2, at=None)
    check_solo([turn], run_checked(engine, [turn]))
    assert timeline(engine, "turn").num_cached == 12  # 8 that came back, 4 that were computed after that


def test_one_who_shares_a_prefix_takes_a_copy_of_it_to_the_host_and_leaves_the_blocks():
    """Fault: a swap frees shared blocks under those who read them, or leaves shared rows out of the copy."""
    common = list(range(8))
    engine = make(7, cache="prefix")
    requests = [ask("A", [*common, 50], 12), ask("B", [*common, 60], 12, at=1.0)]
    check_solo(requests, run_checked(engine, requests))
    ((_, label, tokens, swapped),) = swaps(engine)
    assert (label, swapped) == ("B", True) and timeline(engine, "B").num_cached == 8
    out, back = engine.store.log
    assert len(out[2]) == len(back[2]) == tokens > 8
    assert out[2][:8] == list(range(8)), "the shared blocks are the first two"


def test_salts_survive_a_swap():
    """Fault: what comes back from the host is published without its salt."""
    engine = make(4, cache="prefix")
    a, b = ([1, 2, 3, 4], [5, 6, 7, 8])
    requests = [
        Request(prompt, SamplingParams(max_tokens=9), name, 0.0, cache_salt=name)
        for name, prompt in (("a", a), ("b", b))
    ]
    check_solo(requests, run_checked(engine, requests))
    assert timeline(engine, "b").num_swapped == 8
    turn = [*b, *engine.results["b"].tokens]
    for salt, cached in (("b", 12), (None, 0), ("a", 0)):
        request = Request(turn, SamplingParams(max_tokens=1), f"turn {salt}", cache_salt=salt)
        check_solo([request], run_checked(engine, [request]))
        assert timeline(engine, f"turn {salt}").num_cached == cached


# ---------------------------------------------------------------- displaced by one that is more urgent


def urgent(at, priority=0, name="C"):
    return Request([7, 8, 9], SamplingParams(max_tokens=2), name, at, priority)


@both
@pytest.mark.parametrize("cache", ["paged", "prefix", "contiguous"])
def test_who_is_displaced_for_a_more_urgent_one_is_swapped_too_on_slots_as_on_blocks(cache, kind):
    """Fault: only blocks can be swapped; a slot is given up and its rows with it."""
    engine = make(8, kind, cache, preemption=Swap(displaces=by_priority), max_num_seqs=1, order=Priority())
    requests = [Request([1, 2, 3], SamplingParams(max_tokens=10), "A", 0.0, 1), urgent(3.0)]
    check_solo(requests, run_checked(engine, requests, fcfs=False))
    assert swaps(engine) == [(4, "A", 5, True)]
    assert (token_steps(engine, "A"), token_steps(engine, "C")) == ([1, 2, 3, *range(6, 13)], [4, 5])
    assert sum(step.recomputed for step in engine.trace.steps) == 0
    assert [step.kv.host for step in engine.trace.steps] == [0] * 3 + [5] * 2 + [0] * 7
    (_, _, before), (_, _, after) = engine.store.log
    assert len(before) == len(after) == 5


def test_on_slots_two_who_change_places_do_not_mix_up_their_rows():
    """Fault: the newcomer writes its slot before the victim's rows have been copied away."""
    engine = make(1, cache="contiguous", preemption=Swap(displaces=by_priority), order=Priority())
    requests = [Request([1, 2, 3], SamplingParams(max_tokens=10), "A", 0.0, 1), urgent(3.0), urgent(7.0, name="D")]
    check_solo(requests, run_checked(engine, requests, fcfs=False))
    assert [entry[:2] for entry in engine.store.log] == [("out", "A"), ("in", "A"), ("out", "A"), ("in", "A")]
    assert swaps(engine) == [(4, "A", 5, True), (8, "A", 7, True)]


def test_with_the_maximum_reserved_only_urgency_displaces():
    """Fault: a policy that promised never to preempt for memory swaps for memory."""
    engine = make(5, admission=ReserveMaximum(), preemption=Swap(displaces=by_priority), order=Priority())
    requests = [Request([1, 2, 3, 4], SamplingParams(max_tokens=9), name, 0.0, 1) for name in "AB"]
    requests.append(Request([5, 6, 7, 8, 9], SamplingParams(max_tokens=2), "C", 2.0, 0))
    check_solo(requests, run_checked(engine, requests, fcfs=False))
    assert [(who, swapped) for _, who, _, swapped in swaps(engine)] == []
    assert names(engine.trace.steps[2].admitted) == ("C",)
    assert token_steps(engine, "B")[0] == 10


def test_an_older_victim_rule_swaps_the_one_with_the_least_to_copy():
    """Fault: the rule is asked for recomputation only, and swapping always takes the newest."""
    engine = make(6, preemption=Swap(victim=least_progress_lost))
    requests = [ask("old", 4, 12), ask("short", 1, 10), ask("long", 7, 6)]
    check_solo(requests, run_checked(engine, requests, fcfs=False))
    assert swaps(engine)[0][1] == "short" and engine.trace.steps[swaps(engine)[0][0] - 1].swapped_out > 0
