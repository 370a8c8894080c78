"""The scorecard of the capstone: its measures on paper, workloads that give nothing away, and that it can be beaten."""

from __future__ import annotations

import pandas as pd
import pytest
from lab_solutions import capstone as solutions
from matplotlib.figure import Figure

from minibatch import policies
from minibatch.chunked_prefill import ChunkedPrefill
from minibatch.labs import pictures, scorecard, scorecard_plot
from minibatch.labs.checks import capstone
from minibatch.labs.counterexample import CounterExample
from minibatch.labs.properties import Seed
from minibatch.trace import Timeline, Trace


def timeline(client="a", arrival=0.0, first=1.0, gap=0.1, tokens=3):
    times = [arrival + first + gap * i for i in range(tokens)]
    made = Timeline("r", client, 0, 4, 16, arrival, arrival, times)
    made.finish, made.finish_reason = times[-1], "stop"
    return made


GOOD, LATE = {"first": 1.0}, {"first": 3.5}


def trace(**clients):
    """Of each client, which of its requests were good."""
    return Trace({}, [], [timeline(c, **(GOOD if good else LATE)) for c, each in clients.items() for good in each])


@pytest.mark.parametrize(
    ("made", "good"),
    [
        (timeline(first=3.0, gap=0.119), True),  # the bound belongs to what is good
        (timeline(first=3.001), False),
        (timeline(gap=0.121), False),
        (timeline(tokens=1), True),  # no gap to be long
    ],
)
def test_what_is_good(made, good):
    assert scorecard.is_good(made) == good


def test_unanswered_requests_are_not_good():
    made = timeline()
    made.finish_reason = "rejected"
    assert not scorecard.is_good(made)


@pytest.mark.parametrize(
    ("run", "gap"),
    [
        (trace(a=[1, 1], b=[1, 1]), 0.0),
        (trace(a=[1, 1], b=[1, 0]), 0.5),
        (trace(a=[0, 0], b=[0]), 0.0),  # all are served equally badly
        (trace(a=[1, 0]), 0.0),  # one client
        (trace(a=[1, 1, 1, 0, 0, 0], b=[1, 1]), 0.25),  # an equal share is 4: a has 3 of 4
        (trace(a=[1, 1, 1, 1, 0, 0], b=[1, 0]), 0.5),  # it floods and has its share; b has not
    ],
)
def test_fairness_gap(run, gap):
    """Fault: a client that floods counts as badly served; one with few requests does not."""
    assert scorecard.fairness_gap(run) == pytest.approx(gap)


def test_a_wait_is_for_any_token():
    """Fault: whoever is late already may stand still for ever."""
    assert scorecard.waited(timeline(first=2.0, gap=5.0)) == pytest.approx(5.0)
    assert scorecard.waited(timeline(first=6.0, gap=5.0)) == pytest.approx(6.0)


def test_the_preemption_tax_counts_what_is_computed_again_and_what_is_copied():
    """Against the engine's own counts, on the workload that outgrows the memory."""
    given = scorecard.workload("answers", 0)
    for preemption in (policies.Recompute(), policies.Swap()):
        engine = scorecard.machine(given, policies.FCFS(), ChunkedPrefill(token_budget=256, preemption=preemption))
        noted = scorecard.run(engine, given)
        steps = engine.trace.counts
        lost = sum(step.recomputed + step.swapped_out for step in steps)
        assert noted.meta["lost"] == lost > 0
        assert noted.meta["executed"] == sum(step.prefill + step.decode + step.recomputed for step in steps)
        assert scorecard.preemption_tax(noted) == lost / noted.meta["executed"]


def test_requests_do_not_say_how_long_their_answers_are():
    seen = []

    class Watching(policies.FCFS):
        def add(self, request):
            seen.append((request.request.output_length, request.max_new_tokens))
            super().add(request)

    given = scorecard.workload("steady", 0)
    made = scorecard.served_by(lambda: (Watching(), ChunkedPrefill(token_budget=256)))(given)
    assert {length for length, _ in seen} == {None}
    assert {limit for _, limit in seen} == {1024}
    assert {t.request_id: len(t.token_times) for t in made.timelines} == given.output_lengths


@pytest.mark.parametrize("name", scorecard.WORKLOADS)
def test_workloads_are_drawn_from_seed_and_draw(name):
    """Fault: names, ids or lengths that are the same for every seed could be known in advance."""

    def facts(*which):
        requests = scorecard.workload(name, *which).requests
        return [(r.request_id, r.client, len(r.prompt), r.arrival_time, r.output_length) for r in requests]

    assert facts(3, 1) == facts(3, 1)
    for other in (facts(4, 1), facts(3, 0)):
        assert {client for _, client, *_ in other}.isdisjoint({client for _, client, *_ in facts(3, 1)})
        assert [row[2:] for row in other] != [row[2:] for row in facts(3, 1)]


@pytest.mark.slow
def test_the_published_card_is_the_references():
    """Fault: a student is measured against numbers that are no longer those of the reference."""
    computed = scorecard.card(scorecard.served_by(scorecard.reference), seed=0)
    pd.testing.assert_frame_equal(scorecard.reference_card(0), computed, rtol=1e-9)


@pytest.mark.slow
def test_table_and_figure_have_every_workload_and_measure():
    theirs = scorecard.reference_card(0)
    said = scorecard_plot.table(theirs, theirs, 0.0)
    assert all(name in said for name in [*scorecard.WORKLOADS, "goodput", "fairness gap", "preemption tax", "all"])
    assert isinstance(scorecard_plot.figure(theirs, theirs), Figure)
    assert scorecard.gain(theirs, theirs) == 0
    gains = (0, scorecard.LEAST, (scorecard.LEAST + scorecard.FULL) / 2, scorecard.FULL, 0.9)
    assert [scorecard.share_of_points(gain) for gain in gains] == pytest.approx([0, 0, 0.5, 1, 1])


# --- more that fails, for reasons of its own ---


class Refusing(ChunkedPrefill):
    def check(self, request, kv):
        from minibatch.request import NeverFits

        raise NeverFits("too much work")


class Idle(ChunkedPrefill):
    def plan(self, queue, active, kv, now):
        from minibatch.plan import Plan

        return Plan()


class Beyond(ChunkedPrefill):
    """Plans one token more than its budget."""

    def plan(self, queue, active, kv, now):
        object.__setattr__(self, "token_budget", 257)
        made = super().plan(queue, active, kv, now)
        object.__setattr__(self, "token_budget", 256)
        return made


class Counting(policies.Order):
    """Knows in every run what it has seen in the ones before."""

    runs = 0

    def __init__(self):
        super().__init__()
        type(self).runs += 1

    def key(self, request):
        return -request.rank if type(self).runs > 10 else request.rank


class Touching(policies.FCFS):
    """Sets back the clock of those that it admits."""

    def take(self, request):
        request.timeline.arrival += 1.0
        super().take(request)


class Forging(policies.FCFS):
    """Writes better times into the book when a request has ended."""

    def end(self, request):
        super().end(request)
        known = request.timeline
        known.token_times[:] = [known.arrival + 0.01 * (i + 1) for i in range(len(known.token_times))]


CHUNKED = {"token_budget": 256}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "says"),
    [
        (lambda: policies.FCFS(), "two things"),
        (lambda: (policies.FCFS, ChunkedPrefill()), "ready to use"),
        (lambda: (policies.FCFS(), Refusing()), "has to get its answer"),
        (lambda: (policies.FCFS(), Idle()), "waits for ever"),
        (lambda: (policies.FCFS(), Beyond(**CHUNKED)), "cannot be carried out"),
        (lambda: (Touching(), ChunkedPrefill(**CHUNKED)), "changes nothing"),
        (lambda: (Forging(), ChunkedPrefill(**CHUNKED)), "changes nothing"),
        (lambda: (Counting(), ChunkedPrefill(**CHUNKED)), "kept between runs"),
        (lambda: (policies.FCFS(), ChunkedPrefill(**CHUNKED, max_num_seqs=8)), "starves"),
        (lambda: (policies.FCFS(), ChunkedPrefill(**CHUNKED, max_num_seqs=1)), "come to an end"),
        (lambda: (policies.FCFS(lookahead=16), ChunkedPrefill(**CHUNKED)), "most to gain"),
        (lambda: (solutions._InTime(), ChunkedPrefill(**CHUNKED, max_num_seqs=30)), "answers loses by goodput"),
        (lambda: (policies.FCFS(), ChunkedPrefill(**CHUNKED, admission=policies.Watermark(0.1))), "serves worse"),
    ],
)
def test_what_the_check_says(part, says):
    with pytest.raises(CounterExample) as caught:
        capstone.check(part)
    assert says in caught.value.idea
    assert isinstance(pictures.draw(caught.value.picture, "capstone.1"), Figure)


@pytest.mark.slow
def test_graders_seeds_are_others(monkeypatch):
    monkeypatch.setattr(Seed, "value", 5)
    assert 0 < capstone.check(scorecard.parts)[0] < 0.4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("part", "share"), [(solutions._composed, 0.2), (solutions._in_time, 0.8)])
def test_it_can_be_beaten_whatever_the_seed(part, share, seed, monkeypatch):
    """Fault: an exercise that only luck can solve, or one knob alone."""
    monkeypatch.setattr(Seed, "value", seed)
    assert capstone.check(part)[0] >= share
