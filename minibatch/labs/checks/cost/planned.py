"""Plans to count: by hand, with what is wrong if a count is; drawn; and in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from minibatch.labs.states import state
from minibatch.plan import Admission, Chunk, Padding, Plan, Preemption

Case = tuple[Plan, int | None, dict[str, str]]


def by_hand() -> Iterator[Case]:
    """A plan, the window, and by count the idea if that is wrong."""
    yield from _chunks()
    yield from _windows()
    yield from _padding()
    yield from _swaps()


def chunk(start: int, stop: int, num_tokens: int | None = None, num_prompt: int = 4, name: str = "a") -> Chunk:
    """Tokens ``start:stop`` of a request that has so many (no more, if nothing else is said)."""
    num_tokens = stop if num_tokens is None else num_tokens
    num_prompt = min(num_prompt, num_tokens)
    return Chunk(state(name, num_prompt, num_tokens - num_prompt, start), start, stop)


def _chunks() -> Iterator[Case]:
    once = "A chunk reads its whole context, its own tokens included, once for all its queries together."
    triangle = "The query at position i sees i + 1 keys: the pairs of a prompt are a triangle, and not a square."
    own = "A decode reads the K/V of all tokens up to its own, the newest, and writes one."
    unfinished = "Nobody samples from a chunk that does not reach the newest token: it skips the head."
    before = "A later chunk reads what earlier ones have written, too."
    later = "A later chunk sees all the tokens before it, too: its first query, at position 4, sees 5 keys."
    newest = "What counts is whether a chunk reaches the newest token: prompt or not, one piece or the last of several."
    apart = "Requests do not see each other: each chunk counts by itself, and the counts are added."
    several = (chunk(6, 7), chunk(2, 3, name="b"), chunk(0, 3, 5, 5, "c"))
    yield Plan((chunk(0, 4),)), None, {"kv_read": once, "attended": triangle}
    yield Plan((chunk(6, 7),)), None, {"kv_read": own, "kv_written": own}
    yield Plan((chunk(0, 3, 9, 9),)), None, {"logits": unfinished}
    yield Plan((chunk(4, 6, 9, 9),)), None, {"kv_read": before, "attended": later}
    yield Plan((chunk(0, 6),)), None, {"logits": newest}
    yield Plan((chunk(4, 9, num_prompt=9),)), None, {"logits": newest}
    yield Plan(several), None, {"kv_read": apart, "attended": apart}


def _windows() -> Iterator[Case]:
    last = "With a window a query sees the last so many keys, its own included."
    short = "A query that has fewer keys than the window sees all of them."
    union = "The queries of a chunk see different windows: what is read is the keys that any of them sees, each once."
    each = "Each query of the chunk has a window of its own."
    edge = "Each query has a window of its own: the first of this chunk see all their keys, the later ones do not."
    itself = "With a window of 1 each query sees only itself."
    beside = "Each chunk has its own window: a long one beside it changes nothing."
    for window, chunks, read, attended in (
        (4, [chunk(7, 8)], last, last),
        (4, [chunk(0, 3)], short, short),
        (4, [chunk(6, 9)], union, each),
        (4, [chunk(0, 6)], union, edge),
        (4, [chunk(4, 5)], last, last),
        (1, [chunk(2, 5)], itself, itself),
        (4, [chunk(0, 3), chunk(9, 10, name="b")], beside, beside),
    ):
        yield Plan(tuple(chunks)), window, {"kv_read": read, "attended": attended}


def _padding() -> Iterator[Case]:
    free = "Padding takes no part in attention: it goes through the linear layers, and nobody reads or writes its K/V."
    left = "Left pads come before a prompt: nobody samples from them, so they skip the head."
    run_on = "The row of a finished request goes on through the whole model, the head included."
    costs = "Padding is computed for nobody, and costs like any token in the linear layers."
    both = {"kv_read": free, "kv_written": free, "attended": free, "tokens": costs}
    dead = Padding(state("b"), 1, dead=True), Padding(state("c"), 1, dead=True)
    yield Plan((chunk(0, 4),), padding=(Padding(state("b"), 3, dead=False),)), None, {"logits": left, **both}
    yield Plan((chunk(0, 4),), padding=dead), None, {"logits": run_on, **both}


def _swaps() -> Iterator[Case]:
    by, victim = chunk(4, 5), state("v", 8, 1, 8)
    out = "A victim that swaps moves the K/V of what it has computed, not of its newest token, which has none yet."
    lost = "A victim that will be computed again moves nothing: its K/V are dropped."
    back = "What a waiting request has computed lies on the host, and comes back when it is admitted."
    new = "A new request has computed nothing, so nothing comes back."
    hit = "What a prefix cache had is on the GPU already: an admission with cached tokens brings nothing back."
    applied = f"{hit} (So it is after the engine has applied the plan: the request has gained them.)"
    yield Plan((by,), preemptions=(Preemption(victim, by.request, swap=True),)), None, {"swapped": out}
    yield Plan((by,), preemptions=(Preemption(victim, by.request),)), None, {"swapped": lost}
    for computed, cached, idea in ((6, 0, back), (0, 0, new), (0, 4, hit), (4, 4, applied)):
        joining = Chunk(state("w", 9, 0, computed), max(computed, cached), 9)
        yield Plan((by, joining), admissions=(Admission(joining.request, 9, cached),)), None, {"swapped": idea}


# --- drawn ---


def _drawn(
    chunks: Sequence[tuple[str, int, int, int]],
    padding: Sequence[tuple[int, bool]],
    victims: Sequence[tuple[int, bool]],
) -> Plan:
    """A plan that could be: chunks of active, new, returning and cached requests, of ``left`` tokens too few."""
    made, admissions = [], []
    for (kind, start, length, left), name in zip(chunks, "abcd", strict=False):
        start = 0 if kind == "new" else max(start, 1)
        num_tokens = start + length + left
        one = chunk(start, start + length, num_tokens, max(1, num_tokens - 2), name)
        made.append(one)
        if kind == "found, not yet":
            one.request.num_computed = 0
        if kind != "active":
            admissions.append(Admission(one.request, num_tokens, start if kind.startswith("found") else 0))
    pads = [Padding(state(f"p{n}"), number, dead) for n, (number, dead) in enumerate(padding)]
    gone = [Preemption(state(f"v{n}", 9, 0, c), made[0].request, swap) for n, (c, swap) in enumerate(victims)]
    return Plan(tuple(made), tuple(pads), tuple(admissions), tuple(gone))


ARRIVALS = ("active", "new", "back", "found", "found, not yet")
ANY = st.builds(
    _drawn,
    st.lists(
        st.tuples(st.sampled_from(ARRIVALS), st.integers(0, 12), st.integers(1, 5), st.integers(0, 1)),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=2),
    st.lists(st.tuples(st.integers(1, 8), st.booleans()), max_size=2),
)


# --- in words ---


def in_words(plan: Plan, window: int | None) -> str:
    return "; ".join([*_parts_in_words(plan), "no window" if window is None else f"a window of {window}"])


def _parts_in_words(plan: Plan) -> Iterator[str]:
    for each, start, stop in plan.chunks:
        yield f"tokens {start}:{stop} of {each.label}, which has {each.num_tokens}"
    for each, number, dead in plan.padding:
        yield f"the dead row of {each.label}: {number}" if dead else f"{number} of left padding beside {each.label}"
    for victim, _, swap in plan.preemptions:
        done = f"with {victim.num_computed} computed tokens"
        yield f"{victim.label} is preempted {done}, {'and swaps' if swap else 'to be computed again'}"
    for each, _, cached in plan.admissions:
        yield f"{each.label} is admitted, {each.num_computed} tokens computed, {cached} cached"
