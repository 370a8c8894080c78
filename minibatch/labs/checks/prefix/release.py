"""prefix.5: what a request gives back, the tail first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hypothesis import strategies as st

from minibatch.continuous_batching import ContinuousBatching
from minibatch.labs.checks.prefix.chains import compute, progress
from minibatch.labs.checks.prefix.runs import engines, expect_found, in_turn
from minibatch.labs.counterexample import expect
from minibatch.labs.facts import judge
from minibatch.labs.properties import for_all
from minibatch.labs.states import state
from minibatch.labs.strips import compared, strips
from minibatch.labs.trial import request, run
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.prefix_cache import PrefixCachedKVCache

TAIL = "Of one request the tail goes before the head: without the head, what remains can never be found."
RESERVED = "With the table goes the number of tokens that it was reserved for."

BOOKS = ("tables", "reserved")
FORGOTTEN = "Who holds nothing has no entry, not even an empty one: else a server never forgets who was there."


def check(part: type[PagedKVCache]) -> None:
    _tail_first()
    _all_back(part)
    _shared(part)
    for_all(
        partial(_any_tables, part),
        sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4),
        order=st.permutations(range(4)),
    )
    common = list(range(10, 23))
    expect_found(in_turn([(common, 1), (range(100, 105), 1), (common, 1)], 4), [0, 0, 8], TAIL)
    run([request(5, 8), request(3, 9, first=1), request(4, 8, first=2)], ContinuousBatching(), PagedKVCache(5, 4))
    engines()


def _tail_first() -> None:
    for free in ([0, 1, 2, 3], [3, 1, 2, 0]):
        _given_back(free, 13, 13)
    for blocks in range(2, 8):  # whatever the length of the table
        _given_back(list(range(blocks)), 4 * blocks, 4 * blocks)
        _given_back(list(range(blocks))[::-1], 4 * blocks - 1, 4 * blocks - 1)
    for_all(
        lambda free, tokens, computed: _given_back(free, tokens, min(tokens, computed)),
        free=st.permutations(range(7)),
        tokens=st.integers(1, 28),
        computed=st.integers(0, 28),
    )


def _given_back(free: Sequence[int], tokens: int, computed: int) -> None:
    """A request of so many tokens gives its blocks back; they were taken from this free list."""
    kv, asked = PrefixCachedKVCache(len(free), 4), state("a", range(tokens))
    taken = [kv.pool.take() for _ in free]
    kv.pool.drop(sorted(taken, key=free.index))  # now the free list is this one
    compute(kv, asked, computed)
    cells, table, full = progress(kv, asked), kv.units(asked), computed // 4
    want = table[:full][::-1]
    kv.release(asked)
    what = "idle blocks, the next to be evicted first"
    rows = {"its table": cells} | compared(want, kv.idle())
    case = f"a prefix cache of {len(free)} blocks of 4; a request of {tokens} tokens with the table {list(table)}"
    case += f", {computed} tokens computed: {full} full block{'s' * (full != 1)}"
    same = partial(expect, case=case, picture=partial(strips, rows, what))
    same(kv.idle(), want, idea=TAIL, what=what)
    stays = "What is given back can still be found, until somebody takes it."
    same(len(list(kv.pool.known())), full, idea=stays, what="blocks that can be found")


def _all_back(part: type[PagedKVCache]) -> None:
    kv, asked = part(4, 4), state("a", range(9))
    kv.release(asked)
    case = "4 blocks of 4; a request that holds nothing"
    expect(kv.num_free, 4, case=case, idea="Who holds nothing gives nothing back.", what="free blocks")
    kv.reserve(asked, 9)
    asked.num_computed = 6
    kv.release(asked)
    case = "4 blocks of 4; a request has 3 of them for 9 tokens, 6 are computed, and gives them back"
    computed, asked.num_computed = asked.num_computed, 0
    facts = (
        (
            "computed tokens",
            computed,
            6,
            "How much is computed stays: of a request that is swapped out the host has it.",
        ),
        ("free blocks", kv.num_free, 4, "All blocks come back, the one that is partly filled too."),
        ("blocks of the request", kv.units(asked), (), "It holds nothing any more: its table is gone."),
        ("room", asked.room, 0, "request.room says how far it may write without asking: with its blocks that is over."),
        ("tokens reserved", kv.reserved_for(asked), 0, RESERVED),
        ("entries left for it", [name for name in BOOKS if asked in getattr(kv, name)], [], FORGOTTEN),
    )
    judge(facts, case)
    kv.release(asked)
    case += ", twice"
    expect(kv.num_free, 4, case=case, idea="To give back twice is to give back once.", what="free blocks")
    kv.reserve(asked, 5)
    got = (kv.num_held(asked), kv.num_free, kv.reserved_for(asked))
    case += "; then it comes back for 5 tokens"
    expect(got, (2, 2, 5), case=case, idea=RESERVED, what="blocks held, blocks free, tokens reserved")


def _shared(part: type[PagedKVCache]) -> None:
    kv, a, b = part(4, 4), state("a", range(9)), state("b", range(9))
    kv.reserve(a, 9)
    a.num_computed = 9
    kv.fork(a, b)
    case = "4 blocks of 4; the tables of a and b point to the same 3; a gives its own back"
    kv.release(a)
    own = "A block that another table points to as well is not free: only a reference is given back."
    counts = (kv.num_free, list(kv.pool.references), kv.pool.num_shares, kv.units(b))
    want = (1, [1, 1, 1, 0], 0, (0, 1, 2))
    expect(counts, want, case=case, idea=own, what="free blocks, references, those beyond the first, blocks of b")
    kv.release(b)
    expect(kv.num_free, 4, case=f"{case}, then b does", idea="With the last reference a block is free.", what="free")


def _any_tables(part: type[PagedKVCache], sizes: list[int], order: list[int]) -> None:
    kv, requests, held = part(12, 4), [state("a", max(size, 1)) for size in sizes], list(sizes)
    for asked, size in zip(requests, sizes, strict=True):
        kv.reserve(asked, size)
    for i in [i for i in order if i < len(sizes)]:
        kv.release(requests[i])
        held[i] = 0
        case = f"12 blocks of 4; requests with {', '.join(map(str, sizes))} tokens; given back in the order {order}"
        got = (kv.num_free, [kv.num_held(one) for one in requests], [kv.reserved_for(one) for one in requests])
        blocks = [-(-size // 4) for size in held]
        what = f"free blocks; of each request blocks, tokens reserved; after number {i}"
        idea = "A request gives back all its own blocks, and nobody else's."
        expect(got, (12 - sum(blocks), blocks, held), case=case, idea=idea, what=what)
