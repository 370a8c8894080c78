"""prefix.3: what can be found once it has been computed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hypothesis import strategies as st
from matplotlib.figure import Figure

from minibatch.labs.checks.prefix.chains import Tokens, compute, cut, path, progress, said
from minibatch.labs.checks.prefix.runs import engines, expect_found, in_turn
from minibatch.labs.counterexample import expect
from minibatch.labs.properties import for_all
from minibatch.labs.states import state
from minibatch.labs.strips import RIGHT, WRONG, Cell, strips
from minibatch.labs.trial import alone, request
from minibatch.prefix_cache import CachedBlock, PrefixCache, PrefixCachedKVCache, block_hash
from minibatch.request import RequestState

NOT_BEFORE = (
    "A block can be found when it has been computed, not when it is planned or allocated: nobody has written its rows."
)
AT_ONCE = "Every full block can be found as soon as all its tokens are computed."
ANSWERS = "Generated tokens are tokens like others: the next turn of a conversation finds the prompt and the answer."
PARTLY = "Only full blocks can be found: one that is filled in part will still be written to."
SALT = "A block is remembered with the salt of its request (request.request.cache_salt), so that only it can find it."
ONE_CHAIN = "Each block is remembered behind the block before it: they are one chain."
GOES_ON = "The next call goes on where the last one ended: its first new block comes after the last one of the chain."
FOUND = "What a request has found is the beginning of its chain: its own blocks come after those."
TWIN = "If another block holds the same already, that one stays, and the chain goes on from what remember returns."
LOST = (
    "If remember returns None, the block cannot be found; nor can anything after it, neither behind an earlier block "
    "nor as the beginning of a new chain."
)
CHAIN = ["0:4 in block 0", "0:4 | 4:8 in block 1", "0:4 | 4:8 | 8:12 in block 2"]
BY_HAND = (  # the prompt, how many tokens after it were generated, how many are computed after each call; found blocks
    (10, 0, (4,), 1, NOT_BEFORE),
    (10, 0, (6,), 1, PARTLY),
    (10, 0, (3,), 0, PARTLY),
    (10, 0, (8,), 2, AT_ONCE),
    (3, 6, (8,), 2, ANSWERS),
    (3, 5, (7,), 1, NOT_BEFORE),
    (13, 0, (13,), 3, ONE_CHAIN),
    (13, 0, (4, 6), 1, GOES_ON),
    (13, 0, (4, 6, 8), 2, GOES_ON),
    (13, 0, (4, 6, 8, 8, 12), 3, GOES_ON),
    (13, 0, (4, 6, 8, 8, 12, 13), 3, GOES_ON),
)


def check(part: type[PrefixCachedKVCache]) -> None:
    for prompt, generated, calls, number, idea in BY_HAND:
        kv, asked = part(8, 4), state("a", prompt, range(prompt, prompt + generated))
        for computed in calls:
            compute(kv, asked, computed)
        made = f", {prompt}:{prompt + generated} generated after it" if generated else ""
        case = f"a prompt of 0:{prompt}{made}; computed after each call: {', '.join(map(str, calls))} tokens"
        _can_be_found(kv, CHAIN[:number], [asked], case, idea)
    kv, asked = part(8, 4), state("a", range(5), salt="x")
    compute(kv, asked, 5)
    _can_be_found(kv, ["0:4 in block 0, salt 'x'"], [asked], "a prompt of 0:5, salt 'x', computed", SALT)
    _after_what_was_found(part)
    _side_by_side(part)
    _after_a_collision(part)
    for_all(
        partial(_any_progress, part),
        prompts=st.lists(st.lists(st.integers(1, 2), min_size=2, max_size=8), min_size=1, max_size=3),
        moves=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=1, max_size=6),
    )
    trial = in_turn([(range(3), 6), ([0, 1, 2, *alone(request(range(3), 6)), 99], 2)], 16)
    expect_found(trial, [0, 8], ANSWERS)
    engines()


def _can_be_found(
    kv: PrefixCachedKVCache,
    want: Sequence[str],
    requests: Sequence[RequestState],
    case: str,
    idea: str,
    lost: int | None = None,
) -> None:
    """``want``: of each block that can be found the chain, as :func:`_chain_of` writes it. ``lost``: a block that
    cannot be found because of its hash."""
    want, got = sorted(want), sorted(_chain_of(known) for known in kv.pool.known())

    def picture() -> Figure:
        rows = {one.label: progress(kv, one, lost) for one in requests}
        says = "green: computed; grey: planned, not computed yet" + "; orange: remember returns None" * (
            lost is not None
        )
        for name, mine, other, color in (("missing", want, got, RIGHT), ("too much", got, want, WRONG)):
            if more := [chain for chain in mine if chain not in other]:
                rows[name] = [Cell(f"{more[0]}{f', and {len(more) - 1} more' * (len(more) > 1)}", color, 12)]
        return strips(rows, says)

    if [one.partition(" in ")[0] for one in got] == [one.partition(" in ")[0] for one in want]:
        idea = "The blocks of a request are those of its table, in its order; of equal ones the first stays known."
    elif idea == NOT_BEFORE and set(got) < set(want):
        idea = AT_ONCE
    case = f"blocks of {kv.unit_size}; {case}"
    expect(got, want, case=case, idea=idea, what="can be found", picture=picture)


def _chain_of(known: CachedBlock) -> str:
    words = " | ".join(said(one.tokens) for one in path(known))
    return f"{words} in block {known.block}" + (f", salt {known.salt!r}" if known.salt is not None else "")


def _two() -> tuple[RequestState, RequestState]:
    return state("a", range(9)), state("b", [*range(8), 50, 51, 52, 53, 54])


def _after_what_was_found(part: type[PrefixCachedKVCache]) -> None:
    kv, (a, b) = part(8, 4), _two()
    compute(kv, a, 9)
    kv.adopt(b, 8)
    b.num_computed = 8
    compute(kv, b, 13)
    case = "a: 0:9, computed. Then b: 0:8, 50:55; it has found 8 tokens and computed the rest"
    _can_be_found(kv, [*CHAIN[:2], "0:4 | 4:8 | 50:54 in block 3"], [a, b], case, FOUND)


def _side_by_side(part: type[PrefixCachedKVCache]) -> None:
    kv, (a, b) = part(8, 4), _two()
    for one in (a, b):
        kv.reserve(one, one.num_tokens)
        one.num_computed = 8
    kv.publish([a, b])
    compute(kv, b, 13)
    case = "a: 0:9 and b: 0:8, 50:55, side by side; of both 8 tokens are computed, then all of b"
    _can_be_found(kv, [*CHAIN[:2], "0:4 | 4:8 | 50:54 in block 5"], [a, b], case, TWIN)


def _clash(parent: int, tokens: Tokens, salt: str | None) -> int:
    return 99 if tokens[0] in (4, 54) else block_hash(parent, tokens, salt)


def _after_a_collision(part: type[PrefixCachedKVCache]) -> None:
    for calls, says in (((12,), "all at once"), ((8, 12), "8 tokens and then 4 more")):
        kv, a, b = part(8, 4), state("a", range(13)), state("b", range(50, 63))
        kv.pool = PrefixCache(8, _clash)
        compute(kv, a, 12)
        for computed in calls:
            compute(kv, b, computed)
        case = f"a: 0:13, computed. Then b: 50:63, {says}; the hash of 54:58 is that of 4:8"
        _can_be_found(kv, [*CHAIN, "50:54 in block 4"], [a, b], case, LOST, lost=kv.units(b)[1])


def _any_progress(part: type[PrefixCachedKVCache], prompts: list[list[int]], moves: list[tuple[int, int]]) -> None:
    """Against a list of all that was computed. Nothing is evicted."""
    kv, known, done = part(16, 2), {}, []
    requests = [state(chr(97 + i), p[:1], p[1:]) for i, p in enumerate(prompts)]
    words = "; ".join(f"{one.label}: {said(one.tokens(0, one.num_tokens))}" for one in requests)
    for who, more in moves:
        asked = requests[who % len(requests)]
        computed = min(asked.num_computed + more, asked.num_tokens)
        compute(kv, asked, computed)
        done.append(f"{asked.label} to {computed}")
        for index, block in enumerate(kv.units(asked)[: computed // 2]):
            known.setdefault(tuple(asked.tokens(0, 2 * index + 2)), block)
        want = [f"{' | '.join(map(said, cut(head, 2)))} in block {block}" for head, block in known.items()]
        idea = "What can be found are the full blocks that are computed, each after all that is before it."
        _can_be_found(kv, want, requests, f"{words}; computed: {', '.join(done)}", idea)
