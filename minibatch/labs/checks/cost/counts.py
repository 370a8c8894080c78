"""What an iteration reads and computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minibatch import plot_style
from minibatch.chunked_prefill import ChunkedPrefill
from minibatch.clock import VirtualClock
from minibatch.continuous_batching import ContinuousBatching
from minibatch.cost_model import Counts
from minibatch.engine import Engine
from minibatch.kv_cache import ContiguousKVCache, KVCache
from minibatch.labs import facts
from minibatch.labs.checks.cost import planned
from minibatch.labs.counterexample import expect, in_words
from minibatch.labs.properties import for_all
from minibatch.labs.trial import request
from minibatch.models.toy_model import ToyModel
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.plan import Chunk, Plan, Scheduler
from minibatch.policies import Optimistic, Swap
from minibatch.prefix_cache import PrefixCachedKVCache
from minibatch.static_batching import StaticBatching
from minibatch.trace import StepReport

USUAL = {  # what is wrong if this count is, unless a case says it better
    "tokens": "All tokens of the plan go through the linear layers: those of chunks, of left pads and of dead rows.",
    "logits": "Through the head go one position of each chunk that reaches the newest token, and the dead rows.",
    "kv_read": "A chunk reads the K/V of every token that one of its queries sees, its own included, and each once.",
    "kv_written": "The K/V of every token of a chunk are written; those of padding are kept for nobody.",
    "attended": "The query at position i sees the i + 1 keys up to its own, or the last of them if there is a window.",
    "swapped": "The K/V of victims that swap go out, and those of waiting requests that have computed some come back.",
}
WINDOW = 6  # of runs


def check(part: type[Counts]) -> None:
    for plan, window, better in planned.by_hand():
        _counted(part, plan, window, **better)
    windows = st.none() | st.integers(1, 9)
    for_all(lambda plan, window: _counted(part, plan, window), plan=planned.ANY, window=windows)
    swapping = ContinuousBatching(4, 64, admission=Optimistic(), preemption=Swap())
    recomputing = ContinuousBatching(4, 64, admission=Optimistic())
    chunked = ChunkedPrefill(6, 4, admission=Optimistic())
    _of_a_run(part, "a static batch", StaticBatching(3), ContiguousKVCache(3, 24))
    _of_a_run(part, "continuous batching that recomputes", recomputing, PagedKVCache(7, 4))
    _of_a_run(part, "continuous batching that swaps", swapping, PagedKVCache(7, 4))
    _of_a_run(part, "chunks of 6 tokens with a prefix cache", chunked, PrefixCachedKVCache(7, 4))


def _counted(part: type[Counts], plan: Plan, window: int | None, **better: str) -> None:
    case, want = planned.in_words(plan, window), part(*_from_definition(plan, window))
    got = part.of(plan) if window is None else part.of(plan, window)
    compared = _compared(got, want, case, USUAL | better)
    facts.judge(compared, case, picture=lambda: _masks(plan, window, compared))
    again = part.of(plan, window)
    expect(again, want, case=f"{case}, asked twice", idea="To count is to look: it changes nothing.")


def _compared(got: Any, want: Counts, case: str, ideas: Mapping[str, str]) -> facts.Facts:
    idea = "Return a Counts, as cls(tokens, logits, kv_read, kv_written, attended, swapped) is."
    kind = "a Counts" if isinstance(got, Counts) else in_words(got)
    expect(kind, "a Counts", case=case, idea=idea)
    return [(name, getattr(got, name), getattr(want, name), ideas[name]) for name in Counts._fields]


# --- from the definitions: every query goes through the keys that it sees ---


def _from_definition(plan: Plan, window: int | None) -> tuple[int, ...]:
    spans = [(start, stop, stop == request.num_tokens) for request, start, stop in plan.chunks]
    out = [p.request.num_computed for p in plan.preemptions if p.swap]
    back = [a.request.num_computed for a in plan.admissions if a.cached == 0]
    return _sums(spans, [pad[1:] for pad in plan.padding], sum(out) + sum(back), window)


def _sums(
    spans: Sequence[tuple[int, int, bool]], pads: Sequence[tuple[int, bool]], swapped: int, window: int | None
) -> tuple[int, ...]:
    """``spans``: start, stop, whether it samples; ``pads``: tokens, whether they are dead."""
    tokens = logits = read = written = attended = 0
    for start, stop, samples in spans:
        seen = [_seen(position, window) for position in range(start, stop)]
        tokens, written, logits = tokens + len(seen), written + len(seen), logits + samples
        read += len(set().union(*seen))
        attended += sum(map(len, seen))
    for number, dead in pads:
        tokens, logits = tokens + number, logits + (number if dead else 0)
    return tokens, logits, read, written, attended, swapped


def _seen(position: int, window: int | None) -> range:
    """The keys that a query sees."""
    return range(0 if window is None else max(0, position + 1 - window), position + 1)


# --- of a run ---


def _of_a_run(part: type[Counts], name: str, scheduler: Scheduler, kv: KVCache) -> None:
    """The real engine: each plan is counted when it is made, and when it has been carried out."""
    before, after = [], []

    class Watching(type(scheduler)):
        def plan(self, *arguments: Any) -> Plan:
            plan = super().plan(*arguments)
            if plan.chunks:
                before.append(part.of(plan, WINDOW))
            return plan

    def duration(plan: Plan) -> float:
        after.append(part.of(plan, WINDOW))
        return 1.0

    settings = {field: getattr(scheduler, field) for field in scheduler.__dataclass_fields__}
    engine = Engine(ToyModel(), Watching(**settings), kv, clock=VirtualClock(duration))
    for n, label in enumerate("abcd"):
        asked = request([*range(8), *[10 + n, 20 + n][: n % 3]], 10 - 2 * n, float(n))
        engine.submit(replace(asked, request_id=label))
    while engine.step() is not None:
        pass
    for moment, found in (("when it is planned", before), ("after it was carried out", after)):
        case = f"four requests in {name}, with a window of {WINDOW}; {moment}"
        for report, got in zip(engine.trace.steps, found, strict=True):
            compared = _compared(got, part(*_reported(report)), case, USUAL)
            facts.judge(compared, case, report.index + 1, picture=engine.trace)


def _reported(step: StepReport) -> tuple[int, ...]:
    """The same from the record of what has happened."""
    spans = [(m.start, m.stop, m.emitted is not None) for m in step.members]
    swapped = sum(p.num_tokens for p in step.preempted if p.swapped) + sum(a.swapped_in for a in step.admitted)
    return _sums(spans, [(p.num_tokens, p.dead) for p in step.padding], swapped, WINDOW)


# --- the picture ---


def _masks(plan: Plan, window: int | None, compared: facts.Facts) -> Figure:
    """Of each chunk, which keys its queries see; beside them the counts."""
    shown = [one for one in plan.chunks if one.stop <= 16][:3]
    figure = plot_style.new_figure(2.8)
    widths = [*(max(one.stop, 4) for one in shown), 12]
    axes = figure.subplots(1, len(shown) + 1, width_ratios=widths, squeeze=False)[0]
    for ax, one in zip(axes, shown, strict=False):
        _mask(ax, one, window)
    facts.draw(axes[-1], compared)
    return figure


def _mask(ax: Axes, one: Chunk, window: int | None) -> None:
    request, start, stop = one
    seen = [[key in _seen(query, window) for key in range(stop)] for query in range(start, stop)]
    keys, queries = np.arange(stop + 1) - 0.5, np.arange(start, stop + 1) - 0.5
    ax.pcolormesh(keys, queries, seen, cmap="Greens", vmin=0, vmax=1.6, edgecolor="white", linewidth=1)
    ax.invert_yaxis()
    ax.set_aspect("equal")
    ax.set_xticks(range(0, stop, 1 + stop // 8))
    ax.set_yticks(range(start, stop))
    ax.tick_params(labelsize=plot_style.SMALL)
    ax.set_xlabel("key", fontsize=9)
    ax.set_ylabel("query", fontsize=9)
    ax.set_title(f"{request.label}: who sees whom", loc="left", fontsize=9)
