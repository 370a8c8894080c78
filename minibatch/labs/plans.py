"""For checks of plans: a plan in words, against another one, and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minibatch import plot_style
from minibatch.kv_cache import KVCache
from minibatch.labs.counterexample import CounterExample, expect
from minibatch.plan import Admission, Chunk, Padding, Plan
from minibatch.policies.queueing import Order
from minibatch.request import RequestState
from minibatch.trace import counted

Runs = list[tuple[str, list[str]]]  # tokens of one row: their kind (of plot_style.TOKENS), and a label for each
Rows = dict[str, Runs]  # by request


# ---------------------------------------------------------------- against another plan


def expect_plan(
    got: Any,
    want: Plan,
    *,
    case: str,
    idea: str | Callable[[Plan], str],
    who: Iterable[RequestState] = (),
    rows: bool = False,
    picture: Callable[[], Figure] | None = None,
) -> None:
    """Raises a CounterExample unless both compute the same for the same requests, and let the same ones join.

    ``idea`` may depend on the plan that came out. ``who`` is in the picture in any case. ``rows``: it also matters how
    many rows are set aside for whom. The order of chunks does not matter, nor what is said to those who go without.
    """
    _expect_kinds(got, case)
    if _facts(got, rows) == _facts(want, rows):
        return
    raise CounterExample(
        idea if isinstance(idea, str) else idea(got),
        case=case,
        expected=in_words(want, rows),
        happened=in_words(got, rows),
        picture=picture or (lambda: side_by_side(want, got, who)),
    )


def _expect_kinds(plan: Any, case: str) -> None:
    expect(type(plan).__name__, "Plan", case=case, idea="What comes out has to be a Plan.", what="type of the result")
    for name, kind in (("chunks", Chunk), ("padding", Padding), ("admissions", Admission)):
        values, right = getattr(plan, name), f"a tuple of {kind.__name__} objects"
        said = values if isinstance(values, (tuple, list)) else type(values).__name__
        if isinstance(values, (tuple, list)) and all(isinstance(value, kind) for value in values):
            said = right
        expect(said, right, case=case, idea=f"A plan's {name} are {right}.", what=name)


def _facts(plan: Plan, rows: bool) -> Any:
    if not plan.chunks:  # then nothing else of it is carried out
        return plan.wake_at
    joins = sorted((a.request.label, a.reserve if rows else 0) for a in plan.admissions)
    chunks = sorted((c.request.label, c.start, c.stop) for c in plan.chunks)
    pads = sorted((p.request.label, p.num_tokens, p.dead) for p in plan.padding)
    return joins, chunks, pads, sorted(p.request.label for p in plan.preemptions)


def in_words(plan: Plan, rows: bool = False) -> str:
    """What each request does: ``a: 2 left pads, tokens 0:3, joins; b: tokens 4:5``."""
    if not plan.chunks:
        return "nobody computes" + ("" if plan.wake_at is None else f", until t = {plan.wake_at:g}")
    said: dict[str, list[str]] = {}
    for pad in plan.padding:
        kind = "dead" if pad.dead else "left"
        said.setdefault(pad.request.label, []).append(f"{pad.num_tokens} {kind} pad{'s' * (pad.num_tokens != 1)}")
    for request, start, stop in plan.chunks:
        beyond = f" (it has {counted(request.num_tokens, 'token')})" if stop > request.num_tokens else ""
        said.setdefault(request.label, []).append(f"tokens {start}:{stop}{beyond}")
    for change in plan.preemptions:
        said.setdefault(change.request.label, []).append(f"preempted by {change.by.label}")
    for admission in plan.admissions:
        said.setdefault(admission.request.label, []).append(
            f"joins with {counted(admission.reserve, 'row')}" if rows else "joins"
        )
    return "; ".join(f"{name}: {', '.join(what)}" for name, what in sorted(said.items()))


# ---------------------------------------------------------------- planning changes nothing


def planned(make: Callable[[], Plan], queue: Order, active: Sequence[RequestState], kv: KVCache, case: str) -> Plan:
    """What ``make`` plans; raises a CounterExample if that changes something, or a second time gives something else."""
    idea = "Planning changes nothing: the engine carries the plan out, and may ask for it again."
    known = [*queue, *active]
    before = _books(queue, active, kv, known)
    plan = make()
    _expect_kinds(plan, case)
    after = _books(queue, active, kv, known)
    changed = [name for name in before if before[name] != after[name]]
    said = [{name: books[name] for name in changed} for books in (after, before)]
    expect(*said, case=f"{case}; then a plan is made", idea=idea, what="afterwards")
    expect_plan(make(), plan, case=f"{case}; two plans are made", idea=idea, who=known)
    return plan


def _books(queue: Order, active: Sequence[RequestState], kv: KVCache, known: list[RequestState]) -> dict[str, str]:
    books = {
        "waiting": _names(queue),
        "active": _names(active),
        f"free {kv.unit_name}s": str(kv.num_free),
    }
    for one in known:
        for name in ("status", "num_computed", "num_tokens", "room", "last_scheduled"):
            value = getattr(one, name)
            books[f"{one.label} {name}"] = str(getattr(value, "value", value))
    return books


def _names(requests: Iterable[RequestState]) -> str:
    return " ".join(request.label for request in requests) or "nobody"


def _of_whom(requests: Iterable[RequestState]) -> str:
    return ", ".join(r.label + (f" of {r.client}" if r.client != "default" else "") for r in requests) or "nobody"


def twice(scheduler: type) -> type:
    """The same scheduler, which makes every plan twice and sees that this changes nothing."""

    def plan(self: Any, queue: Order, active: Sequence[RequestState], kv: KVCache, now: float) -> Plan:
        case = f"in a run, t = {now:g}: {_of_whom(active)} active, {_of_whom(queue)} waiting"
        return planned(lambda: scheduler.plan(self, queue, active, kv, now), queue, active, kv, case)

    return type(scheduler.__name__, (scheduler,), {"plan": plan})


# ---------------------------------------------------------------- pictures


def side_by_side(want: Plan, got: Plan, who: Iterable[RequestState] = ()) -> Figure:
    """Two plans: a row a request, a cell a token that it computes."""
    named = {one.label: f"{one.label}, {one.status.value}" for one in who}
    wanted, found = rows_of(want), rows_of(got)
    names = sorted({*named, *wanted, *found})
    figure = plot_style.new_figure(1.7 + 0.34 * max(len(names), 2))
    width = max([1, *(sum(len(cells) for _, cells in runs) for rows in (wanted, found) for runs in rows.values())])
    for ax, plan, rows, title in zip(
        figure.subplots(1, 2), (want, got), (wanted, found), ("expected", "happened"), strict=True
    ):
        draw_rows(ax, rows, names, width, title)
        ax.set_yticks(range(len(names)), [named.get(name, name) for name in names])
        for change in plan.preemptions:
            ax.text(0.1, names.index(change.request.label), "preempted", va="center", style="italic")
        if not rows:
            ax.text(0.5, 0.5, _nothing(plan), transform=ax.transAxes, ha="center", va="center", style="italic")
    explain_kinds(figure, [wanted, found], [key("white", "number: the token's place in its request")])
    return figure


def _nothing(plan: Plan) -> str:
    """What to write where nothing is computed."""
    return "nobody computes" + ("" if plan.wake_at is None else f"\nuntil t = {plan.wake_at:g}")


def rows_of(plan: Plan) -> Rows:
    rows: Rows = {}
    if not plan.chunks:
        return rows
    for pad in plan.padding:
        kind = "dead_padding" if pad.dead else "left_padding"
        rows.setdefault(pad.request.label, []).append((kind, [""] * pad.num_tokens))
    for request, start, stop in plan.chunks:
        for kind, low, high in (("prefill", 0, request.num_prompt), ("decode", request.num_prompt, stop)):
            numbers = [str(i) for i in range(max(low, start), min(high, stop))]
            rows.setdefault(request.label, []).append((kind, numbers))
    return rows


def draw_rows(ax: Axes, rows: Mapping[str, Runs], names: Sequence[str], width: int, title: str) -> None:
    """A line a name, with the cells of its row from the left."""
    for y, name in enumerate(names):
        draw_runs(ax, rows.get(name, []), y, 0, width)
    ax.set_xlim(0, max(width, 8))
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_yticks(range(len(names)), names)
    ax.set_xticks([])
    ax.tick_params(length=0)
    for side in ("top", "right", "bottom"):
        ax.spines[side].set_visible(False)
    ax.set_title(title, loc="left", fontsize=10)


def draw_runs(ax: Axes, runs: Runs, y: float, x: float, width: int) -> None:
    """Cells at this height from ``x`` on; small letters if there is a ``width`` of many."""
    for kind, cells in runs:
        if not cells and "padding" in kind:  # it would not be seen
            ax.text(width + 0.2, y, "and a pad of 0", va="center", fontsize=8, style="italic")
        for cell in cells:
            ink = "white" if kind == "prefill" else "black"
            draw_cell(ax, x, y, cell, plot_style.TOKENS[kind].patch, ink, 8 if width <= 16 else 6)
            x += 1


def draw_cell(
    ax: Axes, x: float, y: float, said: str, look: dict[str, Any], ink: str = "black", size: float = 8
) -> None:
    ax.add_patch(Rectangle((x + 0.04, y - 0.38), 0.92, 0.76, **look))
    ax.text(x + 0.5, y, said, ha="center", va="center", fontsize=size, color=ink)


def key(color: str, said: str) -> Patch:
    return Patch(facecolor=color, edgecolor="#777777", linewidth=0.5, label=said)


def explain_kinds(figure: Figure, shown: Iterable[Mapping[str, Runs]], more: Iterable[Patch] = ()) -> None:
    """A legend of the kinds of tokens that are drawn, and of what else there is."""
    kinds = {kind for rows in shown for runs in rows.values() for kind, cells in runs if cells}
    looks = [look for kind, look in plot_style.TOKENS.items() if kind in kinds]
    keys = [*(Patch(**{**look.patch, "linewidth": 0.5}, label=look.label) for look in looks), *more]
    figure.legend(handles=keys, loc="outside lower left", ncols=len(keys), frameon=False, fontsize=plot_style.SMALL)
