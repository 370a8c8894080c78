"""prefix.2: the longest known beginning of a request."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from hypothesis import strategies as st

from minibatch.labs.checks.prefix.chains import Tokens, cut, remember, said
from minibatch.labs.checks.prefix.runs import engines
from minibatch.labs.counterexample import expect, in_words
from minibatch.labs.properties import for_all
from minibatch.labs.states import state
from minibatch.labs.strips import EMPTY, GONE, RIGHT, Cell, compared, strips
from minibatch.prefix_cache import CachedBlock, PrefixCachedKVCache
from minibatch.request import RequestState

SALTS = "A request finds what was computed with its own salt (request.request.cache_salt), and nothing else."
LEFT = "At least one token of a request is computed, or there are no logits to sample from: never all are found."
AFTER = "Every block is looked for after the block before it; only the first has none before it."
HOLE = "The chain ends at the first block that is not found: what comes later was computed after other tokens."
BACK = "A preempted request comes back with the tokens that it has generated, and finds their blocks too."
ANEW = "Every look-up looks anew: what is known can change while the request waits."

PIECES = ONE, TWO, THREE = cut(range(12), 4)
WHOLE, BRANCH, APART = [range(12)], [range(12), [*ONE, *THREE]], [ONE, TWO, THREE]
BY_HAND = (  # known token lists; the request's prompt, and what it has generated; how many blocks are found
    (WHOLE, range(5), (), 1, "A known full block with one token behind it is found."),
    (WHOLE, range(13), (), 3, f"Known blocks are found one after the other. {AFTER}"),
    (WHOLE, range(12), (), 2, LEFT),
    (WHOLE, range(4), (), 0, LEFT),
    (WHOLE, [0], (), 0, LEFT),
    (WHOLE, range(11), (), 2, "Only full blocks can be found."),
    (BRANCH, [*ONE, 50, 51, 52, 53, *THREE, 99], (), 1, HOLE),
    (BRANCH, [*ONE, 4, 5, 6, 50, *THREE, 99], (), 1, HOLE),
    (BRANCH, [50, 51, 52, 53, *ONE, 99], (), 0, HOLE),
    ([TWO], range(13), (), 0, HOLE),
    (APART, range(13), (), 1, AFTER),
    ([], range(13), (), 0, "Nothing known, nothing found."),
    (WHOLE, range(5), range(5, 13), 3, BACK),
    (WHOLE, range(5), range(5, 8), 1, LEFT),
)


def check(part: type[PrefixCachedKVCache]) -> None:
    for known, prompt, generated, number, idea in BY_HAND:
        case = f"known are {' and '.join(map(said, known)) or 'no blocks'}"
        _look_up(_warm(part, known), state("a", prompt, generated), PIECES[:number], case, idea)
    _whose_it_is(part)
    _changes_nothing(part)
    _looks_anew(part)
    for_all(
        partial(_any_prompt, part),
        known=st.lists(st.lists(st.integers(1, 2), max_size=7), min_size=1, max_size=3),
        asked=st.lists(st.integers(1, 2), min_size=1, max_size=9),
        split=st.integers(1, 9),
        size=st.integers(1, 3),
    )
    engines()


def _warm(
    part: type[PrefixCachedKVCache], known: Sequence[Sequence[int]], size: int = 4, salt: str | None = None
) -> PrefixCachedKVCache:
    """A cache that knows the full blocks of some token lists, which nobody holds. It knows nothing twice."""
    kv = part(32, size)
    for tokens in known:
        remember(kv.pool, cut(tokens, size), salt)
    kv.pool.drop([block for block, count in enumerate(kv.pool.references) if count])
    return kv


def _look_up(kv: PrefixCachedKVCache, asked: RequestState, want: Sequence[Tokens], case: str, idea: str) -> None:
    """``want``: the tokens of the blocks that are to be found."""
    chain, tokens = kv._find(asked), asked.tokens(0, asked.num_tokens)
    made = f", of which the last {len(asked.generated)} are generated" if asked.generated else ""
    case = f"blocks of {kv.unit_size}; {case}. Asked for: {said(tokens)}{made}"
    right = kind = "CachedBlocks"
    if not isinstance(chain, (list, tuple)):
        kind = None if chain is None else f"no list: {type(chain).__name__}"
    elif others := [found for found in chain if not isinstance(found, CachedBlock)]:
        kind = in_words(others[0], 60)
    idea_of_kind = "Return a list of what pool.find returns: CachedBlocks."
    expect(kind, right, case=case, idea=idea_of_kind, what="what is in the list")
    got = [found.tokens for found in chain]

    pieces = cut(tokens, kv.unit_size)
    cells = [Cell(said(piece), RIGHT if piece in want else EMPTY, 3) for piece in pieces]
    rest = tokens[len(pieces) * kv.unit_size :]
    rows = {"the request": [*cells, *[Cell(said(rest), GONE, 2)] * bool(rest)]}
    rows |= compared([said(piece) for piece in want], [said(piece) for piece in got], 3)
    picture = partial(strips, rows, "green: what the request may find; grey: no full block")
    same = partial(expect, case=case, picture=picture)
    same([said(piece) for piece in got], [said(piece) for piece in want], idea=idea, what="found blocks")
    links = [(found.parent and found.parent.block, found.block) for found in chain]
    after = list(pairwise([None, *(found.block for found in chain)]))
    same(links, after, idea=AFTER, what="of each block (the one before it, itself)")


def _whose_it_is(part: type[PrefixCachedKVCache]) -> None:
    for salt, other in (("x", None), (None, "x"), ("x", "y"), (None, "")):
        kv, case = _warm(part, WHOLE, salt=salt), f"0:12 are known with the salt {salt!r}"
        _look_up(kv, state("a", range(13), salt=salt), PIECES, f"{case}; the request has it too", SALTS)
        _look_up(kv, state("a", range(13), salt=other), [], f"{case}; the request has {other!r}", SALTS)
    scored = "A request with prompt_logprobs finds nothing: it needs the logits of every position of its prompt."
    asked = state("a", range(13), prompt_logprobs=0)
    _look_up(_warm(part, WHOLE), asked, [], "0:12 are known; the request has prompt_logprobs=0", scored)


def _changes_nothing(part: type[PrefixCachedKVCache]) -> None:
    kv, asked = _warm(part, WHOLE), state("a", range(13))
    idle = kv.idle()
    kv._find(asked)
    after = (sum(kv.pool.references), kv.idle(), asked.num_computed, kv.num_held(asked))
    pure, what = "To look a prefix up is planning, and planning changes nothing.", "references, idle, computed, held"
    expect(after, (0, idle, 0, 0), case="0:12 are known; 0:13 is looked up", idea=pure, what=what)
    for block in idle:
        kv.pool.share(block)
    shared = "Several requests can share a block: who holds it now does not matter."
    _look_up(kv, asked, PIECES, "0:12 are known, and somebody holds them", shared)


def _looks_anew(part: type[PrefixCachedKVCache]) -> None:
    kv, asked = _warm(part, []), state("a", range(13))
    _look_up(kv, asked, [], "nothing is known", ANEW)
    remember(kv.pool, PIECES)
    _look_up(kv, asked, PIECES, "nothing is known; then 0:12 become known", ANEW)


def _any_prompt(
    part: type[PrefixCachedKVCache], known: list[list[int]], asked: list[int], split: int, size: int
) -> None:
    heads = {tuple(tokens[:stop]) for tokens in known for stop in range(size, len(tokens) + 1, size)}
    stops = [stop for stop in range(size, len(asked), size) if tuple(asked[:stop]) in heads]
    found = cut(asked[: stops[-1]], size) if stops else []
    case = f"known are the blocks of {' and of '.join(map(str, known))}"
    idea = "Found is the longest beginning of full, known blocks that leaves a token to compute."
    _look_up(_warm(part, known, size), state("a", asked[:split], asked[split:]), found, case, idea)
