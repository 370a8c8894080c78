"""The Chrome export: microseconds, spans that nest, one track a request, JSON that any viewer takes."""

import json
import random
from collections import defaultdict

import pytest
from helpers import CONFIGURATIONS, ask, make_engine, names
from hypothesis import given, settings
from hypothesis import strategies as st

from minibatch import ContinuousBatching, Engine, ToyModel, Trace
from minibatch.chrome_trace import ENGINE, REQUESTS, events, save
from minibatch.policies import Swap
from minibatch.prefix_cache import PrefixCachedKVCache
from minibatch.trace import Timeline


def preempted_run():
    """Two overlapping requests; r1 is displaced once and comes back."""
    engine = make_engine("paged", num_blocks=5)
    engine.run([ask("r0", 8, 8), ask("r1", 6, 5)])
    assert [t.num_preemptions for t in engine.trace.timelines] == [0, 1]
    return engine.trace


def spans(trace, name=None, track=None):
    found = [e for e in events(trace) if e["ph"] == "X" and e["pid"] == REQUESTS]
    return [e for e in found if name in (None, e["name"]) and track in (None, e["tid"])]


def check(many):
    """Sorted in time, no negative duration, and on every track spans nest or are disjoint."""
    timed = [e for e in many if e["ph"] != "M"]
    assert many[: len(many) - len(timed)] == [e for e in many if e["ph"] == "M"]
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed)
    tracks = defaultdict(list)
    for event in timed:
        assert event["ts"] >= 0 and isinstance(event["ts"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for track in tracks.values():
        open_ends = []
        for start, end in track:  # in file order: an enclosing span comes first
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], "spans of one track overlap without nesting"
            open_ends.append(end)


def test_nb_05_a_preempted_request_has_two_runs_on_its_own_track(tmp_path):
    """NB-05. Fault: overlapping spans share a track and vanish, or seconds are written as microseconds."""
    trace = preempted_run()
    check(events(trace))
    save(trace, tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    document = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert document["traceEvents"] == events(trace)
    assert document["otherData"]["clock"] == "virtual"
    tracks = {e["tid"]: e["args"]["name"] for e in events(trace) if e["name"] == "thread_name" and e["pid"] == REQUESTS}
    assert tracks == {0: "r0", 1: "r1"}
    runs = trace.timelines[1].runs
    assert len(runs) == 2
    expected = [(round(start * 1e6), round((end - start) * 1e6)) for start, end in runs]
    assert [(e["ts"], e["dur"]) for e in spans(trace, "running", 1)] == expected
    (gap,) = spans(trace, "preempted", 1)
    assert (gap["ts"], gap["ts"] + gap["dur"]) == (round(runs[0][1] * 1e6), round(runs[1][0] * 1e6))
    assert len(spans(trace, "running", 0)) == 1 and not spans(trace, "preempted", 0)


def test_nb_05_iterations_are_microseconds_and_carry_their_counts():
    trace = preempted_run()
    iterations = [e for e in events(trace) if e["ph"] == "X" and e["pid"] == ENGINE]
    assert [(e["ts"], e["dur"]) for e in iterations] == [(s.index * 10**6, 10**6) for s in trace.steps]
    for event, step in zip(iterations, trace.steps, strict=True):
        counts = {key: event["args"][key] for key in ("prefill", "decode", "recomputed", "padding")}
        assert list(counts.values()) == [step.prefill, step.decode, step.recomputed, step.padded]
        assert event["args"]["preempted"] == list(names(step.preempted))
    chunks = [e for e in spans(trace) if e["name"] in ("prefill", "decode", "recompute")]
    assert len(chunks) == sum(len(s.members) for s in trace.steps)
    assert [e["name"] for e in chunks].count("recompute") == 1


def test_counters_hold_the_numbers_of_their_iteration():
    trace = preempted_run()
    counters = defaultdict(list)
    for event in events(trace):
        if event["ph"] == "C":
            counters[event["name"]].append(event)
    for step, rows, requests in zip(trace.steps, counters["KV rows"], counters["requests"], strict=True):
        assert rows["ts"] == requests["ts"] == step.index * 10**6
        assert sum(rows["args"].values()) == step.kv.capacity and rows["args"]["filled"] == step.kv.filled
        assert requests["args"] == {"running": len(step.members), "waiting": step.num_waiting}


def test_prefix_hits_swaps_and_forks_have_valid_tracks_and_their_numbers():
    """Fault: a fork makes spans that overlap, or cached and swapped tokens are missing in the iteration's facts."""
    prompts = [[*range(8), 50 + i, 60 + i, 70 + i] for i in range(8)]
    engine = Engine(ToyModel(), ContinuousBatching(6, 64, preemption=Swap()), PrefixCachedKVCache(11, 4))
    engine.run([ask(f"r{i}", p, 1 + 2 * (i % 5), at=0.7 * i, n=1 + i % 2) for i, p in enumerate(prompts)])
    trace = engine.trace
    assert sum(s.cached for s in trace.steps) and sum(s.swapped_out for s in trace.steps)
    assert sum(len(s.forked) for s in trace.steps) == 4
    check(events(trace))
    iterations = [e for e in events(trace) if e["ph"] == "X" and e["pid"] == ENGINE]
    for event, step in zip(iterations, trace.steps, strict=True):
        for name in ("cached", "swapped_out", "swapped_in"):
            assert event["args"][name] == getattr(step, name)
    kv = [e["args"] for e in events(trace) if e["ph"] == "C" and e["name"] == "KV rows"]
    assert [e["cached"] for e in kv] == [s.kv.cached for s in trace.steps] and max(e["cached"] for e in kv) > 0


def test_waiting_comes_before_the_first_run():
    engine = make_engine("continuous", max_num_seqs=1)
    engine.run([ask("a", 2, 4), ask("b", 2, 2, at=1.25)])
    (wait,) = spans(engine.trace, "waiting")
    assert (wait["tid"], wait["ts"], wait["dur"]) == (1, 1_250_000, 4_000_000 - 1_250_000)
    ends = [e for e in events(engine.trace) if e["ph"] == "i"]
    assert [(e["name"], e["tid"], e["ts"]) for e in ends] == [
        ("finished: length", 0, 4_000_000),
        ("finished: length", 1, 6_000_000),
    ]


def test_whatever_its_end_a_request_has_a_valid_track():
    """Refused at the door, aborted in the queue or while running, still running, not yet arrived; then no request."""
    engine = make_engine("chunked", max_num_seqs=2)
    engine.run([ask("refused", 900, 1)])
    for name in ("running", "aborted", "queued", "gone"):
        engine.submit(ask(name, 3, 9))
    engine.submit(ask("later", 3, 3, at=50.0))
    for _ in range(3):
        engine.step()
    engine.abort("aborted")
    engine.abort("gone")
    trace = engine.trace
    check(events(trace))
    names = [t.request_id for t in trace.timelines]
    kinds = {name: {e["name"] for e in spans(trace, track=names.index(name))} for name in names}
    assert kinds["refused"] == kinds["later"] == set()
    assert kinds["gone"] == kinds["queued"] == {"waiting"}
    assert {"running", "decode"} <= kinds["running"] and "running" in kinds["aborted"]
    (run,) = spans(trace, "running", names.index("running"))
    assert run["ts"] + run["dur"] == 3_000_000  # it is still running at the end of the trace
    assert [e["ph"] for e in events(Trace())] == ["M", "M", "M"]


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=8, deadline=None)
def test_any_run_nests(configuration, seed):
    rng = random.Random(seed)
    engine = make_engine(configuration, num_blocks=rng.randint(4, 10))
    engine.run([ask(f"r{i}", rng.randint(1, 8), rng.randint(1, 8), at=rng.random() * 6) for i in range(7)])
    check(events(engine.trace))
    json.dumps(events(engine.trace), allow_nan=False)


@given(st.lists(st.floats(0, 1e-3), min_size=4, max_size=12))
@settings(max_examples=60, deadline=None)
def test_real_times_nest_however_they_round(gaps):
    """Runs and gaps of a few nanoseconds to a millisecond, as a real clock gives them."""
    times = [12.3456789 + sum(gaps[: i + 1]) for i in range(len(gaps))]
    arrival, *bounds = times
    runs = [[start, stop] for start, stop in zip(bounds[::2], bounds[1::2], strict=False)]
    timeline = Timeline(
        "a", "x", 0, 3, 9, arrival, bounds[0], [runs[-1][1]], runs, len(runs) - 1, runs[-1][1], "length"
    )
    check(events(Trace(timelines=[timeline])))
