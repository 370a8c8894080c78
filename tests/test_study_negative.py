"""The negative controls: cases with an exact answer, chunks counted by hand, verdicts that can fail."""

from functools import cache

import joblib
import numpy as np
import pandas as pd
import pytest

from minibatch.arrival_processes import AllAtOnce, Evenly
from minibatch.cost_model import Counts
from minibatch.distributions import Fixed
from minibatch.open_loop import synthetic
from minibatch.studies import negative
from minibatch.studies.negative_runs import (
    CASES,
    COARSE,
    CUT,
    FIRST,
    LLAMA,
    SCHEDULERS,
    SLOTS,
    WHOLE,
    Runs,
    equal_lengths,
    low_load,
    measure,
    ratio,
)

N = 2 * SLOTS


@cache
def study():
    with joblib.parallel_config("sequential"):
        return negative.run(quick=True, progress=False)


@cache
def equal() -> pd.DataFrame:
    with joblib.parallel_config("sequential"):
        return equal_lengths(Runs(N, [4]))


# ---------------------------------------------------------------- runs


def test_alone_both_schedulers_are_the_same():
    """Fault: they differ in something that has nothing to do with batching."""
    lengths = CASES["both differ"]
    assert measure("static", lengths, Evenly(0.01), 12, 0) == measure("continuous", lengths, Evenly(0.01), 12, 0)


def test_where_all_is_equal_there_is_no_gap_at_all():
    """Fault: padding where there is none, or a token limit that splits the first batch."""
    assert equal().loc["all equal"].tolist() == pytest.approx([1.0, np.inf, 0.0, 0.0])


@pytest.mark.parametrize(("case", "column"), [("prompts differ", "left_padding"), ("answers differ", "dead_padding")])
def test_padding_by_hand(case, column):
    """Fault: a share of something else than the executed tokens, or the two kinds of padding exchanged."""
    requests = synthetic(N, AllAtOnce(), *CASES[case], 4).requests
    prompts = np.array([len(request.prompt) for request in requests]).reshape(-1, SLOTS)
    answers = np.array([request.output_length for request in requests]).reshape(-1, SLOTS)
    left = (prompts.max(axis=1, keepdims=True) - prompts).sum()
    dead = (answers.max(axis=1, keepdims=True) - answers).sum()
    rectangle = SLOTS * (prompts.max(axis=1) + answers.max(axis=1) - 1).sum()
    expected = {"left_padding": left / rectangle, "dead_padding": dead / rectangle}
    assert expected.pop(column) == pytest.approx(equal().loc[case, column], rel=1e-12) != 0
    assert equal().loc[case, next(iter(expected))] == next(iter(expected.values())) == 0


def chunk(start: int, stop: int, last: bool) -> float:
    pairs = (stop * (stop + 1) - start * (start + 1)) // 2
    return LLAMA.seconds(Counts(stop - start, int(last), stop, stop - start, pairs))


@pytest.mark.parametrize(("scheduler", "budget"), [(FIRST, 4096), (WHOLE, 4096), (COARSE, 2048), (CUT, 512)])
def test_a_prompt_alone_takes_its_chunks(scheduler, budget):
    """Fault: another budget than the name says; ceil(P / budget) chunks, each with all K/V before it."""
    starts = range(0, 2600, budget)
    ttft = sum(chunk(start, min(start + budget, 2600), start + budget >= 2600) for start in starts)
    found = measure(scheduler, (Fixed(2600), Fixed(3)), Evenly(0.01), 2, 0)
    assert found.ttft_mean == pytest.approx(ttft, rel=1e-9)
    assert found.e2e == pytest.approx(ttft + chunk(2600, 2601, True) + chunk(2601, 2602, True), rel=1e-9)


def test_who_waits_for_three_prompts_at_once():
    """Fault: the schedulers are exchanged. The first one's second token comes after two prompts, one, or a chunk."""
    longest = {who: measure(who, (Fixed(2600), Fixed(3)), AllAtOnce(), 3, 0).tbt_p99 for who in SCHEDULERS}
    prompt, piece = chunk(0, 2600, True), chunk(0, 512, False)
    assert 1.9 * prompt < longest[FIRST] < 2.2 * prompt
    assert 0.95 * prompt < longest[WHOLE] < 1.2 * prompt
    assert 0.95 * piece < longest[CUT] < 1.2 * piece


def test_a_refused_request_is_an_error():
    """Fault: prompts that do not fit vanish, and the rest looks quick."""
    with pytest.raises(ValueError, match="2 of 2 requests were refused"):
        measure(CUT, (Fixed(5000), Fixed(3)), AllAtOnce(), 2, 0)


def test_ratios_are_paired_and_the_right_way_round():
    """Fault: means divided by means, or under by over."""
    runs = [
        [measure("static", CASES["all equal"], Evenly(0.01), 2, 0)._replace(e2e=e) for e in es]
        for es in ((2, 9), (1, 3))
    ]
    assert ratio(*runs, "e2e").mean == pytest.approx((2 / 1 + 9 / 3) / 2)


def test_the_same_seed_is_the_same_table():
    """Fault: a draw from a generator of its own."""
    with joblib.parallel_config("sequential"):
        tables = [low_load(Runs(6, [seed, seed + 1]), [1.0]) for seed in (3, 3, 5)]
    pd.testing.assert_frame_equal(tables[0], tables[1])
    assert not tables[0].equals(tables[2])


# ---------------------------------------------------------------- verdicts and the whole


def test_verdicts_can_fail():
    """Fault: a verdict that holds whatever the numbers are."""
    assert negative.same(1.04) and not negative.same(1.04, 0.02) and not negative.same(0.9)
    assert negative.moves_the_wait(0.1, 1.3, 0.99)
    assert not negative.moves_the_wait(1.0, 1.3, 0.99)
    assert not negative.moves_the_wait(0.1, 1.0, 0.99)
    assert not negative.moves_the_wait(0.1, 1.3, 0.9)
    assert negative.regimes_differ(1.2, 0.1, 1.01)
    assert not negative.regimes_differ(1.2, 0.3, 1.01)  # uncertain
    assert not negative.regimes_differ(1.01, 0.0, 1.01)
    assert not negative.regimes_differ(1.2, 0.1, 1.1)
    table = pd.DataFrame({"throughput": {"all equal": 1.0, "both differ": 1.5}})
    assert negative.only_by_padding(table)
    assert not negative.only_by_padding(table + 0.01) and not negative.only_by_padding(table.clip(upper=1.0))


@pytest.mark.slow
def test_the_study_is_complete():
    """Fault: a part is missing, or the text of a study does not come out."""
    found = study()
    assert len(found.claims) == 5 and len(found.tables) == 4 and len(found.differences) >= 5
    assert [claim.holds is None for claim in found.claims] == [False, False, False, True, False]
    assert all(isinstance(claim.holds, bool | None) for claim in found.claims)
    assert len(found.figure.axes) == 4
    assert "2.03x" in found.describe()
    waits = found.tables["Chunking: waits at 0.7 of saturation, ratios over prompts first"]
    assert (waits.xs(FIRST, level="scheduler").filter(like="ratio") == 1).all(axis=None)
    assert len(waits) == 3 * len(SCHEDULERS)
