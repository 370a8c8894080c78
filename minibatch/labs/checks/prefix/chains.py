"""Chains of known blocks: made, in words, and in pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minibatch.labs.counterexample import expect
from minibatch.labs.strips import GONE, WRONG, Cell
from minibatch.plot_style import MEMORY
from minibatch.prefix_cache import CachedBlock, PrefixCache, PrefixCachedKVCache, block_hash
from minibatch.request import RequestState

Tokens = tuple[int, ...]
Hash = Callable[[int, Tokens, "str | None"], int]
CACHED, HELD = MEMORY["cached"].color, MEMORY["filled"].color

HASHES: list[tuple[str, Hash]] = [  # most of them so bad that it is seen what is compared besides
    ("Python's", block_hash),
    ("always 7", lambda parent, tokens, salt: 7),
    ("the sum of the tokens", lambda parent, tokens, salt: sum(tokens)),
    ("hash of the block before + 1", lambda parent, tokens, salt: parent + 1),
    ("the last token + 2 * (hash of the block before), modulo 5", lambda p, tokens, s: (tokens[-1] + 2 * p) % 5),
]


def said(tokens: Sequence[int]) -> str:
    """Tokens in words: ``0:8, 99``."""
    runs: list[list[int]] = []
    for token in tokens:
        if runs and token == runs[-1][-1] + 1:
            runs[-1].append(token)
        else:
            runs.append([token])
    return ", ".join(f"{r[0]}:{r[-1] + 1}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)


def cut(tokens: Sequence[int], size: int) -> list[Tokens]:
    """The full blocks."""
    return [tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]


def remember(pool: PrefixCache, pieces: Sequence[Tokens], salt: str | None = None) -> list[CachedBlock]:
    """Takes blocks and has them remembered, each after the one before; what is known already stays."""
    chain: list[CachedBlock] = []
    for tokens in pieces:
        chain.append(pool.remember(pool.take(), chain[-1] if chain else None, tokens, salt))
    return chain


def path(known: CachedBlock | None) -> list[CachedBlock]:
    """From the head of its chain to the block itself."""
    return [*path(known.parent), known] if known is not None else []


def compute(kv: PrefixCachedKVCache, asked: RequestState, num_tokens: int) -> None:
    """An iteration has computed its tokens up to this number; all of its tokens have rows from the start."""
    kv.reserve(asked, asked.num_tokens)
    asked.num_computed = num_tokens
    before = (num_tokens, list(kv.units(asked)), list(kv.pool.references))
    kv.publish([asked])
    after = (asked.num_computed, list(kv.units(asked)), list(kv.pool.references))
    case = f"a prompt of {said(asked.prompt)}, {num_tokens} tokens computed"
    only = "It becomes known what is in the blocks; the request, its table and who holds what stay as they are."
    expect(after, before, case=case, idea=only, what="computed tokens, table, references of the blocks")


def progress(kv: PrefixCachedKVCache, asked: RequestState, lost: int | None = None) -> list[Cell]:
    """Its blocks, cut where the computed tokens end. ``lost``: one to mark."""
    cells, size = [], kv.unit_size
    for index, block in enumerate(kv.units(asked)):
        start, stop = index * size, min((index + 1) * size, asked.num_tokens)
        middle = min(max(asked.num_computed, start), stop)
        for first, last, color in ((start, middle, HELD), (middle, stop, GONE)):
            if first < last:
                color = WRONG if block == lost else color
                cells.append(Cell(f"block {block}: {said(asked.tokens(first, last))}", color, 2 + last - first))
    return cells
