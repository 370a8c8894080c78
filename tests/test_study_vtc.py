"""The VTC study: service by hand, intervals by brute force, bounds and verdicts on numbers that are made up."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minibatch.studies import Study, vtc
from minibatch.studies.vtc import LATE, ON_OFF, THREE, TWO, UNEQUAL, Served
from minibatch.trace import Timeline, Trace


def timeline(name, client, arrival, scheduled, times, prompt=10, most=4):
    return Timeline(name, client, 0, prompt, most, arrival, scheduled, list(times))


def test_service_is_charged_when_it_is_given():
    """By hand. Fault: the input is charged at the arrival or with the first token, or what comes after the end of the
    time counts."""
    trace = Trace(
        timelines=[
            timeline("a0", "a", 0.0, 1.0, [2.0, 3.0, 9.0]),  # 9.0 is beyond the time
            timeline("a1", "a", 0.5, None, []),
            timeline("b0", "b", 0.0, 2.0, [3.0, 4.0], prompt=6),
            timeline("b1", "b", 7.0, None, []),  # beyond the time too
        ]
    )
    served = vtc.account(trace, "ab", 5.0)
    assert served.times.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert served.service["a"].tolist() == [10.0, 12.0, 14.0, 14.0]
    assert served.service["b"].tolist() == [0.0, 6.0, 8.0, 10.0]
    assert served.waits["a"].tolist() == [True] * 4  # a1, all the time
    assert served.waits["b"].tolist() == [True, False, False, False]
    assert served.share == {"a": 14 / 36, "b": 10 / 14}
    assert served.delay == {"a": 2.0, "b": 3.0}
    assert served.total == 24.0


def made_up(a, b, waits=None, **fields):
    """A run with these services, in which both always wait, or as said."""
    service = {"a": np.asarray(a, dtype=float), "b": np.asarray(b, dtype=float)}
    always = np.ones(len(a), dtype=bool)
    waits = {"a": always, "b": always} if waits is None else waits
    values = {"share": {}, "delay": {}, "total": 0.0, "lead": 0.0, **fields}
    return Served(np.arange(len(a), dtype=float), service, waits, **values)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans(), st.booleans()), min_size=1, max_size=15))
def test_the_largest_gap_is_that_of_all_intervals(rows):
    """Oracle: every interval. Fault: only intervals from the beginning are seen, or one reaches over a time in which
    one of them does not wait."""
    gives_a, gives_b, wait_a, wait_b = (np.array(column) for column in zip(*rows, strict=True))
    a, b = np.cumsum(gives_a), np.cumsum(gives_b)
    served = made_up(a, b, {"a": wait_a, "b": wait_b})
    gaps = [0]
    for first in range(len(rows)):
        for last in range(first, len(rows)):
            if all(wait_a[first : last + 1]) and all(wait_b[first : last + 1]):
                gaps.append(abs((a[last] - a[first]) - (b[last] - b[first])))
    assert vtc.largest_gap(served, "a", "b") == max(gaps)


def test_what_was_before_does_not_count():
    """By hand. Fault: ``since`` is ignored."""
    served = made_up([0, 50, 50, 51], [0, 0, 0, 0])
    assert vtc.largest_gap(served, "a", "b") == 51
    assert vtc.largest_gap(served, "a", "b", since=2.0) == 1


@pytest.mark.parametrize("order", ["FCFS", "VTC"])
def test_all_service_is_somebodys_and_a_run_repeats_itself(order):
    """Fault: service is lost or counted twice; hidden state between runs; orders see different requests."""
    first, second = (vtc.serve(THREE, order, 0.5, 1) for _ in range(2))
    for name in "abc":
        assert np.array_equal(first.service[name], second.service[name])
        assert (np.diff(first.service[name]) >= 0).all()
        assert 0 < first.share[name] <= 1
    assert first.total == sum(first.service[name][-1] for name in "abc")
    other = vtc.serve(THREE, order, 0.5, 2)
    assert other.total != first.total


def test_no_counter_runs_away_while_both_wait():
    """Oracle: the theorem. Fault: the study looks at counters of clients that do not wait, or not at all."""
    served = vtc.serve(UNEQUAL, "VTC", 1.0, 0)
    assert 0 < served.lead <= vtc.COUNTERS
    assert 0 < vtc.largest_gap(served, "a", "b") <= vtc.SERVICES
    assert np.isnan(vtc.serve(UNEQUAL, "FCFS", 0.3, 0).lead)


def test_the_bounds_are_the_papers_and_a_token():
    """By hand: 2 * 10,000, and 1."""
    assert (vtc.COUNTERS, vtc.SERVICES) == (20_001.0, 40_002.0)


def good_runs():
    """Made-up runs for which every claim holds."""
    steps = np.arange(101)
    fair = made_up(steps * 500, steps * 500 + steps % 2 * 100, lead=5000.0)
    unfair = made_up(steps * 500, steps * 1000)
    shares = {"a": 0.99, "b": 0.98, "c": 0.6}
    return {
        (TWO, "FCFS"): [unfair], (TWO, "VTC"): [fair], (UNEQUAL, "VTC"): [fair],
        (THREE, "FCFS"): [made_up([1], [1], total=100.0)],
        (THREE, "VTC"): [made_up([1], [1], total=99.0, share=shares)],
        (ON_OFF, "FCFS"): [made_up([1], [1], delay={"a": 30.0})],
        (ON_OFF, "VTC"): [made_up([1], [1], delay={"a": 1.0})],
        (LATE, "VTC"): [fair], (LATE, "no lift"): [unfair],
    }  # fmt: skip


JUDGES = {
    "fcfs": vtc.fcfs_claim,
    "bound": vtc.bound_claim,
    "work": vtc.work_claim,
    "isolation": vtc.isolation_claim,
    "lift": lambda runs: vtc.lift_claim(runs, 10.0),
}


@pytest.mark.parametrize(
    "judge, case, spoil",
    [
        ("fcfs", (TWO, "FCFS"), lambda run, bad: bad["even"]),
        ("fcfs", (TWO, "FCFS"), lambda run, bad: made_up([0, 1], [0, 2])),  # 2 to 1, and not far apart
        ("bound", (TWO, "VTC"), lambda run, bad: bad["uneven"]),
        ("bound", (UNEQUAL, "VTC"), lambda run, bad: bad["uneven"]),
        ("bound", (TWO, "VTC"), lambda run, bad: replace(run, lead=20_002.0)),
        ("work", (THREE, "VTC"), lambda run, bad: replace(run, total=97.0)),
        ("work", (THREE, "VTC"), lambda run, bad: replace(run, share={**run.share, "b": 0.9})),
        ("isolation", (ON_OFF, "VTC"), lambda run, bad: replace(run, delay={"a": 3.1})),
        ("lift", (LATE, "VTC"), lambda run, bad: bad["uneven"]),
        ("lift", (LATE, "no lift"), lambda run, bad: bad["even"]),
    ],
)
def test_each_verdict_can_fail_and_one_seed_is_enough(judge, case, spoil):
    """Fault: a verdict that cannot fail, or one bad seed that is lost in a mean."""
    runs = good_runs()
    assert JUDGES[judge](runs).holds
    bad = {"even": runs[TWO, "VTC"][0], "uneven": runs[TWO, "FCFS"][0]}
    runs[case] = [*runs[case], spoil(runs[case][0], bad)]
    if judge == "work":
        runs[THREE, "FCFS"] *= 2
    if judge == "isolation":
        runs[ON_OFF, "FCFS"] *= 2
    assert not JUDGES[judge](runs).holds


@pytest.mark.slow
def test_the_study_runs():
    """Fault: a part of it is missing."""
    study = vtc.run(quick=True, progress=False)
    assert isinstance(study, Study)
    assert len(study.claims) == 5
    assert study.differences and study.figure is not None and "simulated" in study.describe()
    (table,) = study.tables.values()
    assert set(table.index.unique("suite")) == {TWO, UNEQUAL, THREE, ON_OFF, LATE}
    assert (table["service"] > 0).all() and table["of what it asked"].between(0, 1).all()
