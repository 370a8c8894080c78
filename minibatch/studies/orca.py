"""Orca's experiment: what a server sustains under a limit on latency, if batches may change between iterations.

Yu et al., Orca, OSDI 2022, section 6.2: GPT-3 on A100-40GB, prompts of 32 to 512 tokens and answers of 1 to 128,
uniform, Poisson arrivals. Latency is the median of end-to-end latency / output tokens. At a limit of 190 ms a token the
175B model serves 6.81 requests/s with Orca and 0.185 with FasterTransformer behind a batcher like Triton's, whose best
maximum batches are 1 and 8: 36.9 times.

What a simulation of one process can show: the mechanism. Both schedulers run in one engine with the same cost model;
the static one executes its padding and its dead rows. What it cannot show is 36.9: that number is of 16 GPUs in two
pipeline stages, where the baseline cuts its batch into microbatches and loses more, and of two code bases with kernels
of their own. OPT-13B on one A100-40GB has the size of the paper's 13B model, which runs on one such GPU.

Chosen before any run. The memory is 15,700 tokens of K/V (the vLLM paper's number for this model and GPU). Orca
reserves the server's limit for everybody: slots of 512 + 128 - 1 tokens, 24 of them, with no limit on the tokens of an
iteration. The baseline has the paper's maximum batches 1 and 8 and, lest memory be what is compared, all 24 slots too.
It starts a batch as soon as the last one has ended. The paper's 190 ms belong to its model; here the ratio is a curve
over limits, and where one number is needed, the limit is twice what a request takes alone. The negative control has the
same mean lengths, 272 and 64, for everybody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from minibatch.arrival_processes import AllAtOnce, ArrivalProcess, Evenly, Poisson
from minibatch.continuous_batching import ContinuousBatching
from minibatch.cost_model import CostModel
from minibatch.distributions import Fixed, Uniform
from minibatch.gpus import GPUS
from minibatch.kv_cache import ContiguousKVCache
from minibatch.metrics import requests_table, summary
from minibatch.model_shapes import MODELS
from minibatch.open_loop import synthetic
from minibatch.parallel import run_all
from minibatch.plan import Scheduler
from minibatch.simulation import simulate
from minibatch.static_batching import StaticBatching
from minibatch.studies.orca_plot import draw
from minibatch.studies.spread import spread
from minibatch.studies.study import Claim, Study

LENGTHS = {"unequal": (Uniform(32, 512), Uniform(1, 128)), "equal": (Fixed(272), Fixed(64))}
PROMPT, ANSWER = 512, 128  # the longest ones
SLOT = PROMPT + ANSWER - 1
SLOTS = 15_700 // SLOT
BATCHES = (1, 8, SLOTS)
PUBLISHED_BATCHES = (1, 8)  # the baseline's best ones in the paper
PUBLISHED = 6.81 / 0.185
# Rates of the sweep, as shares of what the same contender serves when all requests wait from the beginning.
LOADS = (0.02, 0.2, 0.4, 0.6, 0.75, 0.9, 1.0, 1.15, 1.4)
LIMITS = 2.0 ** np.linspace(0.25, 4.25, 33)  # of the median latency a token, as multiples of that of a request alone
LIMIT = 2.0  # one of them
TOLERANCE = 0.02  # of the ordering: a curve is a chain of straight pieces between a few rates


class Point(NamedTuple):
    """One run: completed requests/s, and the median of seconds / output tokens."""

    throughput: float
    latency: float


def scheduler(kind: str, batch: int) -> Scheduler:
    """``static`` or ``iteration-level``, of up to ``batch`` requests."""
    return StaticBatching(batch) if kind == "static" else ContinuousBatching(batch, SLOTS * PROMPT)


def measure(kind: str, batch: int, lengths: str, arrivals: ArrivalProcess, n: int, seed: int) -> Point:
    workload = synthetic(n, arrivals, *LENGTHS[lengths], seed, max_tokens=ANSWER)
    cost = CostModel(MODELS["opt-13b"], GPUS["a100-40"])
    trace = simulate(workload, scheduler(kind, batch), ContiguousKVCache(SLOTS, SLOT), cost)
    table = requests_table(trace)
    return Point(summary(trace)["request_throughput"], float((table["e2e"] / table["num_generated"]).median()))


def sustained(points: Sequence[Point], limit: float) -> float:
    """The throughput at which the latency passes the limit, by a straight line (of the latency's logarithm) between two
    runs of a sweep; 0 if the first is above the limit, the highest one if none is."""
    if points[0].latency > limit:
        return 0.0
    for below, above in pairwise(points):
        if above.latency > limit:
            part = math.log(limit / below.latency) / math.log(above.latency / below.latency)
            return below.throughput + part * (above.throughput - below.throughput)
    return max(point.throughput for point in points)


def curve(points: Sequence[Point], alone: float) -> np.ndarray:
    """Throughput at each of LIMITS."""
    return np.array([sustained(points, limit * alone) for limit in LIMITS])


def ratios(ours: np.ndarray, theirs: Sequence[np.ndarray]) -> np.ndarray:
    """Ours over the best of theirs, limit by limit; infinite where only we serve anybody, NaN where nobody does."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return ours / np.max(theirs, axis=0)


# ---------------------------------------------------------------- all the runs


class Sweeps(NamedTuple):
    """``points[lengths][kind, batch][seed]``: a sweep, ascending in rate; ``full[...]``: throughput when all wait;
    ``alone[lengths]``: seconds a token of a request that meets nobody, mean over seeds."""

    points: dict[str, dict[tuple[str, int], list[list[Point]]]]
    full: dict[str, dict[tuple[str, int], list[float]]]
    alone: dict[str, float]


def sweep(n: int, seeds: Sequence[int], loads: Sequence[float], progress: bool) -> Sweeps:
    everybody = [(kind, batch) for kind in ("static", "iteration-level") for batch in BATCHES]
    compared = [who for who in everybody if who[0] == "static" or who[1] == SLOTS]
    keys = [(lengths, *who, seed) for lengths in LENGTHS for who in everybody for seed in seeds]
    full = dict(zip(keys, _all([(key, AllAtOnce()) for key in keys], n, progress), strict=True))
    keys = [(lengths, *who, seed) for lengths in LENGTHS for who in compared for seed in seeds]
    calls = [(key, Poisson(load * full[key].throughput)) for key in keys for load in loads]
    runs = iter(_all(calls, n, progress))
    points = {key: [next(runs) for _ in loads] for key in keys}
    lone = [((lengths, "static", 1, seed), Evenly(0.01)) for lengths in LENGTHS for seed in seeds]
    alone = np.reshape([point.latency for point in _all(lone, n, progress)], (len(LENGTHS), -1)).mean(axis=1)
    return Sweeps(
        {a: {who: [points[(a, *who, seed)] for seed in seeds] for who in compared} for a in LENGTHS},
        {a: {who: [full[(a, *who, seed)].throughput for seed in seeds] for who in everybody} for a in LENGTHS},
        dict(zip(LENGTHS, alone.tolist(), strict=True)),
    )


def _all(calls: Sequence[tuple], n: int, progress: bool) -> list[Point]:
    arguments = [(kind, batch, lengths, arrivals, n, seed) for (lengths, kind, batch, seed), arrivals in calls]
    return run_all(measure, arguments, progress=progress)


def sweep_table(sweeps: Sweeps, lengths: str) -> pd.DataFrame:
    """A row a contender and rate, ascending: means over the seeds of the throughput, and of the latency as a multiple
    of that of a request alone."""
    points = {
        who: np.mean(several, axis=0) / (1.0, sweeps.alone[lengths]) for who, several in sweeps.points[lengths].items()
    }
    rows = [(*who, *point) for who, several in points.items() for point in several]
    return pd.DataFrame(rows, columns=["scheduler", "batch", "requests/s", "latency, x alone"])


def ratio_table(sweeps: Sweeps, lengths: str) -> pd.DataFrame:
    """Index: limits as multiples. Columns: each contender's throughput, and the ratios, mean ± half of an interval over
    seeds; ``lowest``: the smallest ratio over any baseline, of any seed."""
    points = sweeps.points[lengths]
    curves = {who: [curve(p, sweeps.alone[lengths]) for p in several] for who, several in points.items()}
    static = [who for who in curves if who[0] == "static"]
    ours = curves["iteration-level", SLOTS]
    columns: dict[str, list[float]] = {f"{kind} {batch}": np.mean(c, axis=0) for (kind, batch), c in curves.items()}
    rivals = {"published": [who for who in static if who[1] in PUBLISHED_BATCHES], "same": [("static", SLOTS)]}
    for name, those in rivals.items():
        found = [ratios(own, [curves[who][seed] for who in those]) for seed, own in enumerate(ours)]
        spreads = [spread(values) for values in np.transpose(found)]
        columns |= {name: [s.mean for s in spreads], f"{name} ±": [s.half for s in spreads]}
    found = [ratios(own, [curves[who][seed] for who in static]) for seed, own in enumerate(ours)]
    columns["lowest"] = np.min(found, axis=0)
    return pd.DataFrame(columns, index=pd.Index(LIMITS, name="limit, x alone"))


def batch_table(sweeps: Sweeps) -> pd.DataFrame:
    """Throughput when all requests wait, at the same maximum batch; ratios ± half of an interval over seeds."""
    rows = {}
    for lengths, full in sweeps.full.items():
        for batch in BATCHES:
            static, ours = full["static", batch], full["iteration-level", batch]
            ratio = spread(np.divide(ours, static))
            values = (np.mean(static), np.mean(ours), ratio.mean, ratio.half)
            rows[lengths, batch] = dict(zip(("static", "iteration-level", "ratio", "ratio ±"), values, strict=True))
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(["lengths", "batch"])


# ---------------------------------------------------------------- verdicts


def headline(unequal: pd.DataFrame) -> Claim:
    row, finite = unequal.loc[LIMIT], unequal.replace(np.inf, np.nan)
    low, high = finite.min(), finite.max()
    shares = [math.log(row[name]) / math.log(PUBLISHED) for name in ("published", "same")]
    return Claim(
        claim="36.9 times the throughput at the same latency",
        conditions="175B on 16 GPUs, median latency of 190 ms an output token, uniform lengths, Poisson",
        published="6.81 against 0.185 requests/s (section 6.2)",
        ours=f"no number of one engine with equal kernels: pipeline stages, microbatches and another code base are "
        f"missing. The mechanism alone: at {LIMIT:g} times the latency of a request alone, {row['published']:.2f} ± "
        f"{row['published ±']:.2g} times the better of static 1 and 8, {row['same']:.2f} ± {row['same ±']:.2g} times "
        f"a static batch of the same {SLOTS} slots. In logarithms, as factors multiply, that is {shares[0]:.0%} and "
        f"{shares[1]:.0%} of 36.9. Over all limits the first ratio goes from {high['published']:.1f} down to "
        f"{low['published']:.2f}, the second from {high['same']:.1f} to {low['same']:.2f}: the tighter the limit, the "
        "more it costs that who comes late waits for a whole batch",
        holds=None,
    )


def never_below(lowest: pd.Series) -> bool:
    """Whether no ratio is below 1, but for the error of interpolation; NaN, a limit that nobody meets, says nothing."""
    known = lowest.dropna()
    return bool(len(known)) and float(known.min()) >= 1 - TOLERANCE


def ordering(unequal: pd.DataFrame, equal: pd.DataFrame) -> Claim:
    lowest = [float(table["lowest"].min()) for table in (unequal, equal)]
    return Claim(
        claim="iteration-level scheduling sustains at least as much at every limit on latency",
        conditions="13B to 341B, uniform lengths",
        published="at equal latency Orca serves more than FasterTransformer",
        ours=f"smallest ratio over {len(LIMITS)} limits from {LIMITS[0]:.3g} to {LIMITS[-1]:.3g} times the latency of "
        f"a request alone, all seeds and three static batches: {lowest[0]:.2f} with unequal lengths, {lowest[1]:.2f} "
        f"with equal ones (holds: none below {1 - TOLERANCE:g}, which is the error of interpolation)",
        holds=never_below(unequal["lowest"]) and never_below(equal["lowest"]),
    )


def shrinks(unequal: float, equal: float) -> bool:
    """Whether a gap, as a ratio, is smaller with equal lengths, and by more than the error of interpolation."""
    return bool(equal < unequal * (1 - TOLERANCE))


def negative_control(unequal: pd.DataFrame, equal: pd.DataFrame, batches: pd.DataFrame) -> Claim:
    limited = (unequal.loc[LIMIT, "same"], equal.loc[LIMIT, "same"])
    full = {batch: tuple(batches.loc[[("unequal", batch), ("equal", batch)], "ratio"]) for batch in BATCHES}
    gaps = ", ".join(f"{before:.2f} to {after:.2f} at batch {batch}" for batch, (before, after) in full.items())
    return Claim(
        claim="with equal lengths the gap shrinks",
        conditions="every request has the same input and output lengths; same maximum batch",
        published="FasterTransformer benefits from batching; Orca stays ahead, except at maximum batch 1",
        ours=f"throughput ratio when all requests wait: {gaps}. Under Poisson arrivals, at {LIMIT:g} times the latency "
        f"of a request alone, {SLOTS} slots: {limited[0]:.2f} to {limited[1]:.2f}; what stays of it are no idle rows, "
        f"but that who comes a moment late waits for a whole batch (holds: each, but for batch 1, shrinks by more than "
        f"{TOLERANCE:.0%})",
        holds=all(shrinks(*gap) for gap in (limited, *(full[batch] for batch in BATCHES[1:]))),
    )


def run(seed: int = 0, quick: bool = False, progress: bool = True) -> Study:
    n, number, loads = (24, 2, LOADS[1::3]) if quick else (200, 3, LOADS)
    seeds = [1000 * seed + k for k in range(number)]
    sweeps = sweep(n, seeds, loads, progress)
    tables = {lengths: ratio_table(sweeps, lengths) for lengths in LENGTHS}
    batches = batch_table(sweeps)
    what = f"{n} requests a run, seeds {seeds[0]} to {seeds[-1]}"
    ratios = pd.concat(tables, names=["lengths"])[["published", "same"]].reset_index()
    data = {"sweep": sweep_table(sweeps, "unequal"), "ratios": ratios}
    drawn = f"prompts 32 to {PROMPT}, answers 1 to {ANSWER} (equal: 272, 64), Poisson"
    footer = f"simulated: OPT-13B, A100-40GB; {drawn}; {what}"
    return Study(
        name="orca",
        title="Orca: iteration-level against request-level scheduling",
        source="Yu et al., Orca: A Distributed Serving System for Transformer-Based Generative Models, OSDI 2022",
        setting=f"OPT-13B on A100-40GB by roofline, {SLOTS} slots of {SLOT} tokens; prompts uniform 32 to {PROMPT}, "
        f"answers uniform 1 to {ANSWER} (control: 272 and 64 for all), server limit {ANSWER}; Poisson, {len(loads)} "
        f"rates a contender; {what}, the same requests for all; a request alone takes "
        f"{1000 * sweeps.alone['unequal']:.1f} ms a token; mean ± half of a 95 % confidence interval",
        claims=[
            headline(tables["unequal"]),
            ordering(tables["unequal"], tables["equal"]),
            negative_control(tables["unequal"], tables["equal"], batches),
        ],
        differences=DIFFERENCES,
        tables={
            "Sustained requests/s and ratios by limit, unequal lengths": tables["unequal"].iloc[::3],
            "The same, equal lengths": tables["equal"].iloc[::3],
            "Requests/s when all wait, same maximum batch": batches,
        },
        data=data,
        footer=footer,
        figure=figure(data, footer),
    )


def figure(data: dict[str, pd.DataFrame], footer: str) -> Figure:
    sweeps = data["sweep"].set_index(["scheduler", "batch"])
    return draw(sweeps, data["ratios"].set_index(["lengths", "limit, x alone"]), LIMIT, footer)


DIFFERENCES = (
    "OPT-13B on one GPU by a roofline, where the headline is of GPT-3 175B on 16; no pipeline, no microbatches.",
    "Equal kernels for both; FasterTransformer and Orca are two code bases.",
    "A dead row of the static batch goes through all matrices, but reads no K/V here: a courtesy to the baseline.",
    "A finished answer leaves the static batch at once, where FasterTransformer returns all together: another one.",
    "Memory is what the vLLM paper gives for this model and GPU; Orca's own slots a GPU are not known.",
    "The limit on latency is a multiple of what a request takes alone, not 190 ms.",
)
