"""paging.1: blocks, and how many tables point to each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hypothesis import strategies as st
from matplotlib.figure import Figure

from minibatch.labs.counterexample import expect, in_words
from minibatch.labs.properties import for_all
from minibatch.labs.runs import small_runs
from minibatch.labs.strips import EMPTY, GONE, RIGHT, WRONG, Cell, strips
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
REFERENCES = {  # by the last move
    "": "references has a number for each block, how many tables point to it: at first 0.",
    "take": "A block that is taken has one reference, that of the table that takes it.",
    "share": "share() adds one reference to this block, and changes no other.",
    "drop": "drop() takes one reference away from each block that it is given, and changes no other.",
}
SHARES = {
    "": "At first nothing is shared: num_shares is 0.",
    "take": "A block that is taken has its first reference; num_shares counts only those beyond the first.",
    "share": "num_shares rises by one with each reference beyond the first of a block.",
    "drop": "num_shares falls only while another table still points to the block: the last reference was no share.",
}


@dataclass
class _Book:
    """How a pool has to be: references of each block, and the free ones, the next to be taken first."""

    counts: list[int]
    free: deque[int]
    last: str = ""  # the move that made it so

    @property
    def shares(self) -> int:
        return sum(count - 1 for count in self.counts if count)

    def copy(self) -> _Book:
        return replace(self, counts=list(self.counts), free=deque(self.free))


@dataclass
class _Moves:
    """What has been done to a pool, and the books before and after the last move."""

    size: int
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now = _Book([0] * self.size, deque(range(self.size)))
        self.before = self.now

    def begin(self, move: str, said: str) -> None:
        self.before, self.now = self.now, self.now.copy()
        self.now.last = move
        self.told.append(said)

    @property
    def case(self) -> str:
        return f"a pool of {self.size} blocks: {', '.join(self.told) or 'nothing has happened'}"


def check(part: type[BlockPool]) -> None:
    for moves, idea in BY_HAND:
        _counted(part, 4, [(move[0], [int(digit) for digit in move[1:]]) for move in moves.split()], idea)
    _blocks_of_its_own(part)
    move = st.tuples(st.sampled_from("tsdi"), st.lists(st.integers(0, 3), min_size=1, max_size=3))
    for_all(partial(_counted, part), size=st.integers(2, 4), moves=st.lists(move, max_size=24))
    small_runs(lambda: PagedKVCache(6, 4))


def _counted(part: type[BlockPool], size: int, moves: Sequence[tuple[str, list[int]]], idea: str = "") -> None:
    """Against counts and a queue that are kept beside it. Moves that cannot be made are left out."""
    blocks, done = part(size), _Moves(size)
    _compare(blocks, done, idea)
    for move, numbers in moves:
        counts = done.now.counts
        held = [block for block in dict.fromkeys(numbers) if block < size and counts[block]]
        if move == "t" and done.now.free:
            done.begin("take", "take")
            _take(blocks, done, idea)
        elif move == "s" and held:
            done.begin("share", f"share {held[0]}")
            blocks.share(held[0])
            done.now.counts[held[0]] += 1
        elif move in "di" and held:
            done.begin("drop", f"drop {', '.join(map(str, held))}" + " (as an iterator)" * (move == "i"))
            blocks.drop(iter(held) if move == "i" else held)
            for block in held:
                done.now.counts[block] -= 1
            done.now.free += [block for block in held if not done.now.counts[block]]
        _compare(blocks, done, idea)


def _take(blocks: BlockPool, done: _Moves, idea: str) -> None:
    block, want = blocks.take(), done.now.free.popleft()
    done.now.counts[want] = 1
    done.told[-1] = f"take -> {in_words(block, 40)}"
    why = idea or "take() gives the block that has been free longest."
    says = f"take() has to give block {want}, and gave {in_words(block, 40)}"
    expect(block, want, case=done.case, idea=why, what="taken", picture=partial(_drawn, blocks, done, says))


def _compare(blocks: BlockPool, done: _Moves, idea: str) -> None:
    """What is wrong of the pool, and the idea that belongs to it."""
    book, drawn = done.now, partial(_drawn, blocks, done, f"the last move: {done.told[-1] if done.told else 'none'}")
    same = partial(expect, case=done.case, picture=drawn)
    same(len(blocks), len(book.free), idea=idea or "Free are the blocks with no reference.", what="free blocks")
    why = idea if "reference" in idea and "num_shares" not in idea else REFERENCES[book.last]
    same(list(blocks.references), book.counts, idea=why, what="references")
    why = idea if "num_shares" in idea else SHARES[book.last]
    same(blocks.num_shares, book.shares, idea=why, what="num_shares")


def _drawn(blocks: BlockPool, done: _Moves, says: str) -> Figure:
    """The pool before the last move, as it should be after it, and as it is: references, and who is free."""
    got, want = blocks.references, done.now.counts
    rows = {"": [Cell(f"block {block}", EMPTY, 3) for block in range(done.size)]}
    if done.told:
        rows["references before"] = _references(done.before.counts)
        rows["free before"] = _queue(done.before.free)
    rows["references expected"] = _references(want)
    rows["references happened"] = _references(got, want)
    rows["free expected"] = _queue(done.now.free)
    facts = ("free blocks", len(blocks), len(done.now.free)), ("num_shares", blocks.num_shares, done.now.shares)
    for name, had, other in facts:
        cells = [Cell(f"expected {other}", EMPTY, 4), Cell(f"happened {in_words(had, 16)}", EMPTY, 4)]
        if had != other:
            cells = [cells[0]._replace(color=RIGHT), cells[1]._replace(color=WRONG)]
        rows[name] = cells
    return strips(rows, f"{says}; grey: somebody's; the free ones go out from the left")


def _references(counts: Iterable[Any], want: Sequence[int] | None = None) -> list[Cell]:
    """A cell a block, those marked that differ from what is wanted."""
    cells = []
    for block, count in enumerate(counts):
        wrong = want is not None and not (block < len(want) and count == want[block])
        cells.append(Cell(count, WRONG if wrong else GONE if count else EMPTY, 3))
    return cells


def _queue(free: Iterable[int]) -> list[Cell]:
    return [Cell(f"block {block}", EMPTY, 3) for block in free]


def _blocks_of_its_own(part: type[BlockPool]) -> None:
    two = part(2), part(2)
    two[0].take()
    two[0].share(0)
    state = {"free": len(two[1]), "references": list(two[1].references), "num_shares": two[1].num_shares}
    fresh = {"free": 2, "references": [0, 0], "num_shares": 0}
    case = "two pools of 2 blocks; in the first, 0 is taken and shared"
    expect(state, fresh, case=case, idea="Every pool has blocks of its own.", what="the second pool")
