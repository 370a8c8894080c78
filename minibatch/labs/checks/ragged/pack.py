"""ragged.1: one sequence for all requests.

Every token says whose it is and where it stands: request ``a`` has the tokens 100, 101, ..., ``b`` 200, 201, ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from hypothesis import strategies as st
from matplotlib.figure import Figure

from minibatch import plot_style
from minibatch.kv_cache import KVCache
from minibatch.labs.checks.ragged.engines import engines, kind
from minibatch.labs.counterexample import expect, plain
from minibatch.labs.properties import for_all
from minibatch.labs.states import state
from minibatch.labs.strips import GONE, Cell, compared, strips
from minibatch.models.packing import Packed, Span
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.plan import Chunk, Padding, Plan

SCRATCH = 999
BEGINS_ANEW = "Positions begin anew with each request: a token stands where it stands in its own request."
GOES_ON = "A later chunk goes on where the last one ended: its first token is at position start, and not at 0."
OWN_ROWS = "The K/V of a token go to the row that the cache has for it: kv.rows(request, start, stop)."
ALL_BEFORE = (
    "A chunk reads the rows of all tokens of its request up to its own end: those of earlier iterations are in the "
    "cache, and its attention needs them."
)
ONES_FIRST = "Chunks of one token stand before all longer ones, so that they can attend together."
IN_PLAN_ORDER = "Chunks of more than one token stand in the order of the plan."
IN_ONE_PIECE = "The tokens of a chunk stand side by side, in the order in which the request has them."
PADS_LAST = "Padding stands behind all chunks."
BY_CONTEXT = "Chunks of one token stand in the order of their contexts, so that those of like length are neighbours."
OF_THE_PLAN = "Logits come in the order of the plan, however the chunks stand in the sequence: the engine counts on it."
SOME_LOGITS = "Of each chunk its last chunk.num_logits tokens have logits: the newest token to sample from, or none."
SCORED = "A prompt that is scored has logits at each of its positions: chunk.num_logits says how many."
PADS = "Padding is computed like tokens: token 0 at position 0, behind all chunks."
TO_SCRATCH = "Padding belongs to nobody: its K/V go to the scratch row, or they overwrite somebody's."
DEAD = "A dead row pays for its logits as well, behind all others; left padding has none."


class Ask(NamedTuple):
    """A request with so many tokens, of which ``start:stop`` are computed now."""

    total: int
    start: int
    stop: int
    scored: bool = False  # with prompt_logprobs


BY_HAND: tuple[tuple[list[Ask], list[tuple[int, bool]], dict[str, str]], ...] = (  # asks, pads (tokens, dead), ideas
    ([Ask(3, 0, 3), Ask(2, 0, 2)], [], {"positions": BEGINS_ANEW}),
    ([Ask(12, 5, 9)], [], {"positions": GOES_ON}),
    ([Ask(12, 5, 10), Ask(3, 0, 3), Ask(5, 4, 5)], [], {}),
    ([Ask(9, 8, 9), Ask(2, 1, 2), Ask(5, 4, 5)], [], {}),
    ([Ask(5, 0, 5), Ask(3, 0, 3), Ask(4, 0, 4)], [], {}),
    ([Ask(3, 0, 3, True), Ask(9, 2, 6, True), Ask(2, 0, 2)], [], {"logits": SCORED}),
    ([Ask(2, 0, 2), Ask(5, 0, 5)], [(3, False)], {"tokens": PADS, "positions": PADS}),
    ([Ask(6, 5, 6), Ask(3, 2, 3)], [(1, True), (1, True)], {}),
)


def check(part: Callable[[Plan, KVCache, int], Packed]) -> None:
    for asks, pads, ideas in BY_HAND:
        _packed(part, asks, pads, ideas)
    one = st.tuples(st.integers(1, 9), st.integers(0, 8), st.integers(0, 8), st.booleans()).map(_any_ask)
    pad = st.one_of(st.just((1, True)), st.tuples(st.integers(1, 3), st.just(False)))
    asks, pads = st.lists(one, min_size=1, max_size=4), st.lists(pad, max_size=2)
    for_all(lambda asks, pads: _packed(part, asks, pads, {}), asks=asks, pads=pads)
    engines()


def _any_ask(drawn: tuple[int, int, int, bool]) -> Ask:
    """With a start before the end, and a stop behind it."""
    total, start, more, scored = drawn
    start %= total
    return Ask(total, start, start + 1 + more % (total - start), scored)


def _plan(asks: Sequence[Ask], pads: Sequence[tuple[int, bool]]) -> tuple[Plan, KVCache, str]:
    """A plan, a cache with rows for it, and both in words. The blocks of 4 go round: no table is in one piece."""
    kv, chunks, said = PagedKVCache(64, 4), [], []
    for i, (total, start, stop, scored) in enumerate(asks):
        tokens = range(100 * (i + 1), 100 * (i + 1) + total)
        one = state(chr(97 + i), tokens, computed=start, prompt_logprobs=0 if scored else None)
        chunks.append(Chunk(one, start, stop))
    for tokens in range(4, max(ask.stop for ask in asks) + 4, 4):
        for one, _, stop in chunks:
            if tokens < stop + 4:
                kv.reserve(one, min(tokens, stop))
    for (one, start, stop), ask in zip(chunks, asks, strict=True):
        scored = ", prompt_logprobs" if ask.scored else ""
        said.append(f"{one.label} tokens {start}:{stop} of {ask.total}, blocks {list(kv.units(one))}{scored}")
    said += [f"a {'dead row' if dead else 'left padding'} of {tokens}" for tokens, dead in pads]
    plan = Plan(tuple(chunks), tuple(Padding(chunks[0].request, tokens, dead) for tokens, dead in pads))
    return plan, kv, f"blocks of 4; the plan: {'; '.join(said)}; scratch row {SCRATCH}"


def _packed(
    part: Callable[..., Packed], asks: Sequence[Ask], pads: Sequence[tuple[int, bool]], ideas: dict[str, str]
) -> None:
    """All that a Packed has, the simplest first. ``ideas``: what this case is about."""
    plan, kv, case = _plan(asks, pads)
    got = part(plan, kv, SCRATCH)
    same = partial(expect, case=case)
    same(kind(got, Packed, "a Packed"), "a Packed", idea="Return a Packed, with six fields.", what="what comes out")
    kinds = [kind(span, Span, "a Span") or "None" for span in got.spans]
    idea = "The spans of a Packed are Spans (first, length, rows)."
    same(kinds, ["a Span"] * len(kinds), idea=idea, what="what is in spans")
    same(len(got.spans), len(asks), idea="There is one span for each chunk.", what="spans")

    order, num_pads = _order(plan, got.tokens), sum(pad.num_tokens for pad in plan.padding)
    tokens = [token for chunk in order for token in chunk.request.tokens(chunk.start, chunk.stop)]
    positions = [position for chunk in order for position in range(chunk.start, chunk.stop)]
    slots = [row for chunk in order for row in kv.rows(*chunk).tolist()]
    owners = [chunk.request.label for chunk in order for _ in range(chunk.start, chunk.stop)] + ["pad"] * num_pads

    def told(field: str, want: Sequence[Any], got: Any, idea: str) -> None:
        picture = partial(_sequence, owners, field, list(want), list(plain(got)))
        same(got, want, idea=ideas.get(field, idea), what=field, picture=picture)

    idea = "The sequence has the tokens start:stop of each chunk, and a token 0 for each of the padding."
    listed = list(plain(got.tokens))
    if sorted(listed) == sorted(tokens + [0] * num_pads):
        ideas = {**ideas, "tokens": _misplaced(plan, listed, num_pads)}
    told("tokens", tokens + [0] * num_pads, listed, idea)
    told("positions", positions + [0] * num_pads, got.positions, f"{BEGINS_ANEW} {GOES_ON}")
    own = list(plain(got.slots))[: len(slots)] == slots
    told("slots", slots + [SCRATCH] * num_pads, got.slots, TO_SCRATCH if own else OWN_ROWS)
    first = 0
    for span, chunk in zip(got.spans, order, strict=True):
        name, want = chunk.request.label, (first, chunk.stop - chunk.start)
        idea = (
            "A span says where its chunk begins in the sequence, and how many tokens it has; spans stand in its order."
        )
        same((span.first, span.length), want, idea=idea, what=f"first place and length of the span of {name}")
        told(f"rows that {name} reads", kv.rows(chunk.request, 0, chunk.stop).tolist(), span.rows, ALL_BEFORE)
        first += want[1]
    _logits(plan, order, got, told)


def _order(plan: Plan, tokens: Any) -> list[Chunk]:
    """The chunks in the sequence. Which of two equally long contexts comes first is as it is in ``tokens``."""
    listed = list(plain(tokens))

    def key(chunk: Chunk) -> tuple[bool, int, int]:
        (token,) = chunk.request.tokens(chunk.start, chunk.start + 1)
        place = listed.index(token) if token in listed else len(listed)
        return (False, chunk.stop, place) if chunk.stop - chunk.start == 1 else (True, 0, 0)

    return sorted(plan.chunks, key=key)


def _misplaced(plan: Plan, tokens: list[int], num_pads: int) -> str:
    """Which rule the sequence breaks, if it has all the tokens that it should have."""
    if any(tokens[len(tokens) - num_pads :]):
        return PADS_LAST
    places = {c: [tokens.index(token) for token in c.request.tokens(c.start, c.stop)] for c in plan.chunks}
    ones = [places[c][0] for c in sorted(plan.chunks, key=lambda chunk: chunk.stop) if len(places[c]) == 1]
    longer = [places[c] for c in plan.chunks if len(places[c]) > 1]
    if any(own != list(range(own[0], own[0] + len(own))) for own in longer):
        return IN_ONE_PIECE
    if max(ones, default=-1) > min((own[0] for own in longer), default=len(tokens)):
        return ONES_FIRST
    return IN_PLAN_ORDER if longer != sorted(longer) else BY_CONTEXT


def _logits(plan: Plan, order: Sequence[Chunk], got: Packed, told: Callable[..., None]) -> None:
    ends, place = {}, 0
    for chunk in order:
        place = ends[chunk.request] = place + chunk.stop - chunk.start
    want = [n for c in plan.chunks for n in range(ends[c.request] - c.num_logits, ends[c.request])]
    dead = []
    for pad in plan.padding:
        place += pad.num_tokens
        dead += [place - 1] * pad.dead
    listed = list(plain(got.logits))
    if sorted(listed) == sorted(want + dead):
        idea = OF_THE_PLAN
    else:
        idea = DEAD if plan.padding and listed[: len(want)] == want else SOME_LOGITS
    told("logits", want + dead, got.logits, idea)
    told("num_logits", [len(want)], [got.num_logits], f"num_logits counts the logits that are read. {DEAD}")


def _sequence(owners: list[str], field: str, want: list[Any], got: list[Any]) -> Figure:
    """The packed sequence, and below it what is wrong about it."""
    colors = dict(zip(sorted(set(owners) - {"pad"}), plot_style.OWNERS, strict=False)) | {"pad": GONE}
    rows = {"place": [Cell(place) for place in range(len(owners))], "whose": [Cell(o, colors[o]) for o in owners]}
    return strips(rows | compared(want, got), f"the packed sequence; below, the {field}")
