"""A light trace says in numbers what a full one says in detail, and a cache that is not asked would have said yes.

Each property plays the same requests twice on the same parts, and nothing else may differ: with and without the record
of who did what (``record_steps``); and with ``RequestState.room``, which spares the cache most questions, against
an engine that is told there is never any room, so that plan, check and engine ask about every token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

import pytest
from helpers import ask, drive, make_engine, run_checked
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from test_engine_properties import ORDERS, SLOT, make_cache, make_request, make_scheduler, picks

from minibatch import (
    ChunkedPrefill,
    ContiguousKVCache,
    ContinuousBatching,
    Engine,
    PagedKVCache,
    Request,
    SamplingParams,
    StaticBatching,
    ToyModel,
    Trace,
    accounting,
    explain,
    metrics,
)
from minibatch.models.simulated_model import SimulatedModel
from minibatch.plan import Plan
from minibatch.policies import (
    FCFS,
    ByTokensLeft,
    Fair,
    Forecast,
    LongestPrefix,
    Optimistic,
    Priority,
    Recompute,
    ReserveMaximum,
    ShortestFirst,
    Swap,
    by_priority,
)
from minibatch.prefix_cache import PrefixCachedKVCache
from minibatch.request import RequestRefused, RequestState, Result
from minibatch.trace import StepCounts, StepReport

Parts = tuple[Any, Any, Any]  # scheduler, cache, order

QUICK = settings(
    max_examples=50, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


def seconds(plan: Plan) -> float:
    """Of an iteration: no two of different size take the same time."""
    return 0.25 + plan.num_tokens / 64 + len(plan.chunks) / 1024


@dataclass(frozen=True)
class Play:
    """What one run is made of; ``aborts``: before which step, whom."""

    parts: Parts
    requests: tuple[Request, ...]
    aborts: Mapping[int, Sequence[str]]
    max_queue: int | None = None

    def run(self, record_steps: bool, model: Any = None) -> tuple[Engine, list[StepReport | StepCounts]]:
        scheduler, cache, order = deepcopy(self.parts)  # a cache and an order belong to one engine
        model = model or SimulatedModel(seconds)
        engine = Engine(
            model, scheduler, cache, order=order, max_queue=self.max_queue, seed=0, record_steps=record_steps
        )
        records: list[StepReport | StepCounts] = []
        for request in self.requests:
            with suppress(RequestRefused):
                engine.submit(request)
        for step in range(3000):
            for request_id in self.aborts.get(step, ()):
                engine.abort(request_id)
            if (record := engine.step()) is None:
                return engine, records
            records.append(record)
        raise AssertionError("no end")


def simulated(pick: Callable[[Sequence[Any]], Any], request: Request) -> Request:
    """The request with an end of its own, perhaps; its prompt may be a range."""
    end = pick([None, None, *range(1, SLOT // 2 + 3)])
    first = pick([0, 0, 1, 7, 1000])
    prompt = range(first, first + len(request.prompt)) if pick([True, False]) else request.prompt
    return replace(request, prompt=prompt, output_length=end)


@st.composite
def plays(draw: Any) -> Play:
    pick = picks(draw)
    scheduler, cache = make_scheduler(pick), make_cache(pick)
    order = pick(list(ORDERS))
    requests = tuple(
        simulated(pick, make_request(pick, number, pick([None, 0.0, 0.5, 2.0, 7.0])))
        for number in range(pick(range(1, 9)))
    )
    aborts: dict[int, list[str]] = {}
    for _ in range(pick([0, 0, 1, 3])):
        aborts.setdefault(pick(range(15)), []).append(pick(requests).request_id + pick(["", "", "#0", "#1"]))
    return Play((scheduler, cache, ORDERS[order]()), requests, aborts, pick([None, None, 3]))


def random_play(parts: Parts, seed: int, *, n: Sequence[int] = (1,)) -> Play:
    """Fourteen requests of all sizes that come faster than they can be served."""
    rng = Random(seed)
    requests = [
        replace(
            simulated(rng.choice, make_request(rng.choice, number, number / 4)),
            prompt=range(20 * (number % 3), 20 * (number % 3) + rng.randrange(1, SLOT // 2)),
            params=SamplingParams(max_tokens=rng.randrange(3, SLOT // 2), n=rng.choice(n)),
        )
        for number in range(14)
    ]
    return Play(parts, tuple(requests), {9: ["q3", "q12"], 14: ["q8#0"]})


# ---------------------------------------------------------------- the properties


def equal(one: Any, other: Any) -> bool:
    """Also where both are NaN."""
    return repr(one) == repr(other)


def check_same_run(one: Engine, other: Engine) -> None:
    assert one.trace.timelines == other.trace.timelines
    assert one.results == other.results and list(one.results) == list(other.results)
    assert one.clock.now() == other.clock.now()


def check_light(play: Play) -> Engine:
    """Plays it twice and returns the engine of the full run."""
    (full, reports), (light, counts) = play.run(True), play.run(False)
    check_same_run(full, light)
    assert full.trace.steps == reports and full.trace.light == []
    assert light.trace.light == counts and light.trace.steps == []
    assert full.trace.counts == light.trace.counts == counts
    assert all(type(number) in (int, float, type(None)) for line in counts for number in line)
    assert full.trace.num_steps == light.trace.num_steps == len(counts)
    for measure in (metrics.summary, accounting.work, accounting.memory):
        assert equal(measure(full.trace), measure(light.trace))
    assert metrics.steps_table(full.trace).equals(metrics.steps_table(light.trace))
    assert metrics.requests_table(full.trace).equals(metrics.requests_table(light.trace))
    for report, line in zip(reports, counts, strict=True):
        check_sums(report, line)
    check_totals(light)
    return full


def check_sums(report: StepReport, line: StepCounts) -> None:
    """Of one iteration."""
    rows = (line.kv_filled, line.kv_reserved, line.kv_fragmentation, line.kv_cached, line.kv_free)
    assert min(rows) >= 0 and sum(rows) == line.kv_capacity
    assert line.prefill + line.decode + line.recomputed + line.padding == report.num_tokens > 0
    assert 0 <= line.dead_padding <= line.padding
    assert 0 <= line.useful_rows <= line.num_seqs <= line.num_rows
    assert line.token_budget is None or report.num_tokens <= line.token_budget
    sizes = [member.stop - member.start for member in report.members]
    assert line.prefill + line.decode + line.recomputed == sum(sizes) and line.num_seqs == len(sizes)
    useful = sum(member.recomputed < size for member, size in zip(report.members, sizes, strict=True))
    assert line.useful_rows == useful
    units = [unit for holding in report.kv.holdings for unit in holding.units]
    if len(set(units)) == len(units):
        for part in ("filled", "reserved", "fragmentation"):
            assert getattr(line, f"kv_{part}") == sum(getattr(holding, part) for holding in report.kv.holdings)
    assert line.kv_host == report.kv.host and line.num_waiting == report.num_waiting


def check_totals(engine: Engine) -> None:
    """The sums over a light run against its timelines, which are kept by another hand."""
    lines, timelines = engine.trace.light, engine.trace.timelines
    entered = [t for t in timelines if t.finish_reason != "rejected"]
    assert sum(line.admitted + line.forked for line in lines) == sum(len(t.runs) for t in entered)
    assert sum(line.preempted for line in lines) == sum(t.num_preemptions for t in entered)
    assert sum(line.swapped_out for line in lines) == sum(t.num_swapped for t in entered)
    assert sum(line.swapped_in for line in lines) <= sum(t.num_swapped for t in entered)
    if any(t.finish_reason == "abort" for t in entered):
        return  # they ended between two reports, with part of their work done
    assert sum(line.arrived + line.forked for line in lines) == len(entered)
    assert sum(line.swapped_in for line in lines) == sum(t.num_swapped for t in entered)
    found = sum(t.num_recached for t in entered)  # of what it never computed, too
    prefill = sum(t.num_prompt - t.num_cached for t in entered)
    decode = sum(len(t.token_times) - 1 for t in entered)
    assert 0 <= prefill + decode - sum(line.prefill + line.decode for line in lines) <= found


@pytest.mark.slow
@QUICK
@given(plays())
def test_a_light_run_has_the_counts_of_a_full_one(play):
    """Fault: a count is not that of the report, a snapshot without holdings sums otherwise, or the engine decides
    otherwise when nobody looks."""
    full = check_light(play)
    event(f"{type(play.parts[0]).__name__} on {type(play.parts[1]).__name__}")
    for what in ("preempted", "swapped_in", "cached", "forked", "copied_rows", "dead_padding", "recomputed"):
        if any(getattr(line, what) for line in full.trace.counts):
            event(what)


@contextmanager
def no_room():
    """Every request that asks for its room is told that it has none, so that the cache is asked each time."""
    kept = RequestState.room
    RequestState.room = property(lambda state: 0, lambda state, room: None)
    try:
        yield
    finally:
        RequestState.room = kept


@QUICK
@given(plays())
def test_asking_the_cache_for_every_token_changes_nothing(play):
    """Fault: a request writes beyond its rows or into a shared block, because its room is out of date; or it is denied
    rows that it has."""
    quick, reports = play.run(True)
    with no_room():
        asked, same = play.run(True)
    check_same_run(quick, asked)
    assert same == reports


@settings(QUICK, max_examples=40)
@given(plays())
def test_and_the_same_with_a_model_that_reads_what_was_written(play):
    """Fault: the same, seen by the tokens: the toy reads every row."""
    play = replace(play, requests=tuple(replace(r, prompt=[t % 256 for t in r.prompt]) for r in play.requests))
    play = replace(play, requests=tuple(replace(r, output_length=None) for r in play.requests))
    (quick, reports), (light, counts) = play.run(True, ToyModel()), play.run(False, ToyModel())
    with no_room():
        asked, same = play.run(True, ToyModel())
    check_same_run(quick, asked)
    check_same_run(quick, light)
    assert same == reports and [report.counts for report in reports] == counts


def test_room_is_given_back_with_the_memory():
    """Fault: a request that was preempted or has ended, or one whose answer is aborted before the fork, may still write
    where it held rows. The invariants look at ``room`` after every step and abort."""
    run_checked(make_engine("continuous"), [ask(f"s{i}", 3 + i, 4) for i in range(6)])
    for preemption in (Recompute(), Swap()):
        tight = Engine(ToyModel(), continuous(preemption=preemption), PagedKVCache(5, 4))
        run_checked(tight, [ask("old", 4, 12), ask("new", 4, 12)])
        assert sum(len(step.preempted) for step in tight.trace.steps) > 0
    engine = Engine(ToyModel(), ChunkedPrefill(2, 4, admission=ReserveMaximum()), PagedKVCache(6, 4))
    engine.submit(ask("r", 4, 4, at=None, n=3))
    drive(engine, {2: lambda: engine.abort("r#1")})
    assert engine.results["r#1"].tokens == () and len(engine.results["r#2"].tokens) == 4


# ---------------------------------------------------------------- every configuration by name, with what has to happen

SMALL = 7  # blocks of 4: enough for the longest request, and for little else


def continuous(**policies: Any) -> ContinuousBatching:
    return ContinuousBatching(5, 2 * SLOT, **policies)


NAMED: dict[str, tuple[Callable[[], Parts], tuple[str, ...], tuple[int, ...]]] = {
    "static": (lambda: (StaticBatching(3, 1.5), ContiguousKVCache(3, SLOT), FCFS()), ("dead_padding",), (1,)),
    "static, paged": (lambda: (StaticBatching(4), PagedKVCache(SMALL, 4), FCFS()), ("dead_padding",), (1,)),
    "continuous": (lambda: (continuous(), ContiguousKVCache(3, SLOT), FCFS()), ("kv_fragmentation",), (1,)),
    "paged": (lambda: (continuous(), PagedKVCache(SMALL, 4), FCFS()), ("preempted", "recomputed"), (1,)),
    "paged, n > 1": (lambda: (continuous(), PagedKVCache(9, 4), FCFS()), ("forked", "copied_rows"), (1, 2, 3)),
    "paged, maximum": (
        lambda: (continuous(admission=ReserveMaximum()), PagedKVCache(12, 4), FCFS(lookahead=2)),
        ("kv_reserved", "forked", "copied_rows"),
        (1, 2, 3),
    ),
    "paged, forecast": (
        lambda: (continuous(admission=Forecast()), PagedKVCache(SMALL, 4), FCFS(lookahead=1)),
        ("decode",),
        (1,),
    ),
    "paged, swap": (
        lambda: (continuous(admission=Optimistic(), preemption=Swap(host_tokens=12)), PagedKVCache(SMALL, 4), FCFS()),
        ("swapped_out", "swapped_in", "kv_host"),
        (1,),
    ),
    "chunked": (lambda: (ChunkedPrefill(6, 4), PagedKVCache(SMALL, 4), FCFS()), ("preempted",), (1,)),
    "chunked, optimistic": (
        lambda: (ChunkedPrefill(5, 4, 3, admission=Optimistic()), PagedKVCache(SMALL, 4), FCFS()),
        ("preempted", "recomputed"),
        (1,),
    ),
    "chunked, fair": (lambda: (ChunkedPrefill(8, 4), PagedKVCache(SMALL, 4), Fair()), ("preempted",), (1,)),
    "chunked, priority": (
        lambda: (
            ChunkedPrefill(8, 3, preemption=Swap(displaces=by_priority)),
            PagedKVCache(12, 4),
            Priority(ageing=9.0),
        ),
        ("preempted", "swapped_out"),
        (1,),
    ),
    "chunked, shortest": (
        lambda: (
            ChunkedPrefill(8, 3, preemption=Recompute(displaces=ByTokensLeft())),
            PagedKVCache(12, 4),
            ShortestFirst(),
        ),
        ("preempted", "recomputed"),
        (1,),
    ),
    "prefix": (
        lambda: (ChunkedPrefill(8, 4), PrefixCachedKVCache(SMALL, 4), LongestPrefix(window=3)),
        ("cached", "kv_cached", "preempted"),
        (1,),
    ),
    "prefix, n > 1, swap": (
        lambda: (continuous(preemption=Swap(host_tokens=8)), PrefixCachedKVCache(12, 3), FCFS()),
        ("cached", "forked", "copied_rows", "swapped_in"),
        (1, 2, 3),
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_each_configuration_under_pressure(name):
    """Fault: the same as above, in a case that chance might have spared."""
    parts, happens, n = NAMED[name]
    seen: dict[str, int] = dict.fromkeys(happens, 0)
    reasons: set[str | None] = set()
    for seed in range(4):
        play = random_play(parts(), seed, n=n)
        trace = check_light(play).trace
        for what in happens:
            seen[what] += sum(getattr(line, what) for line in trace.counts)
        reasons |= {timeline.finish_reason for timeline in trace.timelines}
        quick, reports = play.run(True)
        with no_room():
            asked, same = play.run(True)
        check_same_run(quick, asked)
        assert same == reports
    assert min(seen.values()) > 0, seen
    assert {"stop", "length", "abort"} <= reasons


# ---------------------------------------------------------------- the trace as an object


@pytest.fixture
def play() -> Play:
    requests = tuple(replace(ask(f"é{i}", 3 + i, 6, at=i / 2, n=1 + i % 2), output_length=5) for i in range(6))
    refused = ask("bad", 200, 3)
    return Play((continuous(), PrefixCachedKVCache(9, 4), FCFS()), (*requests, refused), {4: ["é2"]})


def test_run_hands_out_and_keeps_the_same_numbers(play):
    """Fault: ``on_step`` gets something else than the trace keeps."""
    engine, seen = Engine(SimulatedModel(seconds), *play.parts[:2], record_steps=False), []
    engine.run(play.requests, seen.append)
    assert seen and all(type(record) is StepCounts for record in seen)
    assert engine.trace.light == seen and [line.index for line in seen] == list(range(len(seen)))


def test_a_light_trace_survives_the_disk(play, tmp_path):
    """Fault: a number is lost, a float is cut, or the lines come back as step reports."""
    light, counts = play.run(False)
    light.trace.save(tmp_path / "light.jsonl")
    loaded = Trace.load(tmp_path / "light.jsonl")
    assert loaded == light.trace and loaded.steps == [] and loaded.light == counts
    assert all(type(line) is StepCounts for line in loaded.light)
    assert equal(metrics.summary(loaded), metrics.summary(light.trace))
    assert equal(accounting.work(loaded), accounting.work(light.trace))
    loaded.save(tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "light.jsonl").read_bytes()


def test_a_light_line_that_lacks_a_number_is_no_line_of_a_trace(play, tmp_path):
    """Fault: a trace of another version is read as if it said 0."""
    play.run(False)[0].trace.save(tmp_path / "light.jsonl")
    text = (tmp_path / "light.jsonl").read_text(encoding="utf-8")
    (tmp_path / "light.jsonl").write_text(text.replace('"kv_host":0,', "", 1), encoding="utf-8")
    with pytest.raises(ValueError, match=r":2 is not a line.*kv_host"):
        Trace.load(tmp_path / "light.jsonl")


def test_a_light_file_is_a_fraction_of_a_full_one(play, tmp_path):
    """Fault: holdings or names are kept after all. Also: the snapshots of a light run list no holdings."""
    (full, _), (light, _) = play.run(True), play.run(False)
    for name, engine in (("full", full), ("light", light)):
        engine.trace.save(tmp_path / name)
    assert (tmp_path / "light").stat().st_size < (tmp_path / "full").stat().st_size
    assert full.trace.meta == light.trace.meta  # how it was recorded is not how it was run
    everything, sums = light.kv.snapshot(light.active), light.kv.snapshot(light.active, False)
    assert {**asdict(everything), "holdings": (), "idle": ()} == {**asdict(sums), "holdings": ()}


def test_an_iteration_that_failed_is_in_the_next_numbers():
    """Fault: the model raises, the caller goes on, and who was admitted or preempted then is counted nowhere."""

    def total(record_steps: bool) -> tuple[list[StepCounts], list[Result]]:
        calls: list[Plan] = []

        def flaky(plan: Plan) -> float:
            calls.append(plan)
            if len(calls) % 2:
                raise RuntimeError("out of luck")
            return 1.0

        engine = Engine(SimulatedModel(flaky), continuous(), PagedKVCache(5, 4), record_steps=record_steps)
        for request in (ask("old", 4, 12), ask("new", 4, 12)):
            engine.submit(request)
        while True:
            with suppress(RuntimeError):
                if engine.step() is None:
                    return engine.trace.counts, list(engine.results.values())

    (full, results), (light, same) = total(True), total(False)
    assert full == light and results == same
    assert sum(line.preempted for line in light) == sum(r.timeline.num_preemptions for r in results) > 0


def test_a_light_trace_does_not_say_who_did_what():
    """Fault: zeros for everybody, or a story without its reasons and without a word about that."""
    engine = make_engine("paged", record_steps=False)
    engine.run([ask("a", 3, 4)])
    with pytest.raises(ValueError, match="a light trace of 4 iterations does not say who did what"):
        accounting.work_table(engine.trace)
    assert "kept without step reports" in " ".join(explain.describe(engine.trace, "a").split())
