"""prefix.1: the same tokens after the same prefix."""

from __future__ import annotations

from functools import partial
from typing import Any

from hypothesis import strategies as st
from matplotlib.figure import Figure

from minibatch.labs.checks.prefix.chains import CACHED, HASHES, Tokens, path, remember, said
from minibatch.labs.checks.prefix.runs import engines, expect_found, in_turn
from minibatch.labs.counterexample import expect
from minibatch.labs.properties import for_all
from minibatch.labs.strips import GONE, Cell, compared, strips
from minibatch.prefix_cache import CachedBlock, PrefixCache, block_hash

Question = tuple["CachedBlock | None", Tokens, "str | None"]  # the block before, tokens, salt
OTHER = "The K/V of a token depend on all tokens before it: the same tokens after another prefix are another block."
LOOKS = "A hash only says where to look: two blocks with the same hash can hold different tokens, so compare these."
TENANT = "The salt is compared as well as the tokens: a collision must not leak from one tenant to another."
BEFORE = "The block before is compared as well: the same tokens after another prefix are another block."


def check(part: type[PrefixCache]) -> None:
    _chained(part)
    _looks_anew(part)
    _collisions(part)
    for_all(
        partial(_any_chains, part),
        moves=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.booleans()), min_size=1, max_size=6),
        collide=st.integers(0, len(HASHES) - 1),
    )
    prompt = list(range(9))
    trial = in_turn([(prompt, 3), (prompt, 3), ([*range(4), 60, 61, 62, 63, 64], 3)], 16)
    expect_found(trial, [0, 8, 4], "What has been computed after the same prefix is found again, and no more.")
    engines()


def _ask(pool: PrefixCache, case: str, asked: Question, want: CachedBlock | None, idea: str) -> None:
    """One question to the pool."""
    parent, tokens, salt = asked
    after = f"after block {parent.block}" if parent else "at the beginning"
    case += f". Asked for: {said(tokens)} {after}" + (f", salt {salt!r}" if salt is not None else "")
    known = list(pool.known())
    got = pool.find(parent, tokens, salt)

    def picture() -> Figure:
        rows = {f"block {end.block}": [_cell(b.tokens, b.salt, CACHED) for b in path(end)] for end in known}
        rows["asked for"] = [*(_cell(b.tokens, b.salt, CACHED) for b in path(parent)), _cell(tokens, salt, GONE)]
        says = "blue: known blocks, each with all that is before it"
        return strips(rows | compared([_told(want)], [_told(got)], 2), says)

    same = partial(expect, case=case, picture=picture)
    same(_told(got), _told(want), idea=idea, what="found")
    again = "The block before is compared by identity: return the CachedBlock that is known, not a copy of it."
    same(got is want, True, idea=again, what="the known CachedBlock itself")


def _told(found: Any) -> str:
    if found is None:
        return "nothing"
    return f"block {found.block}" if isinstance(found, CachedBlock) else f"{found!r}, which is no CachedBlock"


def _cell(tokens: Tokens, salt: str | None, color: str) -> Cell:
    return Cell(said(tokens) + (f" (salt {salt!r})" if salt is not None else ""), color, 2)


def _chained(part: type[PrefixCache]) -> None:
    pool = part(8)
    case = "known: block 0 with 1, 2 at the beginning, block 1 with 3, 4 after it"
    root, child = remember(pool, [(1, 2), (3, 4)])
    ask = partial(_ask, pool, case)
    ask((None, (1, 2), None), root, "A first block has a hash with 0 in place of the block before it.")
    ask((root, (3, 4), None), child, "The hash of a block goes on from the hash of the block before it.")
    for parent, tokens in ((None, (3, 4)), (root, (1, 2)), (child, (3, 4))):
        ask((parent, tokens, None), None, OTHER)
    ask((None, (5, 6), None), None, "What was never remembered is not found: None.")
    ask((None, (1, 2), "x"), None, "What was computed with another salt is not shared.")
    pool.drop([1, 0])
    before = (list(pool.references), pool.idle(), len(pool))
    ask = partial(_ask, pool, f"{case}; both are given back")
    still = "A block of nobody can be found as well as one that somebody holds."
    ask((None, (1, 2), None), root, still)
    ask((root, (3, 4), None), child, still)
    after = (list(pool.references), pool.idle(), len(pool))
    pure = "Looking something up changes nothing: neither who holds it nor what is evicted next."
    expect(after, before, case=case, idea=pure, what="references, idle blocks, free blocks")


def _looks_anew(part: type[PrefixCache]) -> None:
    pool, case = part(1), "one block, known for 1, 2 at the beginning"
    (known,) = remember(pool, [(1, 2)])
    _ask(pool, case, (None, (1, 2), None), known, "What is known is found.")
    pool.drop([0])
    pool.take()
    gone = "Every look-up looks anew: what has been forgotten meanwhile is not found."
    _ask(pool, f"{case}; then somebody takes the block", (None, (1, 2), None), None, gone)


def _collisions(part: type[PrefixCache]) -> None:
    """Hash functions that are so bad that it is seen what is compared besides."""
    pool = part(4, lambda parent, tokens, salt: 7)
    (only,) = remember(pool, [(1, 2)])
    ask = partial(_ask, pool, "a hash that is always 7; known: block 0 with 1, 2 at the beginning")
    ask((None, (1, 2), None), only, "The hash says where to look.")
    ask((None, (1, 3), None), None, LOOKS)
    ask((None, (1, 2), "x"), None, TENANT)
    ask((None, (1, 2), ""), None, f"{TENANT} None and the empty string are two salts.")
    ask((only, (1, 2), None), None, BEFORE)

    pool = part(8, lambda parent, tokens, salt: 99 if tokens == (5, 6) else block_hash(parent, tokens, salt))
    x = remember(pool, [(1, 2), (3, 4), (5, 6)])
    y = remember(pool, [(8, 9), (3, 4)])
    case = "two chains, 1, 2 | 3, 4 | 5, 6 and 8, 9 | 3, 4; the hash of the tokens 5, 6 is always 99"
    _ask(pool, case, (x[1], (5, 6), None), x[2], "The hash says where to look.")
    _ask(pool, case, (y[1], (5, 6), None), None, BEFORE)

    pool = part(2, lambda parent, tokens, salt: sum(tokens))
    old, _ = remember(pool, [(1, 2), (5, 6)])
    pool.drop([old.block])
    (new,) = remember(pool, [(2, 1)])
    case = (
        "the hash is the sum of the tokens; block 0 had 1, 2, and block 1 has 5, 6 after it; then block 0 is evicted "
        "and gets 2, 1"
    )
    twins = "The block before has to be the same block, not one that happens to have the same hash."
    _ask(pool, case, (new, (5, 6), None), None, twins)


def _any_chains(part: type[PrefixCache], moves: list[tuple[int, int, bool]], collide: int) -> None:
    """Against a list of all that was remembered. Nothing is evicted."""
    name, function = HASHES[collide]
    pool, known, taken, told = part(8, function), {}, {}, []
    parents: list[CachedBlock | None] = [None]
    for number, digits, salted in moves:
        parent, tokens = parents[number % len(parents)], (digits // 2, digits % 2)
        salt = parent.salt if parent else "x" if salted else None
        place = function(parent.hash if parent else 0, tokens, salt)
        made = pool.remember(pool.take(), parent, tokens, salt)
        if place not in taken:
            known[parent, tokens, salt] = taken[place] = made
            parents.append(made)
            after = f"after block {parent.block}" if parent else "at the beginning"
            told.append(f"{said(tokens)} {after}, salt {salt!r}, in block {made.block}")
        ask = partial(_ask, pool, f"hash: {name}; known: {'; '.join(told)}")
        idea = "Found is the block with these tokens, after this block, with this salt, and no other."
        for after in parents:
            for asked in ((0, 0), (0, 1), (1, 0), (1, 1)):
                for tenant in (None, "x"):
                    ask((after, asked, tenant), known.get((after, asked, tenant)), idea)
