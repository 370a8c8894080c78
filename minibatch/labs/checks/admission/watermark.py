"""admission.2: a share of the pool that stays free for those who run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from hypothesis import strategies as st
from matplotlib.figure import Figure

from minibatch import plot_style
from minibatch.continuous_batching import ContinuousBatching
from minibatch.engine import Engine
from minibatch.kv_cache import ContiguousKVCache, KVCache
from minibatch.labs.counterexample import expect, in_words
from minibatch.labs.properties import for_all
from minibatch.labs.runs import SIZES, after_a_found_prefix
from minibatch.labs.states import state
from minibatch.labs.strips import EMPTY, GONE, Cell, strips
from minibatch.labs.trial import Broken, request, run
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.plan_draft import PlanDraft
from minibatch.policies import Never, Watermark
from minibatch.request import RequestState
from minibatch.trace import StepReport

TEXT = "Return a text: the reason why it has to wait, or '' if it may join."
BY_HAND = (  # of 10 blocks: those that a holds, that were promised to c in this plan, that b needs; share
    (4, 0, 4, 0.2, "Exactly as many blocks as are kept may be left: b may join."),
    (6, 0, 1, 0.5, "The share is one of the whole pool, not of what is free in it."),
    (4, 0, 5, 0.2, "What counts is what would be left after b has joined, not what is free now."),
    (4, 0, 3, 0.35, "The share is rounded down to whole blocks: 0.35 of 10 blocks are 3."),
    (0, 0, 9, 0.2, "Nobody runs, so there is nobody to keep blocks for: b may join, or it waits for ever."),
    (2, 3, 4, 0.2, "Blocks that are promised in this very plan are gone: draft.memory.free knows, kv.num_free not."),
    (0, 1, 5, 0.5, "Who joins in this plan runs as well: b is not alone, though nobody holds a block yet."),
    (4, 0, 6, 0.0, "Where nothing is to be kept, all that is free may be used."),
)


def check(part: type[Watermark]) -> None:
    for held, promised, asks, share, idea in BY_HAND:
        _objection(part, held, promised, asks, share, idea)
    _for_one_chunk_or_slot(part)
    _changes_nothing(part)
    idea = "b joins if at least the kept blocks are left."
    for_all(
        lambda held, promised, asks, share: _objection(
            part, held, promised, min(asks, 10 - held - promised), share, idea
        ),
        held=st.integers(0, 5),
        promised=st.integers(0, 4),
        asks=st.integers(1, 10),
        share=st.sampled_from([0.0, 0.01, 0.1, 0.25, 0.35, 0.5, 0.95, 1.0]),
    )
    _in_the_engine(part)


def _objection(part: type[Watermark], held: int, promised: int, asks: int, share: float, idea: str) -> None:
    """a runs and holds blocks, c joins in the same plan, and b asks; all in numbers of blocks, of ten."""
    kv, a, b, c = PagedKVCache(10, 4), state("a", 4 * held), state("b", 4 * asks), state("c", 4 * promised)
    draft = _draft(kv, [a] if held else [])
    if promised:
        draft.memory.reserve(c, 4 * promised)
        draft.running.append(c)
    keep, left = math.floor(share * 10), 10 - held - promised - asks
    want = "has to wait" if (held or promised) and left < keep else "may join"
    got = part(share).objection(b, 4 * asks, draft)
    who = [f"a runs and holds {held}"] * bool(held) + [f"c joins in this plan with {promised}"] * bool(promised)
    case = f"10 blocks, share {share:g}; {' and '.join(who) or 'nobody runs'}; b needs {asks}, which leaves {left}"
    drawn = partial(_pool_drawn, {"a": held, "c": promised, "b": asks}, left, keep, f"expected: b {want}")
    expect(_told(got, case), want, case=case, idea=idea, what="b", picture=drawn)


def _draft(kv: KVCache, running: Sequence[RequestState]) -> PlanDraft:
    """A plan in the making; those who run hold rows for all their tokens."""
    for one in running:
        kv.reserve(one, one.num_tokens)
    return PlanDraft(running, kv, 1000, 16, Watermark(), Never())


def _told(objection: Any, case: str) -> str:
    """The answer in words. It has to be a text."""
    name = type(objection).__name__
    kind = "a text" if isinstance(objection, str) else f"{in_words(objection, 60)}, a{'n' * (name == 'int')} {name}"
    kind = "None" if objection is None else kind
    expect(kind, "a text", case=case, idea=TEXT, what="what comes out")
    return "has to wait" if objection else "may join"


def _pool_drawn(takes: dict[str, int], left: int, keep: int, says: str) -> Figure:
    """The blocks of the pool, by what they are for."""
    owners = zip(takes.items(), plot_style.OWNERS, strict=False)
    pool = [Cell(name, color) for (name, number), color in owners for _ in range(number)]
    kept = [Cell("", EMPTY, 10 - keep)] * (keep < 10) + [Cell("kept", GONE)] * keep
    return strips({"once b has joined": pool + [Cell("left")] * left, "to stay free": kept}, says)


def _for_one_chunk_or_slot(part: type[Watermark]) -> None:
    chunk = "10 blocks, share 0.2; a holds 4; b has a prompt of 28 tokens, but num_tokens is 8 (its first chunk)"
    slot = "2 slots of 16 rows, share 0.5; a has one; b needs the other"
    only = "Rows for num_tokens tokens would be set aside, not for all that b has."
    grows = "A request in a slot does not grow (kv.grows is False): nothing has to be kept for it."
    for kv, share, case, idea in (
        (PagedKVCache(10, 4), 0.2, chunk, only),
        (ContiguousKVCache(2, 16), 0.5, slot, grows),
    ):
        got = part(share).objection(state("b", 28), 8, _draft(kv, [state("a", 16)]))
        expect(_told(got, case), "may join", case=case, idea=idea, what="b")


def _changes_nothing(part: type[Watermark]) -> None:
    draft, b = _draft(PagedKVCache(10, 4), [state("a", 16)]), state("b", 20)
    for tokens in (8, 20, 8):
        part(0.2).objection(b, tokens, draft)
    case = "10 blocks, a holds 4; b is asked about three times"
    idea = "Asking changes nothing: need() says what it would take, reserve() would take it."
    what = "free blocks in the draft, requests that run"
    expect((draft.memory.free, len(draft.running)), (6, 1), case=case, idea=idea, what=what)


def _in_the_engine(part: type[Watermark]) -> None:
    asked = [request(8, 2, first=i) for i in range(6)]
    trial = run(asked, ContinuousBatching(admission=part(0.2)), PagedKVCache(10, 4))
    idea = "Each needs 2 of the 10 blocks and 2 are kept free: four of them join in the first iteration."
    trial.expect(len(trial.trace.steps[0].members), 4, idea=idea, what="members of the first iteration")
    trial = after_a_found_prefix(ContinuousBatching(admission=part(0.1)), "; share 0.1")
    idea = "b finds 8 of its 10 blocks with a: memory.need() counts the 2 that are missing, and it joins at once."
    trial.expect(trial.steps("b")[0], 3, idea=idea, what="first iteration of b")

    def small_run(share: float, sizes: list[tuple[int, int]]) -> None:
        asked = [request(p, g, first=i) for i, (p, g) in enumerate(sizes)]
        run(asked, ContinuousBatching(admission=part(share)), PagedKVCache(8, 4), watch=_keeps(share))

    for_all(small_run, examples=15, share=st.sampled_from([0.15, 0.25, 0.5, 1.0]), sizes=SIZES)


def _keeps(share: float) -> Callable[[Engine, StepReport], Iterator[Broken]]:
    """Of the iterations of a run: nobody joins beside others who may not, and nobody waits who may join."""

    def watch(engine: Engine, report: StepReport) -> Iterator[Broken]:
        keep, free = math.floor(share * 8), report.kv.free // 4
        if report.admitted and len(report.members) > 1 and free < keep:
            idea = "Somebody has joined beside others, and less is free than has to be kept."
            yield idea, f"at least {keep} free blocks", f"{free}"
        head = next(iter(engine.queue), None)
        if head is None or report.preempted:
            return
        need = -(-head.num_tokens // 4)
        if free - need >= keep:
            idea = "Somebody waits who may join: the blocks that are kept free would still be free."
            what = f"{head.label} needs {need} of {free} free blocks, {keep} are kept"
            yield idea, f"{head.label} joins", f"it waits: {what}"

    return watch
