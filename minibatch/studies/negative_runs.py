"""The runs of the negative controls: low load, equal lengths, chunking. What they are for is in ``negative.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import pandas as pd

from minibatch.accounting import work
from minibatch.arrival_processes import AllAtOnce, ArrivalProcess, Evenly, Poisson
from minibatch.chunked_prefill import ChunkedPrefill
from minibatch.continuous_batching import ContinuousBatching
from minibatch.cost_model import CostModel
from minibatch.distributions import Fixed, Lengths, Normal, Uniform
from minibatch.gpus import GPUS
from minibatch.kv_cache import ContiguousKVCache
from minibatch.metrics import summary
from minibatch.model_shapes import MODELS
from minibatch.open_loop import synthetic
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.parallel import run_all
from minibatch.plan import Scheduler
from minibatch.simulation import simulate
from minibatch.static_batching import StaticBatching
from minibatch.studies.orca import Point, sustained
from minibatch.studies.spread import Spread, spread

Pair = tuple[Lengths, Lengths]  # of prompts and of answers

OPT = CostModel(MODELS["opt-13b"], GPUS["a100-40"])
PROMPTS, ANSWERS = Uniform(32, 512), Uniform(1, 128)
SLOT = 512 + 128 - 1
SLOTS = 15_700 // SLOT
CASES: dict[str, Pair] = {
    "all equal": (Fixed(272), Fixed(64)),
    "prompts differ": (PROMPTS, Fixed(64)),
    "answers differ": (Fixed(272), ANSWERS),
    "both differ": (PROMPTS, ANSWERS),
}
LLAMA = CostModel(MODELS["llama-2-70b"], GPUS["a100-80"], 4)
LONGEST = 3_700
REGIMES: dict[str, Pair] = {
    "2600 + 60": (Normal(2600, 0.3, LONGEST), Normal(60, 0.3)),
    "1200 + 128": (Normal(1200, 0.3, LONGEST), Normal(128, 0.3)),
    "161 + 338": (Normal(161, 0.3), Normal(338, 0.3)),
}
LONG, _, SHORT = REGIMES
SCHEDULERS: dict[str, Scheduler] = {
    "prompts first": ContinuousBatching(max_num_batched_tokens=4096, phase_order="prefill-first"),
    "prompts whole": ContinuousBatching(max_num_batched_tokens=4096),
    "cut, 2048": ChunkedPrefill(2048),
    "cut, 512": ChunkedPrefill(512),
}
FIRST, WHOLE, COARSE, CUT = SCHEDULERS
AT = 0.7  # of the throughput that FIRST reaches when all wait: where waits are compared
LIMIT = 9.0  # seconds, of the mean latency, for a request of the regime LONG


class Numbers(NamedTuple):
    """Requests a second, seconds, tokens."""

    throughput: float
    e2e: float
    ttft_mean: float
    ttft_p50: float
    tbt_p99: float
    left_padding: float
    dead_padding: float
    executed: float


def measure(scheduler: str, lengths: Pair, arrivals: ArrivalProcess, n: int, seed: int) -> Numbers:
    """One run of one contender; ``static`` and ``continuous`` serve OPT-13B, the others Llama-2-70B."""
    workload = synthetic(n, arrivals, *lengths, seed)
    if scheduler in SCHEDULERS:
        trace = simulate(workload, SCHEDULERS[scheduler], PagedKVCache(LLAMA.kv_tokens() // 16), LLAMA)
    else:
        which = StaticBatching(SLOTS) if scheduler == "static" else ContinuousBatching(SLOTS, SLOTS * 512)
        trace = simulate(workload, which, ContiguousKVCache(SLOTS, SLOT), OPT)
    found, done = summary(trace), work(trace)
    if found["completed"] < n:
        raise ValueError(f"{scheduler}: {n - found['completed']} of {n} requests were refused")
    names = ("request_throughput", "e2e_mean", "ttft_mean", "ttft_p50", "tbt_p99")
    return Numbers(*(found[name] for name in names), done.left_padding, done.dead_padding, done.executed)


class Runs(NamedTuple):
    """How often and how much: requests a run, seeds, and whether a bar is shown."""

    n: int
    seeds: Sequence[int]
    progress: bool = False

    def __call__(self, keys: Sequence[tuple[str, Pair, ArrivalProcess]]) -> list[list[Numbers]]:
        """By key, then by seed."""
        calls = [(*key, self.n, seed) for key in keys for seed in self.seeds]
        found = iter(run_all(measure, calls, progress=self.progress))
        return [[next(found) for _ in self.seeds] for _ in keys]


def ratio(over: Sequence[Numbers], under: Sequence[Numbers], field: str) -> Spread:
    """Of one number of two contenders, seed by seed."""
    return spread(getattr(a, field) / getattr(b, field) for a, b in zip(over, under, strict=True))


def _mean(several: Sequence[Numbers], field: str) -> float:
    return float(np.mean([getattr(numbers, field) for numbers in several]))


def low_load(runs: Runs, loads: Sequence[float]) -> pd.DataFrame:
    """Index: load. Continuous over static: ratios, each with half of its interval."""
    lengths = (PROMPTS, ANSWERS)
    (alone,) = runs([("static", lengths, Evenly(0.01))])
    rate = 1 / _mean(alone, "e2e")
    found = runs([(who, lengths, Poisson(load * rate)) for load in loads for who in ("static", "continuous")])
    rows = []
    for static, ours in zip(found[::2], found[1::2], strict=True):
        row = {}
        for name, field in (("throughput", "throughput"), ("mean latency", "e2e"), ("mean TTFT", "ttft_mean")):
            row[name], row[f"{name} ±"] = ratio(ours, static, field)
        rows.append({**row, "static latency, s": _mean(static, "e2e"), "static TTFT, s": _mean(static, "ttft_mean")})
    return pd.DataFrame(rows, index=pd.Index(loads, name="load"))


def equal_lengths(runs: Runs) -> pd.DataFrame:
    """Index: what differs. Throughput, continuous over static, all at once; and the static one's padding, as shares of
    the tokens that it executes."""
    found = runs([(who, lengths, AllAtOnce()) for lengths in CASES.values() for who in ("static", "continuous")])
    rows = []
    for static, ours in zip(found[::2], found[1::2], strict=True):
        gain = ratio(ours, static, "throughput")
        row = {"throughput": gain.mean, "throughput ±": gain.half}
        for part in ("left_padding", "dead_padding"):
            row[part] = np.mean([getattr(numbers, part) / numbers.executed for numbers in static])
        rows.append(row)
    return pd.DataFrame(rows, index=pd.Index(CASES, name="lengths"))


class Chunking(NamedTuple):
    """By regime and scheduler. ``waits``: at 0.7 of saturation; ``gains``: requests/s at the limit on the mean latency.
    Ratios are over prompts first."""

    waits: pd.DataFrame
    gains: pd.DataFrame


def chunking(runs: Runs, shares: Sequence[float]) -> Chunking:
    """``shares``: the rates of the sweep, ascending, over the throughput of FIRST when all wait; AT is one of them."""
    pairs = list(product(REGIMES, SCHEDULERS))
    full = dict(zip(pairs, runs([(who, REGIMES[regime], AllAtOnce()) for regime, who in pairs]), strict=True))
    lone = runs([(FIRST, REGIMES[regime], Evenly(0.01)) for regime in REGIMES])
    alone = {regime: _mean(several, "e2e") for regime, several in zip(REGIMES, lone, strict=True)}
    keys = [(*pair, share) for pair in pairs for share in shares]
    calls = [(who, REGIMES[a], Poisson(share * _mean(full[a, FIRST], "throughput"))) for a, who, share in keys]
    sweep = dict(zip(keys, runs(calls), strict=True))
    waits = {(a, who): _waits(sweep[a, who, AT], sweep[a, FIRST, AT], full[a, who], full[a, FIRST]) for a, who in pairs}
    limits = {regime: LIMIT / alone[LONG] * alone[regime] for regime in REGIMES}
    index = ["prompt + answer", "scheduler"]
    return Chunking(
        pd.DataFrame.from_dict(waits, orient="index").rename_axis(index),
        pd.DataFrame.from_dict(_gains(sweep, limits, alone, shares), orient="index").rename_axis(index),
    )


def _waits(
    ours: Sequence[Numbers], first: Sequence[Numbers], full: Sequence[Numbers], full_first: Sequence[Numbers]
) -> dict[str, float]:
    row = {}
    for name, field in (("P99 TBT", "tbt_p99"), ("P50 TTFT", "ttft_p50"), ("mean e2e", "e2e")):
        row[f"{name}, s"] = _mean(ours, field)
        row[f"{name}, ratio"], row[f"{name} ±"] = ratio(ours, first, field)
    row["full, 1/s"] = _mean(full, "throughput")
    row["full, ratio"], row["full ±"] = ratio(full, full_first, "throughput")
    return row


def _gains(
    sweep: Mapping[tuple[str, str, float], Sequence[Numbers]],
    limits: Mapping[str, float],
    alone: Mapping[str, float],
    shares: Sequence[float],
) -> dict[tuple[str, str], dict[str, float]]:
    rows = {}
    for regime, who in product(REGIMES, SCHEDULERS):
        by_seed = zip(*(sweep[regime, who, share] for share in shares), strict=True)
        found = [sustained([Point(run.throughput, run.e2e) for run in several], limits[regime]) for several in by_seed]
        if who == FIRST:
            first = found
        gain = spread(np.divide(found, first))
        row = {"alone, s": alone[regime], "limit, s": limits[regime], "1/s": float(np.mean(found))}
        rows[regime, who] = {**row, "gain": gain.mean, "gain ±": gain.half}
    return rows
