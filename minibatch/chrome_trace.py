"""A trace for chrome://tracing and https://ui.perfetto.dev: zoom and search instead of a fixed picture.

The format is the JSON of Chrome's Trace Event Format. Two rules of it are easily broken, and then spans vanish: times
are *microseconds*, and the complete (``X``) events of one track must nest or be disjoint. Here times are whole
microseconds, so that touching spans touch exactly, and every request has a track of its own:

    process "engine"    one track of iterations; counters: requests running and waiting, rows of the KV cache
    process "requests"  one track a request: ``waiting``, ``running`` (its chunks inside), ``preempted``, ``running``
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from minibatch.trace import StepReport, Timeline, Trace

ENGINE, REQUESTS = 0, 1  # process ids
Event = dict[str, Any]


def events(trace: Trace) -> list[Event]:
    """All events: names of the tracks first, then by time, an enclosing span before what it encloses."""
    tracks = {timeline.request_id: number for number, timeline in enumerate(trace.timelines)}
    now = _last_time(trace)
    timed = [event for step in trace.steps for event in _step_events(step, tracks)]
    timed += [event for t in trace.timelines for event in _request_events(t, tracks[t.request_id], now)]
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    return [*_names(tracks), *timed]


def save(trace: Trace, path: str | Path) -> None:
    """Writes the events, and the trace's ``meta`` beside them."""
    document = {"traceEvents": events(trace), "displayTimeUnit": "ms", "otherData": trace.meta}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _names(tracks: dict[str, int]) -> Iterator[Event]:
    yield _name("process_name", ENGINE, 0, "engine")
    yield _name("thread_name", ENGINE, 0, "iterations")
    yield _name("process_name", REQUESTS, 0, "requests")
    for request_id, track in tracks.items():
        yield _name("thread_name", REQUESTS, track, request_id)


def _name(kind: str, process: int, track: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "ts": 0, "pid": process, "tid": track, "args": {"name": name}}


def _step_events(step: StepReport, tracks: dict[str, int]) -> Iterator[Event]:
    counts = {
        "prefill": step.prefill,
        "decode": step.decode,
        "recomputed": step.recomputed,
        "padding": step.padded,
        "token_budget": step.token_budget,
        "admitted": [a.request_id for a in step.admitted],
        "preempted": [p.request_id for p in step.preempted],
        "cached": step.cached,
        "swapped_out": step.swapped_out,
        "swapped_in": step.swapped_in,
        "finished": [request_id for request_id, _ in step.finished],
        "waiting": dict(step.waiting),
    }
    yield _span(f"iteration {step.index}", step.start, step.end, ENGINE, 0, counts)
    for member in step.members:
        args = {"start": member.start, "stop": member.stop, "emitted": member.emitted}
        yield _span(member.phase, step.start, step.end, REQUESTS, tracks[member.request_id], args)
    # A counter keeps its value until the next event, so the iteration's numbers are written at its start.
    yield _counter("requests", step.start, {"running": len(step.members), "waiting": step.num_waiting})
    kv = step.kv
    parts = ("filled", "fragmentation", "reserved", "cached", "free")
    yield _counter("KV rows", step.start, {part: getattr(kv, part) for part in parts})


def _request_events(timeline: Timeline, track: int, now: float) -> Iterator[Event]:
    """``now`` ends what has not ended; the last run of a live request is still ``[start, start]``."""
    facts = {
        "client": timeline.client,
        "priority": timeline.priority,
        "num_prompt": timeline.num_prompt,
        "num_generated": len(timeline.token_times),
    }
    end = timeline.finish if timeline.finish is not None else now
    runs = [(start, now if timeline.finish is None and stop == start else stop) for start, stop in timeline.runs]
    first = runs[0][0] if runs else end
    if first > timeline.arrival:
        yield _span("waiting", timeline.arrival, first, REQUESTS, track, facts)
    for start, stop in runs:
        yield _span("running", start, stop, REQUESTS, track, facts)
    for (_, stop), (start, _) in pairwise(runs):
        yield _span("preempted", stop, start, REQUESTS, track, facts)
    if runs and runs[-1][1] < end:  # preempted, and gone or still out at the end
        yield _span("preempted", runs[-1][1], end, REQUESTS, track, facts)
    if timeline.finish is not None:
        name = f"finished: {timeline.finish_reason}"
        yield {"name": name, "ph": "i", "s": "t", "ts": _us(end), "pid": REQUESTS, "tid": track, "args": facts}


def _span(name: str, start: float, end: float, process: int, track: int, args: dict[str, Any]) -> Event:
    ts = _us(start)
    dur = max(_us(end) - ts, 0)
    return {"name": name, "ph": "X", "ts": ts, "dur": dur, "pid": process, "tid": track, "args": args}


def _counter(name: str, when: float, values: dict[str, int]) -> Event:
    return {"name": name, "ph": "C", "ts": _us(when), "pid": ENGINE, "tid": 0, "args": values}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _last_time(trace: Trace) -> float:
    """When the trace ends; arrivals may be planned, and refused, beyond it."""
    times = [step.end for step in trace.steps[-1:]]
    for timeline in trace.timelines:
        if timeline.finish_reason != "rejected":
            times += timeline.token_times[-1:] if timeline.finish is None else [timeline.finish]
    return max(times, default=0.0)
