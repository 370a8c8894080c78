"""The Anyscale study: both static rungs in closed form, what every rung has in common, verdicts that can fail."""

from functools import cache

import joblib
import numpy as np
import pandas as pd
import pytest

from minibatch.cost_model import CostModel, Counts
from minibatch.gpus import GPUS
from minibatch.model_shapes import MODELS
from minibatch.studies import anyscale
from minibatch.studies.anyscale import BATCH, LIMIT, PROMPT, RUNGS, asked, measure, system

COST = CostModel(MODELS["opt-13b"], GPUS["a100-40"])
N = 20


@cache
def study():
    with joblib.parallel_config("sequential"):
        return anyscale.run(quick=True, progress=False)


@cache
def run(rung: str, cap: int, seed: int = 0):
    return measure(rung, cap, N, seed)


def outputs(cap: int, seed: int = 0) -> list[int]:
    return list(asked(cap, N, seed).output_lengths.values())


def batch_seconds(rows: int, iterations: int) -> float:
    """A rectangle: all prompts in one iteration, then a token a row in each of the others."""
    pairs = PROMPT * (PROMPT + 1) // 2
    total = COST.seconds(Counts(rows * PROMPT, rows, rows * PROMPT, rows * PROMPT, rows * pairs))
    contexts = range(PROMPT + 1, PROMPT + iterations)
    return total + sum(COST.seconds(Counts(rows, rows, rows * n, rows, rows * n)) for n in contexts)


# ---------------------------------------------------------------- rungs


@pytest.mark.parametrize("cap", [32, 1536])
@pytest.mark.parametrize("rung", ["whole set", "static"])
def test_static_rungs_in_closed_form(rung, cap):
    """Fault: a dead row that is cheaper than a living one, a batch that ends too early or too late, a changed order."""
    answers, size = outputs(cap), BATCH[cap]
    batches = [answers[start : start + size] for start in range(0, N, size)]
    longest = [max(answers) if rung == "whole set" else max(batch) for batch in batches]
    expected = sum(batch_seconds(len(batch), most) for batch, most in zip(batches, longest, strict=True))
    found = run(rung, cap)
    assert found.seconds == pytest.approx(expected, rel=1e-9)
    rows = sum(len(batch) * most for batch, most in zip(batches, longest, strict=True))
    assert found.useful == pytest.approx(sum(answers) / rows, rel=1e-12)
    assert found.iterations == sum(longest)


@pytest.mark.parametrize("cap", BATCH)
@pytest.mark.parametrize("rung", [*RUNGS, "strict"])
def test_every_rung_is_paid_for_the_same_tokens(rung, cap):
    """Fault: a rung counts tokens that nobody asked for, or another draw of the lengths."""
    found = run(rung, cap)
    assert found.rate * found.seconds == pytest.approx(N * PROMPT + sum(outputs(cap)), rel=1e-9)
    assert found.longest == max(outputs(cap)) <= cap


@pytest.mark.parametrize("cap", BATCH)
def test_no_row_is_dead_where_members_may_leave(cap):
    """Fault: padding, or recomputation, counted as work for somebody."""
    assert run("iteration", cap).useful == 1.0
    assert run("whole set", cap).useful <= run("static", cap).useful < 1.0


def test_memory_is_the_same_on_all_rungs():
    """Fault: a rung gets more memory, and the factor of the mechanism is one of memory."""
    for cap, limit in LIMIT.items():
        rows = {rung: system(rung, cap)[1].num_rows for rung in (*RUNGS, "strict")}
        assert rows["whole set"] == rows["static"] == rows["iteration"] == BATCH[cap] * (PROMPT + cap - 1)
        assert abs(rows["iteration"] / limit - 1) <= 0.0225
        assert limit - 16 < rows["paged"] <= limit and rows["strict"] <= limit
    assert [system("strict", cap)[1].num_units for cap in BATCH] == [16, 11, 7, 3]


def test_the_same_seed_is_the_same_run():
    """Fault: a draw from a generator of its own."""
    assert measure("paged", 128, N, 7) == measure("paged", 128, N, 7) != measure("paged", 128, N, 8)


# ---------------------------------------------------------------- split and verdicts


def test_factors_multiply_to_the_whole():
    """Fault: a factor between the wrong two rungs."""
    runs = {(rung, cap): [run(rung, cap)] for rung in RUNGS for cap in BATCH}
    parts = anyscale.split(runs)
    assert np.allclose(parts["harness"] * parts["mechanism"] * parts["memory"], parts["all"])
    top = parts.loc[1536]
    assert top["all"] * top["left"] == pytest.approx(23) and parts["left"].isna().sum() == 3
    assert top["harness"] == pytest.approx(run("static", 1536).rate / run("whole set", 1536).rate)


def test_verdicts_can_fail():
    """Fault: a verdict that holds whatever the numbers are."""
    assert anyscale.more_than_double([2.1, 3.0]) and not anyscale.more_than_double([2.1, 1.9])
    good = pd.DataFrame({"harness": [1.0, 3.0], "mechanism": [2.0, 2.0], "memory": [0.995, 2.0], "all": [1.99, 12.0]})
    assert anyscale.climbs(good)
    assert not anyscale.climbs(good.assign(memory=[0.98, 2.0]))
    assert not anyscale.climbs(good.assign(all=[12.0, 1.99]))


@pytest.mark.slow
def test_the_study_is_complete():
    """Fault: a part is missing, or the text of a study does not come out."""
    found = study()
    assert len(found.claims) == 4 and len(found.tables) == 2 and len(found.differences) >= 5
    assert len(found.figure.axes) == 2
    assert [type(claim.holds) for claim in found.claims] == [type(None), bool, type(None), bool]
    assert "23" in found.describe()
    table = found.tables["Throughput by cap and rung"]
    assert set(table.index.unique("rung")) == {*RUNGS, "strict"} and (table["tokens/s"] > 0).all()
