"""Fitting the roofline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from matplotlib.figure import Figure

from minibatch import plot_style
from minibatch.gpus import GPU, GPUS, Efficiency, smooth_max
from minibatch.labs import pictures
from minibatch.labs.counterexample import CounterExample, expect, in_words, raised
from minibatch.labs.properties import for_all

Fit = Callable[..., Efficiency]

WITHIN = {"bandwidth": 0.01, "compute": 0.01, "sharpness": 0.03}  # how far off each may be, relatively
SHARES = ("bandwidth", "compute")
ROUND = GPU("a GPU of 1 TB/s and 100 TFLOP/s", 1e14, 1e12, 80e9, 1e11, 1e10)
SPREAD = [(tokens, weights) for tokens in (1, 32, 128, 256, 1024, 4096) for weights in (5e7, 2e8)]

PLACES = "The first share is that of the bandwidth, which reading reaches; the second that of the arithmetic."
READ = "Reading a 16-bit weight is 2 bytes, once, however many tokens: 2e9 bytes in 4 ms are half of 1 TB/s."
COMPUTED = "Computing is 2 operations for each weight and token: 2e12 in 25 ms are 0.8 of 100 TFLOP/s."
CORNER = "Near the ridge reading and computing overlap only in part: that is smooth_max, whose sharpness is fitted."
FEW = "A few slow measurements must not decide: errors count as they are, not squared, and relative to the measured."
SHORT = "A short measurement counts as much as a long one: the error is relative to what was measured, not in seconds."
EXACT = "Exact times give back the efficiency that made them."
UNITS = "The share {name} that made these times is between 0 and 1: bytes, operations or the peaks are mixed up."
SHARP = "The sharpness has to lie between 1 (times add) and 100: do not let your search leave that range."
ENOUGH = "These are enough measurements: what counts is how many different pairs (tokens, weights) there are."
AGAIN = "A measurement that is made again says nothing new: what counts is how many different loads there are."
POSITIVE = "A time that is not a positive number was not measured: there is nothing to fit."


def check(part: Fit) -> None:
    _far_from_the_ridge(part)
    _near_the_ridge(part)
    _slow_measurements(part)
    _long_measurements(part)
    _refusals(part)
    for_all(
        lambda bandwidth, compute, sharpness, gpu: _drawn_truth(part, bandwidth, compute, sharpness, gpu),
        examples=2,
        bandwidth=st.integers(30, 95),
        compute=st.integers(30, 95),
        sharpness=st.integers(12, 40),
        gpu=st.sampled_from(("a100-80", "a40", "l4")),
    )


# --- measurements ---


@dataclass(frozen=True)
class Times:
    """Exact times of loads, which are (tokens, weights); some may be ``slower``, by a factor each."""

    case: str
    gpu: GPU
    truth: Efficiency
    loads: Sequence[tuple[float, float]]
    slower: np.ndarray | float = 1.0

    def columns(self) -> list[list[float]]:
        tokens, weights = np.array(self.loads, dtype=float).T
        seconds = _predicted(self.truth, self.gpu, tokens, weights) * self.slower
        return [tokens.tolist(), weights.tolist(), seconds.tolist()]


def _predicted(efficiency: Efficiency, gpu: GPU, tokens: np.ndarray, weights: np.ndarray) -> np.ndarray:
    read = 2 * weights / (efficiency.bandwidth * gpu.bandwidth)
    computed = 2 * weights * tokens / (efficiency.compute * gpu.flops)
    return smooth_max(read, computed, efficiency.sharpness)


def _far_from_the_ridge(part: Fit) -> None:
    """Where only one of the two takes time, so that each share can be worked out on paper."""
    loads = [*((1, 1e9 * n) for n in range(1, 9)), *((100_000, 1e7 * n) for n in range(1, 6))]
    case = (
        "one token through 1, 2, ... 8 billion weights, 4 ms a billion; "
        "100,000 tokens through 10, 20, ... 50 million weights, 25 ms every 10 million"
    )
    times = Times(case, ROUND, Efficiency(0.5, 0.8, 3.0), loads)
    try:
        found = _found(part, times)
    except CounterExample as error:
        if error.idea == SHARP:  # these times do not say how sharp the corner is; others will
            return
        raise
    swapped = (round(found.bandwidth, 2), round(found.compute, 2)) == (0.8, 0.5)
    _near(found, times, ("bandwidth",), PLACES if swapped else READ)
    _near(found, times, ("compute",), COMPUTED)


def _near_the_ridge(part: Fit) -> None:
    case = "exact times of 1 to 4,096 tokens through 50 and 200 million weights"
    times = Times(case, GPUS["h100"], Efficiency(0.6, 0.5, 1.6), SPREAD)
    _near(_found(part, times), times, tuple(WITHIN), CORNER)


def _slow_measurements(part: Fit) -> None:
    case = "1 to 4,096 tokens through 50 and 200 million weights, each three times; of each three one took five times "
    number = np.arange(3 * len(SPREAD))
    slower = np.where((number + number // len(SPREAD)) % 3 == 0, 5.0, 1.0)
    times = Times(f"{case}as long", GPUS["h100"], Efficiency(0.8, 0.6, 2.0), SPREAD * 3, slower)
    _near(_found(part, times), times, SHARES, FEW)


def _long_measurements(part: Fit) -> None:
    short = [(tokens, 1e7) for tokens in (1, 16, 64, 128, 256, 512, 1024, 4096)]
    long = [(tokens, 1e10) for tokens in (1, 64, 256, 4096)]
    case = (
        "1 to 4,096 tokens: eight measurements with 10 million weights, exact, and four with 10 billion; "
        "these four took 1.5 times as long"
    )
    slower = np.repeat([1.0, 1.5], [len(short), len(long)])
    times = Times(case, ROUND, Efficiency(0.7, 0.5, 2.0), [*short, *long], slower)
    _near(_found(part, times), times, SHARES, SHORT)


def _drawn_truth(part: Fit, bandwidth: int, compute: int, sharpness: int, gpu: str) -> None:
    truth = Efficiency(bandwidth / 100, compute / 100, sharpness / 10)
    case = f"exact times of 1 to 4,096 tokens through 50 and 200 million weights on the {GPUS[gpu].name}"
    times = Times(case, GPUS[gpu], truth, SPREAD)
    _near(_found(part, times), times, tuple(WITHIN), EXACT)


# --- what the part makes of them ---


def _found(part: Fit, times: Times) -> Efficiency:
    given = times.columns()
    failed = {"case": times.case, "expected": f"{_in_shares(times.truth, SHARES)} (within 1 %)"}
    try:
        got = part(*given, times.gpu)
    except ValueError as error:
        raise CounterExample(
            _of_error(str(error)), **failed, happened=f"ValueError: {error}", picture=lambda: _curves(times, None)
        ) from error
    idea = "The measurements are somebody else's: a fit leaves them as they are."
    expect(given == times.columns(), True, case=times.case, idea=idea)
    if not isinstance(got, Efficiency):
        raise CounterExample(
            "Return an Efficiency: bandwidth, compute and sharpness.", **failed, happened=in_words(got)
        )
    return got


def _of_error(said: str) -> str:
    """The idea that belongs to an error: of a parameter that is out of its range, or of the measurements."""
    if "must lie in" not in said and "must be" not in said:
        return ENOUGH
    if "sharpness" in said:
        return SHARP
    return UNITS.format(name=next((name for name in SHARES if name in said), "of a peak"))


def _near(got: Efficiency, times: Times, names: Sequence[str], idea: str) -> None:
    """These parameters are the true ones."""
    if any(abs(getattr(got, name) / getattr(times.truth, name) - 1) > WITHIN[name] for name in names):
        allowed = f"(within 1 %{', sharpness 3 %' if 'sharpness' in names else ''})"
        expected, happened = f"{_in_shares(times.truth, names)} {allowed}", _in_shares(got, names)
        picture = lambda: _curves(times, got)  # noqa: E731
        raise CounterExample(idea, case=times.case, expected=expected, happened=happened, picture=picture)


def _in_shares(efficiency: Efficiency, names: Sequence[str]) -> str:
    return ", ".join(f"{name} {getattr(efficiency, name):.3g}" for name in names)


def _refusals(part: Fit) -> None:
    gpu = GPUS["h100"]
    tokens, weights, seconds = Times("", gpu, Efficiency(0.6, 0.5, 1.6), SPREAD).columns()
    few = [2 * column[:-1] for column in (tokens, weights, seconds)]
    _refused(part, few, gpu, f"{len(SPREAD) - 1} different loads, each measured twice", AGAIN)
    for bad in (0.0, -seconds[0], float("nan"), float("inf")):
        case = f"12 measurements, one of which took {in_words(bad)} s"
        _refused(part, [tokens, weights, [*seconds[:-1], bad]], gpu, case, POSITIVE)


def _refused(part: Fit, columns: Sequence[Sequence[float]], gpu: GPU, case: str, idea: str) -> None:
    def fitted() -> object:
        got = part(*columns, gpu)
        return _in_shares(got, SHARES) if isinstance(got, Efficiency) else got

    with np.errstate(all="ignore"):
        happened = raised(fitted)
    expect(happened, "ValueError", case=case, idea=idea)


def _curves(times: Times, got: Efficiency | None) -> Figure:
    """Seconds a billion weights over tokens: measured, and what the shares predict."""
    tokens, weights, seconds = map(np.array, times.columns())
    figure = plot_style.new_figure(3.2)
    ax = figure.add_subplot()
    line = np.geomspace(tokens.min(), tokens.max(), 80)
    for name, efficiency, style, color in (
        ("expected", times.truth, "-", pictures.EXPECTED),
        ("happened", got, "--", pictures.HAPPENED),
    ):
        if efficiency is not None:
            predicted = _predicted(efficiency, times.gpu, line, np.full_like(line, 1e9))
            ax.plot(line, predicted, style, color=color, label=name)
    ax.plot(tokens, 1e9 * seconds / weights, "o", color="black", markersize=3, label="measured")
    plot_style.tidy(ax, "time of a billion weights, both axes logarithmic", "tokens", "seconds")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    return figure
