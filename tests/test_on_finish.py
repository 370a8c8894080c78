"""``Engine.run(..., on_finish)``: told of every end exactly once, when it is over, and asked what comes next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from helpers import CONFIGURATIONS, ask, cacheless, check_drained, check_invariants, check_solo, make_engine, timeline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_engine_properties import ORDERS, SLOT, make_cache, make_request, make_scheduler, picks

from minibatch import ContinuousBatching, Engine, PagedKVCache, Request, SamplingParams, ToyModel
from minibatch.models.simulated_model import SimulatedModel
from minibatch.request import EngineStalled, Result
from minibatch.trace import StepReport

QUICK = settings(
    max_examples=80, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
Next = Callable[[Result], Iterable[Request] | None]


class Watched:
    """An engine, and a callback that knows what it was told, and what had happened by then."""

    def __init__(self, engine: Engine, then: Next = lambda result: None) -> None:
        self.engine, self.then = engine, then
        self.told: list[str] = []
        self.times: dict[str, float] = {}
        self.steps: list[StepReport] = []

    def run(self, requests: Iterable[Request], on_step: Callable[[Any], object] = lambda step: None) -> list[Result]:
        def after(step: StepReport) -> None:
            self.steps.append(step)
            on_step(step)

        return self.engine.run(requests, after, self.on_finish)

    def on_finish(self, result: Result) -> Iterable[Request] | None:
        name, now = result.request_id, self.engine.clock.now()
        assert name not in self.times, f"told twice of {name}"
        assert result.finish_reason in ("stop", "length", "abort", "rejected")
        assert not self.engine._stepping, f"{name}: the iteration is not over"
        assert self.steps == self.engine.trace.steps, f"{name}: told before the record of its last iteration"
        if result.finish_reason != "rejected" or name in self.engine.results:
            assert self.engine.results[name] is result, f"{name}: not the result that the engine keeps"
            assert all(t.finish is not None for t in self.engine.trace.timelines if name in (t.request_id, t.group))
        self.told.append(name)
        self.times[name] = now
        return self.then(result)


def watched(configuration: str, then: Next = lambda result: None, **options: Any) -> Watched:
    return Watched(make_engine(configuration, **options), then)


# ---------------------------------------------------------------- once for every reason


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_everybody_whose_run_ends_is_told_once_and_at_that_time(configuration):
    """Fault: an end is told twice, not at all, or an iteration late."""
    watch = watched(configuration)
    requests = [ask(f"q{i}", 3 + i, 2 + i % 3, at=i / 2) for i in range(6)]
    results = watch.run(requests)
    assert Counter(watch.told) == Counter(r.request_id for r in requests)
    assert watch.told == [label for step in watch.steps for label, _ in step.finished]
    assert watch.times == {r.request_id: r.timeline.finish for r in results}
    check_solo(requests, results)


def test_every_reason_is_told():
    """Fault: those that were refused, found the queue full or were aborted between two steps are forgotten."""
    engine = Engine(ToyModel(eos_token_id=None), ContinuousBatching(1, 64), PagedKVCache(16, 4), max_queue=1)
    reasons: dict[str, str] = {}
    errors: dict[str, str | None] = {}

    def then(result: Result) -> None:
        reasons[result.request_id], errors[result.request_id] = result.finish_reason, result.error

    watch = Watched(engine, then)
    first, aborts = cacheless(ask("stops", 3, 1))[0], {2: ["aborted", "nobody"], 4: ["never comes"]}
    requests = [
        ask("door", []),
        ask("aborted", 4, 9),
        ask("stops", 3, 8, at=1.0, stop_token_ids=(first,)),
        ask("full", 3, 2, at=1.0),  # one may wait: "stops" does
        ask("runs", 3, 2, at=9.0),
        ask("never comes", 3, 2, at=50.0),
    ]
    results = watch.run(requests, lambda step: [engine.abort(name) for name in aborts.get(step.index, ())])
    expected = {
        "door": "rejected",
        "aborted": "abort",
        "stops": "stop",
        "full": "rejected",
        "runs": "length",
        "never comes": "abort",
    }
    assert reasons == expected == {result.request_id: result.finish_reason for result in results}
    assert len(watch.told) == 6
    assert errors["door"].startswith("InvalidPrompt") and errors["full"].startswith("QueueFull")
    check_drained(engine)


def test_of_several_answers_the_group_is_told_once_when_the_last_one_ends():
    """Fault: every answer is told, or the group when its first answer ends."""
    ended: list[Result] = []
    watch = watched("chunked", ended.append)
    (result,) = watch.run([ask("g", 5, 6, n=3)], lambda step: step.index == 2 and watch.engine.abort("g#1"))
    assert watch.told == ["g"] and ended == [result] and ended[0] is result
    assert [sample.finish_reason for sample in result.samples] == ["length", "abort", "length"]
    assert watch.times["g"] == max(sample.timeline.finish for sample in result.samples)


def test_a_group_that_is_aborted_or_refused_as_a_whole_is_told_once():
    watch = watched("chunked", max_queue=0)
    (result,) = watch.run([ask("g", 5, 6, at=1.0, n=3)])
    assert watch.told == ["g"] and result.finish_reason == "rejected" and len(result.samples) == 3
    watch = watched("chunked")
    (result,) = watch.run([ask("g", 5, 6, n=3)], lambda step: watch.engine.abort("g"))
    assert watch.told == ["g"] and result.finish_reason == "abort"
    watch = watched("static")
    (result,) = watch.run([ask("g", 5, 6, n=3)])
    assert watch.told == ["g"] and result.finish_reason == "rejected" and not result.samples


# ---------------------------------------------------------------- what comes next


def test_what_is_returned_is_submitted_when_the_iteration_is_over():
    """Fault: a follower waits for another iteration first, or its arrival is counted from somewhere else."""
    followers = {
        "a": [ask("now", 3, 2, at=None), ask("late", 3, 2, at=9.0), ask("past", 3, 2, at=0.5)],
        "now": (ask(f"g{i}", 3, 1, at=None) for i in range(2)),  # any iterable
        "late": None,
    }
    watch = watched("paged", lambda result: followers.get(result.request_id, ()))
    requests = [ask("a", 3, 2), ask("b", 3, 7)]
    results = watch.run(requests)
    names = ["a", "b", "now", "late", "past", "g0", "g1"]
    assert [result.request_id for result in results] == names
    assert {result.finish_reason for result in results} == {"length"}
    arrivals = {result.request_id: result.timeline.arrival for result in results}
    scheduled = {result.request_id: result.timeline.scheduled for result in results}
    assert arrivals == {"a": 0.0, "b": 0.0, "now": 2.0, "late": 9.0, "past": 0.5, "g0": 4.0, "g1": 4.0}
    assert scheduled == {"a": 0.0, "b": 0.0, "now": 2.0, "late": 9.0, "past": 2.0, "g0": 4.0, "g1": 4.0}


def test_a_follower_that_is_refused_has_a_result_and_is_told_too():
    """Fault: a typo in the second turn ends the whole run, or its conversation silently."""
    bad = {
        "a": [ask("no prompt", [], at=None), Request([1], "params", "no params"), ask("b", 3, 2, at=None)],
        "no prompt": [ask("too long", 300, 2, at=None)],
        "too long": [replace(ask("at no time", 3, 2), arrival_time=-1.0), ask("c", 3, 2, at=None)],
    }
    watch = watched("paged", lambda result: bad.get(result.request_id))
    results = watch.run([ask("a", 3, 2)])
    assert [(r.request_id, r.finish_reason) for r in results] == [
        ("a", "length"),
        ("no prompt", "rejected"),
        ("no params", "rejected"),
        ("b", "length"),
        ("too long", "rejected"),
        ("at no time", "rejected"),
        ("c", "length"),
    ]
    assert sorted(watch.told) == sorted(result.request_id for result in results)
    check_drained(watch.engine)


def test_a_request_that_is_refused_when_nothing_else_runs_has_followers_all_the_same():
    """Fault: ``step`` has nothing to do, and the run is over before anybody is asked."""
    watch = watched("paged", lambda result: [ask("b", 3, 2, at=None)] if result.request_id == "a" else None)
    results = watch.run([ask("a", [])])
    assert [(r.request_id, r.finish_reason) for r in results] == [("a", "rejected"), ("b", "length")]


def test_a_follower_that_is_in_use_or_of_a_full_queue_is_refused():
    """Fault: an id that still runs is taken over, or ``max_queue`` does not hold for followers."""
    more = {"a": [ask("b", 3, 2, at=None)] + [ask(f"w{i}", 3, 9, at=None) for i in range(6)]}
    watch = watched("paged", lambda result: more.get(result.request_id) if result.finish_reason == "length" else None)
    watch.engine.max_queue = 3
    results = watch.engine.run([ask("a", 3, 2), ask("b", 3, 9)], None, lambda r: more.pop(r.request_id, None))
    assert [r.finish_reason for r in results] == ["length", "length", "rejected", *["length"] * 3, *["rejected"] * 3]
    errors = [result.error.split(":")[0] for result in results if result.error]
    assert errors == ["DuplicateRequest"] + ["QueueFull"] * 3


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("num_clients", [1, 3, 7])
def test_a_closed_loop_never_has_more_in_flight_than_clients(configuration, num_clients):
    """Fault: a follower overtakes the end that it follows. Between two iterations all clients have a request."""
    turns, rng = 4, Random(num_clients)
    sizes = {(client, turn): rng.randrange(1, 7) for client in range(num_clients) for turn in range(turns)}

    def request(client: int, turn: int, at: float | None = None) -> Request:
        return ask(f"c{client}.{turn}", 1 + sizes[client, turn], sizes[client, turn], at)

    def then(result: Result) -> list[Request]:
        client, turn = map(int, result.request_id[1:].split("."))
        return [request(client, turn + 1)] if turn + 1 < turns else []

    watch = watched(configuration, then)
    in_flight: list[int] = []
    results = watch.run(
        [request(client, 0, 0.0) for client in range(num_clients)],
        lambda step: in_flight.append(len(watch.engine.life.live) + len(step.finished)),
    )
    assert len(results) == turns * num_clients == len(set(watch.told))
    assert max(in_flight) == num_clients and in_flight[0] == num_clients
    for result in results:
        client, turn = map(int, result.request_id[1:].split("."))
        if turn:
            assert result.timeline.arrival == watch.times[f"c{client}.{turn - 1}"]
            assert result.timeline.scheduled >= result.timeline.arrival
    check_solo([request(*map(int, r.request_id[1:].split("."))) for r in results], results)
    order = [result.request_id for result in results]
    assert order[:num_clients] == [f"c{client}.0" for client in range(num_clients)]
    followed = [name for name in watch.told if not name.endswith(f".{turns - 1}")]
    assert order[num_clients:] == [f"{name[:-1]}{int(name[-1]) + 1}" for name in followed]


@st.composite
def scenes(draw: Any) -> tuple[Any, dict[str, list[Request]], list[tuple[int, str]], int | None]:
    """Parts; what follows whom, "" being nobody; whom to abort after which step; the longest queue."""
    pick = picks(draw)
    parts = make_scheduler(pick), make_cache(pick), ORDERS[pick(list(ORDERS))]()
    follows: dict[str, list[Request]] = {"": []}
    for number in range(pick(range(1, 11))):
        request = make_request(pick, number, pick([None, None, 0.0, 3.0, 20.0]))
        request = replace(request, request_id=f"q{number}", output_length=pick([None, 1, 3, SLOT]))
        if pick([True, False, False, False]):
            request = replace(request, prompt=[])
        follows.setdefault(pick(["", *[f"q{i}" for i in range(number)]]), []).append(request)
    aborts = [(pick(range(12)), f"q{pick(range(10))}" + pick(["", "#0", "#1"])) for _ in range(pick([0, 0, 1, 3]))]
    return parts, follows, aborts, pick([None, None, 2])


@QUICK
@given(scenes())
def test_everybody_who_can_be_reached_is_told_once_and_has_a_result(scene):
    """Fault: of the many ways to end, one is told twice or lost, or the results are out of order."""
    (scheduler, cache, order), follows, aborts, max_queue = scene
    engine = Engine(SimulatedModel(lambda plan: 1.0), scheduler, cache, order=order, max_queue=max_queue, seed=0)
    watch = Watched(engine, lambda result: follows.get(result.request_id))

    def on_step(step: StepReport) -> None:
        for when, name in aborts:
            if when == step.index:
                engine.abort(name)
        check_invariants(engine, fcfs=False)

    results = watch.run(follows[""], on_step)
    check_drained(engine)
    expected = [request.request_id for request in follows[""]]
    expected += [request.request_id for name in watch.told for request in follows.get(name, ())]
    assert [result.request_id for result in results] == expected
    everybody = [request.request_id for requests in follows.values() for request in requests]
    assert sorted(watch.told) == sorted(expected) == sorted(everybody)
    for result in results:
        if result.finish_reason in ("stop", "length"):  # the others may have ended before they came
            last = max(answer.timeline.finish for answer in result.samples or [result])
            assert watch.times[result.request_id] == last


# ---------------------------------------------------------------- runs, errors, and engines without it


def test_a_second_run_does_not_hear_of_the_first():
    """Fault: ends that nobody asked about are kept and told to the next callback."""
    engine = make_engine("paged")
    engine.run([ask("a", 3, 2), ask("bad", [])])
    engine.submit(ask("b", 3, 2, at=None))
    while engine.step() is not None:
        pass
    watch = Watched(engine)
    watch.steps += engine.trace.steps
    engine.submit(ask("lives", 3, 4, at=None))
    watch.run([ask("c", 3, 2, at=None)])
    assert watch.told == ["c", "lives"]  # what still runs ends in this run
    told: list[str] = []
    assert engine.run([], None, lambda result: told.append(result.request_id)) == [] and told == []


@pytest.mark.parametrize("where", ["on_finish", "on_step", "what follows"])
def test_an_error_in_a_callback_leaves_the_engine_usable(where):
    """Fault: a request is lost, or a later run is told of ends of the one that failed."""

    def fail() -> Iterable[Request]:
        yield ask("f", 3, 2, at=None)
        raise KeyError("mine")

    def on_finish(result: Result) -> Iterable[Request]:
        if where == "on_finish":
            raise KeyError("mine")
        return fail() if where == "what follows" else ()

    def on_step(step: StepReport) -> None:
        if where == "on_step" and step.index == 1:
            raise KeyError("mine")

    requests = [ask("a", 3, 2), ask("b", 3, 2), ask("c", 3, 6), ask("d", 3, 2, at=4.0)]
    engine = make_engine("paged")
    with pytest.raises(KeyError, match="mine"):
        engine.run(requests, on_step, on_finish)
    check_invariants(engine)
    told: list[str] = []
    (result,) = engine.run([ask("g", 3, 3, at=None)], None, lambda result: told.append(result.request_id))
    assert sorted(told) == ["c", "d", *["f"] * (where == "what follows"), "g"]
    check_solo([*requests, ask("g", 3, 3)], [*(engine.results[r.request_id] for r in requests), result])
    check_drained(engine)


def test_a_stalled_run_has_told_what_ended_before():
    """Fault: with the error the ends before it are lost."""
    engine, plan = make_engine("paged"), ContinuousBatching.plan
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:

        def blind(self: Any, queue: Any, active: Any, kv: Any, now: float) -> Any:
            found = plan(self, queue, active, kv, now)
            return replace(found, chunks=(), admissions=()) if now >= 3.0 else found

        patch.setattr(ContinuousBatching, "plan", blind)
        with suppress(EngineStalled):
            engine.run([ask("a", 3, 2), ask("b", 3, 9)], None, lambda result: told.append(result.request_id))
    assert told == ["a"] and set(engine.life.live) == {"b"}


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_a_callback_that_asks_for_nothing_changes_nothing(configuration):
    """Fault: the loop goes another way when somebody listens."""
    requests = [ask(f"q{i}", 3 + i, 5, at=i / 2) for i in range(7)] + [ask("bad", [])]
    one, two = (make_engine(configuration, num_blocks=8, max_queue=3) for _ in range(2))
    assert one.run(requests) == two.run(requests, None, lambda result: None)
    assert one.trace == two.trace


def test_a_callback_may_abort_and_stream():
    """Fault: ends that a callback itself brings about are told late, twice or never."""
    engine = make_engine("paged")
    told: list[str] = []
    streamed: list[int] = []

    def on_finish(result: Result) -> None:
        told.append(result.request_id)
        if result.request_id == "a":
            engine.abort("b")
            for delta in engine.stream(ask("s", 3, 4, at=None)):
                streamed.extend(delta.tokens)

    results = engine.run([ask("a", 3, 2), ask("b", 3, 30), ask("c", 3, 3), ask("d", 3, 30)], None, on_finish)
    assert [result.finish_reason for result in results] == ["length", "abort", "length", "length"]
    assert told == ["a", "b", "c", "s", "d"]
    assert tuple(streamed) == engine.results["s"].tokens and len(streamed) == 4
    assert timeline(engine, "b").finish == 2.0
    check_drained(engine)


def test_it_works_without_step_reports():
    """Fault: the loop takes the end of a light run for the end of the work, or the other way round."""
    engine = Engine(SimulatedModel(lambda plan: 0.5), ContinuousBatching(2, 64), PagedKVCache(8, 4), record_steps=False)
    more = {f"q{i}": [Request(range(9, 14), SamplingParams(max_tokens=3), f"q{i + 1}")] for i in range(9)}
    results = engine.run(
        [Request(range(9, 14), SamplingParams(max_tokens=3), "q0", 2.0)], None, lambda r: more.get(r.request_id)
    )
    assert [result.timeline.arrival for result in results] == [2.0 + 1.5 * i for i in range(10)]
    assert len(engine.trace.light) == 30 and engine.trace.steps == []


def test_who_follows_a_refused_request_does_not_wait_for_an_iteration():
    """Fault: told only after the next iteration, which may be long after: the engine sleeps until the next arrival."""
    more = {"bad": [ask("worse", [], at=None)], "worse": [ask("b", 3, 2, at=None)]}
    engine = make_engine("paged")
    results = engine.run([ask("bad", []), ask("late", 3, 3, at=1000.0)], None, lambda r: more.get(r.request_id))
    assert [r.timeline.scheduled for r in results] == [None, 1000.0, None, 0.0]
