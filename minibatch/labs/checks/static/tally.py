"""Checks of static.3: useful rows and wasted ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from minibatch import accounting
from minibatch.continuous_batching import ContinuousBatching
from minibatch.kv_cache import KVSnapshot
from minibatch.labs.checks.static.batches import SIZES, run_static
from minibatch.labs.facts import judge
from minibatch.labs.properties import for_all
from minibatch.labs.trial import Trial, requests_of, run
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.trace import Member, PadRow, StepReport

Counts = dict[str, dict[str, int]]
Add = Callable[[StepReport, Counts], None]
Computed = tuple[str, int, int, int]  # a request, and its tokens that are prefill, decode, recomputed
Pads = tuple[str, int, bool]  # a request, its tokens of padding, and whether they are dead
KINDS = ("prefill", "decode", "recomputed")
COLUMNS = (*KINDS, "left_padding", "dead_padding", "useful_rows", "executed_rows")
ABSENT = "Who was not in this iteration has the same counts as before."


def check(part: Add) -> None:
    _by_hand(part)
    idea = "Each iteration is added to the counts."
    steps = st.lists(_steps(), min_size=1, max_size=3)
    for_all(lambda steps: _tallied(part, idea, *(_iteration(*step) for step in steps)), steps=steps)
    for_all(lambda sizes: _tallied_run(run_static(requests_of(sizes), 3)), examples=10, sizes=SIZES)
    for_all(lambda sizes: _tallied_run(_run_short_of_memory(sizes)), examples=10, sizes=SIZES)


def _iteration(computed: Sequence[Computed] = (), pads: Sequence[Pads] = ()) -> StepReport:
    members = tuple(Member(name, 0, sum(kinds), *kinds, None) for name, *kinds in computed)
    kv = KVSnapshot(64, 0, 0, 0, 64, ())
    return StepReport(0, 0.0, 1.0, members, tuple(PadRow(*pad) for pad in pads), (), (), (), (), (), 0, "", None, kv)


def _by_hand(part: Add) -> None:
    decodes = ("b", 0, 1, 0)
    idea = "useful_rows counts rows: one that computes something new counts once, for one token as for three."
    _tallied(part, idea, _iteration([("a", 3, 0, 0), decodes]))
    idea = "Left pads stand in the row of their prompt: the request has one row in the iteration, not two."
    _tallied(part, idea, _iteration([("a", 2, 0, 0), ("b", 5, 0, 0)], [("a", 3, False)]))
    idea = "A dead row was executed as any other, and is useful to nobody: it counts in executed_rows alone."
    _tallied(part, idea, _iteration([decodes], [("a", 1, True)]))
    idea = "A row that only computes again what it had computed before does not move its request forward: not useful."
    _tallied(part, idea, _iteration([("a", 0, 0, 5), decodes]))
    idea = "A row is useful if at least one of its tokens is computed for the first time."
    _tallied(part, idea, _iteration([("a", 0, 1, 5)]))
    _tallied(part, idea, _iteration([("a", 2, 0, 2)]))
    idea = "What the table has from the iterations before is kept: this one is added."
    _tallied(part, idea, *[_iteration([("a", 0, 1, 0)], [("b", 1, True)])] * 2)
    _tallied(part, ABSENT, _iteration([("a", 0, 1, 0)]), _iteration([("b", 4, 0, 0)]))
    _tallied(part, ABSENT, _iteration([decodes]), _iteration())


def _steps() -> st.SearchStrategy:
    """Iterations in which a request computes, with left pads or without, or has a dead row, or is not there."""
    few = st.integers(0, 3)
    computes = st.tuples(few, few, few, few).filter(lambda row: sum(row[:3]) > 0)
    row = st.one_of(st.none(), st.integers(1, 2), computes)

    def as_step(rows: tuple[Any, ...]) -> tuple[list[Computed], list[Pads]]:
        named = [(name, row) for name, row in zip("abc", rows, strict=True) if row is not None]
        computed = [(name, *row[:3]) for name, row in named if isinstance(row, tuple)]
        pads = [(name, row[3], False) for name, row in named if isinstance(row, tuple) and row[3]]
        return computed, pads + [(name, row, True) for name, row in named if isinstance(row, int)]

    return st.tuples(row, row, row).map(as_step)


def _tallied(part: Add, idea: str, *steps: StepReport) -> None:
    table = {name: dict.fromkeys(COLUMNS, 0) for name in "abc"}
    for step in steps:
        part(step, table)
    want = {name: _count(steps, name) for name in "abc"}
    cells = [(name, column) for name in want for column in COLUMNS]
    facts = [(f"{n}: {c}", table.get(n, {}).get(c, "missing"), want[n][c]) for n, c in cells]
    wrong = [cell for cell, (_, got, right) in zip(cells, facts, strict=True) if got != right]
    more = [f"{name}: {column}" for name in table for column in table[name] if (name, column) not in cells]
    shown = [fact for fact in facts if fact[0][0] in {name for name, _ in wrong}]
    shown.append(("others", more, []))
    case, idea = "; then ".join(map(_in_words, steps)), _idea(table, wrong, steps, idea)
    judge([(*fact, idea) for fact in shown], case)


def _count(steps: Sequence[StepReport], name: str) -> dict[str, int]:
    """One request's counts, one after the other."""
    mine = [m for step in steps for m in step.members if m.request_id == name]
    pads = [p for step in steps for p in step.padding if p.request_id == name]
    return {
        **{kind: sum(getattr(m, kind) for m in mine) for kind in KINDS},
        "left_padding": sum(p.num_tokens for p in pads if not p.dead),
        "dead_padding": sum(p.num_tokens for p in pads if p.dead),
        "useful_rows": sum(m.prefill > 0 or m.decode > 0 for m in mine),
        "executed_rows": sum(name in _there(step) for step in steps),
    }


def _there(step: StepReport) -> set[str]:
    return {row.request_id for row in (*step.members, *step.padding)}


def _idea(got: Counts, wrong: Sequence[tuple[str, str]], steps: Sequence[StepReport], idea: str) -> str:
    """What such a table has got wrong, in general or in this case."""
    if not wrong:
        return "The table keeps its requests and columns: no others are added."
    if not any(sum(row.values()) for row in got.values()):
        return "The counts are to be added to the table that is given; what is returned nobody reads."
    if any(name not in set().union(*map(_there, steps)) for name, _ in wrong):
        return ABSENT
    if len(steps) == 1 and any("padding" in column for _, column in wrong):
        return "Tokens of padding are of two kinds, and counted apart: left pads of a prompt, and dead rows."
    if len(steps) == 1 and any(column in KINDS for _, column in wrong):
        return "Every token counts once, as what it is: prefill, decode or recomputed."
    return idea


def _in_words(step: StepReport) -> str:
    said = []
    for m in step.members:
        kinds = [f"{getattr(m, kind)} {kind}" for kind in KINDS if getattr(m, kind)]
        said.append(f"{m.request_id} computes {' and '.join(kinds)}")
    said += [f"{p.request_id} has {p.num_tokens} {'dead' if p.dead else 'left pads'}" for p in step.padding]
    return "an iteration: " + (", ".join(said) or "of nobody")


def _run_short_of_memory(sizes: list[tuple[int, int]]) -> Trial:
    return run(requests_of(sizes), ContinuousBatching(), PagedKVCache(5, 2))


def _tallied_run(trial: Trial) -> None:
    """Each token of a prompt is prefill once, each other one that is fed back decode once."""
    table = accounting.work_table(trial.trace)
    for timeline in trial.trace.timelines:
        label, row = timeline.request_id, table.loc[timeline.request_id]
        want = [timeline.num_prompt, len(timeline.token_times) - 1]
        idea = "A prompt is prefill once, and a generated token decode once, but for the last, which is never fed back."
        trial.expect([int(row.prefill), int(row.decode)], want, idea=idea, what=f"prefill and decode of {label}")
        there = sum(label in _there(step) for step in trial.trace.steps)
        trial.expect(int(row.executed_rows), there, idea="A row an iteration.", what=f"executed rows of {label}")
