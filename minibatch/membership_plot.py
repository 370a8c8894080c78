"""Batch membership, the picture of the thesis: who executes in which iteration.

A static batch is a rectangle that stays shut until its longest row ends. Under continuous batching the rows come and
go. :func:`read` turns a trace into spans of equal cells (one rectangle each, however many iterations it covers, so that
60 requests over 600 iterations stay a few hundred shapes); :func:`draw` paints them, one artist a kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.patheffects import withStroke

from minibatch.batch_map import follow_queue, seat
from minibatch.plot_style import FOUND, LINES, MARKS, RESIDENT, TOKENS
from minibatch.trace import StepReport, Trace

FEW = 48  # iterations that are still drawn as single cells, with the number of tokens in those of more than one
CELL, THIN = 0.4, 0.12  # half heights, of a row's 1
LOOKS = {**TOKENS, "resident": RESIDENT, "found": FOUND}
Places = Callable[[StepReport], dict[str, int]]


@dataclass
class Cells:
    """What to draw. Iteration ``i`` spans ``[i - 0.5, i + 0.5]``, row ``r`` is at height ``r``.

    ``spans``   kind -> [row, left, right]; the kinds of ``LOOKS`` and ``LINES``
    ``marks``   kind -> (x, row); the kinds of ``MARKS``
    ``counts``  (left, right, row, tokens, kind) of the cells that stand for more than one token
    ``stays``   [request id, row, left, right]: its unbroken presence there
    """

    spans: dict[str, list[list[float]]] = field(default_factory=lambda: defaultdict(list))
    marks: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    counts: list[tuple[float, float, int, int, str]] = field(default_factory=list)
    stays: list[list] = field(default_factory=list)
    _last: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    _stay: dict[str, list] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        spans = (row for spans in self.spans.values() for row, _, _ in spans)
        return 1 + int(max([*spans, *(row for marks in self.marks.values() for _, row in marks)], default=0))

    def add(self, kind: str, row: int, left: float, right: float) -> None:
        """A new span, or the last one of this kind in this row made longer, if they touch."""
        last = self._last.get((kind, row))
        if last is not None and last[2] == left:
            last[2] = right
        else:
            self._last[kind, row] = [row, left, right]
            self.spans[kind].append(self._last[kind, row])

    def stay(self, request_id: str, row: int, left: float, right: float) -> None:
        stay = self._stay.get(request_id)
        if stay is not None and stay[1] == row and stay[3] >= left:
            stay[3] = right
        else:
            self._stay[request_id] = [request_id, row, left, right]
            self.stays.append(self._stay[request_id])

    def mark(self, kind: str, x: float, row: int | None) -> None:
        if row is not None:
            self.marks[kind].append((x, row))


def read(trace: Trace, rows: str = "requests") -> Cells:
    """``rows="requests"``: one row a request, in order of arrival, with its waiting.
    ``rows="units"``: one row a place in the batch, and who has it when; those who wait have none.
    """
    if rows not in ("requests", "units"):
        raise ValueError(f"rows must be 'requests' or 'units', got {rows!r}")
    places = _positions() if rows == "units" else _arrival_order(trace)
    cells = Cells()
    absent: dict[str, str] = {}  # who is in the queue, and why
    for step in trace.steps:
        _read_step(step, places(step), absent, cells)
    if rows == "units":
        cells.marks.pop("arrived", None)  # it has a place only if it did not have to wait for one
    return cells


def _read_step(step: StepReport, place: dict[str, int], absent: dict[str, str], cells: Cells) -> None:
    left, right = step.index - 0.5, step.index + 0.5
    executed = {row.request_id for row in (*step.members, *step.padding)}
    forked = {fork.request_id for fork in step.forked}
    for request_id in step.arrived:
        cells.mark("arrived", left, place.get(request_id))
    for request_id in forked:
        cells.mark("forked", right, place.get(request_id))
    for request_id, reason in step.finished:
        at = right if request_id in executed | forked else left  # others ended before the iteration began
        kind = "finished" if reason in ("stop", "length") else "ended"
        cells.mark(kind, at, place.get(request_id))
    follow_queue(absent, step)
    for kind, request_id, start, stop, tokens in _cells_of(step, executed | forked):
        cells.add(kind, place[request_id], start, stop)
        cells.stay(request_id, place[request_id], left, right)
        if tokens > 1 and kind != "left_padding":
            cells.counts.append((start, stop, place[request_id], tokens, kind))
    for request_id, kind in absent.items():
        if request_id in place:
            cells.add(kind, place[request_id], left, right)


def _cells_of(step: StepReport, executed: set[str]) -> Iterator[tuple[str, str, float, float, int]]:
    """(kind, request id, left, right, tokens). Left pads, and tokens that a prefix cache had, take their share of the
    cell of those that are computed."""
    left, right = step.index - 0.5, step.index + 0.5
    pads = {pad.request_id: pad.num_tokens for pad in step.padding if not pad.dead}
    found = {admitted.request_id: admitted.cached for admitted in step.admitted}
    for member in step.members:
        name, done = member.request_id, 0
        parts = {"left_padding": pads.get(name, 0), "found": found.get(name, 0)}
        parts[member.phase] = member.stop - member.start
        whole = sum(parts.values())
        for kind, tokens in parts.items():
            if tokens:
                yield kind, name, left + done / whole, left + (done + tokens) / whole, tokens
                done += tokens
    for pad in step.padding:
        if pad.dead:
            yield "dead_padding", pad.request_id, left, right, 0
    for holding in step.kv.holdings:
        if holding.units and holding.request_id not in executed:
            yield "resident", holding.request_id, left, right, 0


def _arrival_order(trace: Trace) -> Places:
    """Rows for the requests that the steps speak of: those refused at the door never took part."""
    seen = {name for step in trace.steps for name in _names(step)}
    order = sorted((t for t in trace.timelines if t.request_id in seen), key=lambda t: t.arrival)
    place = {timeline.request_id: row for row, timeline in enumerate(order)}
    return lambda step: place


def _positions() -> Places:
    """Places in the batch: who joins takes the lowest one that is free, and keeps it until it gives up its memory."""
    place: dict[str, int] = {}

    def places(step: StepReport) -> dict[str, int]:
        nonlocal place
        place = seat(place, (row.request_id for row in (*step.members, *step.padding, *step.kv.holdings)))
        return place

    return places


def _names(step: StepReport) -> Iterator[str]:
    yield from step.arrived
    for row in (*step.members, *step.padding, *step.kv.holdings):
        yield row.request_id
    for name, _ in step.finished:
        yield name


def draw(ax: Axes, trace: Trace, limits: tuple[float, float], rows: str = "requests") -> None:
    """Paints the cells between the ``limits`` of the x axis, and labels the rows; the first to arrive is on top."""
    cells = read(trace, rows)
    for kind, look in LOOKS.items():
        if cells.spans[kind]:
            rectangles = [_rectangle(span, THIN if kind == "resident" else CELL) for span in cells.spans[kind]]
            ax.add_collection(PolyCollection(rectangles, label=look.label, zorder=2, **look.patch))
    for kind, (label, style) in LINES.items():
        if cells.spans[kind]:
            strokes = [[(left, row), (right, row)] for row, left, right in cells.spans[kind]]
            ax.add_collection(LineCollection(strokes, label=label, zorder=4, **_plural(style)))
    num_steps = round(limits[1] - limits[0])
    count = cells.num_rows
    ax.set_xlim(limits)
    ax.set_ylim(count - 0.5, -0.5)
    _mark(ax, cells, _row_height(ax, count))
    if num_steps <= FEW:
        _single_cells(ax, cells, num_steps)
    if rows == "requests":
        _label_requests(ax, trace, count)
    else:
        _label_stays(ax, cells, count, num_steps)


def _row_height(ax: Axes, count: int) -> float:
    """Points, about: the layout is settled only when the figure is drawn."""
    return 72 * ax.get_position().height * ax.get_figure().get_figheight() / count


def _mark(ax: Axes, cells: Cells, height: float) -> None:
    """Marks of single moments, no higher than a row."""
    for kind, (label, style) in MARKS.items():
        if cells.marks[kind]:
            x, row = zip(*cells.marks[kind], strict=True)
            size = min(style["markersize"], 0.9 * height)
            ax.plot(x, row, linestyle="none", label=label, clip_on=False, **style | {"markersize": size})


def _rectangle(span: list[float], half: float) -> list[tuple[float, float]]:
    row, left, right = span
    return [(left, row - half), (left, row + half), (right, row + half), (right, row - half)]


def _plural(style: dict) -> dict:
    return {"colors": style["color"], "linewidths": style["linewidth"], "linestyles": [style["linestyle"]]}


def _single_cells(ax: Axes, cells: Cells, num_steps: int) -> None:
    """White lines between iterations, and the size of every chunk of more than one token, where it fits in."""
    left, right = ax.get_xlim()
    ax.vlines(np.arange(left + 1, right), -0.5, ax.get_ylim()[0], colors="white", linewidths=0.8, zorder=3)
    if _row_height(ax, cells.num_rows) < 10:
        return
    for start, stop, row, tokens, kind in cells.counts:
        if (len(str(tokens)) + 0.3) * num_steps <= 150 * (stop - start):
            middle = (start + stop) / 2
            text = ax.text(middle, row, str(tokens), ha="center", va="center", fontsize=7, color="white", zorder=6)
            if kind != "prefill":  # light, or hatched
                text.set(color="black", path_effects=[withStroke(linewidth=2, foreground="white")])


def _ticks(ax: Axes, count: int) -> range:
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100, count) if n * _row_height(ax, count) >= 9)
    return range(0, count, every)


def _label_requests(ax: Axes, trace: Trace, count: int) -> None:
    """All ids, or every n-th where they would touch; with client and priority, where these differ."""
    names = {row: name for name, row in _arrival_order(trace)(trace.steps[0]).items()}
    who = {t.request_id: t for t in trace.timelines}
    differ = [what for what in ("client", "priority") if len({getattr(t, what) for t in who.values()}) > 1]
    if differ:
        ax.set_ylabel(f"request ({', '.join(differ)})")
        for row, name in names.items():
            names[row] = f"{name} ({', '.join(str(getattr(who[name], what)) for what in differ)})"
    ticks = _ticks(ax, count)
    ax.set_yticks(ticks, [names[row] for row in ticks])


def _label_stays(ax: Axes, cells: Cells, count: int, num_steps: int) -> None:
    """The places by number; in each of them the ids of those who had it, where there is room for an id."""
    ax.set_yticks(_ticks(ax, count))
    for request_id, row, left, right in cells.stays:
        if (right - left) / num_steps > 0.01 * (len(request_id) + 1):
            text = ax.text(left, row - 0.2, " " + request_id, va="center", fontsize=7, color="black", zorder=6)
            text.set_path_effects([withStroke(linewidth=2, foreground="white")])
