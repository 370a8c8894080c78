"""A trace as a film: one frame an iteration, with all there is to see in it, and no word about how it looks.

Frames are pure functions of a :class:`~minibatch.trace.Trace`. What an iteration's report does not say by itself
follows from those before it: who else is in the queue, who is on the host, which unit is new, found, or a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from minibatch.batch_map import follow_queue, seat
from minibatch.block_map import Unit, marks_of, unit_size, units_of
from minibatch.checks import check_int
from minibatch.kv_cache import Holding
from minibatch.metrics import COMPLETED
from minibatch.player.so_far import SoFar, Tally
from minibatch.trace import StepReport, Timeline, Trace, counted

MOST_UNITS, MOST_ROWS = 2_000_000, 50_000  # over all iterations: each some 10 MB of HTML


@dataclass(frozen=True, slots=True)
class Row:
    """One request that holds memory, and its part in the iteration: it computed ``tokens[start:stop]``.

    ``place``      its row in the batch: the lowest that was free when it came; it keeps it until it leaves
    ``phase``      ``prefill``, ``decode``, ``recompute``, or without tokens: ``dead`` (finished, its row runs on),
                   ``forked`` (shares what a sibling computed), ``resident`` (holds memory, did not run)
    ``left_pads``  tokens of padding before its own
    ``computed``   leading tokens whose K/V are in the cache, after the iteration
    ``generated``  tokens of its answer so far, of at most ``max_new``
    ``units``      how many it holds, shared ones included
    ``reason``     why it got no tokens, if the plan said so
    """

    request_id: str
    place: int
    phase: str
    start: int
    stop: int
    left_pads: int
    computed: int
    num_prompt: int
    generated: int
    max_new: int
    units: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """What the iteration executed, by kind (the kinds of ``plot_style.TOKENS``), and what it was allowed."""

    prefill: int
    decode: int
    recompute: int
    left_padding: int
    dead_padding: int
    budget: int | None

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.recompute + self.left_padding + self.dead_padding


@dataclass(frozen=True, slots=True)
class Queued:
    """One that waits after the iteration was planned. ``state``: ``waiting``, ``preempted`` (its K/V is lost) or
    ``swapped``; ``examined``: whether the reason is its own, or that of all the others."""

    request_id: str
    state: str
    reason: str
    examined: bool


@dataclass(frozen=True, slots=True)
class Event:
    """``kind``: ``arrived``, ``refused``, ``admitted``, ``preempted``, ``forked``, ``copied``, ``finished``,
    ``aborted``. A copy is nobody's (``request_id`` is empty): the report only counts its rows."""

    kind: str
    request_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Frame:
    """One iteration.

    ``rows``   in the order of their places
    ``units``  in physical order
    ``unseen`` free rows that keep a prefix, in a trace that does not say which
    ``host``   (request, tokens) of those whose K/V are in host memory
    ``queue``  those examined first, in the plan's order; then the others, in that of their arrival
    ``longest_wait``  seconds since the arrival of the one that has waited longest without ever having run; NaN if
                      there is none. (The latencies ``so_far`` are of completed requests, and silent about these.)
    """

    index: int
    start: float
    end: float
    rows: tuple[Row, ...]
    units: tuple[Unit, ...]
    unseen: int
    host: tuple[tuple[str, int], ...]
    tokens: Tokens
    queue: tuple[Queued, ...]
    events: tuple[Event, ...]
    so_far: SoFar
    longest_wait: float


def frames(trace: Trace, first: int | None = None, last: int | None = None) -> list[Frame]:
    """One frame an iteration, of those from ``first`` to ``last`` (indices, both included; default: all).

    Raises ValueError for a light trace, for one without iterations or memory, and for more than ``MOST_UNITS`` units or
    ``MOST_ROWS`` rows of the batch in all.
    """
    size = _unit_size(trace)
    first, last = _range(trace, first, last)
    _check_size(trace.steps[first : last + 1], size)
    told = _Story({timeline.request_id: timeline for timeline in trace.timelines}, size)
    made = []
    for step in trace.steps[: last + 1]:
        told.take(step)
        if step.index >= first:
            made.append(told.frame(step))
        told.before = {holding.request_id: holding for holding in step.kv.holdings}
    return made


def events(made: list[Frame]) -> list[int]:
    """The positions of those worth a jump: somebody came, gave way, forked, left or was refused. (Not: arrived.)"""
    return [place for place, frame in enumerate(made) if any(event.kind != "arrived" for event in frame.events)]


def _unit_size(trace: Trace) -> int:
    if trace.light:
        raise ValueError(
            f"a light trace of {counted(trace.num_steps, 'iteration')} does not say who did what: use record_steps"
        )
    if not (size := unit_size(trace)):
        raise ValueError(f"nothing to step through: {counted(len(trace.timelines), 'request')}, no iteration")
    for step in trace.steps:
        if step.kv.capacity < size:
            raise ValueError(f"iteration {step.index} has {step.kv.capacity} rows of KV cache, one unit has {size}")
    return size


def _check_size(steps: list[StepReport], size: int) -> None:
    units = len(steps) * (steps[0].kv.capacity // size)
    rows = sum(len(step.kv.holdings) for step in steps)
    if units > MOST_UNITS or rows > MOST_ROWS:
        raise ValueError(
            f"{counted(len(steps), 'iteration')} have {units:,} units of KV cache and {rows:,} rows of the batch to "
            f"show, the most are {MOST_UNITS:,} and {MOST_ROWS:,}: choose fewer iterations with first and last"
        )


def _range(trace: Trace, first: int | None, last: int | None) -> tuple[int, int]:
    end = trace.num_steps - 1
    given = {name: number for name, number in (("first", first), ("last", last)) if number is not None}
    for name, number in given.items():
        check_int(name, number, 0)
        if number > end:
            raise ValueError(f"{name} {number} must be one of the iterations 0 to {end}")
    first, last = given.get("first", 0), given.get("last", end)
    if first > last:
        raise ValueError(f"first {first} must not come after last {last}")
    return first, last


@dataclass
class _Story:
    """What has been told so far, and is not over."""

    timelines: Mapping[str, Timeline]
    size: int  # rows of a unit
    before: dict[str, Holding] = field(default_factory=dict)  # after the last iteration
    places: dict[str, int] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)  # who is in the queue, and in which state
    host: dict[str, int] = field(default_factory=dict)
    generated: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tally = Tally(dict(self.timelines))

    def take(self, step: StepReport) -> None:
        """All that outlasts the iteration."""
        self._tally.add(step)
        follow_queue(self.absent, step)
        self.host.update((change.request_id, change.num_tokens) for change in step.preempted if change.swapped)
        self.host = {name: rows for name, rows in self.host.items() if self.absent.get(name) == "swapped"}
        for change in (*step.members, *step.forked):
            if change.emitted is not None:
                self.generated[change.request_id] = self.generated.get(change.request_id, 0) + 1
        self.places = seat(self.places, (holding.request_id for holding in step.kv.holdings))

    def frame(self, step: StepReport) -> Frame:
        units = units_of(step, self.size, marks_of(step, self.before, self.size))
        return Frame(
            index=step.index,
            start=step.start,
            end=step.end,
            rows=tuple(sorted(self._rows(step), key=lambda row: row.place)),
            units=units,
            unseen=step.kv.cached - sum(unit.idle for unit in units) * self.size,
            host=tuple(self.host.items()),
            tokens=_tokens(step),
            queue=tuple(self._queue(step)),
            events=tuple(self._events(step)),
            so_far=self._tally.so_far(),
            longest_wait=max((step.end - self.timelines[name].arrival for name in self._never_ran()), default=math.nan),
        )

    def _never_ran(self) -> Iterator[str]:
        return (name for name, state in self.absent.items() if state == "waiting")

    # ---------------------------------------------------------------- the batch

    def _rows(self, step: StepReport) -> Iterator[Row]:
        members = {member.request_id: member for member in step.members}
        pads = {pad.request_id: pad.num_tokens for pad in step.padding if not pad.dead}
        without = dict.fromkeys((h.request_id for h in step.kv.holdings), "resident")
        without |= {fork.request_id: "forked" for fork in step.forked}
        without |= {pad.request_id: "dead" for pad in step.padding if pad.dead}
        reasons = dict(step.waiting)
        for holding in step.kv.holdings:
            name, member = holding.request_id, members.get(holding.request_id)
            who = self.timelines[name]
            yield Row(
                request_id=name,
                place=self.places[name],
                phase=without[name] if member is None else member.phase,
                start=0 if member is None else member.start,
                stop=0 if member is None else member.stop,
                left_pads=pads.get(name, 0),
                computed=holding.filled,
                num_prompt=who.num_prompt,
                generated=self.generated.get(name, 0),
                max_new=who.max_new_tokens,
                units=len(holding.units),
                reason=reasons.get(name, ""),
            )

    # ---------------------------------------------------------------- the queue, and what happened

    def _queue(self, step: StepReport) -> Iterator[Queued]:
        examined = {name: reason for name, reason in step.waiting if name in self.absent}
        for name, reason in examined.items():
            yield Queued(name, self.absent[name], reason, True)
        for name, state in self.absent.items():
            if name not in examined:
                yield Queued(name, state, step.rest, False)

    def _events(self, step: StepReport) -> Iterator[Event]:
        yield from (Event("arrived", name, "arrived") for name in step.arrived)
        for change in step.preempted:
            fate = "to the host" if change.swapped else "lost"
            how = "had to give way" if change.by == change.request_id else f"preempted by {change.by}"
            text = f"{how}: the K/V of {counted(change.num_tokens, 'token')} {fate}"
            yield Event("preempted", change.request_id, text)
        for change in step.admitted:
            text = "admitted again" if change.resumed else "admitted"
            text += f", {counted(change.cached, 'token')} found in the prefix cache" if change.cached else ""
            text += f", {counted(change.swapped_in, 'token')} back from the host" if change.swapped_in else ""
            yield Event("admitted", change.request_id, text)
        yield from (Event("forked", fork.request_id, f"forked from {fork.parent}") for fork in step.forked)
        if step.copied_rows:
            yield Event("copied", "", f"{counted(step.copied_rows, 'row')} of shared blocks copied (copy-on-write)")
        for name, reason in step.finished:
            if reason in COMPLETED:
                text = f"finished ({reason}), {counted(self.generated.get(name, 0), 'token')}"
                yield Event("finished", name, text)
            else:
                kind, error = "refused" if reason == "rejected" else "aborted", self.timelines[name].error
                yield Event(kind, name, f"{kind}: {error}" if error else kind)


def _tokens(step: StepReport) -> Tokens:
    dead = sum(pad.num_tokens for pad in step.padding if pad.dead)
    return Tokens(step.prefill, step.decode, step.recomputed, step.padded - dead, dead, step.token_budget)
