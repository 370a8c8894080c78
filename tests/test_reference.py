"""When may tokens differ from solo generation? Only at a tie, and a tie has to be shown by the logits of both runs."""

from __future__ import annotations

from minibatch.reference import Solo, TopTwo, compare
from minibatch.request import Result

ALONE = Solo((5, 6, 7), 1.0, (TopTwo((5, 1), (9.0, 3.0)), TopTwo((6, 8), (4.0, 3.99)), TopTwo((7, 2), (8.0, 1.0))))


def verdict(tokens, *best):
    """Of one request whose run kept these two best logits a position."""
    kept = {("r", index): two for index, two in enumerate(best)}
    return compare([Result("r", "length", tuple(tokens))], {"r": ALONE}, kept)


def test_equal_tokens_need_no_reason():
    found = verdict((5, 6, 7))
    assert found.holds and found.num_equal == 1 and str(found) == "1 of 1 equal solo generation"


def test_the_second_best_within_twice_the_noise_is_a_tie():
    found = verdict((5, 8, 1), TopTwo((5, 1), (9.006, 3.0)), TopTwo((8, 6), (3.995, 3.994)))
    (difference,) = found.differences
    assert found.holds and difference.tie and difference.index == 1
    assert abs(difference.gap - 0.01) < 1e-9 and abs(difference.noise - 0.006) < 1e-9
    assert str(found) == "0 of 1 equal solo generation, 1 part at a numerical tie"


def test_a_gap_above_twice_the_noise_is_a_fault():
    found = verdict((5, 8, 1), TopTwo((5, 1), (9.001, 3.0)), TopTwo((8, 6), (3.991, 3.999)))
    assert not found.holds and "1 DIFFER" in str(found)


def test_the_third_best_is_a_fault_however_noisy():
    assert not verdict((5, 9, 1), TopTwo((5, 1), (9.5, 3.0)), TopTwo((9, 6), (4.1, 3.9))).holds


def test_an_answer_that_ends_early_or_late_is_a_fault():
    best = [TopTwo((5, 1), (9.5, 3.0)), TopTwo((6, 8), (4.0, 3.9)), TopTwo((7, 2), (8.0, 1.0))]
    assert not verdict((5, 6), *best).holds
    assert not verdict((5, 6, 7, 1), *best).holds
    assert not verdict(()).holds


def test_logits_after_the_first_difference_are_not_noise():
    """From there on the two runs answer different texts: of course their logits differ."""
    found = verdict(
        (5, 8, 7), TopTwo((5, 1), (9.001, 3.0)), TopTwo((8, 6), (3.991, 3.999)), TopTwo((7, 2), (80.0, 1.0))
    )
    assert not found.holds and found.differences[0].noise < 0.01


def test_exact_models_have_no_ties():
    alone = Solo((1, 2), 1.0)
    assert not compare([Result("r", "length", (1, 3))], {"r": alone}, {}).holds
