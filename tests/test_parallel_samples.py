"""Several answers to one prompt (``n > 1``): forked when it is computed, sharing its blocks until somebody writes."""

import math
from dataclasses import replace

import pytest
from helpers import (
    CONFIGURATIONS,
    FixedLogitsModel,
    ScriptedModel,
    ask,
    check_drained,
    check_invariants,
    check_solo,
    chunk_sizes,
    drive,
    make_engine,
    names,
    num_rejected,
    run_checked,
    solo,
    timeline,
    token_steps,
)

from minibatch import ChunkedPrefill, ContinuousBatching, Engine, PagedKVCache, StaticBatching, ToyModel, metrics
from minibatch.policies import Forecast, Never, Optimistic, Recompute, ReserveMaximum, Swap, Watermark
from minibatch.prefix_cache import PrefixCachedKVCache
from minibatch.request import MOST_ANSWERS, DuplicateRequest, InvalidParams, NeverFits, QueueFull

BLOCK = 4
CACHES = {"paged": PagedKVCache, "prefix": PrefixCachedKVCache}


def make(
    num_blocks=32, kind="paged", cache="paged", *, max_num_seqs=8, tokens=64, model=None, policies=None, **options
):
    scheduler = {
        "paged": lambda: ContinuousBatching(max_num_seqs, tokens, **(policies or {})),
        "chunked": lambda: ChunkedPrefill(min(tokens, 5), max_num_seqs, **(policies or {})),
    }[kind]()
    return Engine(model or ToyModel(), scheduler, CACHES[cache](num_blocks, BLOCK), **options)


def several(request_id, prompt, max_tokens, n=3, at=0.0, **params):
    """Answers that differ: drawn with seeds 5, 6, 7, ..."""
    return ask(request_id, prompt, max_tokens, at, **{"n": n, "temperature": 1.0, "seed": 5} | params)


def alone(request, index):
    """The request whose only answer is answer ``index`` of this one."""
    seed = request.params.seed
    return replace(request, params=replace(request.params, n=1, seed=None if seed is None else seed + index))


def check_answers(request, result, cut=()):
    """Every answer has the tokens of its own solo run; those in ``cut`` the beginning."""
    assert result.request_id == request.request_id
    assert len(result.samples) == request.params.n
    for index, sample in enumerate(result.samples):
        assert sample.request_id == f"{request.request_id}#{index}"
        tokens = solo(alone(request, index))
        if index in cut:
            assert sample.finish_reason == "abort"
            tokens = tokens[: len(sample.tokens)]
        else:
            assert sample.finish_reason == "length"
        assert sample.tokens == tokens, f"{sample.request_id} does not have the tokens of its solo run"
    first = result.samples[0]
    assert (result.tokens, result.finish_reason, result.timeline) == (first.tokens, first.finish_reason, first.timeline)


def run(engine, *requests):
    """Runs to the end with the invariants; the answers are those of solo runs. Returns the step reports."""
    for request, result in zip(requests, run_checked(engine, requests), strict=True):
        if request.params.n > 1:
            check_answers(request, result)
        else:
            check_solo([request], [result])
    return engine.trace.steps


def units(step):
    return {holding.request_id: holding.units for holding in step.kv.holdings}


both = pytest.mark.parametrize("kind", ["paged", "chunked"])
either = pytest.mark.parametrize("cache", CACHES)


# ---------------------------------------------------------------- sharing and copying


@either
def test_answers_share_the_blocks_of_the_prompt_and_copy_the_last_one_when_they_write(cache):
    """Fault: every answer has a prompt of its own; or the one who writes first changes what the others read."""
    engine = make(cache=cache)
    first, second, third, fourth = run(engine, several("a", 6, 4))
    assert [(m.request_id, m.start, m.stop) for m in first.members] == [("a#0", 0, 6)]
    assert [(f.request_id, f.parent) for f in first.forked] == [("a#1", "a#0"), ("a#2", "a#0")]
    assert units(first) == dict.fromkeys(["a#0", "a#1", "a#2"], (0, 1))
    assert (first.kv.filled, first.kv.fragmentation, first.copied_rows) == (6, 2, 0)
    # Two rows of the last block for the first two that write; the last holder writes in place.
    assert second.copied_rows == 4
    assert units(second) == {"a#0": (0, 2), "a#1": (0, 3), "a#2": (0, 1)}
    assert (second.kv.filled, second.kv.fragmentation) == (4 + 3 * 3, 3)
    assert third.copied_rows == fourth.copied_rows == 0
    assert units(fourth) == {"a#0": (0, 2, 4), "a#1": (0, 3, 5), "a#2": (0, 1, 6)}


def test_reference_counts_follow_the_answers():
    """Fault: a fork does not count, a copy does not give its reference back, or an end takes a neighbour's block."""
    engine = make()
    engine.submit(several("a", 6, 4, at=None))
    engine.step()
    assert engine.kv.pool.references[:3] == [3, 3, 0]
    engine.step()
    assert engine.kv.pool.references[:5] == [3, 1, 1, 1, 0]
    engine.abort("a#1")
    check_invariants(engine)
    assert engine.kv.pool.references[:5] == [2, 1, 1, 0, 0]
    drive(engine)


@both
@either
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_one_copy_an_answer_but_the_last_and_none_at_a_block_boundary(num_prompt, n, cache, kind):
    """Fault: a full block is copied, the last holder copies too, or more rows than there are tokens."""
    engine = make(kind=kind, cache=cache)
    steps = run(engine, several("a", num_prompt, 6, n=n))
    assert sum(step.copied_rows for step in steps) == (n - 1) * (num_prompt % BLOCK)
    assert sum(step.prefill for step in steps) == num_prompt
    assert sum(step.decode for step in steps) == n * 5
    assert {len(step.forked) for step in steps} == {0, n - 1}
    assert all(token_steps(engine, f"a#{i}") == token_steps(engine, "a#0")[1:] for i in range(1, n))


@both
@pytest.mark.parametrize("num_prompt", [3, 4, 5])
def test_one_token_each_needs_no_block_beyond_the_prompt(num_prompt, kind):
    """Fault: G = 1: the draft wants a copy for answers that end before they write, or an answer is forked and lost."""
    engine = make(num_blocks=-(-num_prompt // BLOCK), kind=kind)
    steps = run(engine, several("a", num_prompt, 1))
    assert len(steps) == 1
    assert steps[0].finished == (("a#0", "length"), ("a#1", "length"), ("a#2", "length"))
    assert steps[0].copied_rows == 0


@both
def test_greedy_answers_are_all_the_same_and_each_has_its_own_rows(kind):
    """Fault: equal answers write the same rows, and one that ends frees what the others read."""
    run(make(kind=kind), several("a", 6, 7, temperature=0.0, seed=None))


@both
@either
@pytest.mark.parametrize("num_blocks", [5, 6, 7, 8, 10, 14])
@pytest.mark.parametrize("way", [Recompute(), Swap(), Swap(host_tokens=9)])
def test_groups_survive_every_shortage_of_blocks(num_blocks, way, cache, kind):
    """Fault: short of memory, an answer gets a block that another reads, or a victim comes back to wrong rows."""
    engine = make(num_blocks, kind, cache, tokens=40, policies={"preemption": way})
    requests = [
        several("a", 6, 9),
        ask("b", 5, 8, at=1.0),
        several("c", 8, 6, n=2, at=2.0),
        several("d", 3, 9, n=4, at=2.0),
    ]
    run(engine, *requests)
    assert not engine.trace.timelines[0].num_preemptions  # a#0, the first of all


# ---------------------------------------------------------------- the draft


def forked(num_blocks, num_prompt=6, max_tokens=8, n=3, **options):
    """An engine in which a prompt has just been computed, and its answers by id."""
    engine = make(num_blocks, **options)
    engine.submit(several("a", num_prompt, max_tokens, n=n, at=None))
    engine.step()
    return engine, {state.request_id: state for state in engine.active}


def test_a_draft_counts_the_copy_of_a_shared_block_and_promises_none_to_the_last_holder():
    """Fault: the need is the growth of the table alone, so that the copy finds no block; or everybody copies."""
    engine, states = forked(4)
    draft = engine.kv.draft()
    a, b, c = (states[f"a#{i}"] for i in range(3))
    assert (draft.free, [draft.need(state, 7) for state in (a, b, c)]) == (2, [1, 1, 1])
    assert draft.reserve(a, 7) and draft.reserve(a, 7)  # once
    assert (draft.free, draft.need(b, 7), draft.need(c, 7)) == (1, 1, 1)
    assert draft.reserve(b, 7)
    assert (draft.free, draft.need(c, 7)) == (0, 0)
    assert draft.reserve(c, 7)
    assert not draft.reserve(c, 9)
    drive(engine)


def test_a_draft_gives_back_the_promised_copy_of_a_victim_and_the_share_that_it_had():
    """Fault: after a victim its siblings still count it as a holder, or its promised block is lost."""
    engine, states = forked(4)
    a, b, c = (states[f"a#{i}"] for i in range(3))
    draft = engine.kv.draft()
    draft.reserve(c, 7)
    draft.release(c)
    assert (draft.free, draft.held(c)) == (2, 0)  # the shared ones are still the others'
    assert draft.reserve(a, 7) and draft.free == 1
    assert draft.need(b, 7) == 0  # the last holder now
    draft.release(a)
    draft.release(b)
    assert draft.free == 4
    assert engine.kv.num_free == 2 and len(engine.kv.units(a)) == 2
    drive(engine)


def test_a_copy_of_a_draft_knows_its_promises_and_what_is_tried_there_does_not_count():
    """Fault: in the copy a promised block comes back twice, or as one that others hold; or both share their books."""
    engine, states = forked(4)
    a, b, c = (states[f"a#{i}"] for i in range(3))
    draft = engine.kv.draft()
    draft.reserve(b, 7)
    draft.reserve(c, 7)
    attempt = draft.copy()
    for request, free in ((b, 1), (c, 2), (a, 4)):
        attempt.release(request)
        assert (attempt.free, attempt.held(request)) == (free, 0)
    assert (draft.free, draft.held(a), draft.need(a, 7)) == (0, 2, 0)  # the last holder
    draft.release(a)
    assert draft.free == 1  # of its two blocks, the prompt's first is still the others'


@both
@pytest.mark.parametrize("num_prompt, max_tokens", [(6, 2), (6, 3), (6, 4), (8, 2), (3, 2), (3, 6)])
@pytest.mark.parametrize("n", [2, 3])
def test_a_pool_of_exactly_the_blocks_of_all_answers_preempts_nobody_and_one_less_does(num_prompt, max_tokens, n, kind):
    """Fault: a spare block is wanted for the copies, or the copy is left out and the pool is empty in the middle."""
    full, most = num_prompt // BLOCK, -(-(num_prompt + max_tokens - 1) // BLOCK)
    enough = full + n * (most - full)
    engine = make(enough, kind)
    steps = run(engine, several("a", num_prompt, max_tokens, n=n))
    assert min(step.kv.free for step in steps) == 0
    assert not any(step.preempted for step in steps)
    engine = make(enough - 1, kind)
    steps = run(engine, several("a", num_prompt, max_tokens, n=n))
    assert {p.request_id for step in steps for p in step.preempted} == {f"a#{n - 1}"}


def test_an_answer_that_is_displaced_before_its_first_write_leaves_the_block_to_the_others():
    """Fault: the victim's share of the prompt is copied for it, or freed under those who read it."""
    engine = make(3)
    steps = run(engine, several("a", 6, 3))
    assert names(steps[1].preempted) == ("a#2",)
    assert (steps[1].copied_rows, units(steps[1])) == (2, {"a#0": (0, 2), "a#1": (0, 1)})
    (back,) = (m for s in steps for m in s.members if m.request_id == "a#2" and m.recomputed)
    assert (back.start, back.stop, back.recomputed, back.decode) == (0, 7, 6, 1)


# ---------------------------------------------------------------- preempted answers


@both
@either
@pytest.mark.parametrize("way", [Recompute(), Swap()])
def test_a_preempted_answer_resumes_as_an_ordinary_request(way, cache, kind):
    """Fault: it forks again, it begins anew, or it counts as the parent of those who go on."""
    engine = make(6, kind, cache, policies={"preemption": way})
    steps = run(engine, several("a", 6, 9))
    assert sum(len(step.forked) for step in steps) == 2
    assert timeline(engine, "a#0").num_preemptions == 0
    assert timeline(engine, "a#2").num_preemptions >= 1
    assert sum(step.prefill for step in steps) == 6 and sum(step.decode for step in steps) == 3 * 8


def test_a_preempted_answer_shares_the_prompt_again_where_it_can_be_found():
    """Fault: it computes its prompt again though its siblings hold it, or it adopts their unfinished block."""
    engine = make(6, cache="prefix")
    steps = run(engine, several("a", 6, 9))
    back = [a for s in steps for a in s.admitted if a.resumed]
    assert back and all(a.cached >= 4 for a in back)
    assert timeline(engine, "a#2").num_cached == 6  # as before: the first answer computed its prompt


def test_answers_stand_right_behind_the_first_one_and_before_later_arrivals():
    """Fault: an answer is younger than requests that arrived after its prompt, and is displaced for them."""
    engine = make(7)
    steps = run(engine, several("a", 6, 6, n=2), ask("late", 6, 6, at=0.0))
    assert [h.request_id for h in steps[0].kv.holdings] == ["a#0", "a#1", "late"]
    assert {p.request_id for s in steps for p in s.preempted} == {"late"}


@both
def test_a_group_that_loses_its_place_in_the_middle_of_its_prompt_forks_when_it_is_done(kind):
    """Fault: a prompt that is preempted half-way forgets its answers, or they fork at the first chunk."""
    engine = make(
        5, "chunked", policies={"admission": Optimistic(), "preemption": Swap() if kind == "paged" else Recompute()}
    )
    steps = run(engine, ask("old", 4, 9), several("a", 14, 2, n=2))
    assert timeline(engine, "a#0").num_preemptions >= 1
    (fork,) = (step for step in steps if step.forked)
    assert [(m.stop, m.emitted is None) for m in fork.members if m.request_id == "a#0"] == [(14, False)]


# ---------------------------------------------------------------- aborts


@both
def test_an_answer_that_is_aborted_before_the_fork_is_not_forked(kind):
    """Fault: it begins though it has ended, or the others are lost with it."""
    for step, budget in ((1, 64), (2, 5)):
        engine = make(kind="chunked", tokens=budget) if step == 2 else make(kind=kind)
        request = several("a", 9, 3)
        engine.submit(request)
        drive(engine, {step: lambda engine=engine: engine.abort("a#1")})
        check_answers(request, engine.results["a"], cut=(1,))
        assert engine.results["a#1"].tokens == ()
        assert [f.request_id for s in engine.trace.steps for f in s.forked] == ["a#2"]
        assert timeline(engine, "a#1").scheduled is None


def test_all_but_the_first_answer_can_be_aborted_before_the_fork():
    """Fault: a group of one left has nobody to fork, and keeps its places."""
    engine = make(max_num_seqs=3)
    request = several("a", 6, 3)
    engine.submit(request)
    engine.submit(ask("b", 3, 2))
    drive(engine, {1: lambda: [engine.abort("a#1"), engine.abort("a#2")]})
    check_answers(request, engine.results["a"], cut=(1, 2))
    assert names(engine.trace.steps[0].admitted) == ("a#0", "b")
    assert not any(step.forked for step in engine.trace.steps)


@pytest.mark.parametrize("when", ["waiting", "mid-prompt"])
def test_without_the_first_answer_nobody_computes_the_prompt_of_the_others(when):
    """The rule: before the fork, aborting id#0 ends the group. Fault: the others wait for ever for a prompt."""
    engine = make(kind="chunked")
    engine.submit(several("a", 12, 3))
    drive(engine, {1 if when == "waiting" else 3: lambda: engine.abort("a#0")})
    assert [sample.finish_reason for sample in engine.results["a"].samples] == ["abort"] * 3
    assert len(engine.trace.steps) == (0 if when == "waiting" else 2)


@either
@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("step", [2, 3, 5])
def test_an_answer_that_is_aborted_after_the_fork_ends_alone(step, who, cache):
    """Fault: the first answer is taken for the group; or a copy is made for one who left (or not made for the last)."""
    engine = make(cache=cache)
    request = several("a", 6, 8)
    engine.submit(request)
    drive(engine, {step: lambda: engine.abort(f"a#{who}")})
    check_answers(request, engine.results["a"], cut=(who,))
    assert len(engine.results[f"a#{who}"].tokens) == step - 1
    assert sum(s.copied_rows for s in engine.trace.steps) == (2 if step == 2 else 4)


WHEN = {"to come": (0, 50.0), "waiting": (1, 0.0), "mid-prompt": (3, 0.0), "running": (5, 0.0)}


@either
@pytest.mark.parametrize("when", WHEN)
def test_a_group_is_aborted_as_a_whole_wherever_it_is(when, cache):
    """Fault: only the first answer goes, or an answer that has not begun stays behind, and memory with it."""
    step, at = WHEN[when]
    engine = make(kind="chunked", cache=cache)
    request, other = several("a", 12, 9, at=at), ask("b", 3, 12)
    if when == "waiting":
        engine.submit(request)
        assert engine.abort("a")
    else:
        engine.submit(other)
        engine.submit(request)
        if step == 0:
            assert engine.abort("a")
        drive(engine, {step: lambda: engine.abort("a")})
        check_solo([other], [engine.results["b"]])
    check_drained(engine)
    result = engine.results["a"]
    assert result.finish_reason == "abort" and [s.finish_reason for s in result.samples] == ["abort"] * 3
    assert {len(sample.tokens) for sample in result.samples} == ({1} if when == "running" else {0})
    assert not engine.abort("a") and not engine.abort("a#1")
    assert [t.finish_reason for t in engine.trace.timelines if t.group == "a"] == ["abort"] * 3


def test_a_group_of_which_some_have_ended_is_aborted_without_touching_these():
    """Fault: an answer that has ended gets a second result, or the group never gets its own."""
    engine = make(model=ends_early({1: 2}))
    engine.submit(several("a", PROMPT, 9))
    drive(engine, {4: lambda: engine.abort("a")})
    assert [s.finish_reason for s in engine.results["a"].samples] == ["abort", "stop", "abort"]
    assert [len(s.tokens) for s in engine.results["a"].samples] == [3, 2, 3]


@pytest.mark.parametrize("way", [Recompute(), Swap()])
def test_an_answer_is_aborted_while_it_is_preempted(way):
    """Fault: rows on the host, or a place in the queue, are left of an answer that was waiting to come back."""
    engine = make(6, policies={"preemption": way})
    request = several("a", 6, 9)
    engine.submit(request)
    drive(engine, {6: lambda: engine.abort("a#2")})  # preempted in step 4
    assert engine.trace.steps[4].num_waiting == 1
    check_answers(request, engine.results["a"], cut=(2,))


# ---------------------------------------------------------------- ends


PROMPT = [3, 1, 4, 1, 5, 9]


def ends_early(at, prompt=PROMPT):
    """A model that ends answer i with its token number ``at[i]``, whatever is drawn."""

    class EndsEarly(ToyModel):
        def forward(self, plan, kv, store):
            logits, row = super().forward(plan, kv, store), 0
            for chunk in plan.chunks:
                row += chunk.num_logits
                index = int(chunk.request.request_id[-1])
                if not chunk.forks and chunk.samples and at.get(index) == len(chunk.request.generated) + 1:
                    logits[row - 1] = -1e9
                    logits[row - 1, 255] = 0.0
            return logits

    return EndsEarly(eos_token_id=255)


def test_an_answer_that_ends_early_gives_its_blocks_to_the_others():
    """Fault: the end of one is the end of all, or its place and blocks stay taken until the last one ends."""
    engine = make(model=ends_early({0: 3, 2: 2}))
    (result,) = run_checked(engine, [several("a", PROMPT, 6)])
    assert [s.finish_reason for s in result.samples] == ["stop", "length", "stop"]
    assert [len(s.tokens) for s in result.samples] == [3, 6, 2]
    assert [len(step.kv.holdings) for step in engine.trace.steps] == [3, 3, 2, 1, 1, 1]
    assert result.samples[1].tokens == solo(alone(several("a", PROMPT, 6), 1))


def test_answers_that_end_with_their_first_token_end_in_the_iteration_of_the_fork():
    """Fault: an answer is forked, ended and computed once more."""
    engine = make(model=ScriptedModel({tuple(PROMPT): [255]}, eos_token_id=255))
    (result,) = run_checked(engine, [several("a", PROMPT, 6)])
    assert [s.tokens for s in result.samples] == [(255,)] * 3
    assert len(engine.trace.steps) == 1
    assert timeline(engine, "a#2").runs == [[1.0, 1.0]] and timeline(engine, "a#0").runs == [[0.0, 1.0]]


def test_a_distribution_that_is_broken_ends_all_answers_and_nobody_else():
    """Fault: the error of one row is raised for the batch, or an answer without a first token goes on."""
    bad, good = several("bad", [1, 2, 3], 4), ask("good", [4, 5], 4)
    model = FixedLogitsModel([0.0, 1.0, 0.0, 0.0, 0.0, 0.0], {(1, 2, 3): [math.nan] * 6})
    engine = make(model=model)
    results = engine.run([bad, good])
    assert engine.kv.num_free == 32 and not engine.active and not engine.queue
    assert [s.finish_reason for s in results[0].samples] == ["abort"] * 3
    assert all("SamplingError" in s.error for s in results[0].samples)
    assert results[1].tokens == (1, 1, 1, 1)
    assert [f.emitted for f in engine.trace.steps[0].forked] == [None, None]


# ---------------------------------------------------------------- other policies


def test_reserving_the_maximum_reserves_for_all_answers_and_hands_the_blocks_over_at_the_fork():
    """Fault: the maximum of one answer is reserved, and the others grow into nothing; or the blocks of all stay with
    the first."""
    engine = make(16, policies={"admission": ReserveMaximum()}, tokens=64)
    steps = run(engine, several("a", 6, 4))
    assert [step.kv.free // BLOCK for step in steps] == [16 - 7] * 4  # 1 full, and 2 more for each
    assert steps[0].copied_rows == 4 and not any(step.copied_rows for step in steps[1:])
    assert units(steps[0]) == units(steps[3]) == {"a#0": (0, 1, 2), "a#1": (0, 5, 6), "a#2": (0, 3, 4)}
    assert [(s.kv.filled, s.kv.reserved, s.kv.fragmentation) for s in steps] == [
        (10, 9, 9),
        (13, 6, 9),
        (16, 3, 9),
        (19, 0, 9),
    ]


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
@pytest.mark.parametrize("preemption", [Never(), Recompute()])
@either
def test_reserving_the_maximum_never_runs_out(num_prompt, max_tokens, preemption, cache):
    """Fault: at some boundary an answer has a block less than was promised, and there is nobody to preempt."""
    full, most = num_prompt // BLOCK, -(-(num_prompt + max_tokens - 1) // BLOCK)
    enough = most if max_tokens == 1 else full + 3 * (most - full)  # with one token each, nobody writes
    policies = {"admission": ReserveMaximum(), "preemption": preemption}
    for kind in ("paged", "chunked"):
        engine = make(enough, kind, cache, policies=policies)
        run(engine, several("a", num_prompt, max_tokens), several("b", num_prompt, max_tokens, n=2, seed=9))
        assert not any(step.preempted for step in engine.trace.steps)
    if enough > most:
        with pytest.raises(
            NeverFits, match=f"3 answers of up to {num_prompt + max_tokens - 1} tokens need {enough} blocks"
        ):
            make(enough - 1, "chunked", cache, policies=policies).submit(several("a", num_prompt, max_tokens))


def test_reserving_the_maximum_shows_the_blocks_of_the_others_as_reserved_while_the_prompt_is_computed():
    """Fault: what is kept for the answers is reported as free, as waste, or as memory of nobody."""
    engine = make(16, "chunked", policies={"admission": ReserveMaximum()})
    steps = run(engine, several("a", 6, 4))
    assert (steps[0].kv.filled, steps[0].kv.reserved, steps[0].kv.fragmentation) == (5, 4 + 4 * BLOCK, 3)
    assert units(steps[0]) == {"a#0": (0, 1, 2, 3, 4, 5, 6)}


@pytest.mark.parametrize("n", [2, 3])
def test_what_was_reserved_for_an_answer_that_is_aborted_before_the_fork_is_given_back(n):
    """Fault: the blocks of the aborted answer stay with the first one, which can never use them."""
    engine = make(16, "chunked", policies={"admission": ReserveMaximum()})
    engine.submit(several("a", 6, 4, n=n, at=None))
    engine.step()
    assert engine.kv.num_free == 16 - 1 - 2 * n
    engine.abort("a#1")
    assert engine.kv.num_free == 16 - 1 - 2 * (n - 1)
    drive(engine)


@both
@pytest.mark.parametrize(
    "admission", [Forecast(), Watermark(share=0.3), Watermark(whole_prompt=False), Optimistic()], ids=repr
)
def test_groups_run_under_every_admission_policy(admission, kind):
    """Fault: a policy counts a group as one sequence, and refuses, stalls, or loses answers."""
    for num_blocks in (9, 12, 32):
        engine = make(num_blocks, kind, policies={"admission": admission})
        run(
            engine,
            several("a", 6, 7),
            several("b", 5, 7, n=2, at=1.0),
            ask("c", 9, 5, at=2.0),
            several("d", 4, 4, n=4, at=2.0),
        )


def test_a_group_waits_until_it_has_a_place_for_every_answer():
    """Fault: it joins with one free place, and the batch is larger than it may be after the fork."""
    engine = make(max_num_seqs=4)
    steps = run(engine, ask("x", 3, 5), ask("y", 3, 3), several("a", 6, 4), ask("z", 3, 2))
    assert steps[0].waiting == (("a#0", "places: needs 3, 2 of 4 taken"),)
    assert steps[0].rest == "behind a#0: 1 more"
    assert token_steps(engine, "a#0")[0] == 4 and token_steps(engine, "z")[0] == 6
    assert max(len(step.kv.holdings) for step in steps) == 4


def test_a_prompt_that_is_found_in_the_prefix_cache_is_shared_by_all_answers():
    """Fault: the blocks that were found are taken for the first answer's own, and written by all."""
    engine = make(cache="prefix")
    prompt = list(range(9))
    steps = run(engine, ask("w", prompt, 1), several("a", prompt, 5, at=3.0))
    assert [(a.request_id, a.cached) for a in steps[1].admitted] == [("a#0", 8)]
    assert [timeline(engine, f"a#{i}").num_cached for i in range(3)] == [8, 9, 9]
    assert len({u for held in units(steps[1]).values() for u in held}) == 3


# ---------------------------------------------------------------- results, timelines, numbers


def test_a_group_has_one_result_with_all_answers_and_each_answer_has_its_own():
    """Fault: the result of the first to end is that of the request, or answers are in the order of their ends."""
    engine = make(model=ends_early({0: 5, 1: 2}))
    request = several("a", PROMPT, 6)
    assert engine.submit(request) == "a"
    seen = []
    drive(engine, {k: lambda: seen.append(sorted(engine.results)) for k in range(2, 7)})
    assert seen == [[], ["a#1"], ["a#1"], ["a#1"], ["a#0", "a#1"]]
    result = engine.results["a"]
    assert [sample.request_id for sample in result.samples] == ["a#0", "a#1", "a#2"]
    assert [len(sample.tokens) for sample in result.samples] == [5, 2, 6]
    assert result.tokens == result.samples[0].tokens and result.finish_reason == "stop"
    assert all(engine.results[sample.request_id] is sample for sample in result.samples)
    assert all(sample.samples == () for sample in result.samples)


def test_run_returns_one_result_a_request_in_input_order():
    """Fault: a result an answer, so that requests and results do not correspond any more."""
    engine = make()
    requests = [several("a", 3, 3), ask("b", 3, 1), several("c", 3, 2, n=2, at=2.0)]
    results = run_checked(engine, requests)
    assert [result.request_id for result in results] == ["a", "b", "c"]
    assert [len(result.samples) for result in results] == [3, 0, 2]


def test_one_answer_is_an_ordinary_request():
    """Fault: n = 1 makes a group of one, with another id."""
    engine = make()
    (result,) = run_checked(engine, [ask("a", 3, 2, n=1)])
    assert (result.request_id, result.samples, result.timeline.group) == ("a", (), None)
    assert list(engine.results) == ["a"]


def test_every_answer_has_a_timeline_of_its_own_from_the_arrival_of_the_request_on():
    """Fault: answers share the token times, or begin when they fork, which hides the prefill from their latency."""
    engine = make(kind="chunked")
    run(engine, several("a", 9, 3, at=2.0))
    known = [timeline(engine, f"a#{i}") for i in range(3)]
    assert {t.group for t in known} == {"a"}
    assert [(t.arrival, t.scheduled, t.token_times, t.finish) for t in known] == [(2.0, 2.0, [4.0, 5.0, 6.0], 6.0)] * 3
    assert [t.runs for t in known] == [[[2.0, 6.0]], [[4.0, 6.0]], [[4.0, 6.0]]]
    assert [(t.num_prompt, t.num_cached, t.max_new_tokens) for t in known] == [(9, 0, 3), (9, 9, 3), (9, 9, 3)]
    assert [t.request_id for t in engine.trace.timelines] == ["a#0", "a#1", "a#2"]


def test_the_summary_counts_answers_and_a_prompt_computed_once():
    """Fault: answers are no requests to the metrics, or the prompt of a group counts as computed n times."""
    engine = make()
    run(engine, several("a", 9, 4), ask("b", 5, 2))
    numbers = metrics.summary(engine.trace)
    assert (numbers["completed"], numbers["generated_tokens"]) == (4, 3 * 4 + 2)
    assert (numbers["prompt_tokens"], numbers["cached_tokens"]) == (3 * 9 + 5, 2 * 9)
    assert numbers["prompt_tokens"] - numbers["cached_tokens"] == sum(step.prefill for step in engine.trace.steps)
    assert numbers["ttft_mean"] == 1.0 and len(metrics.latencies(engine.trace)["ttft"]) == 4
    assert metrics.steps_table(engine.trace)["forked"].tolist() == [2, 0, 0, 0]
    assert metrics.steps_table(engine.trace)["copied_rows"].tolist() == [0, 2, 0, 0]


def test_answers_that_were_refused_or_never_began_have_no_cached_tokens():
    """Fault: the prompt tokens of an answer count as saved, though nobody ever computed them."""
    engine = make(max_num_seqs=3, max_queue=1)
    engine.submit(several("runs", 3, 4))
    engine.submit(several("waits", 3, 4, at=1.0))
    engine.submit(several("refused", 3, 4, at=1.0))
    drive(engine, {3: lambda: engine.abort("waits")})
    numbers = metrics.summary(engine.trace)
    assert (numbers["completed"], numbers["aborted"], numbers["rejected"]) == (3, 3, 3)
    assert numbers["cached_tokens"] == 2 * 3


# ---------------------------------------------------------------- sampling


@both
@pytest.mark.parametrize("n", [2, 3, 5])
def test_answer_i_of_a_seeded_request_is_a_solo_run_with_seed_plus_i(n, kind):
    """Fault: all answers draw the same numbers, or numbers that depend on n, the chunks, or who runs beside them."""
    run(
        make(kind=kind),
        ask("other", 4, 9, temperature=1.0, seed=6),
        several("a", 7, 8, n=n),
        several("b", 7, 8, n=n, seed=6),
    )


def test_unseeded_answers_differ_from_each_other():
    """Fault: one seed is drawn for the request, and all answers are the same."""
    engine = make(seed=0)
    results = run_checked(engine, [several(name, [1, 2, 3], 8, n=4, seed=None) for name in "ab"])
    tokens = [sample.tokens for result in results for sample in result.samples]
    assert len(set(tokens)) == 8
    again = run_checked(make(seed=0), [several(name, [1, 2, 3], 8, n=4, seed=None) for name in "ab"])
    assert [sample.tokens for result in again for sample in result.samples] == tokens


@both
def test_penalties_and_logprobs_of_an_answer_see_its_own_tokens_only(kind):
    """Fault: answers share the list of what has been generated."""
    request = several("a", 7, 8, presence_penalty=2.0, repetition_penalty=1.7, min_tokens=3, logprobs=2)
    (result,) = run_checked(make(kind=kind), [request])
    for index, sample in enumerate(result.samples):
        expected = make().run([replace(alone(request, index), request_id=None)])[0]
        assert (sample.tokens, sample.logprobs) == (expected.tokens, expected.logprobs)
        assert (sample.text, len(sample.logprobs)) == (expected.text, 8)


@both
@either
def test_the_prompt_is_scored_once_for_all_answers(cache, kind):
    """Fault: only the first answer has the log-probabilities of the prompt, or they grow while it is shared."""
    request = several("a", 9, 3, prompt_logprobs=2)
    engine = make(8, kind, cache)
    results = run_checked(engine, [request, ask("b", 3, 12)])
    expected = make().run([replace(alone(request, 0), request_id=None)])[0].prompt_logprobs
    assert len(expected) == 9
    assert [sample.prompt_logprobs for sample in results[0].samples] == [expected] * 3
    assert sum(chunk_sizes(engine, "a#0")) == 9 + 2


@pytest.mark.parametrize("way", [Recompute(), Swap()])
def test_an_answer_that_is_preempted_does_not_score_the_prompt_again(way):
    """Fault: the recomputation adds log-probabilities to a list that is complete, or replaces those of another."""
    request = several("a", 6, 9, prompt_logprobs=1)
    engine = make(6, policies={"preemption": way})
    (result,) = run_checked(engine, [request])
    assert any(step.preempted for step in engine.trace.steps)
    check_answers(request, result)
    assert {len(sample.prompt_logprobs) for sample in result.samples} == {6}


def test_a_stop_string_ends_the_answer_that_says_it():
    """Fault: answers share the text, and what one says ends the others."""
    request = several("a", [1, 2, 3], 12)
    (plain,) = make().run([request])
    mark = next(
        c for c in plain.samples[1].text[3:] if c.isascii() and c.isprintable() and c not in plain.samples[0].text
    )
    stopped = replace(request, params=replace(request.params, stop=(mark,)))
    (result,) = run_checked(make(), [stopped])
    assert result.samples[1].finish_reason == "stop" and result.samples[1].stop_reason == mark
    assert mark not in result.samples[1].text and len(result.samples[1].tokens) < 12
    assert result.samples[0].finish_reason == "length" and result.samples[0].tokens == plain.samples[0].tokens


# ---------------------------------------------------------------- ids


@pytest.mark.parametrize("taken", ["a", "a#0", "a#1", "a#2"])
def test_the_id_of_a_group_and_of_each_of_its_answers_is_in_use(taken):
    """BI-01. Fault: an answer's id can be taken, and the two of that name mix up."""
    engine = make()
    request = several("a", 6, 4, at=None)
    engine.submit(request)
    for step in range(4):
        with pytest.raises(DuplicateRequest, match=f"'{taken}' is in use"):
            engine.submit(ask(taken, 3, 2, at=None))
        check_invariants(engine)
        if step < 3:
            engine.step()
    drive(engine)
    check_answers(request, engine.results["a"])


def test_a_group_is_refused_if_any_of_its_answers_would_take_an_id_that_is_in_use():
    """BI-01. Fault: only the id of the request is compared."""
    engine = make()
    engine.submit(ask("a#1", 3, 2, at=None))
    with pytest.raises(DuplicateRequest, match="'a#1' is in use"):
        engine.submit(several("a", 3, 2, at=None))
    engine.submit(ask("a", 3, 2, at=None))
    with pytest.raises(DuplicateRequest, match="'a' is in use"):
        engine.submit(several("a", 3, 2, n=2, at=None))
    engine.submit(several("b", 3, 2, n=2, at=None))
    engine.submit(ask("b#2", 3, 2, at=None))  # b has two answers
    drive(engine)
    assert sorted(engine.results) == ["a", "a#1", "b", "b#0", "b#1", "b#2"]


def test_groups_without_an_id_get_one():
    """Fault: ids that the engine makes collide with those of the answers."""
    engine = make()
    ids = [engine.submit(replace(several("", 3, 2, n=2, at=None), request_id=None)) for _ in range(2)]
    assert ids == ["r0", "r1"]
    drive(engine)
    assert sorted(engine.results) == ["r0", "r0#0", "r0#1", "r1", "r1#0", "r1#1"]


def test_an_id_that_is_used_again_names_the_new_group():
    """BI-01. Fault: the second group of an id cannot be aborted, waited for, or found under it."""
    engine = make()
    run_checked(engine, [several("a", 6, 2)])
    request = several("a", 6, 4, at=None)
    assert engine.submit(request) == "a"
    with pytest.raises(DuplicateRequest):
        engine.submit(ask("a", 3, 2, at=None))
    drive(engine)
    check_answers(request, engine.results["a"])
    assert [t.request_id for t in engine.trace.timelines[3:6]] == ["a~2#0", "a~2#1", "a~2#2"]
    engine.submit(several("a", 6, 4, at=None))
    assert engine.abort("a")
    drive(engine)


def test_an_id_that_was_refused_once_names_the_group_that_is_accepted():
    """BI-01. Fault: the same after a refusal, which has used the label up."""
    engine = make()
    with pytest.raises(NeverFits):
        engine.submit(several("a", 6, 4, n=99, at=None))
    assert engine.submit(several("a", 6, 4, at=None)) == "a"
    assert engine.abort("a")
    drive(engine)


# ---------------------------------------------------------------- the door


def refused():
    """What cannot run with several answers, and why."""
    return {
        "more answers than places": (
            make(max_num_seqs=2),
            NeverFits,
            "3 answers need as many places, max_num_seqs is 2",
        ),
        "continuous": (make_engine("continuous"), InvalidParams, "n = 3: answers share .* cannot share"),
        "static": (make_engine("static"), InvalidParams, "n = 3: answers share .* cannot share"),
        "static on blocks": (
            Engine(ToyModel(), StaticBatching(4), PagedKVCache(16, BLOCK)),
            InvalidParams,
            "n = 3: the rows of a static batch are fixed",
        ),
        "too long": (make(2), NeverFits, "needs 3 blocks of 4, the pool has 2"),
        "too long together": (
            make(6, policies={"admission": ReserveMaximum()}),
            NeverFits,
            "3 answers of up to 9 tokens need 7 blocks of 4, the pool has 6",
        ),
    }


@pytest.mark.parametrize("what", refused())
def test_several_answers_where_they_cannot_run_are_refused_at_the_door(what):
    """Fault: the engine finds out in the middle; or something of the refused request stays behind."""
    engine, error, message = refused()[what]
    request = several("a", 6, 4, at=None)
    with pytest.raises(error, match=message):
        engine.submit(request)
    assert num_rejected(engine) == len(engine.trace.timelines) == 1
    assert (len(engine.queue), engine.active, engine.results) == (0, [], {})
    assert not engine.abort("a") and not engine.abort("a#0")
    check_drained(engine)
    (result,) = engine.run([request])
    assert (result.request_id, result.finish_reason, result.samples) == ("a", "rejected", ())
    small = ask("a#0", 3, 1)
    check_solo([small], run_checked(engine, [small]))


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_a_stream_has_one_answer(configuration):
    """Fault: a stream of a group yields the tokens of all answers in turn, or of the first only, without a word."""
    engine = make_engine(configuration)
    with pytest.raises(InvalidParams, match="n = 3: a stream has one answer"):
        engine.stream(several("a", 3, 2, at=None))
    assert (len(engine.queue), engine.active, engine.results) == (0, [], {})
    deltas = list(engine.stream(ask("a", 3, 2, at=None, n=1)))
    assert len(deltas) == 2


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "3", None, MOST_ANSWERS + 1])
def test_a_number_of_answers_that_is_none_is_refused(n):
    """Fault: n = 0 makes a group without answers, which never ends."""
    with pytest.raises(InvalidParams, match="n must be"):
        several("a", 3, 2, n=n)


def test_a_full_queue_counts_a_group_once():
    """BI-09. Fault: every answer takes a place in the queue, or none does."""
    engine = make(max_num_seqs=3, max_queue=2)
    engine.submit(several("runs", 3, 6, at=None))
    engine.step()
    engine.submit(several("w0", 3, 2, at=None))
    engine.submit(several("w1", 3, 2, n=2, at=None))
    for request in (several("w2", 3, 2, at=None), ask("w2", 3, 2, at=None)):
        with pytest.raises(QueueFull, match="2 requests wait already"):
            engine.submit(request)
    assert len(engine.queue) == 2
    engine.abort("w0#1")  # its group still waits
    with pytest.raises(QueueFull):
        engine.submit(ask("w2", 3, 2, at=None))
    engine.abort("w0")
    engine.submit(ask("w2", 3, 2, at=None))
    drive(engine)
    assert {name: engine.results[name].finish_reason for name in ("runs", "w0", "w1", "w2")} == {
        "runs": "length",
        "w0": "abort",
        "w1": "length",
        "w2": "length",
    }


def test_a_group_that_arrives_at_a_full_queue_is_refused_with_all_its_answers():
    """BI-09. Fault: the first answer is refused, and the others stay in the engine for ever."""
    engine = make(max_num_seqs=3, max_queue=1)
    requests = [several("runs", 3, 6), several("waits", 3, 2, at=1.0), several("late", 3, 2, at=2.0)]
    results = run_checked(engine, requests)
    assert [result.finish_reason for result in results] == ["length", "length", "rejected"]
    assert [sample.finish_reason for sample in results[2].samples] == ["rejected"] * 3
    assert all("QueueFull" in sample.error for sample in results[2].samples)
