"""Anyscale's ladder: what of "23x" is the harness, what is continuous batching, what is memory, what is left.

C. Daniel et al., How continuous batching enables 23x throughput in LLM inference, Anyscale 2023, and its benchmark's
repository: OPT-13B on one A100-40GB, 1000 requests at once, prompts of 512 tokens, answers exponential with a mean of
128, drawn again above a cap of 32, 128, 512 or 1536. Throughput counts prompt and answer tokens. At cap 1536 naive
static batching falls to 81 tokens/s; FasterTransformer reaches 4 times that, continuous batching without paging 8
times, vLLM 23 times.

These are five programs with five sets of kernels. And the naive one's harness lets *every* batch run as long as the
longest of all 1000 answers takes, which no server does. So here one engine with one cost model climbs four rungs, and
between two neighbours one thing changes:

    whole set   static; every batch runs on until the longest answer of the whole set would have ended
    static      static; a batch ends with its own longest                        (the harness's choice)
    iteration   members may change between iterations; reserves the maximum      (the mechanism)
    paged       K/V in blocks of 16, taken when needed                           (memory)

What is left of 23 after these is not of one engine with equal kernels.

Chosen before any run: batches of 16, 12, 8 and 4 as published, which take as much memory as the published limits of the
continuous engines (8700, 7500, 8100 and 8100 tokens of K/V), within 2.2 %. ``iteration`` has as many slots, so that
memory does not change with the mechanism; ``strict`` is the same held to the published limit, which costs it a slot
from cap 128 on, and is shown beside it. Iterations hold prompts and decodes, and as many tokens as the limit. All rows
have the same prompt, so a dead row is as long as a living one; here, unlike elsewhere in this project, it also costs as
much attention, so that the two static rungs differ in nothing but the number of iterations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from minibatch.accounting import work
from minibatch.arrival_processes import AllAtOnce
from minibatch.continuous_batching import ContinuousBatching
from minibatch.cost_model import CostModel, Counts
from minibatch.distributions import Exponential, Fixed
from minibatch.gpus import GPUS
from minibatch.kv_cache import ContiguousKVCache, KVCache
from minibatch.metrics import makespan, steps_table
from minibatch.model_shapes import MODELS
from minibatch.open_loop import synthetic
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.parallel import run_all
from minibatch.plan import Plan, Scheduler
from minibatch.simulation import simulate
from minibatch.static_batching import StaticBatching
from minibatch.studies.anyscale_plot import draw
from minibatch.studies.spread import spread
from minibatch.studies.study import Claim, Study
from minibatch.workloads import Workload

PROMPT, MEAN = 512, 128
BATCH = {32: 16, 128: 12, 512: 8, 1536: 4}  # by cap
LIMIT = {32: 8700, 128: 7500, 512: 8100, 1536: 8100}  # tokens of K/V
RUNGS = ("whole set", "static", "iteration", "paged")
STEPS = ("harness", "mechanism", "memory")  # between two rungs
TOP = 1536
PUBLISHED = {"static": 4.0, "iteration": 8.0, "paged": 23.0}  # times the lowest rung, at the highest cap
LOWEST = 81.0  # tokens/s


@dataclass(frozen=True)
class Rectangle:
    """Seconds of an iteration in which a dead row costs what a living one does, attention included. Of static batches
    whose prompts are equally long: then all rows are, and any chunk says how long."""

    cost: CostModel

    def __call__(self, plan: Plan) -> float:
        counts, dead = Counts.of(plan), sum(padding.dead for padding in plan.padding)
        if dead:
            stop = plan.chunks[0].stop
            counts = counts._replace(
                kv_read=counts.kv_read + dead * stop,
                kv_written=counts.kv_written + dead,
                attended=counts.attended + dead * stop,
            )
        return self.cost.seconds(counts)


class Run(NamedTuple):
    """``rate``: prompt and answer tokens a second; ``batch``: mean living members, by time; ``useful``: share of the
    rows executed that are somebody's next token; ``seconds`` and ``iterations``: of the whole set;
    ``longest``: answer."""

    rate: float
    batch: float
    useful: float
    seconds: float
    iterations: int
    longest: int


def asked(cap: int, n: int, seed: int) -> Workload:
    return synthetic(n, AllAtOnce(), Fixed(PROMPT), Exponential(MEAN, cap, reject=True), seed, max_tokens=cap)


def system(rung: str, cap: int) -> tuple[Scheduler, KVCache]:
    slot, limit = PROMPT + cap - 1, LIMIT[cap]
    if rung == "paged":
        return ContinuousBatching(max_num_batched_tokens=limit), PagedKVCache(limit // 16)
    slots = limit // slot if rung == "strict" else BATCH[cap]
    if rung in ("iteration", "strict"):
        return ContinuousBatching(slots, limit), ContiguousKVCache(slots, slot)
    return StaticBatching(slots), ContiguousKVCache(slots, slot)


def measure(rung: str, cap: int, n: int, seed: int) -> Run:
    wanted = asked(cap, n, seed)
    outputs = wanted.output_lengths.values()
    longest, tokens = max(outputs), n * PROMPT + sum(outputs)
    parts = _alike(cap, n, longest) if rung == "whole set" else [(1, wanted)]
    seconds, living, rows, iterations = 0.0, 0.0, 0, 0
    for number, workload in parts:
        trace = simulate(workload, *system(rung, cap), Rectangle(CostModel(MODELS["opt-13b"], GPUS["a100-40"])))
        steps = steps_table(trace)
        seconds += number * makespan(trace)
        living += number * float((steps["num_seqs"] * steps["duration"]).sum())
        rows += number * work(trace).executed_rows
        iterations += number * trace.num_steps
    # with the prefill's iteration a request has a row for each token
    return Run(tokens / seconds, living / seconds, sum(outputs) / rows, seconds, iterations, longest)


def _alike(cap: int, n: int, longest: int) -> list[tuple[int, Workload]]:
    """The batches of the lowest rung, and how many of each: all generate the longest answer, and what nobody asked for
    is thrown away. So all full batches are alike, and one is run for all."""
    full, rest = divmod(n, BATCH[cap])
    sizes = [(BATCH[cap], full), (rest, 1)]
    lengths = (Fixed(PROMPT), Fixed(longest))
    return [(k, synthetic(size, AllAtOnce(), *lengths, max_tokens=cap)) for size, k in sizes if size and k]


# ---------------------------------------------------------------- tables


def ladder(runs: dict[tuple[str, int], Sequence[Run]]) -> pd.DataFrame:
    """Index: cap, rung. Tokens/s with half a confidence interval over seeds, and means of the other numbers."""
    rows = {}
    for (rung, cap), several in runs.items():
        rate, batch = spread(run.rate for run in several), BATCH[cap]
        means = np.mean(several, axis=0)
        rows[cap, rung] = {"tokens/s": rate.mean, "±": rate.half, "living rows": means[1], "useful rows": means[2]}
        rows[cap, rung] |= {
            "seconds": means[3],
            "iterations": means[4],
            "longest answer": means[5],
            "static batch": batch,
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(["cap", "rung"]).sort_index(sort_remaining=False)


def split(runs: dict[tuple[str, int], Sequence[Run]]) -> pd.DataFrame:
    """Index: cap. How many times the throughput each step brings, mean ± half of an interval over seeds, and all
    together; ``left``: what is missing to the published 23, at the cap that it belongs to."""
    rows = {}
    for cap in BATCH:
        rates = [np.array([run.rate for run in runs[rung, cap]]) for rung in RUNGS]
        row = {}
        for name, (lower, upper) in zip((*STEPS, "all"), [*pairwise(rates), (rates[0], rates[-1])], strict=True):
            row[name], row[f"{name} ±"] = spread(upper / lower)
        row["left"] = PUBLISHED["paged"] / row["all"] if cap == TOP else math.nan
        rows[cap] = row
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("cap")


# ---------------------------------------------------------------- verdicts


def headline(parts: pd.DataFrame) -> Claim:
    row = parts.loc[TOP]
    shares = [math.log(row[name]) / math.log(PUBLISHED["paged"]) for name in (*STEPS, "left")]
    factors = ", ".join(
        f"{name} {row[name]:.2f} ± {row[f'{name} ±']:.2g} ({share:.0%})"
        for name, share in zip(STEPS, shares, strict=False)
    )
    return Claim(
        claim="vLLM has 23 times the throughput of naive static batching",
        conditions=f"cap {TOP}",
        published="23x",
        ours=f"with equal kernels {row['all']:.1f} ± {row['all ±']:.2g} times. Factors, and in logarithms their shares "
        f"of 23: {factors}; left for kernels, overheads and the engines' other choices: {row['left']:.2f} "
        f"({shares[-1]:.0%})",
        holds=None,
    )


def lowest_claim(table: pd.DataFrame, naive: Sequence[Run]) -> Claim:
    falls, own = (table.xs(rung, level="rung")["tokens/s"].loc[list(BATCH)] for rung in RUNGS[:2])
    iterations, seconds = sum(run.iterations for run in naive), sum(run.seconds for run in naive)
    longer = (sum(run.rate * run.seconds for run in naive) / LOWEST - seconds) / iterations
    return Claim(
        claim="naive static batching falls to 81 tokens/s",
        conditions=f"cap {TOP}, batches of 4; kernels of Hugging Face's transformers of 2023",
        published="81 tokens/s",
        ours=f"it falls: {', '.join(f'{rate:.0f}' for rate in falls)} tokens/s at caps {', '.join(map(str, BATCH))}; "
        f"with batches that end with their own longest, {own.iloc[-1]:.0f} at the last. How far it falls hangs on "
        f"one answer, the longest of all: it had {', '.join(str(run.longest) for run in naive)} tokens, which gave "
        f"{', '.join(f'{run.rate:.0f}' for run in naive)} tokens/s, seed by seed; the benchmark's is not known, and "
        "neither is what its program spent beside the GPU's work. For 81, on average over the seeds, an iteration "
        f"would have to take {1000 * longer:.0f} ms longer than {1000 * seconds / iterations:.0f}, of which 2 are "
        "overhead",
        holds=None,
    )


def more_than_double(ratios: Sequence[float]) -> bool:
    return bool(min(ratios) > 2)


def paging_claim(parts: pd.DataFrame, table: pd.DataFrame) -> Claim:
    ratios = parts["memory"]
    strict = [table.loc[(cap, "paged"), "tokens/s"] / table.loc[(cap, "strict"), "tokens/s"] for cap in BATCH]
    return Claim(
        claim="vLLM has more than twice the throughput of naive continuous batching, on every set",
        conditions="all four caps; different kernels",
        published="more than 2x",
        ours=f"with equal kernels {', '.join(f'{ratio:.2f}' for ratio in ratios)} at caps {', '.join(map(str, BATCH))} "
        f"(over continuous batching held to the published limit, with a slot less: "
        f"{', '.join(f'{ratio:.2f}' for ratio in strict)}). Paging can only bring back what was reserved and not "
        "filled: with a cap of 32 behind prompts of 512 that is next to nothing, so there the 2x must have come from "
        "somewhere else",
        holds=more_than_double(ratios),
    )


def climbs(parts: pd.DataFrame) -> bool:
    """Whether no rung is below the one under it (by more than 1 %: blocks of 16 do not quite fill a limit), and the
    whole ladder is higher the higher the cap."""
    return bool((parts[list(STEPS)] >= 0.99).all(axis=None) and parts["all"].is_monotonic_increasing)


def order_claim(parts: pd.DataFrame) -> Claim:
    row = parts.loc[TOP]
    ours = {"static": row["harness"], "iteration": row["harness"] * row["mechanism"], "paged": row["all"]}
    pairs = ", ".join(f"{name} {ours[name]:.1f} ({PUBLISHED[name]:g})" for name in PUBLISHED)
    return Claim(
        claim="static, then continuous, then paged; and the higher the cap, the more it matters",
        conditions="all four caps",
        published="at cap 1536, times naive static batching: FasterTransformer 4, TGI and Ray Serve about 8, vLLM 23",
        ours=f"at cap {TOP} (published): {pairs}; whole ladder {', '.join(f'{x:.1f}' for x in parts['all'])} at caps "
        f"{', '.join(map(str, BATCH))} (holds: no rung falls by more than 1 %, and the ladder grows with the cap)",
        holds=climbs(parts),
    )


def run(seed: int = 0, quick: bool = False, progress: bool = True) -> Study:
    n, number = (32, 2) if quick else (1000, 5)
    seeds = [1000 * seed + k for k in range(number)]
    keys = [(rung, cap) for rung in (*RUNGS, "strict") for cap in BATCH]
    found = run_all(measure, [(*key, n, s) for key in keys for s in seeds], progress=progress)
    runs = {key: found[place * number : (place + 1) * number] for place, key in enumerate(keys)}
    table, parts = ladder(runs), split(runs)
    what = f"{n} requests at once, prompts {PROMPT}, answers exponential({MEAN}), seeds {seeds[0]} to {seeds[-1]}"
    data, footer = (
        {"rungs": table.reset_index(), "steps": parts.reset_index()},
        f"simulated: OPT-13B, A100-40GB; {what}",
    )
    return Study(
        name="anyscale",
        title="Anyscale: the ladder from static batching to paged continuous batching",
        source="C. Daniel et al., How continuous batching enables 23x throughput in LLM inference, Anyscale, 2023",
        setting=f"OPT-13B on A100-40GB by roofline; {what}, drawn again above the cap, the same requests for all "
        f"rungs; static batches of {', '.join(map(str, BATCH.values()))}, K/V limits "
        f"{', '.join(map(str, LIMIT.values()))}; FCFS; "
        "mean ± half of a 95 % confidence interval",
        claims=[
            headline(parts),
            order_claim(parts),
            lowest_claim(table, runs[RUNGS[0], TOP]),
            paging_claim(parts, table),
        ],
        differences=DIFFERENCES,
        tables={"Throughput by cap and rung": table, "What each step brings, as a factor": parts},
        data=data,
        footer=footer,
        figure=figure(data, footer),
    )


def figure(data: dict[str, pd.DataFrame], footer: str) -> Figure:
    table, parts = data["rungs"].set_index(["cap", "rung"]), data["steps"].set_index("cap")
    return draw(table, parts, LOWEST, PUBLISHED["paged"], footer)


DIFFERENCES = (
    "One engine, one cost model, where the benchmark compares five programs with kernels of their own.",
    "The naive harness's rows go on living to the longest answer of all; what nobody asked for is not counted. Its "
    "full batches are all alike, so one of them is run.",
    "Continuous batching has the static batch's slots; the published limits would leave it one less from cap 128 on "
    "(the rung strict).",
    "Lengths are drawn from the distribution that is described; the benchmark's own draws are not used.",
    "Prompts and decodes share iterations; vLLM then had iterations of prompts only.",
    "Paged is held to the published limit of tokens too, and not given all memory that the model leaves.",
)
