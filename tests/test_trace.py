"""A trace survives the disk unchanged, and a file that is none says where it stops being one."""

from __future__ import annotations

import json

import pytest
from helpers import CONFIGURATIONS, ask, make_engine

from minibatch import Trace


@pytest.fixture(params=CONFIGURATIONS)
def trace(request):
    engine = make_engine(request.param, num_blocks=8, max_queue=3)
    engine.run([ask(f"é{i}", 3 + i, 6, at=i / 2, seed=i) for i in range(6)] + [ask("bad", 200)])
    return engine.trace


def test_save_and_load_give_an_equal_trace(trace, tmp_path):
    trace.save(tmp_path / "run.jsonl")
    loaded = Trace.load(tmp_path / "run.jsonl")
    assert loaded == trace and loaded.steps and loaded.steps[0].kv == trace.steps[0].kv
    loaded.save(tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "run.jsonl").read_bytes()


def test_a_file_that_was_cut_off_is_no_trace(trace, tmp_path):
    """Fault: a KeyError, much later, in whatever reads the timelines."""
    trace.save(tmp_path / "run.jsonl")
    lines = (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for kept in (3, 1 + len(trace.steps), len(lines) - len(trace.timelines) + 1):
        (tmp_path / "cut.jsonl").write_text("".join(lines[:kept]), encoding="utf-8")
        with pytest.raises(ValueError, match=r"cut.jsonl is cut off: it has no timeline of é\d"):
            Trace.load(tmp_path / "cut.jsonl")


def test_every_line_is_strict_json(trace, tmp_path):
    trace.save(tmp_path / "run.jsonl")
    for line in (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_trace_says_how_it_was_made(trace):
    assert trace.simulated and trace.meta["clock"] == "virtual" and trace.meta["model"] == "toy"
    assert {"python", "minibatch", "numpy"} <= set(trace.meta["versions"])
    assert trace.meta["scheduler"] and trace.meta["kv_cache"]


def test_reports_cannot_be_changed(trace):
    with pytest.raises(AttributeError):
        trace.steps[0].end = 3.0
    with pytest.raises(AttributeError):
        trace.steps[0].kv.free = 3


def test_the_tables_have_a_row_a_step_and_a_row_a_request(trace):
    steps, requests = trace.to_pandas()
    assert len(steps) == len(trace.steps) and len(requests) == len(trace.timelines)
    assert set(requests.finish_reason) == {"length", "rejected"}


def test_the_chrome_export_is_written(trace, tmp_path):
    trace.save_chrome(tmp_path / "chrome.json")
    events = json.loads((tmp_path / "chrome.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {event["ph"] for event in events} >= {"X", "C", "M"} and all(event.get("dur", 0) >= 0 for event in events)


def test_what_the_user_says_of_a_run_does_not_hide_what_it_was(tmp_path):
    engine = make_engine("paged", meta={"clock": "real", "format": 7, "workload": "mine"})
    engine.trace.save(tmp_path / "x.jsonl")
    loaded = Trace.load(tmp_path / "x.jsonl")
    assert loaded.simulated and loaded.meta["workload"] == "mine"
    Trace().save(tmp_path / "empty.jsonl")
    assert Trace.load(tmp_path / "empty.jsonl") == Trace()


BROKEN = {
    "empty": ("", "no header"),
    "not json": ("hello\n", ":1 is not"),
    "other json": ('{"a": 1}\n', ":1 is not"),
    "a list": ("[]\n", ":1 is not"),
    "newer format": ('{"meta": {"format": 99}}\n', "format 2"),
    "half a line": ('{"meta": {"format": 2, "clock": "real"}}\n{"step": {"ind', ":2 is not"),
    "a field too many": ('{"meta": {"format": 2, "clock": "real"}}\n{"timeline": {"x": 1}}', ":2 is not"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_trace_is_refused_with_its_line(case, tmp_path):
    text, words = BROKEN[case]
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(ValueError, match=words):
        Trace.load(tmp_path / "x.jsonl")
