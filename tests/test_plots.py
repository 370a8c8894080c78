"""The pictures show the numbers of the trace, in every state of a trace, and leave nothing behind."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
from helpers import CONFIGURATIONS, ask, make_engine, names
from matplotlib import pyplot
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from minibatch import (
    ChunkedPrefill,
    ContiguousKVCache,
    ContinuousBatching,
    Engine,
    PagedKVCache,
    ToyModel,
    Trace,
    plots,
)
from minibatch.membership_plot import LOOKS, read
from minibatch.metrics import latencies as measured
from minibatch.metrics import steps_table
from minibatch.plot_style import BUDGET, FOUND, LINES, MARKS, MEMORY, TOKENS, footer
from minibatch.policies import Priority, Recompute, Swap, by_priority
from minibatch.prefix_cache import PrefixCachedKVCache

pytestmark = pytest.mark.filterwarnings("error")


def run(configuration, count=12, seed=3, **options):
    rng = random.Random(seed)
    engine = make_engine(configuration, **options)
    engine.run([ask(f"r{i}", rng.randint(1, 8), rng.randint(1, 8), at=0.7 * i) for i in range(count)])
    return engine.trace


def preempted_run():
    trace = run("paged", num_blocks=7)
    assert sum(t.num_preemptions for t in trace.timelines) > 1
    return trace


def swapped_run():
    """Prompts that begin alike, on a prefix cache so small that requests are swapped out."""
    rng = random.Random(3)
    beginning = [(5 * i) % 90 for i in range(8)]
    engine = Engine(ToyModel(), ChunkedPrefill(8, 4, preemption=Swap()), PrefixCachedKVCache(10, 4))
    prompts = [beginning + [rng.randrange(100) for _ in range(rng.randint(2, 9))] for _ in range(12)]
    engine.run([ask(f"r{i}", prompt, rng.randint(2, 12), at=0.7 * i) for i, prompt in enumerate(prompts)])
    steps = engine.trace.steps
    assert sum(s.cached for s in steps) > 8 and sum(s.swapped_out for s in steps) > 8
    return engine.trace


def forked_run():
    """Requests with several answers among others."""
    engine = Engine(ToyModel(), ContinuousBatching(6, 64), PagedKVCache(20, 4))
    engine.run([ask(f"r{i}", 5, 2 + i % 4, at=float(i), n=1 + 2 * (i % 2), temperature=1.0) for i in range(6)])
    assert sum(len(s.forked) for s in engine.trace.steps) == 6
    return engine.trace


def abc(configuration):
    engine = make_engine(configuration, slot_size=160)
    engine.run([ask(name, 4, length) for name, length in (("A", 18), ("B", 73), ("C", 141))])
    return engine.trace


TRACES = {name: lambda name=name: run(name) for name in CONFIGURATIONS} | {
    "preempted": preempted_run,
    "swapped": swapped_run,
    "forked": forked_run,
}


@pytest.fixture(params=TRACES)
def trace(request):
    return TRACES[request.param]()


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """No pyplot figure stays open, and no global setting of matplotlib is changed."""
    before = dict(mpl.rcParams)
    yield
    assert pyplot.get_fignums() == []
    assert dict(mpl.rcParams) == before


def drawn(ax, label):
    """The rectangles with that label: (row, left, right)."""
    paths = [path for c in ax.collections if c.get_label() == label for path in c.get_paths()]
    corners = [path.vertices for path in paths]
    return [
        (round(v[:, 1].mean() * 2) / 2 if len(v) == 2 else _middle(v), v[:, 0].min(), v[:, 0].max()) for v in corners
    ]


def _middle(vertices):
    return (vertices[:, 1].min() + vertices[:, 1].max()) / 2


def title(ax):
    return ax.get_title(loc="left").replace("\n", " ")


def stacks(ax):
    """label -> (bottoms, tops) of a stack, one value an iteration."""
    found = {}
    for patch in ax.patches:
        tops, _, bottoms = patch.get_data()
        found[patch.get_label()] = (np.asarray(bottoms), np.asarray(tops))
    return found


def height(ax, label):
    bottoms, tops = stacks(ax).get(label, (0, 0))
    return tops - bottoms


# ---------------------------------------------------------------- membership


def test_every_cell_of_the_membership_is_a_member_and_every_member_a_cell(trace):
    ax = plots.membership(trace)
    rows = {text.get_text(): tick for text, tick in zip(ax.get_yticklabels(), ax.get_yticks(), strict=True)}
    expected = Counter()
    for step in trace.steps:
        pads = {p.request_id: p.num_tokens for p in step.padding if not p.dead}
        cached = {a.request_id: a.cached for a in step.admitted}
        for m in step.members:
            parts = {"left padding": pads.get(m.request_id, 0), FOUND.label: cached.get(m.request_id, 0)}
            parts[TOKENS[m.phase].label] = m.stop - m.start
            for label, number in parts.items():
                expected[label, rows[m.request_id]] += number / sum(parts.values())
        for p in step.padding:
            expected[TOKENS["dead_padding"].label, rows[p.request_id]] += p.dead
    painted = Counter()
    for look in (FOUND, *TOKENS.values()):
        for row, left, right in drawn(ax, look.label):
            painted[look.label, row] += right - left
    expected, painted = +expected, +painted  # without zeros
    assert expected.keys() == painted.keys()
    assert all(painted[key] == pytest.approx(expected[key]) for key in expected)


def test_membership_of_three_requests_is_five_rectangles_and_their_dead_rows():
    ax = plots.membership(abc("static"))
    assert drawn(ax, "decode") == [(0, 0.5, 17.5), (1, 0.5, 72.5), (2, 0.5, 140.5)]
    assert drawn(ax, TOKENS["dead_padding"].label) == [(0, 17.5, 140.5), (1, 72.5, 140.5)]
    assert drawn(ax, "prefill") == [(row, -0.5, 0.5) for row in range(3)]
    assert ax.get_title(loc="left") == "StaticBatching: 141 iterations, 232 of 423 row-iterations useful"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["A", "B", "C"]
    assert ax.get_xlabel() == "iteration" and ax.yaxis_inverted()


@pytest.mark.parametrize(("make", "kind"), [(preempted_run, "preempted"), (swapped_run, "swapped")])
def test_waiting_and_preempted_gaps_are_lines_from_the_arrival_to_the_admission(make, kind):
    """Also: lost K/V and swapped K/V are different lines. Fault: a swap looks like a recomputation."""
    trace = make()
    ax = plots.membership(trace)
    queued = Counter()
    waiting = {}
    for step in trace.steps:
        waiting |= dict.fromkeys(step.arrived, "waiting") | dict.fromkeys(names(step.preempted), kind)
        for name in names(step.admitted):
            del waiting[name]
        queued.update(waiting.values())
    for line, (label, _) in LINES.items():
        assert sum(right - left for _, left, right in drawn(ax, label)) == queued[line]
    assert queued["waiting"] > 0 and queued[kind] > 0
    spans = drawn(ax, LINES[kind][0])
    assert len(spans) == sum(t.num_preemptions for t in trace.timelines)
    cells = [span for look in LOOKS.values() for span in drawn(ax, look.label)]
    for row, left, right in spans:  # between two stays of the same row
        assert any(c[0] == row and c[2] == left for c in cells) and any(c[0] == row and c[1] == right for c in cells)


def test_lost_and_swapped_kv_differ_in_their_lines_and_not_only_in_colour():
    """Fault: in greyscale, or for a colour-blind reader, the two kinds of preemption are one."""
    (_, lost), (_, swapped) = LINES["preempted"], LINES["swapped"]
    assert lost["linestyle"] != swapped["linestyle"] and lost["linewidth"] != swapped["linewidth"]


def test_titles_count_the_tokens_that_were_cached_swapped_and_computed_again():
    """Fault: what a policy saved or cost can be seen in no number, or the counts are of something else."""
    trace = swapped_run()
    cached, swapped = (sum(getattr(s, name) for s in trace.steps) for name in ("cached", "swapped_out"))
    preemptions = sum(t.num_preemptions for t in trace.timelines)
    ends = f"{preemptions} preemptions"
    assert title(plots.membership(trace)).endswith(f"useful, tokens: {cached} cached, {swapped} swapped, {ends}")
    host = max(s.kv.host for s in trace.steps)
    assert title(plots.kv_memory(trace)).endswith(f", up to {host} more rows on the host, {ends}")
    assert title(plots.token_budget(trace)).endswith(f"useful, {cached} cached, {ends}")
    plain = preempted_run()
    recomputed = sum(s.recomputed for s in plain.steps)
    assert f"useful, tokens: {recomputed} recomputed, " in title(plots.membership(plain))
    assert "host" not in title(plots.kv_memory(plain)) and "cached" not in title(plots.token_budget(plain))


def test_a_title_is_broken_after_commas_and_stays_inside_the_picture():
    """Fault: a title with all its counts runs out of the picture."""
    trace = swapped_run()
    trace.meta["name"] = "a configuration with a long name"
    ax = plots.membership(trace)
    lines = ax.get_title(loc="left").split("\n")
    assert len(lines) == 2 and lines[0].endswith(",") and max(map(len, lines)) <= 100
    ax.figure.draw_without_rendering()
    assert ax.get_tightbbox().x1 <= 801


def test_answers_fork_off_where_their_prompt_is_computed():
    """Fault: the answers of one request appear from nowhere, or seem to hold memory for nothing."""
    trace = forked_run()
    ax = plots.membership(trace)
    rows = {text.get_text(): tick for text, tick in zip(ax.get_yticklabels(), ax.get_yticks(), strict=True)}
    (marks,) = [line.get_xydata().tolist() for line in ax.lines if line.get_label() == MARKS["forked"][0]]
    expected = [[s.index + 0.5, rows[fork.request_id]] for s in trace.steps for fork in s.forked]
    assert sorted(marks) == sorted(expected)
    assert not drawn(ax, LOOKS["resident"].label)
    assert [rows[f"r1#{i}"] - rows["r1#0"] for i in range(3)] == [0, 1, 2]  # below each other
    one = Engine(ToyModel(), ContinuousBatching(6, 64), PagedKVCache(20, 4))
    one.run([ask("a", 5, 1, n=2)])  # they end with the token that they fork off with
    (ends,) = [line.get_xydata().tolist() for line in plots.membership(one.trace).lines if line.get_marker() == "|"]
    assert sorted(ends) == [[0.5, 0], [0.5, 1]]


def test_rows_say_client_and_priority_where_these_differ():
    """Fault: who was displaced by whom can be seen, but not why."""
    engine = Engine(
        ToyModel(),
        ContinuousBatching(1, 64, preemption=Recompute(displaces=by_priority)),
        PagedKVCache(8, 4),
        order=Priority(),
    )
    requests = [ask("a", 3, 6), ask("b", 3, 3, at=1.5)]
    engine.run([replace(requests[0], priority=2, client="x"), replace(requests[1], client="y")])
    ax = plots.membership(engine.trace)
    assert [text.get_text() for text in ax.get_yticklabels()] == ["a (x, 2)", "b (y, 0)"]
    assert ax.get_ylabel() == "request (client, priority)"
    for timeline in engine.trace.timelines:
        timeline.client = "x"
    ax = plots.membership(engine.trace)
    assert [text.get_text() for text in ax.get_yticklabels()] == ["a (2)", "b (0)"]
    assert ax.get_ylabel() == "request (priority)"


def test_a_number_is_written_only_where_its_cell_has_room():
    """Fault: the numbers of found and computed tokens run into each other."""
    engine = Engine(ToyModel(), ContinuousBatching(4, 64), PrefixCachedKVCache(40, 4))
    engine.run([ask("a", list(range(40)), 25), ask("b", [*range(36), 7, 7, 7, 7], 2, at=1.0)])
    step = engine.trace.steps[1]
    assert [a.cached for a in step.admitted] == [36]
    texts = {text.get_text(): text.get_position() for text in plots.membership(engine.trace).texts}
    assert texts == {"40": (0, 0), "36": (pytest.approx(0.95), 1)}


def test_every_request_has_an_arrival_and_an_end(trace):
    ax = plots.membership(trace)
    marks = {line.get_label(): line.get_xydata() for line in ax.lines}
    ends = {(i, name) for i, step in enumerate(trace.steps) for name, _ in step.finished}
    assert sorted(x for x, _ in marks[MARKS["finished"][0]]) == sorted(i + 0.5 for i, _ in ends)
    forked = marks.get(MARKS["forked"][0], ())
    assert len(marks[MARKS["arrived"][0]]) + len(forked) == len(trace.timelines)
    assert MARKS["ended"][0] not in marks


def test_aborted_and_refused_requests_are_crossed_out():
    engine = make_engine("chunked", max_num_seqs=2, max_queue=2)
    for name in "abcd":
        engine.submit(ask(name, 3, 6, at=0.0 if name < "c" else 1.5))
    engine.submit(ask("e", 3, 6, at=1.5))  # finds the queue full
    for _ in range(4):
        engine.step()
    engine.abort("a")
    engine.abort("d")
    while engine.step():
        pass
    reasons = {t.request_id: t.finish_reason for t in engine.trace.timelines}
    assert reasons == {"a": "abort", "b": "length", "c": "length", "d": "abort", "e": "rejected"}
    ax = plots.membership(engine.trace)
    (crosses,) = [line.get_xydata().tolist() for line in ax.lines if line.get_label() == MARKS["ended"][0]]
    assert sorted(crosses) == [[1.5, 4], [3.5, 0], [3.5, 3]]
    assert ax.get_ylim() == (4.5, -0.5)  # the refused one, which never ran, has its row too


def test_who_holds_memory_without_running_is_shown_thin():
    """With prefill-first, decodes stall while prompts are computed."""
    engine = Engine(ToyModel(), ContinuousBatching(4, 16, "prefill-first"), ContiguousKVCache(4, 16))
    engine.run([ask("a", 3, 6), ask("b", 3, 3, at=1.5), ask("c", 3, 3, at=3.5)])
    ax = plots.membership(engine.trace)
    stalled = sum(len(s.kv.holdings) - len(s.members) for s in engine.trace.steps)
    assert sum(right - left for _, left, right in drawn(ax, LOOKS["resident"].label)) == stalled > 0


def test_places_in_the_batch_are_filled_again():
    trace = run("continuous")
    ax = plots.membership(trace, rows="units")
    assert ax.get_ylabel() == "place in the batch" and ax.get_ylim() == (3.5, -0.5)
    cells = read(trace, "units")
    assert sorted({name for name, *_ in cells.stays}) == sorted(t.request_id for t in trace.timelines)
    for row in range(4):
        stays = sorted(stay[2:] for stay in cells.stays if stay[1] == row)
        assert all(mine[1] <= theirs[0] for mine, theirs in itertools.pairwise(stays))  # one at a time
    assert len(cells.stays) == 12  # in four places
    width = sum(right - left for _, _, left, right in cells.stays)
    assert width == sum(len(s.kv.holdings) for s in trace.steps)
    with pytest.raises(ValueError, match="rows must be"):
        plots.membership(trace, rows="slots")


def test_sixty_requests_over_six_hundred_iterations_stay_a_few_artists():
    rng = random.Random(1)
    engine = make_engine("static", slot_size=64)
    engine.run([ask(f"r{i}", rng.randint(1, 20), rng.randint(1, 44), at=5.0 * i) for i in range(60)])
    trace = engine.trace
    assert len(trace.steps) > 500
    ax = plots.membership(trace)
    ax.figure.draw_without_rendering()
    assert len(ax.collections) + len(ax.lines) + len(ax.patches) + len(ax.texts) < 15
    assert len(drawn(ax, "decode")) <= 60


# ---------------------------------------------------------------- memory and tokens


def test_kv_memory_stacks_to_the_whole_cache(trace):
    ax = plots.kv_memory(trace)
    for part, look in MEMORY.items():
        expected = [100 * getattr(s.kv, part) / s.kv.capacity for s in trace.steps]
        assert np.allclose(height(ax, look.label), expected), part
    assert np.allclose(sum(height(ax, look.label) for look in MEMORY.values()), 100)
    bottoms = sorted((tuple(b), tuple(t)) for b, t in stacks(ax).values())
    assert all(np.allclose(low[1], high[0]) for low, high in itertools.pairwise(bottoms))  # no gap, no overlap
    (rows,) = ax.child_axes
    assert rows.get_ylabel() == "rows (tokens)" and ax.get_ylabel() == "% of KV cache"
    ax.figure.draw_without_rendering()
    assert rows.get_ylim()[1] == pytest.approx(1.04 * trace.steps[0].kv.capacity)
    assert any(np.allclose(line.get_ydata(), 100) for line in ax.lines)


def test_token_budget_stacks_to_the_executed_tokens(trace):
    ax = plots.token_budget(trace)
    steps = steps_table(trace)
    total = sum(height(ax, look.label) for look in TOKENS.values())
    assert (total == steps["num_tokens"]).all()
    assert (height(ax, "prefill") == steps["prefill"]).all()
    assert (height(ax, "recomputed") == steps["recomputed"]).all()
    assert (height(ax, TOKENS["dead_padding"].label) == steps["dead_padding"]).all()
    budget = [line for line in ax.lines if line.get_label() == BUDGET[0]]
    texts = [text.get_text() for text in ax.texts]
    if steps["token_budget"].isna().all():
        assert not budget and not texts
    elif steps["token_budget"].max() <= 2 * steps["num_tokens"].max():
        assert set(budget[0].get_ydata()) == set(steps["token_budget"]) and not texts
        assert ax.get_ylim()[1] > steps["token_budget"].max()
    else:
        assert not budget and texts == ["budget 64 is off the scale"]


# ---------------------------------------------------------------- latencies


def test_latencies_show_every_value_and_both_percentiles():
    traces = {name: run(name) for name in CONFIGURATIONS}
    axes = plots.latencies(traces)
    assert [ax.get_title(loc="left") for ax in axes] == [
        "queueing delay",
        "time to first token",
        "time between tokens",
        "end to end",
    ]
    assert [label.get_text() for label in axes[0].get_yticklabels()] == list(CONFIGURATIONS)
    for ax, measure in zip(axes, ("queueing_delay", "ttft", "tbt", "e2e"), strict=True):
        assert ax.get_xlabel() == "s (simulated)"
        dots = [line.get_xdata() for line in ax.lines if line.get_label() == "values"]
        for shown, trace in zip(dots, traces.values(), strict=True):
            assert np.array_equal(shown, np.sort(measured(trace)[measure]))
        for label, percent in (("p50", 50), ("p99", 99)):
            shown = [line.get_xdata()[0] for line in ax.lines if line.get_label() == label]
            assert shown == [np.percentile(measured(trace)[measure], percent) for trace in traces.values()]
        low, high = ax.get_xlim()
        assert all(low <= x <= high for line in ax.lines for x in line.get_xdata())


def test_many_values_are_drawn_as_their_quantiles():
    trace = run("paged", count=160)
    tbt = measured(trace)["tbt"]
    assert len(tbt) > 400
    (dots,) = [line.get_xdata() for line in plots.latencies(trace)[2].lines if line.get_label() == "values"]
    assert len(dots) == 400 and (dots[0], dots[-1]) == (tbt.min(), tbt.max())


@pytest.mark.parametrize(
    "delays, scale",
    [([1.0, 2.0], "linear"), ([0.0, 0.0], "linear"), ([0.1, 90.0], "log"), ([0.0, 0.1, 90.0], "symlog")],
)
def test_latency_axes_are_logarithmic_where_the_range_demands_it(delays, scale):
    engine = make_engine("paged")
    engine.run([ask(f"r{i}", 1, 2, at=0.0) for i in range(len(delays))])
    trace = engine.trace
    trace.timelines = [replace(t, arrival=t.scheduled - d) for t, d in zip(trace.timelines, delays, strict=True)]
    ax = plots.latencies(trace)[0]
    ax.figure.draw_without_rendering()
    assert ax.get_xscale() == scale


# ---------------------------------------------------------------- figures


def test_compare_figures_have_a_panel_each_a_shared_axis_and_a_footer():
    traces = {name: run(name) for name in CONFIGURATIONS}
    for trace in traces.values():
        trace.meta |= {"workload": "12 requests", "seed": 3, "machine": "a laptop"}
    figures = plots.compare_figures(traces)
    assert list(figures) == ["membership", "kv_memory", "token_budget", "latency"]
    for figure in figures.values():
        assert isinstance(figure, Figure) and figure.get_figwidth() * figure.dpi == 800
        line = figure.get_supxlabel()
        assert line.startswith("simulated time · model toy") and "workload 12 requests · seed 3" in line
    for name in ("membership", "kv_memory", "token_budget"):
        axes = figures[name].axes
        assert len({ax.get_xlim() for ax in axes}) == 1
        titles = [ax.get_title(loc="left") for ax in axes]
        assert [title.split(":")[0] for title in titles] == list(CONFIGURATIONS)
        assert [ax.get_legend() is not None for ax in axes] == [False, False, False, True]
    entries = [text.get_text() for text in figures["token_budget"].axes[-1].get_legend().get_texts()]
    assert TOKENS["left_padding"].label in entries and BUDGET[0] in entries  # of all panels, not of the last


def test_the_same_figure_is_the_same_file_and_its_text_stays_text(tmp_path):
    for name in ("a.svg", "b.svg"):
        plots.save(plots.kv_memory(run("paged")).figure, tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert "<text" in text and "% of KV cache" in text
    plots.save(plots.kv_memory(run("paged")).figure, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_everything_is_inside_the_picture():
    """No title, label, tick or legend is cut off, with the longest legend and a footer of two lines."""
    engine = make_engine("paged", num_blocks=7, max_num_seqs=3)
    engine.run([ask(f"request-{i}", 5, 7, at=float(i)) for i in range(9)])
    several = {"a very long name of a configuration": swapped_run(), "forked": forked_run()}
    traces = {"static": run("static", count=40), "a long name": engine.trace, "chunked": run("chunked"), **several}
    for trace in traces.values():
        trace.meta["workload"] = "a workload with so much to be said about it that the line has to be broken " * 2
    for name, figure in plots.compare_figures(traces).items():
        figure.draw_without_rendering()
        width, full = figure.get_size_inches() * figure.dpi
        for box in (part.get_tightbbox() for part in (*figure.axes, figure._supxlabel)):
            assert box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1 and box.y1 <= full + 1, (name, box)


@pytest.mark.parametrize("draw", [plots.membership, plots.kv_memory, plots.token_budget, plots.latencies])
def test_traces_of_no_and_of_one_iteration_can_be_drawn(draw):
    whole = run("chunked")
    one = make_engine("paged")
    one.run([ask("a", 3, 1)])
    for trace in (
        Trace(),
        one.trace,
        Trace(whole.meta, [], whole.timelines),
        Trace(whole.meta, whole.steps[5:9], whole.timelines),
    ):
        axes = np.atleast_1d(draw(trace))
        axes[0].figure.draw_without_rendering()
    assert plots.membership(Trace()).texts[0].get_text() == "no iteration was executed"
    assert "without step reports" in plots.kv_memory(Trace(timelines=whole.timelines)).texts[0].get_text()
    assert all(isinstance(figure, Figure) for figure in plots.compare_figures({}).values())


def test_pictures_can_be_drawn_into_given_axes():
    trace = run("paged")
    figure = Figure()
    axes = figure.subplots(3, 1)
    for ax, draw in zip(axes, (plots.membership, plots.kv_memory, plots.token_budget), strict=True):
        assert draw(trace, ax) is ax and ax.get_legend() is not None
    four = Figure().subplots(2, 2)
    assert plots.latencies(trace, four).tolist() == four.reshape(-1).tolist()


@pytest.mark.parametrize("looks", [{**TOKENS, "found": FOUND}, MEMORY])
def test_kinds_differ_in_greyscale(looks):
    """By luminance, or by their hatching."""
    light = {kind: float(np.dot(to_rgb(look.color), (0.299, 0.587, 0.114))) for kind, look in looks.items()}
    for one, other in itertools.combinations(looks, 2):
        differ = abs(light[one] - light[other]) > 0.07 or looks[one].hatch != looks[other].hatch
        assert differ, f"{one} and {other} look alike"


def test_the_footer_says_only_what_is_known():
    assert footer([Trace()]) == "simulated time"
    meta = {"clock": "real", "model": "m", "dtype": "float32", "seed": 0, "versions": {"torch": "2", "numpy": None}}
    assert footer([Trace(meta)]) == "measured time · model m · float32 · seed 0 · torch 2"
    assert footer([Trace({"seed": 1}), Trace({"seed": 2})]) == "simulated time · seed 1 / 2"
