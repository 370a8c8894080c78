"""Pictures of a trace: who ran when, what filled the memory, what filled the iterations, who waited.

Every function draws into ``ax`` (a new figure of 800 pixels if None) and returns the axes; ``ax.figure`` is the
picture, :func:`save` writes it. :func:`compare_figures` puts several configurations above each other, one panel each,
with titles that say in numbers what is to be seen and a footer that says how the numbers came about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator, MaxNLocator, NullLocator, StrMethodFormatter

from minibatch import block_plot, curves_plot, membership_plot
from minibatch.accounting import memory, work
from minibatch.block_map import unit_name, unit_size
from minibatch.latency_plot import PANELS, draw_latency
from minibatch.metrics import steps_table
from minibatch.plot_style import (
    BUDGET,
    MEMORY,
    RC,
    SMALL,
    TOKENS,
    Look,
    footer,
    legend,
    name_of,
    new_axes,
    nothing,
    save,
    sign,
    tidy,
)
from minibatch.trace import Trace, counted

__all__ = ["blocks", "compare_figures", "curves", "kv_memory", "latencies", "membership", "save", "token_budget"]

Limits = tuple[float, float]  # of the x axis
BOTTOM_UP = ("decode", "dead_padding", "recompute", "prefill", "left_padding")  # how an iteration's tokens are stacked
LINEAR = 16  # tokens up to which their scale is linear
LOG_TICKS = (0, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def membership(trace: Trace, ax: Axes | None = None, rows: str = "requests") -> Axes:
    """Who takes part in which iteration, coloured by phase; waiting as a line, dead rows and left pads hatched.

    ``rows``  ``"requests"``: a row a request, in order of arrival; ``"units"``: a row a place in the batch
    """
    places = max((len(step.kv.holdings) for step in trace.steps), default=0)
    count = places if rows == "units" else len(trace.timelines)
    return _single(trace, ax, min(max(1.6 + 0.2 * count, 2.0), 10), lambda *args: _membership(*args, rows=rows))


def kv_memory(trace: Trace, ax: Axes | None = None) -> Axes:
    """Where the rows of the KV cache are in each iteration, after its forward: shares of the capacity, stacked."""
    return _single(trace, ax, 3.0, _kv_memory)


def token_budget(trace: Trace, ax: Axes | None = None) -> Axes:
    """Tokens that each iteration executes, stacked by kind, and the budget line where the scheduler sets one.

    What every iteration has (decodes, dead rows) stands at the bottom, where the scale is linear; what comes in bursts
    (prompts and their padding) on top of it. Above ``LINEAR`` tokens the scale is logarithmic.
    """
    return _single(trace, ax, 3.0, _token_budget)


def blocks(trace: Trace, ax: Axes | None = None) -> Axes:
    """Who has which physical block (or slot) in which iteration, after its forward, and how far it is filled."""
    count = trace.steps[-1].kv.capacity // max(unit_size(trace), 1) if trace.steps else 0
    return _single(trace, ax, min(max(1.6 + 0.2 * count, 2.0), 10), _blocks)


def curves(
    table: pd.DataFrame,
    x: str,
    y: str,
    by: str | Sequence[str] = (),
    ax: Axes | None = None,
    *,
    kind: str = "simulated",
) -> Axes:
    """Lines of a tidy table, one for each value of the column(s) ``by``; several rows of a point: mean and range.

    ``kind``  what the numbers are, ``simulated`` or ``measured``: it stands in the title
    """
    with mpl.rc_context(RC):
        ax = new_axes(3.4) if ax is None else ax
        names = [by] if isinstance(by, str) else list(by)
        tidy(ax, f"{y} by {x} ({kind})", x, y)
        ax.xaxis.set_major_locator(AutoLocator())
        curves_plot.draw(ax, table, x, y, names)
        ax.grid(color="#E6E6E6", linewidth=0.6)
        ax.set_axisbelow(True)
        if names and len(table):
            ax.legend(title=", ".join(names), fontsize=SMALL, title_fontsize=SMALL, frameon=False)
    return ax


def latencies(traces: Trace | Mapping[str, Trace], ax: np.ndarray | None = None) -> np.ndarray:
    """Who waits: every completed request (every gap, for TBT) a dot, with P50 and P99, a row a configuration.

    ``ax``  four axes, for queueing delay, TTFT, TBT and end-to-end latency; returns them as an array ``[4]``
    """
    traces = {name_of(traces): traces} if isinstance(traces, Trace) else traces
    with mpl.rc_context(RC):
        axes = new_axes(1.8 + 0.8 * len(traces), 2, 2, sharey=True) if ax is None else ax
        axes = np.asarray(axes).reshape(-1)
        for panel, (measure, title) in zip(axes, PANELS.items(), strict=True):
            draw_latency(panel, traces, measure, title)
        if ax is None:
            sign(axes[0].figure, footer(traces.values()))
    return axes


def compare_figures(traces: Mapping[str, Trace]) -> dict[str, Figure]:
    """Figures ``membership``, ``kv_memory``, ``token_budget`` (a panel a configuration) and ``latency``."""
    requests = max((len(trace.timelines) for trace in traces.values()), default=1)
    figures = {
        "membership": _panels(traces, min(max(0.9 + 0.08 * requests, 1.3), 3.2), _membership),
        "kv_memory": _panels(traces, 1.7, _kv_memory),
        "token_budget": _panels(traces, 1.7, _token_budget),
        "latency": latencies(traces)[0].figure,
    }
    for figure in figures.values():
        sign(figure, footer(traces.values()))
    return figures


def _single(trace: Trace, ax: Axes | None, height: float, draw: Callable[[Axes, Trace, str, Limits], None]) -> Axes:
    with mpl.rc_context(RC):
        fresh, ax = ax is None, new_axes(height) if ax is None else ax
        draw(ax, trace, name_of(trace), _limits([trace]))
        if ax.get_legend() is None:
            legend(ax, [ax])
        if fresh:  # a figure of the caller's is the caller's to sign
            sign(ax.figure, footer([trace]))
    return ax


def _panels(traces: Mapping[str, Trace], height: float, draw: Callable[[Axes, Trace, str, Limits], None]) -> Figure:
    """One panel a configuration over a shared x axis; one legend, for all of them, under the last."""
    with mpl.rc_context(RC):
        rows = max(len(traces), 1)
        axes = new_axes(1.0 + height * rows, rows, sharex=True, squeeze=False)[:, 0]
        limits = _limits(traces.values())
        for ax, (name, trace) in zip(axes, traces.items(), strict=False):
            draw(ax, trace, name, limits)
            ax.label_outer()
        legend(axes[-1], axes)
    return axes[0].figure


def _limits(traces: Iterable[Trace]) -> Limits:
    """The x axis that shows every iteration of all of them."""
    indices = [step.index for trace in traces for step in (*trace.steps[:1], *trace.steps[-1:])]
    return min(indices, default=0) - 0.5, max(indices, default=0) + 0.5


def _blocks(ax: Axes, trace: Trace, name: str, limits: Limits) -> None:
    unit, size = unit_name(trace), unit_size(trace)
    every = block_plot.spans(trace, size) if size else []
    says = f"{unit}s of {counted(size, 'token')}, {block_plot.held_share(every, size):.0%} of what is held is filled"
    _tidy(ax, trace, name, says + _preemptions(trace), f"physical {unit}")
    if trace.steps:
        ax.set_xlim(limits)
        ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, min_n_ticks=1))
        legend(ax, [], block_plot.draw(ax, trace, every, size))


def _membership(ax: Axes, trace: Trace, name: str, limits: Limits, rows: str = "requests") -> None:
    done = work(trace)
    says = f"{counted(len(trace.steps), 'iteration')}, {done.useful_rows} of {done.executed_rows} row-iterations useful"
    swapped = sum(step.swapped_out for step in trace.steps)
    kinds = {"recomputed": done.recomputed, "cached": _cached(trace), "swapped": swapped}
    tokens = [f"{number:,} {kind}" for kind, number in kinds.items() if number]
    says += f", tokens: {', '.join(tokens)}" if tokens else ""
    _tidy(ax, trace, name, says + _preemptions(trace), "request" if rows == "requests" else "place in the batch")
    if trace.steps:
        membership_plot.draw(ax, trace, limits, rows)


def _kv_memory(ax: Axes, trace: Trace, name: str, limits: Limits) -> None:
    used = memory(trace)
    says = f"{used.mean_filled:.0%} filled on average, at most {used.peak_filled:.0%}"
    on_host = max((step.kv.host for step in trace.steps), default=0)
    says += f", up to {on_host:,} more rows on the host" if on_host else ""
    _tidy(ax, trace, name, says + _preemptions(trace), "% of KV cache")
    if trace.steps:
        steps = steps_table(trace)
        shares = {part: 100 * (steps[f"kv_{part}"] / steps["kv_capacity"]).to_numpy() for part in MEMORY}
        _stack(ax, steps["index"].to_numpy(), shares, MEMORY)
        ax.set_xlim(limits)
        _capacity(ax, int(used.capacity))


def _capacity(ax: Axes, rows: int) -> None:
    """The line at 100 %, and a second scale in rows."""
    ax.axhline(100, color="black", linewidth=1.2)
    ax.set_ylim(0, 104)
    second = ax.secondary_yaxis("right", functions=(lambda share: share / 100 * rows, lambda row: row * 100 / rows))
    second.set_ylabel("rows (tokens)", fontsize=9)
    second.tick_params(labelsize=SMALL)
    second.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))


def _token_budget(ax: Axes, trace: Trace, name: str, limits: Limits) -> None:
    done = work(trace)
    says = f"{done.executed:,} tokens executed, {done.useful_share:.0%} useful"
    says += f", {_cached(trace):,} cached" if _cached(trace) else ""
    _tidy(ax, trace, name, says + _preemptions(trace), "tokens")
    if trace.steps:
        steps = steps_table(trace)
        left = steps["padding"] - steps["dead_padding"]
        columns = (steps["prefill"], steps["decode"], steps["recomputed"], left, steps["dead_padding"])
        heights = {kind: column.to_numpy() for kind, column in zip(TOKENS, columns, strict=True)}
        _stack(ax, steps["index"].to_numpy(), heights, {kind: TOKENS[kind] for kind in BOTTOM_UP})
        ax.set_xlim(limits)
        if steps["num_tokens"].max() > 4 * LINEAR:
            ax.set_yscale("symlog", linthresh=LINEAR, linscale=1.2)
            highest = np.fmax(steps["num_tokens"].max(), np.fmax.reduce(steps["token_budget"].to_numpy()))
            ticks = [tick for tick in LOG_TICKS if tick <= 1.6 * highest]
            ax.set_yticks(ticks if len(ticks) <= 12 else [*ticks[:3], *ticks[3::2]])  # room for each
            ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
            ax.yaxis.set_minor_locator(NullLocator())
            ax.set_ylabel(f"tokens (log above {LINEAR})")
        else:
            ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        _budget(ax, steps["index"].to_numpy(), steps["token_budget"].to_numpy(), int(steps["num_tokens"].max()))


def _budget(ax: Axes, index: np.ndarray, budget: np.ndarray, most: int) -> None:
    """The budget's line, if there is one; where it would flatten all below it, only a word about how far up it is."""
    low, high = np.fmin.reduce(budget), np.fmax.reduce(budget)
    if low > 2 * most and ax.get_yscale() == "linear":
        text = f"budget {low:,.0f} is off the scale"
        ax.text(1, 0.98, text, transform=ax.transAxes, ha="right", va="top", fontsize=SMALL)
    elif high > 0:
        label, style = BUDGET
        ax.step(_edges(index), np.append(budget, budget[-1]), where="post", label=label, **style)
        most = max(most, high)
    ax.set_ylim(0, 1.12 * most if ax.get_yscale() == "linear" else 1.6 * most)


def _stack(ax: Axes, index: np.ndarray, heights: Mapping[str, np.ndarray], looks: Mapping[str, Look]) -> None:
    """Steps of width 1 centred on the iterations, one artist a kind; kinds that never occur are left out."""
    base = np.zeros(len(index))
    for kind, look in looks.items():
        top = base + heights[kind]
        if heights[kind].any():
            ax.stairs(top, _edges(index), baseline=base, fill=True, label=look.label, **look.patch)
        base = top


def _edges(index: np.ndarray) -> np.ndarray:
    return np.append(index, index[-1] + 1) - 0.5


def _tidy(ax: Axes, trace: Trace, name: str, says: str, ylabel: str) -> None:
    says = says if trace.steps else ""
    tidy(ax, ": ".join(part for part in (name, says) if part), "iteration", ylabel)
    if not trace.steps:
        nothing(ax, trace)


def _cached(trace: Trace) -> int:
    """Tokens that did not have to be computed, because a prefix cache had them."""
    return sum(step.cached for step in trace.steps)


def _preemptions(trace: Trace) -> str:
    number = sum(timeline.num_preemptions for timeline in trace.timelines)
    return f", {counted(number, 'preemption')}" if number else ""
