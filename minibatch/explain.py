"""One request's story: what happened to it, when, and why.

A trace says who did what in every iteration. Here it is read along one request, and what is the same in consecutive
iterations becomes one event: a wait with one kind of reason, a row of decodes. :func:`story` gives the events,
:func:`describe` the text that ``minibatch explain`` prints.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import groupby, pairwise

from minibatch.metrics import steps_kept
from minibatch.trace import Admitted, Member, Preempted, StepReport, Timeline, Trace, counted

WIDTH = 100  # columns
FEW = 6  # changes of reason in a wait, or chunks of a prompt, that are told one by one

Said = tuple[StepReport, str]  # a reason, and when it was given


class UnknownRequest(ValueError):
    """The trace has no request of that id; the message names some that it has."""


@dataclass(frozen=True)
class Event:
    """``time`` in seconds on the trace's clock; ``iterations`` the first and last one, None if it was in none."""

    time: float
    iterations: tuple[int, int] | None
    text: str


def story(trace: Trace, request_id: str) -> list[Event]:
    """What happened to a request, in order. Of a request with ``n > 1``: what its answers share, and how each ended.

    Raises UnknownRequest. Of a trace that was kept without step reports, only what the timeline knows.
    """
    timeline = next((t for t in trace.timelines if t.request_id == request_id), None)
    answers = [t for t in trace.timelines if t.group == request_id]
    if answers:
        return _shared(trace, answers[0]) + [_brief(trace, answer) for answer in answers]
    if timeline is None:
        raise UnknownRequest(_unknown(trace, request_id))
    return _tell(trace, timeline)


def describe(trace: Trace, request_id: str) -> str:
    """The story as plain text of at most ``WIDTH`` columns."""
    events = story(trace, request_id)
    rows = [(_clock(e.time), _iterations(e), e.text) for e in events]
    heads = ("time", "iteration", "what happened")
    wide = [max(len(row[column]) for row in (heads, *rows)) for column in (0, 1)]
    lines = [*_wrap("", _title(trace, request_id)), ""]
    for row in (heads, *rows):
        lines += _wrap(f"{row[0]:>{wide[0]}}  {row[1]:>{wide[1]}}  ", row[2])
    return "\n".join([*lines, "", *_wrap("", _footer(trace))])


def _title(trace: Trace, request_id: str) -> str:
    mine = [t for t in trace.timelines if request_id in (t.request_id, t.group)]
    who = mine[0]
    asks = f"prompt {who.num_prompt}, at most {who.max_new_tokens} new tokens" if who.num_prompt else "never accepted"
    parts = [f"{request_id}: {asks}", f"client {who.client}", f"priority {who.priority}"]
    if who.group is not None:
        parts.append(f"{len(mine)} answers" if who.group == request_id else f"an answer of {who.group}")
    again = [t.request_id for t in trace.timelines if t.request_id.startswith(f"{request_id}~")]
    if again:
        parts.append(f"the same id again: {', '.join(again)}")
    return ", ".join(parts)


def _footer(trace: Trace) -> str:
    """What the times are, and what ran."""
    kind = "simulated" if trace.simulated else "measured"
    text = f"Times are seconds, {kind}; iterations are numbered as in the pictures."
    if trace.light or not steps_kept(trace):
        text += " This trace was kept without step reports: there are no iterations in it, and no reasons."
    parts = [str(trace.meta[key]) for key in ("name", "model", "scheduler", "kv_cache", "order") if key in trace.meta]
    return f"{text} Run: {', '.join(parts)}." if parts else text


def _shared(trace: Trace, first: Timeline) -> list[Event]:
    """What happened before the answers of a request forked off the first one."""
    teller = _Teller(trace, first)
    for step in trace.steps:
        teller.read(step)
        if any(fork.parent == first.request_id for fork in step.forked) or teller.state == "ended":
            break
    teller.flush()
    return teller.events[:-1] if teller.state == "ended" else teller.events


def _brief(trace: Trace, answer: Timeline) -> Event:
    """How one answer of several ended."""
    last = _tell(trace, answer)[-1]
    return Event(last.time, last.iterations, f"{answer.request_id} {last.text}")


def _unknown(trace: Trace, request_id: str) -> str:
    names = list(dict.fromkeys(name for t in trace.timelines for name in (t.request_id, t.group) if name))
    text = f"no request {request_id!r} in this trace"
    if close := get_close_matches(request_id, names, n=5, cutoff=0.5):
        return f"{text}; close to it: {', '.join(close)}"
    return f"{text}, which has {len(names)}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"


# ----------------------------------------------------------------------------------------------------------- telling


def _tell(trace: Trace, timeline: Timeline) -> list[Event]:
    if not trace.steps:
        return list(_from_timeline(trace, timeline))
    teller = _Teller(trace, timeline)
    for step in trace.steps:
        teller.read(step)
    return teller.end()


class _Teller:
    """Reads the steps one after the other. ``_same`` are the steps, and what was special about each, that are alike so
    far; when something else happens they become events."""

    def __init__(self, trace: Trace, timeline: Timeline) -> None:
        self.trace, self.timeline, self.name = trace, timeline, timeline.request_id
        self.events = [_arrival(timeline)]
        self.state = "coming"  # waiting, active, ended
        self.out_since = timeline.arrival
        self.recomputed = self.num_tokens = 0
        self.busy_until = 0.0
        self._kind, self._same = "", []

    def read(self, step: StepReport) -> None:
        if self.name in step.arrived:
            self.state = "waiting"
        self._moves(step)
        ended = any(name == self.name for name, _ in step.finished)
        if ended and self.timeline.finish != step.end:  # before the iteration began
            self._ends(step)
        self._displaced(step)
        member = next((m for m in step.members if m.request_id == self.name), None)
        if member is not None:
            self.state = "active"
            self._computed(step, member)
        elif self.state == "waiting":
            self._waits(step)
        elif self.state == "active" and any(h.request_id == self.name for h in step.kv.holdings):
            self._goes_without(step)
        self._forks(step)
        dead = sum(p.num_tokens for p in step.padding if p.dead and p.request_id == self.name)
        if dead:
            self._add("dead", step, dead)
        if ended and self.state != "ended":
            self._ends(step)
        self.busy_until = step.end

    def end(self) -> list[Event]:
        """All events."""
        if self.state != "ended" and self.timeline.finish_reason is not None:
            self._ends(None)
        self.flush()
        if self.timeline.finish_reason is None:
            self.events.append(_unfinished(self.trace, self.timeline, self.state))
        return self.events

    def _say(self, time: float, step: StepReport | None, text: str) -> None:
        self.flush()
        self.events.append(Event(time, None if step is None else (step.index, step.index), text))

    # --- between iterations ---

    def _moves(self, step: StepReport) -> None:
        """Admissions and preemptions, which take turns. (One report has several if a forward failed before it.)"""
        admitted = [a for a in step.admitted if a.request_id == self.name]
        preempted = [p for p in step.preempted if p.request_id == self.name]
        while admitted or preempted:
            if preempted and (self.state == "active" or not admitted):
                self._preempted(step, preempted.pop(0))
            else:
                self._admitted(step, admitted.pop(0))

    def _admitted(self, step: StepReport, change: Admitted) -> None:
        self.state = "active"
        text = _joined(change.resumed, step.start - self.out_since)
        if self.busy_until <= self.out_since < step.start:
            text += ", in which nothing ran"
        if change.cached:
            of = counted(self.timeline.num_prompt + self.num_tokens, "token")
            text += f"; {change.cached:,} of its {of} found in the prefix cache"
        if change.swapped_in:
            text += f"; the K/V of {_moved(self.trace, change.swapped_in)} come back from the host"
        self._say(step.start, step, text)

    def _preempted(self, step: StepReport, change: Preempted) -> None:
        self.state, self.out_since = "waiting", step.start
        reason = dict(step.waiting).get(self.name, "").partition("preempted: ")[2]
        why = f"preempted, because {reason}" if reason else f"preempted by {change.by}"
        if change.by == self.name:
            why = "preempted itself: it needs memory that is not there, and is the one to give way"
        if change.swapped:
            what = f"the K/V of {_moved(self.trace, change.num_tokens)} go to the host"
        else:
            fate = "are given up (the prefix cache may find them again)" if self.trace.prefix_cached else "are lost"
            what = f"the K/V of {counted(change.num_tokens, 'token')} {fate}"
        self._say(step.start, step, f"{why}; {what}")

    def _displaced(self, step: StepReport) -> None:
        """Others, for its sake."""
        names = [p.request_id for p in step.preempted if p.by == self.name != p.request_id]
        if names:
            self._say(step.start, step, f"{', '.join(names)} had to give way to it")

    # --- in an iteration ---

    def _computed(self, step: StepReport, member: Member) -> None:
        self.recomputed += member.recomputed
        self._add("decode" if member.phase == "decode" else "chunk", step, member)

    def _waits(self, step: StepReport) -> None:
        reason = dict(step.waiting).get(self.name) or step.rest or "no reason given"
        if not reason.startswith("preempted: "):  # that has been told
            self._add("wait", step, reason)

    def _goes_without(self, step: StepReport) -> None:
        """It is active and holds memory, and gets no tokens."""
        reason = dict(step.waiting).get(self.name)
        if reason is None and step.token_budget is not None and step.num_tokens >= step.token_budget:
            reason = f"token budget: the others had all {step.token_budget}"
        elif reason is None:
            reason = "others ran, " + ("only prompts" if not step.decode else "and there was budget left")
        self._add("decode" if self._kind == "decode" else "stall", step, reason)

    def _forks(self, step: StepReport) -> None:
        mine = next((fork for fork in step.forked if fork.request_id == self.name), None)
        children = [fork.request_id for fork in step.forked if fork.parent == self.name]
        if mine is not None:
            self.state = "active"
            text = f"forked from {mine.parent}, which has computed the prompt: shares the K/V of its "
            text += counted(self.timeline.num_prompt, "token")
            self._say(step.end, step, text if mine.emitted is None else f"{text}; {self._emitted()}")
        elif children:
            forks = "fork off and share" if len(children) > 1 else "forks off and shares"
            self._say(step.end, step, f"{', '.join(children)} {forks} the K/V of the prompt")

    def _ends(self, step: StepReport | None) -> None:
        self.state = "ended"
        ran = step is not None and self.timeline.finish == step.end
        text = _ending(self.trace, self.timeline, self.recomputed)
        self._say(self.timeline.finish, step if ran else None, text)

    def _emitted(self) -> str:
        """Of the next token of the answer."""
        times, index = self.timeline.token_times, self.num_tokens
        self.num_tokens += 1
        if not index:
            return f"first token, {_seconds(times[0] - self.timeline.arrival)} after its arrival"
        return f"token {index + 1}, {_seconds(times[index] - times[index - 1])} after the one before"

    # --- what is alike ---

    def _add(self, kind: str, step: StepReport, what: Member | str | int) -> None:
        if kind != self._kind:
            self.flush()
        self._kind = kind
        self._same.append((step, what))

    def flush(self) -> None:
        kind, same = self._kind, self._same
        self._kind, self._same = "", []
        if same:
            tell = {"wait": _waited, "stall": _stalled, "dead": _dead, "chunk": self._chunks, "decode": self._decodes}
            for some, text in tell[kind](same):
                first, last = some[0][0], some[-1][0]
                self.events.append(Event(first.start, (first.index, last.index), text))

    def _chunks(self, same: list[tuple[StepReport, Member]]) -> Iterator[tuple[Sequence, str]]:
        if len(same) <= FEW:
            for step, member in same:
                yield [(step, member)], self._chunk(step, member)
            return
        sizes = sorted(member.stop - member.start for _, member in same)
        last = same[-1][1]
        text = f"{len(same)} chunks of {sizes[0]} to {sizes[-1]} tokens: "
        yield same, text + self._progress(sum(m.prefill for _, m in same), sum(m.recomputed for _, m in same), last)

    def _chunk(self, step: StepReport, member: Member) -> str:
        pads = sum(p.num_tokens for p in step.padding if not p.dead and p.request_id == self.name)
        beside = f", beside {counted(pads, 'left pad')}" if pads else ""
        return self._progress(member.prefill, member.recomputed, member, beside)

    def _progress(self, prefill: int, recomputed: int, last: Member, beside: str = "") -> str:
        parts = [f"{counted(recomputed, 'token')} computed again"] if recomputed else []
        parts += [f"prefill of {counted(prefill, 'token')}"] if prefill else []
        parts += ["a decode"] if last.decode else []
        text = f"{' and '.join(parts)} ({last.stop} of {self.timeline.num_prompt + self.num_tokens} computed){beside}"
        return text if last.emitted is None else f"{text}; {self._emitted()}"

    def _decodes(self, same: list[tuple[StepReport, Member | str]]) -> Iterator[tuple[Sequence, str]]:
        emitted = sum(isinstance(what, Member) and what.emitted is not None for _, what in same)
        without = [(step, what) for step, what in same if isinstance(what, str)]
        first, self.num_tokens = self.num_tokens, self.num_tokens + emitted
        times = self.timeline.token_times[max(first - 1, 0) : self.num_tokens]
        gap = max((late - soon for soon, late in pairwise(times)), default=0.0)
        text = "computed its newest token, and no next one could be drawn"
        if emitted == 1:
            text = f"decoded token {self.num_tokens}, {_seconds(gap)} after the one before"
        elif emitted:
            text = f"decoded {emitted:,} tokens ({first + 1} to {self.num_tokens}), longest gap {_seconds(gap)}"
        if without:
            text += f"; went without in {len(without)} of {counted(len(same), 'iteration')}: {_reasons(without)}"
        yield same, text


# ------------------------------------------------------------------------------------------------------------- words


def _arrival(timeline: Timeline) -> Event:
    return Event(timeline.arrival, None, "arrived")


def _waited(same: list[Said]) -> Iterator[tuple[Sequence, str]]:
    runs = [list(run) for _, run in groupby(same, key=lambda said: _kind(said[1]))]
    for run in runs if len(runs) <= FEW else ():
        why = _because(run)
        comma = "" if why.startswith(("for ", "behind ")) else ","
        yield run, f"waited {counted(len(run), 'iteration')}{comma} {why}"
    if len(runs) > FEW:
        yield same, f"waited {counted(len(same), 'iteration')}, for changing reasons: {_reasons(same)}"


def _stalled(same: list[Said]) -> Iterator[tuple[Sequence, str]]:
    yield same, f"kept its memory and got no tokens in {counted(len(same), 'iteration')}: {_reasons(same)}"


def _dead(same: list[tuple[StepReport, int]]) -> Iterator[tuple[Sequence, str]]:
    yield same, f"its row ran on, dead, for {counted(len(same), 'iteration')}: the batch was not over"


def _parts(reason: str) -> tuple[str, str]:
    """What it is about, and its numbers."""
    if (behind := re.fullmatch(r"(behind .*): ([\d,]+) more", reason)) is not None:
        return behind[1], f", one of {behind[2]} there"
    head, colon, numbers = reason.partition(": ")
    return head, colon + numbers


def _kind(reason: str) -> str:
    """What reasons that differ only in their numbers have in common."""
    return "behind" if reason.startswith("behind ") else re.sub(r"\d+", "0", reason.partition(":")[0])


def _because(said: Sequence[Said]) -> str:
    """The reason with its numbers when it was first and when it was last given."""
    (first, numbers), (last, then) = _parts(said[0][1]), _parts(said[-1][1])
    text = first + numbers
    if (first, numbers) != (last, then):
        text += f" ... {last + then if last != first else then.lstrip(',: ')}"
    return f"for {text}" if re.fullmatch(r"(place|slot|block)s|token budget", first) else text


def _reasons(said: Sequence[Said]) -> str:
    """All kinds of reasons, each with its first and last numbers."""
    kinds: dict[str, list[Said]] = {}
    for step, reason in said:
        kinds.setdefault(_kind(reason), []).append((step, reason))
    texts = (_because(some).removeprefix("for ") for some in kinds.values())
    if len(kinds) == 1:
        return next(texts)
    return "; ".join(f"{counted(len(some), 'time')} {text}" for some, text in zip(kinds.values(), texts, strict=True))


def _ending(trace: Trace, timeline: Timeline, recomputed: int = 0) -> str:
    if timeline.finish_reason == "rejected":
        return f"refused: {timeline.error}"
    text = f"ended by {timeline.finish_reason} with {_tokens(timeline)}"
    text += f" ({timeline.error})" if timeline.error else ""
    if timeline.finish_reason in ("stop", "length"):
        ttft = timeline.token_times[0] - timeline.arrival
        text += f"; TTFT {_seconds(ttft)}, end to end {_seconds(timeline.finish - timeline.arrival)}"
    text += f"; preempted {counted(timeline.num_preemptions, 'time')}" if timeline.num_preemptions else ""
    text += f"; {counted(recomputed, 'token')} computed again in all" if recomputed else ""
    text += f"; {_moved(trace, timeline.num_swapped)} swapped to the host in all" if timeline.num_swapped else ""
    return text


def _unfinished(trace: Trace, timeline: Timeline, state: str) -> Event:
    time = max([timeline.arrival, *timeline.token_times[-1:], *(step.end for step in trace.steps[-1:])])
    what = {"coming": "it has not come yet", "waiting": "it waits", "active": "it runs"}.get(state, "it lives")
    return Event(time, None, f"the trace ends: {what}, with {_tokens(timeline)}")


def _from_timeline(trace: Trace, timeline: Timeline) -> Iterator[Event]:
    """The stays among the active requests, and the tokens of each: there are no iterations, and so no reasons."""
    yield _arrival(timeline)
    out_since, given = timeline.arrival, 0
    shares = timeline.group is not None and timeline.num_cached == timeline.num_prompt
    for number, (start, stop) in enumerate(timeline.runs):
        text = _joined(number > 0, start - out_since)
        if not number and timeline.num_cached:
            whose = "of the answer that it forks from" if shares else "found in the prefix cache"
            text += f"; {counted(timeline.num_cached, 'prompt token')} {whose}"
        last = number == len(timeline.runs) - 1
        total = len(timeline.token_times) if last else sum(time <= stop for time in timeline.token_times)
        yield Event(start, None, f"{text}; {counted(total - given, 'token')} in this stay")
        out_since, given = stop, total
        if number < timeline.num_preemptions:
            yield Event(stop, None, "preempted")
    if timeline.finish_reason is None:
        yield _unfinished(trace, timeline, "")
    else:
        yield Event(timeline.finish, None, _ending(trace, timeline))


def _tokens(timeline: Timeline) -> str:
    number, most = len(timeline.token_times), timeline.max_new_tokens
    return counted(number, "token") if number == most else f"{counted(number, 'token')} of at most {most}"


def _joined(again: bool, waited: float) -> str:
    return f"{'back' if again else 'admitted'} {f'after {_seconds(waited)}' if waited > 0 else 'at once'}"


def _moved(trace: Trace, num_tokens: int) -> str:
    """Tokens whose K/V crossed to the host, and how many bytes that was."""
    size, unit = num_tokens * trace.meta.get("kv_bytes_per_token", 0), "B"
    for larger in ("KiB", "MiB"):
        if size >= 10_000:
            size, unit = size / 1024, larger
    return counted(num_tokens, "token") + (f" ({size:,.0f} {unit})" if size else "")


def _range(first: int, last: int) -> str:
    return f"{first}" if first >= last else f"{first}-{last}"


def _seconds(duration: float) -> str:
    return f"{1000 * duration:.3g} ms" if 0 < duration < 0.1 else f"{duration:,.4g} s"


def _clock(time: float) -> str:
    return f"{time:,.3f}".rstrip("0").rstrip(".")


def _iterations(event: Event) -> str:
    return "" if event.iterations is None else _range(*event.iterations)


def _wrap(start: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False)
