"""paging.1: blocks, and how many tables point to each."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

from hypothesis import strategies as st

from minibatch.labs.counterexample import expect
from minibatch.labs.properties import for_all
from minibatch.labs.runs import small_runs
from minibatch.paged_kv_cache import BlockPool, PagedKVCache

# t: a block is taken; s0: block 0 is shared; d20: blocks 2 and 0 are dropped, at once; i20: as an iterator.
BY_HAND = (
    ("", "At first all blocks are free."),
    (
        "t t t",
        "At first the blocks are taken in the order 0, 1, 2, ...; a taken one has one reference and is not free.",
    ),
    ("t t t d0 d2", "A block that no table points to is free again."),
    ("t t t t d0 d2 t t", "Free blocks are a queue, not a stack: first freed, first taken."),
    ("t t t t d20 t t", "The number of a block does not matter: taken next is the one that was dropped first."),
    ("t s0", "Sharing adds a reference, and takes no other block."),
    ("t s0 s0", "num_shares counts references beyond the first of a block, not blocks: three tables, two shares."),
    ("t t s0 s1 s1", "num_shares is the sum over all blocks: one share of block 0 and two of block 1 are three."),
    ("t s0 s0 d0 d0", "A block is free when its last reference is dropped, not before; before, num_shares goes down."),
    ("t s0 s0 d0 d0 d0", "The last reference of a block was no share: num_shares stays, and the block is free."),
    ("t t t i10", "drop() is given any iterable, and an iterator can be gone through only once."),
)


def check(part: type[BlockPool]) -> None:
    for moves, idea in BY_HAND:
        _counted(part, 4, [(move[0], [int(digit) for digit in move[1:]]) for move in moves.split()], idea)
    _blocks_of_its_own(part)
    move = st.tuples(st.sampled_from("tsdi"), st.lists(st.integers(0, 3), min_size=1, max_size=3))
    for_all(partial(_counted, part), size=st.integers(2, 4), moves=st.lists(move, max_size=24))
    small_runs(lambda: PagedKVCache(6, 4))


def _counted(part: type[BlockPool], size: int, moves: Sequence[tuple[str, list[int]]], idea: str = "") -> None:
    """Against counts and a queue that are kept beside it. Moves that cannot be made are left out."""
    blocks, counts, free, told = part(size), [0] * size, deque(range(size)), []
    _compare(blocks, counts, f"a pool of {size} blocks", idea)
    for move, numbers in moves:
        held = [block for block in dict.fromkeys(numbers) if block < size and counts[block]]
        if move == "t" and free:
            block, want = blocks.take(), free.popleft()
            told.append(f"take -> {block}")
            case, why = (
                f"a pool of {size} blocks: {', '.join(told)}",
                "take() gives the block that has been free longest.",
            )
            expect(block, want, case=case, idea=idea or why, what="taken")
            counts[block] = 1
        elif move == "s" and held:
            told.append(f"share {held[0]}")
            blocks.share(held[0])
            counts[held[0]] += 1
        elif move in "di" and held:
            told.append(f"drop {', '.join(map(str, held))}" + " (as an iterator)" * (move == "i"))
            blocks.drop(iter(held) if move == "i" else held)
            for block in held:
                counts[block] -= 1
            free += [block for block in held if not counts[block]]
        _compare(blocks, counts, f"a pool of {size} blocks: {', '.join(told) or 'nothing'}", idea)


def _compare(blocks: BlockPool, counts: list[int], case: str, idea: str) -> None:
    same = partial(expect, case=case)
    why = "Free are the blocks with no reference."
    same(len(blocks), counts.count(0), idea=idea or why, what="free blocks")
    why = "references counts the tables that point to each block."
    same(list(blocks.references), counts, idea=idea or why, what="references")
    why = "num_shares counts the references beyond the first of each block."
    same(blocks.num_shares, sum(n - 1 for n in counts if n), idea=idea or why, what="num_shares")


def _blocks_of_its_own(part: type[BlockPool]) -> None:
    two = part(2), part(2)
    two[0].take()
    two[0].share(0)
    state = {"free": len(two[1]), "references": list(two[1].references), "num_shares": two[1].num_shares}
    fresh = {"free": 2, "references": [0, 0], "num_shares": 0}
    case = "two pools of 2 blocks; in the first, 0 is taken and shared"
    expect(state, fresh, case=case, idea="Every pool has blocks of its own.", what="the second pool")
