"""A frame as HTML: a few panels, each a list of small pieces that many frames have in common.

The only renderer of the stepper: the widget joins the pieces, the file stores each of them once. Everything that comes
from a trace (ids, reasons, names) is escaped here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from minibatch.block_map import Unit, holders, unit_name
from minibatch.metrics import ratio
from minibatch.player.film import Frame, Row, Tokens
from minibatch.player.numbers import amount, clock, decimals_of, seconds, share
from minibatch.player.so_far import SoFar
from minibatch.plot_style import OWNERS, TOKENS
from minibatch.trace import Trace, counted

PANELS = {
    "head": "",
    "batch": "Batch",
    "memory": "KV memory",
    "tokens": "Tokens of this iteration",
    "queue": "Queue",
    "events": "What happens",
    "metrics": "So far",
}
MARKS = {"hit": "★", "copied": "⇉", "swapped": "↑", "new": "+"}
MARK_LABELS = {
    "hit": "found in the prefix cache",
    "copied": "copied (copy-on-write)",
    "swapped": "back from the host",
    "new": "just taken",
}
PHASES = {
    "prefill": "prefill",
    "decode": "decode",
    "recompute": "recompute",
    "dead": "dead row",
    "forked": "forks off",
    "resident": "does not run",
}
STATES = {"waiting": "", "preempted": "preempted; ", "swapped": "on the host; "}
FEW, MANY = 24, 256  # units that are drawn large; and those beyond which a cell has no text
LONG = 40  # letters of an id or a name that stand in the text whole
NAMED = 12  # of the queue, and of those who wait for the same reason
Panels = dict[str, list[str]]


@dataclass(frozen=True)
class Look:
    """What the frames of one run need to know of the whole of it: ``places`` of the batch, the ``scale`` of the token
    bar, the name of a unit, the colour (a number) of each request, and the ``decimals`` of its moments in seconds."""

    places: int
    scale: int
    unit: str
    colors: Mapping[str, int]
    decimals: int


def look_of(trace: Trace, film: Sequence[Frame], colors: Mapping[str, int]) -> Look:
    most = max(frame.tokens.total for frame in film)
    budgets = [frame.tokens.budget for frame in film if frame.tokens.budget is not None]
    places = max((row.place + 1 for frame in film for row in frame.rows), default=0)
    close = [budget for budget in budgets if budget <= 4 * most]  # else the bar would be a dot
    decimals = decimals_of(frame.end - frame.start for frame in film)
    return Look(places, max([most, *close]), unit_name(trace), colors, decimals)


def colors_of(traces: Sequence[Trace]) -> dict[str, int]:
    """A colour for each request, the same in all runs, in the order in which they had memory (as in the block map)."""
    return {name: place % len(OWNERS) for place, name in enumerate(holders(traces))}


def panels(frame: Frame, look: Look) -> Panels:
    """Each panel as pieces of HTML, to be joined."""
    start, end = (clock(time, look.decimals) for time in (frame.start, frame.end))
    return {
        "head": [f"<b>iteration {frame.index}</b> · {start} to {end}"],
        "batch": list(_batch(frame, look)),
        "memory": list(_memory(frame, look)),
        "tokens": list(_tokens(frame.tokens, look)),
        "queue": list(_queue(frame, look)),
        "events": list(_events(frame, look)),
        "metrics": list(_metrics(frame.so_far, frame.longest_wait)),
    }


def nothing() -> Panels:
    """Of a run whose first iteration has not ended."""
    return {name: ["has not begun"] if name == "head" else [] for name in PANELS}


def says(frame: Frame) -> str:
    """The frame in one sentence, for the line that screen readers read out."""
    ran = sum(row.stop > row.start for row in frame.rows)
    text = f"{counted(ran, 'request')} ran, {counted(frame.tokens.total, 'token')}, {len(frame.queue)} waiting"
    told = [
        f"{isolated(event.request_id)} <bdi>{escape(event.text)}</bdi>" if event.request_id else escape(event.text)
        for event in frame.events
        if event.kind != "arrived"
    ]
    more = f" and {len(told) - 4} more" if len(told) > 4 else ""
    return text + (f"; {'; '.join(told[:4])}{more}" if told else "")


def isolated(name: str) -> str:
    """An id or a run's name: whatever writing direction it has or asks for ends with it."""
    return f"<bdi{_whole(name)}>{escape(name)}</bdi>"


def _whole(name: str) -> str:
    """An attribute for one that is too long to be shown whole: the style sheet cuts what has it."""
    return f' title="{escape(name)}"' if len(name) > LONG else ""


# -------------------------------------------------------------------------------------------------------- the batch


def _batch(frame: Frame, look: Look) -> Iterator[str]:
    yield ("<table class=rows><thead><tr><th>request<th>does<th>its tokens<th>answer<th>holds</thead><tbody>")
    rows = {row.place: row for row in frame.rows}
    for place in range(look.places):
        yield _row(rows[place], look) if place in rows else "<tr class=none><td colspan=5>"
    yield "</table>"


def _row(row: Row, look: Look) -> str:
    pads = f" + {row.left_pads} pads" if row.left_pads else ""
    tokens = "" if row.stop == row.start else _range(row.start, row.stop) + pads
    why = f' title="{escape(row.reason)}"' if row.reason else ""
    phase = {"dead": "dead_padding"}.get(row.phase, row.phase)
    return (
        f"<tr{why}><th>{_id(row.request_id, look)}<td><i class={phase}></i> {PHASES[row.phase]}<td>{tokens}"
        f"<td>{row.generated} of {row.max_new}{_progress(row)}"
        f"<td>{counted(row.units, look.unit)}"
    )


def _progress(row: Row) -> str:
    """How far it is: what was computed before, what this iteration computed, and what may be still to come."""
    whole = max(row.num_prompt + row.max_new - 1, 1)
    ran = row.stop - row.start
    phase = row.phase if row.phase in TOKENS else "past"
    return _bar([("past", (row.computed - ran) / whole), (phase, ran / whole)])


def _bar(parts: Sequence[tuple[str, float]], more: str = "") -> str:
    inner = "".join(f'<i class={kind} style="width:{100 * share:.3g}%"></i>' for kind, share in parts if share > 0)
    return f"<span class=bar>{inner}{more}</span>"


def _range(start: int, stop: int) -> str:
    return f"{start}" if stop == start + 1 else f"{start}–{stop - 1}"


def _id(request_id: str, look: Look) -> str:
    return f"<b class=o{look.colors.get(request_id, 0)}{_whole(request_id)}>{escape(request_id)}</b>"


# ------------------------------------------------------------------------------------------------------- the memory


def _memory(frame: Frame, look: Look) -> Iterator[str]:
    units = frame.units
    held = sum(bool(unit.owners) for unit in units)
    size = _size(units)
    filled = sum(unit.filled for unit in units)
    full = share(ratio(filled, len(units) * size))
    text = f"{held} of {counted(len(units), look.unit)} held, {full} of the rows filled"
    shared = sum(len(unit.owners) > 1 for unit in units)
    text += f", {shared} shared" if shared else ""
    text += f", {counted(frame.unseen, 'free row')} more keep a prefix" if frame.unseen else ""
    kind = "big" if len(units) <= FEW else "mid" if len(units) <= MANY else "tiny"
    yield f"<p>{text}</p>"
    yield f"<ol class='units {kind}' start=0>"
    for unit in units:
        yield _unit(unit, size, look, bare=kind == "tiny")
    yield "</ol>"
    if frame.host:
        yield "<p>on the host: "
        yield ", ".join(f"{_id(name, look)} {counted(tokens, 'row')}" for name, tokens in frame.host)
        yield "</p>"


def _size(units: Sequence[Unit]) -> int:
    return max(unit.filled + unit.reserved + unit.fragmentation for unit in units) or 1


def _unit(unit: Unit, size: int, look: Look, bare: bool) -> str:
    """``bare``: there are so many that a cell is a coloured dot, and says the rest when it is pointed at."""
    if not unit.owners:
        inner = "" if bare else "<s></s>"
        return f"<li class=cached title='free, keeps a prefix'>{inner}" if unit.idle else f"<li class=free>{inner}"
    first, more = unit.owners[0], len(unit.owners) - 1
    title = f"{', '.join(unit.owners)}: {unit.filled} of {counted(size, 'row')} filled"
    title += f", {MARK_LABELS[unit.mark]}" if unit.mark else ""
    cell = f'<li class="o{look.colors.get(first, 0)} {unit.mark}" title="{escape(title)}">'
    if bare:
        return cell
    parts = [(kind, getattr(unit, kind) / size) for kind in ("filled", "reserved", "fragmentation")]
    name = f"{MARKS.get(unit.mark, '')}<bdi>{escape(first)}</bdi>{f'<em>+{more}</em>' if more else ''}"
    return f"{cell}<s>{name}</s>{_bar(parts)}"


# -------------------------------------------------------------------------------------- tokens, queue, events, numbers


def _tokens(tokens: Tokens, look: Look) -> Iterator[str]:
    kinds = {kind: getattr(tokens, kind) for kind in TOKENS}
    line = ""
    if tokens.budget is not None and tokens.budget <= look.scale:
        line = f'<u style="left:{100 * tokens.budget / look.scale:.4g}%"></u>'
    yield _bar([(kind, number / look.scale) for kind, number in kinds.items()], line)
    limit = "no budget" if tokens.budget is None else f"of a budget of {tokens.budget:,}"
    parts = [f"<i class={kind}></i> {number:,} {TOKENS[kind].label}" for kind, number in kinds.items() if number]
    yield f"<p><b>{counted(tokens.total, 'token')}</b>, {limit} <span class=parts>{' '.join(_spans(parts))}</span></p>"


def _spans(parts: Sequence[str]) -> Iterator[str]:
    return (f"<span>{part}</span>" for part in parts)


def _queue(frame: Frame, look: Look) -> Iterator[str]:
    if not frame.queue:
        yield "<p class=none>Nobody waits.</p>"
        return
    yield "<ul>"
    examined = [queued for queued in frame.queue if queued.examined]
    for queued in examined[:NAMED]:
        state = "" if queued.reason.startswith("preempted") else STATES[queued.state]
        yield f"<li>{_id(queued.request_id, look)} · {state}{escape(queued.reason)}"
    rest = [*examined[NAMED:], *(queued for queued in frame.queue if not queued.examined)]
    if rest:
        names = " ".join(_id(queued.request_id, look) for queued in rest[:NAMED])
        more = f" and {len(rest) - NAMED:,} more" if len(rest) > NAMED else ""
        yield f"<li>{names}{more} · {escape(rest[-1].reason)}"
    yield "</ul>"


def _events(frame: Frame, look: Look) -> Iterator[str]:
    if not frame.events:
        yield "<p class=none>Nobody comes or goes.</p>"
        return
    yield "<ul>"
    for event in frame.events:
        yield f"<li>{_id(event.request_id, look) if event.request_id else ''} {escape(event.text)}"
    yield "</ul>"


def _metrics(so_far: SoFar, longest_wait: float) -> Iterator[str]:
    """Those of everybody; then those of the completed, which say nothing about who still waits."""
    yield from _numbers(
        {
            "completed": f"{so_far.completed} of {so_far.num_requests}",
            "waits now, longest": seconds(longest_wait),
            "tokens/s": amount(so_far.throughput),
            "useful": share(so_far.useful_share),
            "preemptions": f"{so_far.preemptions}",
            "KV filled, mean": share(so_far.mean_filled),
            "KV filled, peak": share(so_far.peak_filled),
        }
    )
    yield f"<p>Of the {so_far.completed} completed, and of nobody else:</p>"
    latencies = {
        "queueing, mean": seconds(so_far.queueing_delay_mean),
        "TTFT, mean": seconds(so_far.ttft_mean),
        "TTFT, longest": seconds(so_far.ttft_max),
        "TBT, P50": seconds(so_far.tbt_p50),
        "TBT, longest": seconds(so_far.tbt_max),
    }
    yield from _numbers(latencies)


def _numbers(numbers: Mapping[str, str]) -> Iterator[str]:
    yield "<dl>"
    for name, text in numbers.items():
        yield f"<div><dt>{name}<dd>"
        yield f"{text}</div>"
    yield "</dl>"
