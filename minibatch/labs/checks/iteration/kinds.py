"""Checks of iteration.2: prefill, decode or again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from hypothesis import strategies as st
from matplotlib.figure import Figure

from minibatch.chunked_prefill import ChunkedPrefill
from minibatch.continuous_batching import ContinuousBatching
from minibatch.engine import Engine
from minibatch.labs.checks.iteration.asked import ASKED, Asked
from minibatch.labs.counterexample import expect, in_words, plain
from minibatch.labs.properties import for_all
from minibatch.labs.states import state
from minibatch.labs.strips import EMPTY, GONE, RIGHT, Cell, compared, strips
from minibatch.labs.trial import Broken, Watch, requests_of, run
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.plan import Chunk
from minibatch.trace import StepReport

KINDS = ("prefill", "decode", "recomputed")


def check(part: type[Chunk]) -> None:
    _by_hand(part)
    numbers = st.tuples(*[st.integers(0, 30)] * 3)
    for_all(partial(_drawn, part), prompt=st.integers(1, 6), made=st.integers(0, 5), numbers=numbers)
    _back_from_a_preemption()
    for_all(_in_little_memory, examples=15, asked=ASKED, budget=st.integers(1, 6))


def _by_hand(part: type[Chunk]) -> None:
    """Each: prompt, generated tokens, high-water mark, and the chunk."""
    several = "A chunk can have tokens of several kinds: those up to the mark are recomputed, the others are new."
    counted = partial(_counted, part)
    idea = "The last token of a prompt is prefill as well, although the next token is sampled from it."
    counted(4, 0, 0, 0, 4, idea)
    counted(10, 0, 3, 3, 6, "A piece of a prompt is prefill.")
    counted(4, 2, 5, 5, 6, "A generated token that is fed back for the first time is decode.")
    idea = "Below the high-water mark a token was computed before: it is recomputed, though it is one of the prompt."
    counted(10, 0, 6, 0, 5, idea)
    counted(4, 6, 9, 0, 8, "A generated token whose K/V was lost is recomputed, it is not decoded a second time.")
    counted(4, 6, 9, 0, 10, several)
    counted(10, 0, 6, 0, 10, several)
    idea = (
        "With a prefix cache a chunk may begin beyond the mark. Then nothing is recomputed: none, not less than none."
    )
    counted(12, 0, 0, 8, 12, idea)
    counted(4, 7, 10, 10, 11, "Once a preempted request is beyond its mark again, its tokens are new ones.", True)


def _drawn(part: type[Chunk], prompt: int, made: int, numbers: tuple[int, int, int]) -> None:
    size = prompt + made
    mark = size - 1 if made else numbers[0] % prompt  # whoever has generated has computed all but the newest
    start = numbers[1] % size
    stop = start + 1 + numbers[2] % (size - start)
    _counted(part, prompt, made, mark, start, stop, "Each token of the chunk is of one kind.")


def _counted(
    part: type[Chunk], prompt: int, made: int, mark: int, start: int, stop: int, idea: str, preempted: bool = False
) -> None:
    preempted = preempted or start < mark
    one = state("a", prompt, made, start)
    one.high_water, one.timeline.num_preemptions = mark, int(preempted)
    case = f"prompt of {prompt}, {made} generated, high-water mark {mark}: chunk {start}:{stop}"
    case += ", after a preemption" if preempted else ""
    want, got = _by_token(prompt, mark, start, stop), plain(part(one, start, stop).kinds)
    if got is not None:
        three = isinstance(got, (tuple, list)) and len(got) == 3 and all(type(plain(n)) in (int, float) for n in got)
        form = "What comes out are three numbers, in a tuple or a list: prefill, decode and recomputed, in this order."
        said = "three numbers" if three else in_words(got)
        expect(said, "three numbers", case=case, idea=form, what="result")

    def picture() -> Figure:
        rows = {
            "request": [Cell(i, EMPTY if i < prompt else GONE) for i in range(prompt + made)],
            "up to the mark": [Cell("was computed before", GONE, mark)] if mark else [],
            "chunk": [Cell("", EMPTY, start), Cell("is computed now", RIGHT, stop - start)][not start :],
            **compared(_named(want), _named(got), width=3),
        }
        return strips(rows, "tokens of the prompt (white) and generated ones (grey)")

    expect(got, want, case=case, idea=idea, what=", ".join(KINDS), picture=picture)


def _named(counts: object) -> list[str]:
    if not (isinstance(counts, (list, tuple)) and len(counts) == len(KINDS)):
        return [in_words(counts, 30)]
    return [f"{number} {kind}" for number, kind in zip(counts, KINDS, strict=True)]


def _by_token(prompt: int, mark: int, start: int, stop: int) -> list[int]:
    """Prefill, decode, recomputed: token by token."""
    again = [token for token in range(start, stop) if token < mark]
    new = [token for token in range(start, stop) if token >= mark]
    return [sum(token < prompt for token in new), sum(token >= prompt for token in new), len(again)]


def _back_from_a_preemption() -> None:
    trial = run(requests_of([(8, 12), (8, 12)]), ContinuousBatching(), PagedKVCache(6, 4), watch=_ledger())
    again = [m for step in trial.trace.steps for m in step.members if m.request_id == "b" and m.recomputed]
    idea = (
        "b is preempted with 12 tokens computed and one that is new: when it is back, it computes 12 again and 1 new."
    )
    trial.expect([[m.prefill, m.decode, m.recomputed] for m in again], [[0, 1, 12]], idea=idea, what="kinds")


def _in_little_memory(asked: Asked, budget: int) -> None:
    run(requests_of(asked), ChunkedPrefill(budget), PagedKVCache(5, 2), watch=_ledger())


def _ledger() -> Watch:
    """Follows how far each request has ever been computed."""
    marks: dict[str, int] = {}

    def watch(engine: Engine, report: StepReport) -> Iterator[Broken]:
        prompts = {timeline.request_id: timeline.num_prompt for timeline in engine.trace.timelines}
        for m in report.members:
            mark = marks.get(m.request_id, 0)
            want, got = _by_token(prompts[m.request_id], mark, m.start, m.stop), [m.prefill, m.decode, m.recomputed]
            if got != want:
                what = f"{', '.join(KINDS)} of {m.request_id}: "
                idea = "Each token is prefill or decode once, and recomputed after that."
                yield idea, f"{what}{want}", f"{what}{got}"
            marks[m.request_id] = max(mark, m.stop)

    return watch
