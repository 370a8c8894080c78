"""The Orca study: the queue of one as a recursion, curves by hand, the exact ends of the comparison, verdicts that can
fail."""

from functools import cache

import joblib
import numpy as np
import pandas as pd
import pytest

from minibatch.arrival_processes import AllAtOnce, Evenly, Poisson
from minibatch.cost_model import CostModel, Counts
from minibatch.gpus import GPUS
from minibatch.model_shapes import MODELS
from minibatch.open_loop import synthetic
from minibatch.studies import orca
from minibatch.studies.orca import BATCHES, LENGTHS, SLOTS, Point, measure, sustained
from minibatch.studies.spread import spread

COST = CostModel(MODELS["opt-13b"], GPUS["a100-40"])


@cache
def study():
    with joblib.parallel_config("sequential"):
        return orca.run(quick=True, progress=False)


# ---------------------------------------------------------------- what is measured


def seconds(prompt: int, answer: int) -> float:
    """What a request takes alone: its prompt, then every token but the first behind all before it."""
    total = COST.seconds(Counts(prompt, 1, prompt, prompt, prompt * (prompt + 1) // 2))
    return total + sum(COST.seconds(Counts(1, 1, n, 1, n)) for n in range(prompt + 1, prompt + answer))


def test_static_batches_of_one_are_a_queue_with_one_server():
    """Fault: arrivals, latency or throughput mean something else. Lindley's recursion knows no engine."""
    n, seed, arrivals = 40, 3, Poisson(0.5)
    workload = synthetic(n, arrivals, *LENGTHS["unequal"], seed, max_tokens=128)
    free, latencies = 0.0, []
    for request in workload.requests:
        prompt, answer = len(request.prompt), request.output_length
        free = max(free, request.arrival_time) + seconds(prompt, answer)
        latencies.append((free - request.arrival_time) / answer)
    point = measure("static", 1, "unequal", arrivals, n, seed)
    assert point.latency == pytest.approx(np.median(latencies), rel=1e-9)
    assert point.throughput == pytest.approx(n / (free - workload.requests[0].arrival_time), rel=1e-9)


@pytest.mark.parametrize("arrivals", [AllAtOnce(), Poisson(0.6), Evenly(0.01)])
def test_one_place_is_one_place(arrivals):
    """Fault: the two schedulers differ in something else than membership (a cost, an order, an overhead)."""
    assert measure("static", 1, "unequal", arrivals, 20, 1) == measure("iteration-level", 1, "unequal", arrivals, 20, 1)


@pytest.mark.parametrize("batch", BATCHES)
def test_equal_lengths_in_whole_batches_leave_nothing_to_gain(batch):
    """Fault: padding where there is none, or a limit that only one of the two meets."""
    static = measure("static", batch, "equal", AllAtOnce(), 2 * SLOTS, 0)
    assert static == measure("iteration-level", batch, "equal", AllAtOnce(), 2 * SLOTS, 0)


def test_the_memory_is_that_of_the_paper():
    """Fault: more K/V than the GPU has, or a slot that does not hold the longest request."""
    assert (SLOTS, orca.SLOT) == (24, 639)
    assert SLOTS * orca.SLOT <= 15_700 <= COST.kv_tokens(0.9)


def test_the_same_seed_is_the_same_run():
    """Fault: a draw from a generator of its own."""
    runs = [measure("iteration-level", 8, "unequal", Poisson(3.0), 20, seed) for seed in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2]


# ---------------------------------------------------------------- curves

SWEEP = [Point(1.0, 1.0), Point(2.0, 2.0), Point(3.0, 8.0)]


@pytest.mark.parametrize(
    ("limit", "throughput"),
    [(0.9, 0.0), (1.0, 1.0), (2**0.5, 1.5), (2.0, 2.0), (4.0, 2.5), (8.0, 3.0), (9.0, 3.0)],
)
def test_sustained_by_hand(limit, throughput):
    """Fault: the wrong piece of the curve, or a line of the latency instead of its logarithm."""
    assert sustained(SWEEP, limit) == pytest.approx(throughput)


def test_ratios_where_somebody_serves_nobody():
    """Fault: a limit that only one contender can meet counts as a tie, or is averaged as a number."""
    found = orca.ratios(np.array([2.0, 2.0, 0.0]), [np.array([1.0, 0.0, 0.0]), np.array([0.5, 0.0, 0.0])])
    assert found[0] == 2.0 and found[1] == np.inf and np.isnan(found[2])


def test_spread():
    """Fault: the interval of a normal distribution where three values need Student's (4.303 standard errors)."""
    assert spread([1.0, 2.0, 3.0]).half == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
    assert spread([1.0]).half == spread([1.0, np.inf]).half == np.inf
    with pytest.raises(ValueError, match="no values"):
        spread([])


# ---------------------------------------------------------------- verdicts and the whole


def test_verdicts_can_fail():
    """Fault: a verdict that holds whatever the numbers are."""
    assert orca.never_below(pd.Series([1.5, np.nan, 0.99]))
    assert not orca.never_below(pd.Series([1.5, 0.97]))
    assert not orca.never_below(pd.Series([np.nan]))  # nobody served anybody
    assert orca.shrinks(1.5, 1.2) and not orca.shrinks(1.5, 1.48) and not orca.shrinks(1.0, 1.0)


@pytest.mark.slow
def test_claims_follow_the_tables():
    """Fault: a claim judges another table, or the ratio the wrong way round."""
    found = study()
    assert found.claims[0].holds is None
    ahead = pd.DataFrame({"lowest": [1.2, 1.1]})
    behind = pd.DataFrame({"lowest": [1.2, 0.5]})
    assert orca.ordering(ahead, ahead).holds
    assert not orca.ordering(ahead, behind).holds and not orca.ordering(behind, ahead).holds


def test_the_study_is_complete():
    """Fault: a part is missing, or the text of a study does not come out."""
    found = study()
    assert len(found.claims) == 3 and len(found.tables) == 3 and len(found.differences) >= 5
    assert len(found.figure.axes) == 2
    assert "36.9" in found.describe() and "CANNOT BE SHOWN HERE" in found.describe()
    batches = found.tables["Requests/s when all wait, same maximum batch"]
    assert batches.loc[("unequal", 1), "ratio"] == pytest.approx(1.0)
    assert (batches["ratio"] > 0.99).all()
