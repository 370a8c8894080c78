"""The stepper's page: all moments of one run or of several, in one HTML file without kernel or network.

Python has made all the HTML; the file's script only puts the pieces of a moment in their panels, plays, and listens to
keys. Each piece is stored once, so a run of 18 requests, 340 iterations and 22 blocks is a file of about 570 KB, of
which style and script are 15 KB.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

from minibatch.player import Moment, common_clock
from minibatch.player.film import Frame, events, frames
from minibatch.player.html import (
    MARK_LABELS,
    MARKS,
    PANELS,
    Look,
    Panels,
    colors_of,
    isolated,
    look_of,
    nothing,
    panels,
    says,
)
from minibatch.player.numbers import clock
from minibatch.player.strip import strip
from minibatch.player.style import LEGEND, style
from minibatch.plot_style import footer
from minibatch.trace import Trace

HERE = Path(__file__).parent
KEYS = (
    ("← →", "step back, step on"),
    ("space", "play, pause"),
    ("n p", "next, previous event"),
    ("home end", "first, last iteration"),
)
SPEEDS = (1, 2, 4, 10, 25)  # moments a second


@dataclass(frozen=True)
class Run:
    """One configuration, ready to be shown. ``strip``: its membership over the whole run, as HTML."""

    name: str
    trace: Trace
    film: list[Frame]
    look: Look
    strip: str

    def panels(self, place: int | None) -> Panels:
        return nothing() if place is None else panels(self.film[place], self.look)

    @property
    def part(self) -> str:
        """Which iterations these are, if not all."""
        if len(self.film) == self.trace.num_steps:
            return ""
        first, last, end = self.film[0].index, self.film[-1].index, self.trace.num_steps - 1
        return f"<span class=part> · iterations {first:,} to {last:,} of 0 to {end:,}</span>"

    def cursor(self, place: int | None) -> tuple[float, float]:
        """Left edge and width of the current iteration in the strip, in percent."""
        width = 100 / len(self.film)
        return (0.0, 0.0) if place is None else (round(place * width, 4), round(width, 4))


@dataclass(frozen=True)
class Show:
    """Several runs on their common clock. ``jumps``: the moments at which one of them has an event."""

    runs: list[Run]
    moments: list[Moment]
    jumps: list[int]

    @classmethod
    def of(cls, traces: Mapping[str, Trace], first: int | None = None, last: int | None = None) -> Show:
        """Raises ValueError for what ``frames`` refuses, and if there is no trace."""
        if not traces:
            raise ValueError("there is no trace to show")
        colors = colors_of(list(traces.values()))
        runs = [_run(name, trace, first, last, colors) for name, trace in traces.items()]
        moments = common_clock([run.film for run in runs])
        return cls(runs, moments, list(_jumps(runs, moments)))

    def says(self, moment: Moment) -> str:
        """What has happened by then: a line a run."""
        lines = []
        for run, place, done in zip(self.runs, moment.current, moment.done, strict=True):
            text = "has not begun" if place is None else f"iteration {run.film[place].index}: {says(run.film[place])}"
            name = f"{isolated(run.name)}, " if len(self.runs) > 1 else ""
            lines.append(f"{name}{'ended, ' if done else ''}{text}")
        decimals = max(run.look.decimals for run in self.runs)
        return f"<b>{clock(moment.time, decimals)}</b> {'<br>'.join(lines)}"

    def html(self, number: int) -> str:
        """All runs at one moment."""
        moment = self.moments[number]
        shown = [run_html(*each) for each in zip(self.runs, moment.current, moment.done, strict=True)]
        return f"<div class='runs of{len(self.runs)}'>{''.join(shown)}</div>"

    @property
    def signature(self) -> str:
        return escape(footer([run.trace for run in self.runs]))


def _run(name: str, trace: Trace, first: int | None, last: int | None, colors: Mapping[str, int]) -> Run:
    end = trace.num_steps - 1
    try:
        film = frames(trace, first, min(last, end) if last is not None and trace.steps else last)
    except ValueError as error:
        raise ValueError(f"{name}: {error}" if name else str(error)) from error
    return Run(name, trace, film, look_of(trace, film, colors), strip(trace, film))


def _jumps(runs: Sequence[Run], moments: Sequence[Moment]) -> Iterator[int]:
    worth = [set(events(run.film)) for run in runs]
    before: tuple[int | None, ...] = (None,) * len(runs)
    for number, moment in enumerate(moments):
        changed = zip(before, moment.current, worth, strict=True)
        if any(then != now and now in places for then, now, places in changed):
            yield number
        before = moment.current


def run_html(run: Run, place: int | None, done: bool) -> str:
    """One run at one of its frames."""
    left, width = run.cursor(place)
    made = run.panels(place)
    boxes = [
        f"<section class='panel {name}'><h3>{title}</h3><div data-panel={name}>{''.join(made[name])}</div></section>"
        for name, title in PANELS.items()
        if title
    ]
    return (
        f"<section class='run{' done' if done else ''}'><header><h2>{isolated(run.name)}</h2>"
        f"<p class=head><span data-panel=head>{''.join(made['head'])}</span>{run.part}"
        f"<span class=ended>ended</span></p></header>"
        f"<div class=strip>{run.strip}"
        f"<div class=track><div class=cursor style='left:{left}%;width:{width}%'></div></div></div>"
        f"<div class=panels>{''.join(boxes)}</div></section>"
    )


def page(traces: Mapping[str, Trace], first: int | None = None, last: int | None = None) -> str:
    """The whole file."""
    show = Show.of(traces, first, last)
    names = [run.name for run in show.runs]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>minibatch: {escape(" and ".join(names))}</title>
<style>
{style()}</style>
</head>
<body class="mb">
<h1>minibatch: {" and ".join(map(isolated, names))}</h1>
{_controls(len(show.moments))}
<p id="says" role="status" aria-live="polite">{show.says(show.moments[0])}</p>
<main>{show.html(0)}</main>
{legend()}
<p class="keys">{" · ".join(f"<kbd>{keys}</kbd> {what}" for keys, what in KEYS)} · click into the picture of the run</p>
<footer>{show.signature}</footer>
<script type="application/json" id="show">{_json(show)}</script>
<script>
{(HERE / "player.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def _controls(count: int) -> str:
    buttons = {
        "back-event": ("|◀", "previous event"),
        "back": ("◀", "step back"),
        "play": ("Play", ""),
        "on": ("▶", "step on"),
        "on-event": ("▶|", "next event"),
    }
    shown = "".join(
        f'<button id="{name}"{f""" aria-label="{label}" title="{label}" """ if label else ""}>{text}</button>'
        for name, (text, label) in buttons.items()
    )
    speeds = "".join(f"<option{' selected' if speed == 4 else ''}>{speed}</option>" for speed in SPEEDS)
    return (
        f'<div class="controls">{shown}'
        f'<input id="slider" type="range" min="0" max="{count - 1}" value="0" aria-label="moment of the run">'
        f'<label>steps a second <select id="speed">{speeds}</select></label></div>'
    )


def legend() -> str:
    """What the colours and signs mean."""
    looks = [f"<span><i class={kind}></i> {label}</span>" for kind, label in LEGEND.items()]
    signs = [f"<span><b>{MARKS[mark]}</b> {label}</span>" for mark, label in MARK_LABELS.items()]
    return f"<p class=legend>{' '.join(looks)} {' '.join(signs)}</p>"


def _json(show: Show) -> str:
    """For the script. ``pieces``: HTML; each run's ``frames``: for each panel the numbers of its pieces (several equal
    ones in a row: the number, and how often), and the cursor; the first is of a run that has not begun. ``moments``:
    what is said, each run's frame, and whether it is done.
    """
    kept: dict[str, int] = {}
    runs = [
        [
            [[_packed(made[name], kept) for name in PANELS], run.cursor(place)]
            for place in (None, *range(len(run.film)))
            for made in [run.panels(place)]
        ]
        for run in show.runs
    ]
    moments = [
        [_packed([show.says(m)], kept), [0 if i is None else i + 1 for i in m.current], [int(done) for done in m.done]]
        for m in show.moments
    ]
    data = {"panels": list(PANELS), "runs": runs, "moments": moments, "jumps": show.jumps, "pieces": list(kept)}
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _packed(pieces: Sequence[str], kept: dict[str, int]) -> list[int | list[int]]:
    packed = []
    for piece, equal in groupby(pieces):
        number, count = kept.setdefault(piece, len(kept)), len(list(equal))
        packed.append(number if count == 1 else [number, count])
    return packed
