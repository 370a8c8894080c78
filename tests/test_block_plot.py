"""The block map is the snapshots of the trace, and nothing else; lines of a table are its rows."""

import re

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from test_plots import TRACES, run, swapped_run

from minibatch import Trace, block_plot, plots
from minibatch.block_map import unit_size


@pytest.mark.parametrize("make", TRACES.values(), ids=TRACES)
def test_the_map_shows_every_snapshot(make):
    """Fault: a span is extended over an iteration in which the unit was free, or somebody else's, or less filled."""
    trace = make()
    size = unit_size(trace)
    spans = block_plot.spans(trace, size)
    for step in trace.steps:
        shown = {unit: what for unit, left, right, what in spans if left < step.index < right}
        owned = {unit for holding in step.kv.holdings for unit in holding.units}
        assert set(shown) == owned | set(step.kv.idle)
        assert size * (step.kv.capacity // size - len(owned)) == step.kv.free + step.kv.cached
        for holding in step.kv.holdings:
            assert all(holding.request_id in shown[unit].owners for unit in holding.units)
        assert sum(what.filled for what in shown.values()) == step.kv.filled


def test_units_of_nobody_are_there_only_if_they_keep_a_prefix():
    """Fault: a snapshot's list of idle units and its number of cached rows disagree."""
    trace = swapped_run()
    assert sum(len(step.kv.idle) for step in trace.steps) > 8
    for step in trace.steps:
        assert len(step.kv.idle) * 4 == step.kv.cached


def test_traces_keep_idle_units_and_old_ones_have_none(tmp_path):
    """Fault: a list where a tuple was, after loading; or a trace that was saved before there were any is refused."""
    trace = swapped_run()
    trace.save(tmp_path / "new.jsonl")
    assert Trace.load(tmp_path / "new.jsonl").steps == trace.steps
    text = re.sub(r',"idle":\[[\d,]*\]', "", (tmp_path / "new.jsonl").read_text())
    assert "idle" not in text
    (tmp_path / "old.jsonl").write_text(text)
    assert all(step.kv.idle == () for step in Trace.load(tmp_path / "old.jsonl").steps)


@pytest.mark.parametrize("make", TRACES.values(), ids=TRACES)
def test_the_map_can_be_drawn_and_its_legend_says_what_is_in_it(make):
    ax = plots.blocks(make())
    ax.figure.draw_without_rendering()
    entries = [text.get_text() for text in ax.get_legend().get_texts()]
    assert entries[0] == "filled (a colour a request)"


def test_the_map_of_nothing():
    light = run("paged")
    for trace in (Trace(), Trace(light.meta, [], light.timelines), Trace(light.meta, light.steps[3:4])):
        plots.blocks(trace).figure.draw_without_rendering()
    ax = Figure().subplots()
    assert plots.blocks(light, ax) is ax


def table():
    rows = [(rate, name, rate * k + seed) for rate in (1, 2) for k, name in enumerate("ab", 1) for seed in (0, 2)]
    return pd.DataFrame(rows, columns=["rate", "name", "wait"])


def test_curves_are_means_with_their_range():
    """Fault: seeds are drawn as a zigzag, or whiskers are not those of the point's own rows."""
    ax = plots.curves(table(), "rate", "wait", "name", kind="measured")
    lines = list(ax.containers)
    assert [line.get_label() for line in lines] == ["a", "b"]
    assert [line.lines[0].get_ydata().tolist() for line in lines] == [[2, 3], [3, 5]]
    low_high = lines[1].lines[2][0].get_segments()
    assert np.allclose(low_high, [[[1, 2], [1, 4]], [[2, 4], [2, 6]]])
    assert ax.get_title(loc="left") == "wait by rate (measured)"


def test_curves_of_one_line_have_no_legend_and_a_missing_column_is_an_error():
    assert plots.curves(table(), "rate", "wait").get_legend() is None
    assert plots.curves(table(), "rate", "wait", ["name", "rate"]).get_legend() is not None
    with pytest.raises(ValueError, match="no column weight; it has rate, name, wait"):
        plots.curves(table(), "rate", "weight")


def test_curves_keep_every_group():
    """Fault: rows whose key is None vanish, or two groups whose names look alike become one line."""
    rows = table().assign(budget=[None] * 4 + [512.0] * 4)
    assert len(plots.curves(rows, "rate", "wait", "budget").containers) == 2
    pairs = pd.DataFrame({"x": [1, 1], "y": [1, 2], "a": ["p, q", "p"], "b": ["r", "q, r"]})
    assert len(plots.curves(pairs, "x", "y", ["a", "b"]).containers) == 2
    assert plots.curves(table().head(0), "rate", "wait", "name").get_legend() is None
    with pytest.raises(ValueError, match="column name is not of numbers"):
        plots.curves(table(), "rate", "name")


def test_names_with_dollars_are_no_mathematics():
    """Fault: an id is parsed as a formula, and the picture fails."""
    trace = run("paged")
    trace.meta["name"] = "$x_$"
    for timeline in trace.timelines[:1]:
        timeline.client = "$_"
    for draw in (plots.blocks, plots.membership, plots.kv_memory, plots.token_budget):
        draw(trace).figure.draw_without_rendering()
    plots.latencies({"$x_$": trace})[0].figure.draw_without_rendering()
    for figure in plots.compare_figures({"$x_$": trace}).values():
        figure.draw_without_rendering()
    plots.curves(table().assign(name="$x_$"), "rate", "wait", "name").figure.draw_without_rendering()
