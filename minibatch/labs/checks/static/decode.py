"""Checks of static.1: a batch decodes until all have ended."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from minibatch.kv_cache import ContiguousKVCache
from minibatch.labs.checks.static.batches import SIZES, run_static
from minibatch.labs.counterexample import expect, in_words
from minibatch.labs.plans import expect_plan, planned
from minibatch.labs.properties import for_all
from minibatch.labs.states import decoding, described, holding, line_up, state
from minibatch.labs.trial import alone, request, requests_of
from minibatch.plan import Chunk, Padding, Plan
from minibatch.policies.queueing import FCFS
from minibatch.request import RequestState
from minibatch.static_batching import StaticBatching

Member = tuple[int, int, bool]  # tokens of its prompt, generated ones, and whether it has ended
MEMBERS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.booleans()), max_size=5)


def check(part: type[StaticBatching]) -> None:
    _step(part, [(3, 2, False), (2, 2, False)])
    _step(part, [(3, 2, True), (3, 2, False), (2, 2, False)])
    _step(part, [(3, 2, True), (3, 5, True), (4, 3, False)])
    for waits in (True, False):
        _step(part, [(3, 2, True), (3, 2, False)], waits)
    for_all(lambda members: _step(part, [*members, (2, 2, False)]), members=MEMBERS)
    _one_stops_early()
    _one_comes_late()
    for_all(_batch_after_batch, examples=15, sizes=SIZES, places=st.integers(1, 4))


def _step(part: type[StaticBatching], members: Sequence[Member], waits: bool | None = None) -> None:
    """``waits``: whether somebody does, and then the plan's rest is looked at too."""
    active = []
    for i, (prompt, made, over) in enumerate(members):
        why = ("length", "stop")[i % 2] if over else None
        active.append(decoding("abcdef"[i], prompt, made, new=made if why == "length" else 9, ended=why))
    queue = line_up(FCFS(), [state("w", 2)] if waits else [])
    case = f"a batch of {described(active)}; {'w' if waits else 'nobody'} waits"
    kv = holding(ContiguousKVCache(len(active) + 1, 16), active)
    scheduler = part(batch_size=len(active) + 1)
    plan = planned(lambda: scheduler._decode(queue, active), queue, active, kv, case)
    want = Plan(
        tuple(Chunk(one, one.num_tokens - 1, one.num_tokens) for one in active if not one.is_finished),
        tuple(Padding(one, 1, True) for one in active if one.is_finished),
    )
    expect_plan(plan, want, case=case, idea=lambda got: _idea(got, active), who=[*active, *queue])
    if waits:
        idea = "Those who wait are told why: the plan's rest says it."
        said = "a text" if isinstance(plan.rest, str) and plan.rest else in_words(plan.rest) or "the empty string"
        expect(said, "a text", case=case, idea=idea, what="rest")
    elif waits is not None:
        idea = "The plan's rest is for those who wait: if nobody does, it is the empty string."
        expect(in_words(plan.rest) or "the empty string", "the empty string", case=case, idea=idea, what="rest")


def _idea(plan: Plan, active: list[RequestState]) -> str:
    """What such a plan has got wrong."""
    chunks = {chunk.request: chunk for chunk in plan.chunks}
    if plan.admissions or any(one not in active for one in chunks):
        return "Nobody joins a batch that runs: it stays shut until its longest member has ended."
    if any(one.is_finished for one in chunks):
        return "A finished request gets no more tokens: its row is padding, not a chunk."
    if any(one not in chunks for one in active if not one.is_finished):
        return "The end of one member is not the end of the batch: whoever is alive goes on."
    if any(chunk.stop - chunk.start != 1 for chunk in plan.chunks):
        return "A decode computes one token, the newest: the K/V of all before it are cached."
    if any(not pad.dead for pad in plan.padding):
        return "The row of a finished request is a dead row: its padding is marked dead, left pads are for prompts."
    if any(pad.num_tokens != 1 for pad in plan.padding):
        return "A dead row is one token in every iteration, as any other row of the batch."
    if len(plan.padding) > sum(one.is_finished for one in active):
        return "There is a row for each member, and none for a place that nobody took."
    return "A finished row still goes through the model until the batch ends: it is padding of one token, marked dead."


def _one_stops_early() -> None:
    """Four places, two requests; one stops by itself."""
    stop = alone(request(3, 6))[1]
    trial = run_static([request(3, 6, stop_token_ids=(stop,)), request(3, 6, first=1)], 4)
    idea = "The batch runs until its longest member has ended: neither shorter nor longer."
    trial.expect(trial.trace.num_steps, 6, idea=idea, what="iterations (a stops at its 2nd token)")
    pads = [pad for step in trial.trace.steps for pad in step.padding]
    dead = [sum(pad.num_tokens for pad in pads if pad.request_id == label) for label in "ab"]
    idea = "A row that has ended at token 2 of 6 runs 4 more iterations for nobody, and an empty place none."
    trial.expect(dead, [4, 0], idea=idea, what="dead rows of a, b")


def _one_comes_late() -> None:
    trial = run_static(requests_of([(2, 2), (2, 5), (2, 2, 1)]), 3)
    idea = "Who comes one iteration late waits for the whole batch, even beside an empty place."
    trial.expect_tokens("c", [6, 7], idea)


def _batch_after_batch(sizes: list[tuple[int, int]], places: int) -> None:
    trial = run_static(requests_of(sizes), places)
    begin = 0
    for first in range(0, len(sizes), places):
        lengths = [new for _, new in sizes[first : first + places]]
        for label, new in zip("abcde"[first:], lengths, strict=False):
            idea = "A member gets a token in every iteration of its batch until it has ended."
            trial.expect_tokens(label, range(begin + 1, begin + 1 + new), idea)
        for step in trial.trace.steps[begin : begin + max(lengths)]:
            rows = {row.request_id for row in (*step.members, *step.padding)}
            idea = "A batch of n executes n rows in each of its iterations."
            trial.expect(len(rows), len(lengths), idea=idea, what="rows", iteration=step.index + 1)
        begin += max(lengths)
