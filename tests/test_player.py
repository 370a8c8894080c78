"""The stepper without a browser: frames are the trace's own facts, and the widget shows what the frames say."""

import functools
import json
import math
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from helpers import CONFIGURATIONS, ask, make_engine
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minibatch import (
    ChunkedPrefill,
    ContinuousBatching,
    Engine,
    PagedKVCache,
    PrefixCachedKVCache,
    Request,
    SamplingParams,
    StaticBatching,
    ToyModel,
    Trace,
    accounting,
    metrics,
    player,
)
from minibatch.cli import main
from minibatch.player.numbers import amount, clock, decimals_of, seconds
from minibatch.player.page import Show, page
from minibatch.player.style import palette, style
from minibatch.plot_style import TOKENS
from minibatch.policies import ReserveMaximum, Swap

NASTY = "<b>&\"'</script><!--"


def engine_of(kind, seed=3):
    """An engine with its requests submitted; every kind shows something that the others do not."""
    rng = random.Random(seed)
    if kind in CONFIGURATIONS:
        engine, beginning, answers = make_engine(kind), 0, 1
    elif kind == "preempted":
        engine, beginning, answers = make_engine("paged", num_blocks=7), 0, 1
    elif kind == "refused":
        engine, beginning, answers = make_engine("paged", max_queue=1, max_num_seqs=2), 0, 1
    elif kind == "separate":
        engine = Engine(ToyModel(), ContinuousBatching(4, 64, phase_order="prefill-first"), PagedKVCache(16, 4))
        beginning, answers = 0, 1
    elif kind == "static on blocks":  # the dead keep blocks that the living share
        engine, beginning, answers = Engine(ToyModel(), StaticBatching(4), PrefixCachedKVCache(24, 4)), 9, 1
    elif kind == "prefix":
        engine = Engine(ToyModel(), ContinuousBatching(4, 64), PrefixCachedKVCache(12, 4))
        beginning, answers = 9, 1
    elif kind == "swapped":
        engine = Engine(ToyModel(), ChunkedPrefill(8, 4, preemption=Swap()), PrefixCachedKVCache(10, 4))
        beginning, answers = 8, 1
    elif kind == "forked":
        engine, beginning, answers = Engine(ToyModel(), ChunkedPrefill(8, 6), PagedKVCache(16, 4)), 0, 3
    elif kind == "reserved":
        scheduler = ContinuousBatching(6, 64, admission=ReserveMaximum())
        engine, beginning, answers = Engine(ToyModel(), scheduler, PagedKVCache(30, 4)), 0, 3
    for i in range(10):
        prompt = [*range(beginning), *(rng.randrange(100) for _ in range(rng.randint(1, 8)))]
        params = {"n": answers, "temperature": 1.0} if i % 2 and answers > 1 else {}
        engine.submit(ask(f"r{i}", prompt, rng.randint(1, 9), at=0.7 * i, **params))
    return engine


KINDS = (
    *CONFIGURATIONS,
    "separate",
    "static on blocks",
    "preempted",
    "refused",
    "prefix",
    "swapped",
    "forked",
    "reserved",
)


@functools.cache
def run(kind, seed=3, aborts=()):
    """A run to its end; ``aborts``: pairs of an iteration and who is aborted before it."""
    aborts = dict(aborts)
    engine = engine_of(kind, seed)
    for number in range(1000):
        if number in aborts:
            engine.abort(aborts[number])
        if engine.step() is None:
            return engine.trace
    raise AssertionError("the run does not end")


@pytest.fixture(scope="module", params=KINDS)
def trace(request):
    return run(request.param)


def test_every_kind_of_run_shows_what_it_is_for():
    """Fault: tests that pass because nothing happens in their runs."""
    seen = {kind: Counter(u.mark for f in player.frames(run(kind)) for u in f.units) for kind in KINDS}
    assert seen["prefix"]["hit"] and seen["swapped"]["swapped"] and seen["forked"]["copied"]
    phases = {kind: {row.phase for f in player.frames(run(kind)) for row in f.rows} for kind in KINDS}
    assert "dead" in phases["static"] and "recompute" in phases["preempted"] and "forked" in phases["forked"]
    assert any(row.left_pads for f in player.frames(run("static")) for row in f.rows)
    assert "resident" in phases["separate"]
    kinds = {event.kind for kind in KINDS for f in player.frames(run(kind)) for event in f.events}
    kinds |= {event.kind for f in player.frames(run("paged", aborts=((3, "r1"),))) for event in f.events}
    told = {"arrived", "refused", "admitted", "preempted", "forked", "copied", "finished", "aborted"}
    assert kinds == told


def check_frame(frame, step, size):
    """Everything in a frame that the iteration's report says too, in other words."""
    assert (frame.index, frame.start, frame.end) == (step.index, step.start, step.end)
    kv, owners = step.kv, Counter()
    for holding in kv.holdings:
        owners.update((unit, holding.request_id) for unit in holding.units)
    assert Counter((i, name) for i, unit in enumerate(frame.units) for name in unit.owners) == owners
    for name in ("filled", "reserved", "fragmentation"):
        assert sum(getattr(unit, name) for unit in frame.units) == getattr(kv, name), name
    assert all(unit.filled + unit.reserved + unit.fragmentation == size for unit in frame.units if unit.owners)
    assert {i for i, unit in enumerate(frame.units) if unit.idle} == set(kv.idle)
    assert size * sum(unit.idle for unit in frame.units) == kv.cached and frame.unseen == 0
    assert size * len(frame.units) == kv.capacity
    assert frame.tokens.total == step.num_tokens and frame.tokens.budget == step.token_budget
    assert sum(tokens for _, tokens in frame.host) == kv.host
    assert len(frame.queue) == step.num_waiting
    assert {q.request_id: q.reason for q in frame.queue if q.examined}.items() <= dict(step.waiting).items()
    assert [row.request_id for row in frame.rows if row.stop > row.start] != []
    assert {row.request_id for row in frame.rows} == {holding.request_id for holding in kv.holdings}
    for member in step.members:
        (row,) = (row for row in frame.rows if row.request_id == member.request_id)
        assert (row.start, row.stop, row.phase) == (member.start, member.stop, member.phase)
        assert row.computed == member.stop
    assert sum(row.left_pads for row in frame.rows) == frame.tokens.left_padding
    dead = {pad.request_id for pad in step.padding if pad.dead}
    assert {row.request_id for row in frame.rows if row.phase == "dead"} == dead


def check_film(trace):
    held = next(h for step in trace.steps for h in step.kv.holdings if h.units)
    size = (held.filled + held.reserved + held.fragmentation) // len(held.units)
    film = player.frames(trace)
    for frame, step in zip(film, trace.steps, strict=True):
        check_frame(frame, step, size)
    places = {}
    for frame in film:
        now = {row.request_id: row.place for row in frame.rows}
        assert len(set(now.values())) == len(now)
        assert all(places[name] == place for name, place in now.items() if name in places), "somebody has moved"
        places = now
    timelines = {t.request_id: t for t in trace.timelines}
    for row in film[-1].rows:
        assert row.generated == len(timelines[row.request_id].token_times)


def test_frames_say_what_the_reports_say(trace):
    """Fault: a unit with a wrong owner; shared rows counted twice; somebody missing in the queue or on the host."""
    check_film(trace)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(KINDS), st.integers(0, 10**6), st.dictionaries(st.integers(1, 12), st.sampled_from(["r1", "r4"]))
)
def test_frames_say_what_the_reports_say_of_any_run(kind, seed, aborts):
    """The same with random lengths, and aborts of those who wait, run, are swapped out or fork.

    Fault: an ended request stays in the queue or on the host."""
    trace = run(kind, seed, tuple(aborts.items()))
    if trace.steps:
        check_film(trace)


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_aborted_is_nowhere_any_more(kind):
    """Each of those who wait at some time, or are on the host, aborted then. Fault: somebody who has ended waits."""
    waits = {queued.request_id: frame.index + 1 for frame in player.frames(run(kind)) for queued in frame.queue}
    for name, number in list(waits.items())[:4]:
        check_film(run(kind, aborts=((number, name),)))


@pytest.mark.parametrize("aborted", ["ran", "waits"])
def test_the_time_of_a_run_goes_on_with_the_abort_of_one_who_ran(aborted):
    """While long prompts are computed there are no tokens, but somebody may end.

    Fault: the end of one who ran does not count for the throughput, or that of one who never did."""
    engine = Engine(ToyModel(), ChunkedPrefill(4, 1), PagedKVCache(32, 4))
    for request in (ask("first", 3, 1), ask("ran", 40), ask("next", 40), ask("waits", 3)):
        engine.submit(request)
    throughputs = []
    for number in range(9):
        if number == 5:
            engine.abort(aborted)
        engine.step()
        throughputs.append(metrics.summary(engine.trace)["throughput"])
    assert [frame.so_far.throughput for frame in player.frames(engine.trace)] == throughputs
    assert throughputs[-1] == (1 / 5 if aborted == "ran" else 1.0)


def test_who_waits_is_not_hidden_by_who_has_completed():
    """Fault: latencies of completed requests only, so that the run with the longer queue looks the better one."""
    trace = run("static")
    arrival = {timeline.request_id: timeline.arrival for timeline in trace.timelines}
    ran, waits = set(), []
    for frame, step in zip(player.frames(trace), trace.steps, strict=True):
        ran |= {member.request_id for member in step.members}
        waiting = [step.end - at for name, at in arrival.items() if name not in ran and at <= step.start]
        assert frame.longest_wait == pytest.approx(max(waiting, default=math.nan), nan_ok=True)
        waits.append(frame.longest_wait)
    assert max(wait for wait in waits if not math.isnan(wait)) > 5


@pytest.mark.parametrize("kind", ["static", "refused", "swapped", "forked"])
def test_metrics_so_far_are_those_of_the_run_stopped_there(kind):
    """The oracle is the same engine, stopped after each iteration: its trace knows nothing of the future.

    Fault: a token, an end or a wait is counted an iteration early or late."""
    film, engine = player.frames(run(kind)), engine_of(kind)
    for frame in film:
        engine.step()
        numbers, work, memory = (f(engine.trace) for f in (metrics.summary, accounting.work, accounting.memory))
        names = ("completed", "generated_tokens", "preemptions", "throughput", "queueing_delay_mean")
        expected = {name: numbers[name] for name in (*names, "ttft_mean", "ttft_max", "tbt_p50", "tbt_max")}
        expected |= {"useful_share": work.useful_share}
        expected |= {"mean_filled": memory.mean_filled, "peak_filled": memory.peak_filled}
        found = {name: getattr(frame.so_far, name) for name in expected}
        assert found == pytest.approx(expected, rel=1e-12, nan_ok=True), f"iteration {frame.index}"


@pytest.mark.parametrize("kind", ["paged", "preempted", "prefix", "swapped", "forked", "reserved"])
def test_new_and_copied_blocks_are_those_that_the_pool_gave_out(kind):
    """Fault: a copy shown as new, or the wrong block; a shared or kept block shown as taken."""
    engine, taken, copied = engine_of(kind), [], []
    take, copy = engine.kv.pool.take, engine.store.copy_rows
    engine.kv.pool.take = lambda: taken[-1].append(block := take()) or block
    engine.store.copy_rows = lambda source, target: copied[-1].update((target // 4).tolist()) or copy(source, target)
    while True:
        taken.append([])
        copied.append(set())
        if engine.step() is None:
            break
    for frame, blocks, copies in zip(player.frames(engine.trace), taken, copied, strict=False):
        marked = {mark: {i for i, unit in enumerate(frame.units) if unit.mark == mark} for mark in ("new", "copied")}
        swapped = {i for i, unit in enumerate(frame.units) if unit.mark == "swapped"}
        assert marked["copied"] == copies, frame.index
        if kind != "reserved":  # there an answer that forks off is handed blocks that were taken before
            assert marked["new"] | copies | swapped == set(blocks), frame.index


def test_hits_are_the_blocks_that_the_prefix_cache_had():
    for frame, step in zip(player.frames(run("prefix")), run("prefix").steps, strict=True):
        hits = {i for i, unit in enumerate(frame.units) if unit.mark == "hit"}
        held = {h.request_id: h.units for h in step.kv.holdings}
        assert hits == {unit for a in step.admitted for unit in held[a.request_id][: a.cached // 4]}


def test_a_part_of_a_run_is_the_same_as_in_the_whole():
    """Fault: what happened before the first iteration is forgotten."""
    trace = run("swapped")
    whole = player.frames(trace)
    assert player.frames(trace, 7, 12) == whole[7:13] and player.frames(trace, last=0) == whole[:1]


@pytest.mark.parametrize("first, last", [(-1, 3), (4, 3), (0, 10_000), (True, None), (0, 2.5)])
def test_iterations_that_are_not_there_are_refused(first, last):
    with pytest.raises(ValueError, match=r"first|last"):
        player.frames(run("paged"), first, last)


def test_what_cannot_be_stepped_through_is_refused_with_its_numbers(monkeypatch):
    light = make_engine("paged", record_steps=False)
    light.run([ask("a", 3), ask("b", 3)])
    with pytest.raises(ValueError, match="light trace of 4 iterations"):
        player.frames(light.trace)
    with pytest.raises(ValueError, match="0 requests, no iteration"):
        player.frames(Trace())
    with pytest.raises(ValueError, match="no trace"):
        page({})
    trace = run("paged")
    monkeypatch.setattr("minibatch.player.film.MOST_UNITS", 100)
    with pytest.raises(ValueError, match=rf"{trace.num_steps} iterations have {trace.num_steps * 16} units"):
        player.frames(trace)
    assert len(player.frames(trace, 2, 7)) == 6


def test_a_cache_without_memory_is_refused():
    """Fault: a damaged trace ends in a division by zero."""
    trace = run("paged")
    steps = [replace(step, kv=replace(step.kv, capacity=0)) if step.index == 2 else step for step in trace.steps]
    with pytest.raises(ValueError, match=r"iteration 2 has 0 rows of KV cache, one unit has 4"):
        player.frames(replace(trace, steps=steps))


@pytest.mark.parametrize(
    "first, last, words",
    [
        (900, None, "b: first 900 must be one of the iterations 0 to {end}"),
        (900, 901, "b: first 900 must be one of the iterations 0 to {end}"),
        (None, -5, "a: last must be an integer of at least 0, got -5"),
        (4, 3, "a: first 4 must not come after last 3"),
    ],
)
def test_of_several_runs_it_is_said_which_one_cannot_be_shown(first, last, words):
    """Fault: the message names no run, or a number that nobody gave."""
    short = run("paged")
    long = replace(short, steps=[replace(short.steps[0], index=i) for i in range(1000)])
    with pytest.raises(ValueError) as error:
        page({"a": long, "b": short}, first, last)
    assert str(error.value) == words.format(end=short.num_steps - 1)


def test_events_are_worth_a_jump():
    trace = run("preempted")
    film = player.frames(trace)
    for place in player.events(film):
        step = trace.steps[place]
        assert step.admitted or step.preempted or step.finished
    assert {s.index for s in trace.steps if s.preempted} <= set(player.events(film)) < set(range(len(film)))


# ---------------------------------------------------------------- the common clock


def film_of(*ends):
    film = player.frames(run("paged"))
    return [replace(film[0], index=i, end=end) for i, end in enumerate(ends)]


def test_alone_a_run_has_a_moment_an_iteration():
    """Fault: two iterations that end at the same time are one moment, and one of them cannot be seen."""
    moments = player.common_clock([film_of(1.0, 2.0, 2.0, 2.0, 5.0)])
    assert [m.current for m in moments] == [(i,) for i in range(5)] and not any(m.done[0] for m in moments)


def test_two_runs_show_what_each_of_them_did_last():
    """Fault: a frame that has not ended yet is shown; the shorter run vanishes, or is not said to be over."""
    moments = player.common_clock([film_of(1.0, 3.0), film_of(2.0, 3.0, 3.0, 7.0)])
    assert [(m.time, *m.current) for m in moments] == [(1, 0, None), (2, 0, 0), (3, 1, 1), (3, 1, 2), (7, 1, 3)]
    assert [m.done for m in moments] == [(False, False)] * 3 + [(True, False)] * 2


def test_jumps_are_where_a_run_comes_to_an_event():
    show = Show.of({"a": run("static"), "b": run("paged")})
    for number, moment in enumerate(show.moments):
        before = show.moments[number - 1].current if number else (None, None)
        new = [
            run.film[place]
            for run, place, then in zip(show.runs, moment.current, before, strict=True)
            if place is not None and place != then
        ]
        assert (number in show.jumps) == any(e.kind != "arrived" for frame in new for e in frame.events)


# ---------------------------------------------------------------- the idle blocks of a snapshot


def test_a_snapshot_says_which_blocks_keep_a_prefix_and_a_light_one_does_not(tmp_path):
    trace = run("prefix")
    assert any(step.kv.idle for step in trace.steps)
    trace.save(tmp_path / "t.jsonl")
    again = Trace.load(tmp_path / "t.jsonl")
    assert again.steps == trace.steps and player.frames(again) == player.frames(trace)
    engine = engine_of("prefix")
    engine.run([])
    assert engine.kv.idle() and engine.kv.snapshot([], holdings=False).idle == ()


def test_a_trace_from_before_that_shows_how_many_and_not_which(tmp_path):
    """Fault: it does not load, or its free blocks are said to be empty."""
    run("prefix").save(tmp_path / "t.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    for line in lines:
        if "step" in line:
            del line["step"]["kv"]["idle"]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    trace = Trace.load(tmp_path / "t.jsonl")
    unseen = [frame.unseen for frame in player.frames(trace)]
    assert unseen == [step.kv.cached for step in trace.steps] and any(unseen)


# ---------------------------------------------------------------- HTML, without a browser


def nasty_trace():
    """Ids and a name that are HTML, and an id that is JavaScript's end."""
    engine = make_engine("paged", num_blocks=6, meta={"name": NASTY, "workload": NASTY, "seed": 7})
    engine.run([ask(f"{NASTY}{i}", 6, 8, at=0.0) for i in range(4)])
    return engine.trace


def test_nothing_from_a_trace_is_read_as_html():
    """Fault: an id, a reason or a name that is not escaped, or that ends the script."""
    text = page({NASTY: nasty_trace()})
    assert "<b>&" not in text and text.count("</script>") == 2
    data = text.split('<script type="application/json" id="show">')[1].split("</script>")[0]
    assert "<" not in data
    assert not any("<!--" in piece or "'</script>" in piece for piece in json.loads(data)["pieces"])


def test_the_file_holds_what_python_shows(trace):
    """The pieces that the script joins are those of the frames. Fault: pieces mixed up when they are stored once."""
    show = Show.of({"a": trace})
    data = page({"a": trace}).split('<script type="application/json" id="show">')[1].split("</script>")[0]
    film = json.loads(data)
    (frames,) = film["runs"]
    assert film["jumps"] == show.jumps and len(frames) == 1 + len(show.runs[0].film)
    for number, (_, current, _) in enumerate(film["moments"]):
        for name, packed in zip(film["panels"], frames[current[0]][0], strict=True):
            pairs = (each if isinstance(each, list) else (each, 1) for each in packed)
            text = "".join(film["pieces"][piece] * count for piece, count in pairs)
            assert text == "".join(show.runs[0].panels(number)[name]), (number, name)


def test_a_page_needs_nothing_from_outside_and_says_what_it_shows():
    text = page({"paged": run("paged")})
    assert "http" not in text and "src=" not in text and "@import" not in text and "url(" not in text
    assert "simulated time" in text
    assert "workload &lt;b&gt;" in page({"x": nasty_trace()}) and "seed 7" in page({"x": nasty_trace()})


def luminance(color):
    """Of WCAG 2.1."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_text_has_contrast_on_all_that_it_stands_on(mode):
    """At least 4.5 to 1 (WCAG 2.1, AA). Fault: a colour that is fine on white only."""
    colors = palette(mode)
    grounds = {"ink": ["back", "panel", *(name for name in colors if name.startswith("owner"))]}
    grounds["muted"] = ["back", "panel"]
    for text, behind in grounds.items():
        for ground in behind:
            assert contrast(colors[text], colors[ground]) >= 4.5, f"{text} on {ground}"
    assert f"--panel: {colors['panel']}" in style()


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_parts_of_a_bar_can_be_told_from_its_ground(mode):
    """At least 3 to 1 (WCAG 2.1, non-text): the part itself, or its edge in ink, on either side of it."""
    colors = palette(mode)
    for kind in (*TOKENS, "filled", "reserved", "fragmentation", "past"):
        ground, edge = contrast(colors[kind], colors["nobody"]), contrast(colors[kind], colors["ink"])
        assert ground >= 3 or min(edge, contrast(colors["ink"], colors["nobody"])) >= 3, kind


def test_moments_are_written_so_that_iterations_differ():
    """Fault: two moments that look the same; an exponent."""
    decimals = decimals_of([0.0, 0.02, 0.5])
    assert [clock(time, decimals) for time in (0.0, 0.02, 123.456, 123.476, 12345.6)] == [
        "0 s",
        "20 ms",
        "123.456 s",
        "123.476 s",
        "12,345.600 s",
    ]
    trace = run("paged")
    scaled = [replace(s, start=9000 + 0.003 * s.index, end=9000.003 + 0.003 * s.index) for s in trace.steps]
    show = Show.of({"a": replace(trace, steps=scaled)})
    heads = [show.runs[0].panels(i)["head"][0].split(" · ")[1] for i in range(len(scaled))]
    assert len(set(heads)) == len(scaled) and heads[1] == "9,000.0030 s to 9,000.0060 s"
    said = [show.says(moment).split("</b>")[0] for moment in show.moments]
    assert len(set(said)) == len(scaled)


@given(st.floats(1e-4, 1e12))
def test_no_number_has_an_exponent(value):
    texts = (seconds(value), amount(value), clock(value, 3))
    assert not any("e" in text for text in texts), texts
    assert float(amount(value).replace(",", "")) == pytest.approx(value, rel=0.006)


def test_durations_and_rates_in_words():
    assert [seconds(x) for x in (math.nan, 0.00035, 12.5, 999.96, 12345.6)] == [
        "–",
        "0.35 ms",
        "12.5 s",
        "1,000 s",
        "12,346 s",
    ]
    assert [amount(x) for x in (math.nan, 84.31, 999.7, 2573456.0)] == ["–", "84.3", "1,000", "2,573,456"]


def test_a_part_of_a_run_says_that_it_is_one():
    trace = run("paged")
    end = trace.num_steps - 1
    assert f"iterations 3 to 5 of 0 to {end}" in page({"a": trace}, 3, 5)
    assert f"of 0 to {end}" not in page({"a": trace})


def test_many_units_are_bare_cells():
    """Fault: thousands of cells with content that the style sheet hides."""
    engine = make_engine("paged", num_blocks=300)
    engine.run([ask("a", 5, 3)])
    memory = "".join(Show.of({"a": engine.trace}).runs[0].panels(1)["memory"])
    cells = memory.split("<ol")[1].split("<li")[1:]
    assert len(cells) == 300 and all(re.fullmatch(r" class=[^<>]*>(</ol>)?", cell) for cell in cells)


def test_the_direction_of_an_id_ends_with_it():
    """Fault: an id with a right-to-left override turns the sentence around."""
    name = "\u202eabc"
    engine = make_engine("paged")
    engine.run([ask(name, 5, 3)])
    show = Show.of({name: engine.trace, "b": engine.trace})
    said = show.says(show.moments[0])
    assert said.count(f"<bdi>{name}</bdi>") == 3, "the run's name, and the id in both runs"
    assert name not in re.sub("<bdi>.*?</bdi>", "", said)


# ---------------------------------------------------------------- Jupyter, without a browser


@pytest.fixture
def shown(monkeypatch):
    """What is displayed."""
    import IPython.display

    outputs = []
    monkeypatch.setattr(IPython.display, "display", lambda value, raw=False: outputs.append(value))
    return outputs


def test_the_slider_and_the_buttons_change_what_is_shown(shown):
    """Fault: a callback that is not connected, or that goes to the wrong moment."""
    trace = run("preempted")
    stepper = player.show(trace)
    film, jumps = player.frames(trace), player.events(player.frames(trace))
    assert "<b>iteration 0</b>" in stepper.view.value
    stepper.slider.value = 5
    assert "<b>iteration 5</b>" in stepper.view.value and "iteration 5" in stepper.says.value
    next_one, next_but_one = [i for i in jumps if i > 5][:2]
    for name, expected in ((">", 6), ("<", 5), (">|", next_one), (">|", next_but_one), ("|<", next_one)):
        stepper.buttons[name].click()
        assert stepper.slider.value == expected and f"<b>iteration {expected}</b>" in stepper.view.value
    stepper.play.value = 9
    assert "<b>iteration 9</b>" in stepper.view.value
    stepper.slider.value = len(film) - 1
    for name in (">", ">|"):
        stepper.buttons[name].click()
        assert stepper.slider.value == len(film) - 1


def test_the_output_is_a_picture_before_it_is_a_widget(shown):
    """Fault: an output that is nothing without a kernel."""
    stepper = player.show(run("static"), run("paged"))
    picture, widget = shown
    assert picture.data[:4] == b"\x89PNG" and picture.alt.endswith(": StaticBatching, ContinuousBatching")
    assert {"application/vnd.jupyter.widget-view+json", "text/html"} <= set(widget)
    assert len(stepper.stage.runs) == 2 and stepper.slider.max == len(stepper.stage.moments) - 1


def test_without_ipywidgets_there_is_the_picture_and_one_line(shown, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert player.show(run("paged")) is None
    assert len(shown) == 1 and shown[0].data[:4] == b"\x89PNG"
    (line,) = capsys.readouterr().out.splitlines()
    assert "pip install ipywidgets" in line


def test_runs_of_the_same_name_are_told_apart(shown):
    stepper = player.show(run("paged"), run("paged", seed=4))
    assert [each.name for each in stepper.stage.runs] == ["ContinuousBatching", "ContinuousBatching (2)"]
    stepper = player.show(run("paged"), run("static"), names=["mine", "yours"])
    assert [each.name for each in stepper.stage.runs] == ["mine", "yours"]
    with pytest.raises(ValueError, match="2 traces and 1 name"):
        player.show(run("paged"), run("static"), names=["mine"])


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["a", "b", "a (2)", "a (3)", "a (2) (2)"])))
@example(["a", "a", "a (2)"])
def test_distinct_names_are_distinct(names):
    """Fault: a made name is one that was given, and a run disappears."""
    made = player.distinct(names)
    assert len(set(made)) == len(names)
    assert all(new == old for i, (new, old) in enumerate(zip(made, names, strict=True)) if old not in names[:i])


def test_what_cannot_be_shown_is_refused_before_a_picture_is(shown):
    with pytest.raises(ValueError, match="no iteration"):
        player.show(run("paged"), Trace())
    assert shown == []


def test_the_module_needs_neither_ipywidgets_nor_ipython():
    check = "import sys, minibatch.player as p; assert not {'ipywidgets', 'IPython'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0


# ---------------------------------------------------------------- the command


def test_the_command_writes_a_file_beside_the_trace(tmp_path, capsys):
    run("static").save(tmp_path / "a.trace.jsonl")
    run("paged").save(tmp_path / "b.trace.jsonl")
    assert main(["export-html", str(tmp_path / "a.trace.jsonl")]) == 0
    assert "<title>minibatch: a</title>" in (tmp_path / "a.html").read_text()
    both = [str(tmp_path / f"{name}.trace.jsonl") for name in "ab"]
    assert main(["export-html", *both, "--first", "2", "--last", "4"]) == 0
    text = (tmp_path / "a-b.html").read_text()
    assert "<title>minibatch: a and b</title>" in text and "iteration 4" in text and "iteration 5" not in text
    assert "a-b.html" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words", [(["--first", "900"], "900"), (["--out", "no/such/place.html"], "no/such")]
)
def test_what_the_command_cannot_do_is_said_with_exit_code_2(tmp_path, capsys, arguments, words):
    run("paged").save(tmp_path / "b.jsonl")
    assert main(["export-html", str(tmp_path / "b.jsonl"), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert main(["export-html", str(tmp_path / "missing.jsonl")]) == 2


@pytest.mark.parametrize("out", ["a.trace.jsonl", "there/../a.trace.jsonl", "link"])
def test_the_command_does_not_write_over_what_it_reads(tmp_path, capsys, out):
    """Fault: the trace is replaced by the page."""
    trace = tmp_path / "a.trace.jsonl"
    run("paged").save(trace)
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(trace)
    before = trace.read_bytes()
    assert main(["export-html", str(trace), "--out", str(tmp_path / out)]) == 2
    assert "is one of the traces" in capsys.readouterr().err
    assert trace.read_bytes() == before


def test_a_request_that_starts_again_counts_once():
    """One whose prompt is computed twice has one place, one colour and its tokens once."""
    engine = make_engine("paged", num_blocks=4, max_num_seqs=2)
    engine.run([Request([1, 2, 3], SamplingParams(max_tokens=9), name) for name in "ab"])
    last = player.frames(engine.trace)[-1]
    assert last.so_far.preemptions and last.so_far.generated_tokens == 18 and not math.isnan(last.so_far.tbt_max)
