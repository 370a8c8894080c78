"""prefix.4: forget before you overwrite."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hypothesis import strategies as st
from matplotlib.figure import Figure

from minibatch.labs.checks.prefix.chains import CACHED, HELD, said
from minibatch.labs.checks.prefix.runs import engines, expect_found, in_turn, watched
from minibatch.labs.counterexample import expect
from minibatch.labs.properties import for_all
from minibatch.labs.strips import EMPTY, Cell, compared, strips
from minibatch.labs.trial import request
from minibatch.prefix_cache import PrefixCache, PrefixCachedKVCache
from minibatch.trace import counted

FORGET = "Forget before you overwrite: a block that is taken gets other K/V, and must not be found for its old tokens."
NO_CONTENT = "A block that was forgotten has no content: it is not a known one, and comes back as empty, not as idle."
AGAIN = "What was forgotten can be remembered again."
IDLE_LONGEST = "Of the blocks that can be found the one idle longest is taken: the first key of self._idle."
ONE = "One block is needed, so one is forgotten: the others can still be found."
# t: a block is taken; r0: a token is remembered of block 0; d0: it is given back; s0: it is found by somebody.
BY_HAND = (
    (3, "t t", "Blocks without content are taken in the order in which they became free."),
    (1, "t r0 d0 t", "A block of nobody can be taken, although it can be found."),
    (1, "t r0 d0 t d0 t r0", AGAIN),
    (2, "t r0 d0 t", "Blocks without content go first: nothing has to be forgotten for them."),
    (2, "t r0 t r1 d1 d0 t t", IDLE_LONGEST),
    (3, "t r0 t r1 t r2 d2 d0 d1 t t", IDLE_LONGEST),
    (2, "t r0 t r1 d0 d1 s0 t", "A block that somebody holds is never taken."),
    (2, "t r0 t r1 d0 d1 s0 d0 t", "Idle longest means since its last use: one that was found again goes to the end."),
)


def check(part: type[PrefixCache]) -> None:
    for size, moves, idea in BY_HAND:
        _life(part, size, [(move[0], int(move[1:] or 0)) for move in moves.split()], idea)
    idea = "Empty blocks go first, in order; then those idle longest."
    moves = st.lists(st.tuples(st.sampled_from("ttrdds"), st.integers(0, 5)), max_size=24)
    for_all(lambda moves: _life(part, 4, moves, idea), moves=moves)
    first, other = [1, 2, 3, 4, 5], range(11, 18)
    expect_found(in_turn([(first, 1), (other, 1), (first, 1)], 2), [0, 0, 0], FORGET)
    asked = [request(first, 1, 0), request([21, 22, 23], 9, 1), request([1, 2, 3, 4, 9], 1, 8)]
    expect_found(watched(asked, PrefixCachedKVCache(3, 4)), [0, 0, 0], FORGET)
    engines()


def _life(part: type[PrefixCache], size: int, moves: Sequence[tuple[str, int]], idea: str) -> None:
    """Against two queues and the token of each block that can be found. Moves that cannot be made are left out."""
    pool, empty, idle, held, content, told = part(size), list(range(size)), [], [], {}, []
    for number, (move, which) in enumerate(moves):
        case, token = f"a pool of {counted(size, 'block')}: {', '.join(told) or 'nothing yet'}", number % 5
        if move == "t" and (empty or idle):
            held.append((empty or idle).pop(0))
            content.pop(held[-1], None)
            _take(pool, held[-1], f"{case}. One is taken", idea)
            told.append(f"{held[-1]} taken")
        elif move == "r" and token not in content.values() and (new := [b for b in held if b not in content]):
            block = _pick(new, which)
            content[block] = token
            pool.remember(block, None, (token,), None)
            told.append(f"{block} remembered for token {token}")
        elif move == "s" and idle:
            held.append(idle.pop(idle.index(_pick(idle, which))))
            pool.share(held[-1])
            told.append(f"{held[-1]} found")
        elif move == "d" and held:
            block = held.pop(held.index(_pick(held, which)))
            pool.drop([block])
            (idle if block in content else empty).append(block)
            told.append(f"{block} given back")
        else:
            continue
        _compare(pool, content, idle, empty, f"a pool of {counted(size, 'block')}: {', '.join(told)}", move)


def _pick(blocks: list[int], which: int) -> int:
    return which if which in blocks else blocks[which % len(blocks)]


def _take(pool: PrefixCache, want: int, case: str, idea: str) -> None:
    rows = _cells(pool)
    got = pool.take()

    def picture() -> Figure:
        return strips(rows | compared([f"block {want}"], [f"block {got}"], 2), "blue: can be found; green: held")

    expect(got, want, case=case, idea=idea, what="block", picture=picture)


def _compare(
    pool: PrefixCache, content: dict[int, int], idle: list[int], empty: list[int], case: str, move: str
) -> None:
    want = sorted(content.values())
    found = [token for token in range(5) if pool.find(None, (token,), None) is not None]
    known = sorted(one.tokens[0] for one in pool.known())
    free = (list(pool.idle()), len(pool), [block for block, count in enumerate(pool.references) if not count])
    right = (idle, len(idle) + len(empty), sorted(idle + empty))
    lost = ONE if move == "t" else AGAIN
    gone = "A block that was taken is held, and no longer among the idle ones." if move == "t" else NO_CONTENT
    for got, wanted, idea, what in (
        (found, want, FORGET if set(found) > set(want) else lost, "tokens that can be found"),
        (known, want, NO_CONTENT, "tokens that the pool says it knows (pool.known())"),
        (free, right, gone, "idle blocks, number of free blocks, blocks without a reference"),
    ):
        rows = _cells(pool) | compared(wanted, got, 2)
        expect(got, wanted, case=case, idea=idea, what=what, picture=partial(strips, rows, f"below, the {what}"))


def _cells(pool: PrefixCache) -> dict[str, list[Cell]]:
    """The blocks with what can be found of them, and the queue of the idle ones."""
    known = {one.block: one for one in pool.known()}
    cells = []
    for block, references in enumerate(pool.references):
        content = said(known[block].tokens) if block in known else "no content"
        color = HELD if references else CACHED if block in known else EMPTY
        cells.append(Cell(f"{block}: {content}" + (", held" if references else ""), color, 3))
    return {"block: content": cells, "idle, oldest first": [Cell(block) for block in pool.idle()]}
