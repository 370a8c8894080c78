"""Sarathi-Serve's capacity experiment: how many requests a second, if nobody may wait long for the next token.

Agrawal et al., Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve, OSDI 2024: Mistral-7B on one
A100-80GB, conversations with long prompts, Poisson arrivals, at most 128 requests at a time. Capacity is the highest
rate at which the 99th percentile of the time between tokens (TBT) stays below a limit, strict (0.1 s) or relaxed
(0.5 s), and half of the requests wait no longer than 2 s to be scheduled. Chunked prefill carries 2.6 times (abstract)
to 3.5 times (figure 12, strict) what vLLM did, which then computed prompts first.

What a simulation can show: the stalls and their effect on capacity are a matter of what shares an iteration, and an
iteration's time is the sum of what is in it; a roofline has both. It does not have what chunks cost kernels (the paper:
up to a quarter of the prefill time at 512), so chunking is a little too cheap here. Kernels are the same for all.

Chosen before any run: lengths are lognormal with the published medians and 90th percentiles, and a prompt is cut so
that a request has at most 8,192 tokens (cutting keeps the percentiles, drawing again would not); K/V in 90 % of the
memory beside the weights, in blocks of 16; token budgets of 512 and 2,048 as published; systems that do not cut prompts
may put 8,320 tokens into an iteration, the longest prompt beside 128 decodes; an overhead of 2 ms an iteration, the
cost model's default.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from minibatch.arrival_processes import Poisson
from minibatch.capacity import Capacity, highest_rate
from minibatch.chunked_prefill import ChunkedPrefill
from minibatch.contents import own
from minibatch.continuous_batching import ContinuousBatching
from minibatch.cost_model import CostModel
from minibatch.distributions import LogNormal
from minibatch.gpus import GPUS
from minibatch.metrics import gaps, latencies
from minibatch.model_shapes import MODELS
from minibatch.open_loop import from_lengths, simulated_request
from minibatch.paged_kv_cache import PagedKVCache
from minibatch.parallel import run_all
from minibatch.plan import Scheduler
from minibatch.simulation import simulate
from minibatch.studies.sarathi_plot import Window, draw
from minibatch.studies.study import Claim, Study
from minibatch.trace import Trace
from minibatch.workloads import Workload

COST = CostModel(MODELS["mistral-7b"], GPUS["a100-80"])
PROMPT, OUTPUT, LONGEST = LogNormal(1730, 5696), LogNormal(415, 834), 8192
LIMITS = {"strict": 0.1, "relaxed": 0.5}  # seconds, of the P99 of the TBT
BUDGETS = {"strict": 512, "relaxed": 2048}  # of chunked prefill, tokens an iteration
DELAY = 2.0  # seconds, of the median scheduling delay
RATES = (0.5, 6.0)  # searched, requests a second
FIRST, MIXED, CHUNKED, SMALL_BATCH = "prefill first", "mixed, uncut", "chunked", "prefill first, batch of 32"
PUBLISHED, SIZE = 3.5, 0.25  # figure 12, strict; how near ours has to be, relative
DECODES, CONTEXT, SINCE = 32, 4096, 12.0  # the paper's reference batch; seconds, when all of them decode
STALL = 28.3
FULL, QUICK = (300, 3, 0.05), (160, 1, 1.0)  # requests a run, seeds, tolerance of a capacity
DRAWN = Window(20.0, 40.0, rate=2.0)


def scheduler(name: str, limit: str) -> Scheduler:
    if name == CHUNKED:
        return ChunkedPrefill(BUDGETS[limit], max_num_seqs=128)
    phases = "mixed" if name == MIXED else "prefill-first"
    return ContinuousBatching(32 if name == SMALL_BATCH else 128, LONGEST + 128, phases)


def workload(n: int, rate: float, seed: int) -> Workload:
    """The same lengths and the same pattern of arrivals at every rate."""
    prompts, outputs = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(2))
    output = np.minimum(OUTPUT.draw(outputs, n), LONGEST // 2)
    pairs = np.stack([np.minimum(PROMPT.draw(prompts, n), LONGEST - output), output], axis=1)
    return from_lengths(pairs, Poisson(rate), seed)


def served(name: str, limit: str, n: int, rate: float, seed: int) -> Trace:
    cache = PagedKVCache(COST.kv_tokens(0.9) // 16, 16)
    return simulate(workload(n, rate, seed), scheduler(name, limit), cache, COST)


@dataclass(frozen=True)
class Latency:
    """P99 of the time between tokens, and the median scheduling delay, in seconds."""

    tbt: float
    delay: float

    def within(self, limit: str) -> bool:
        return self.tbt <= LIMITS[limit] and self.delay <= DELAY


def latency(trace: Trace) -> Latency:
    values = latencies(trace)
    return Latency(float(np.percentile(values["tbt"], 99)), float(np.median(values["queueing_delay"])))


def capacities(name: str, n: int, tolerance: float, seed: int) -> dict[str, Capacity]:
    """By limit, of one system under one sequence of requests."""

    @functools.cache
    def measured(settings: str, rate: float) -> Latency:
        return latency(served(name, settings, n, rate, seed))

    def search(limit: str) -> Capacity:
        settings = limit if name == CHUNKED else "strict"  # who does not chunk is the same under both limits
        return highest_rate(lambda rate: measured(settings, rate).within(limit), *RATES, tolerance)

    return {limit: search(limit) for limit in (["strict"] if name == SMALL_BATCH else LIMITS)}


def stall(name: str, prompt: int) -> float:
    """The longest gap, in seconds, that ``DECODES`` requests see when a prompt of so many tokens arrives among them;
    0 tokens: none arrives."""
    requests = [simulated_request(f"d{i}", own(i, CONTEXT), 1200, 0.0) for i in range(DECODES)]
    if prompt:
        requests.append(simulated_request("long", own(DECODES, prompt), 1, SINCE + 1))
    trace = simulate(Workload(requests), scheduler(name, "strict"), PagedKVCache(COST.kv_tokens(0.9) // 16, 16), COST)
    decoding = [t for t in trace.timelines if t.request_id != "long"]
    until = min(t.token_times[-1] for t in decoding)
    if max(t.token_times[0] for t in decoding) > SINCE or until < SINCE + 3:
        raise ValueError(f"at {SINCE} to {SINCE + 3} s not all of {DECODES} requests decode")
    return max(gaps(t)[np.asarray(t.token_times[1:]) > SINCE].max() for t in decoding)


# ---------------------------------------------------------------- tables


def capacity_table(found: dict[str, list[dict[str, Capacity]]]) -> pd.DataFrame:
    """One row a system and limit: requests a second, mean and range over the seeds (a search that has left its range
    counts as the nearest rate that was tried)."""
    rows = {}
    for name, several in found.items():
        for limit in several[0]:
            rates = [rate_of(capacities[limit]) for capacities in several]
            inside = all(capacities[limit].found for capacities in several)
            rows[name, limit] = {"mean": np.mean(rates), "low": min(rates), "high": max(rates), "in range": inside}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(["system", "limit"])


def rate_table(found: dict[str, list[dict[str, Capacity]]], names: Sequence[str]) -> pd.DataFrame:
    """The same by seed, of these systems."""
    rows = [(name, x, k, rate_of(c[x])) for name in names for x in LIMITS for k, c in enumerate(found[name])]
    return pd.DataFrame(rows, columns=["system", "limit", "run", "requests/s"])


def gap_table(traces: dict[str, Trace]) -> pd.DataFrame:
    """The times between iterations that decode, in the window that is drawn: what each request that decodes waits for
    its next token."""
    rows = []
    for name, trace in traces.items():
        ends = [counts.end for counts in trace.counts if counts.decode]
        gaps = zip(ends[1:], np.diff(ends).tolist(), strict=True)
        rows += [(name, end, gap) for end, gap in gaps if DRAWN.start <= end <= DRAWN.stop]
    return pd.DataFrame(rows, columns=["system", "time, s", "TBT, s"])


def rate_of(capacity: Capacity) -> float:
    return capacity.passed or capacity.failed


def ratios(found: dict[str, list[dict[str, Capacity]]], over: str, limit: str) -> np.ndarray:
    """Chunked prefill's capacity over another's, by seed."""
    pairs = zip(found[CHUNKED], found[over], strict=True)
    return np.array([rate_of(chunked[limit]) / rate_of(other[limit]) for chunked, other in pairs])


def _gains(found: dict[str, list[dict[str, Capacity]]]) -> pd.DataFrame:
    columns: Sequence[str] = list(LIMITS)
    rows = {over: [ratios(found, over, limit).mean() for limit in columns] for over in (FIRST, MIXED)}
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("over")


# ---------------------------------------------------------------- verdicts


def gain_claims(found: dict[str, list[dict[str, Capacity]]]) -> list[Claim]:
    strict, relaxed = (ratios(found, FIRST, limit) for limit in LIMITS)
    conditions = "Mistral-7B, A100-80GB, openchat_sharegpt4, P99 TBT at most 0.1 s, median delay at most 2 s"
    return [
        Claim(
            claim="chunked prefill carries more than prefill-first where the time between tokens is bounded",
            conditions=conditions,
            published="more, under both limits",
            ours=f"strict: {_range(strict)}, relaxed: {_range(relaxed)} (holds: more in each run, under both)",
            holds=bool(min(strict.min(), relaxed.min()) > 1),
        ),
        Claim(
            claim="under the strict limit it carries 3.5 times as much",
            conditions=conditions,
            published="3.5x (figure 12); 2.6x in the abstract",
            ours=f"{_range(strict)} (holds: mean within {SIZE:.0%} of 3.5)",
            holds=bool(abs(strict.mean() / PUBLISHED - 1) <= SIZE),
        ),
    ]


def batch_claim(found: dict[str, list[dict[str, Capacity]]]) -> Claim:
    small, large = ([rate_of(c["strict"]) for c in found[name]] for name in (SMALL_BATCH, FIRST))
    apart = max(abs(a / b - 1) for a, b in zip(small, large, strict=True))
    return Claim(
        claim="prefill-first carries as much with 32 requests at a time as with 128: stalls bound it, not the batch",
        conditions="strict limit",
        published="nearly the same at 32, 64 and 128",
        ours=f"{np.mean(small):.2f} and {np.mean(large):.2f} requests/s, {apart:.0%} apart at most (holds: up to 15 %)",
        holds=bool(apart <= 0.15),
    )


def stall_claim(stalls: pd.DataFrame) -> Claim:
    worst, cut = stalls[MIXED].iloc[-1], stalls[CHUNKED].iloc[-1]
    return Claim(
        claim="a prompt that is computed whole beside decodes makes the time between tokens up to 28.3 times as long",
        conditions="hybrid batches without chunks against decodes alone; their batch and prompt are not stated here",
        published="up to 28.3x",
        ours=f"{worst:.1f}x for a prompt of {stalls.index[-1]:,} beside {DECODES} decodes at {CONTEXT:,}; {cut:.1f}x "
        f"in chunks of {BUDGETS['strict']} (holds: from half of it to twice as much, and a fifth at most in chunks)",
        holds=bool(STALL / 2 <= worst <= STALL * 2 and cut <= worst / 5),
    )


def _range(values: np.ndarray) -> str:
    return f"{values.mean():.2f}x ({values.min():.2f} to {values.max():.2f})"


# ---------------------------------------------------------------- all of it


def run(seed: int = 0, quick: bool = False, progress: bool = True) -> Study:
    n, number, tolerance = QUICK if quick else FULL
    seeds = [1000 * seed + k for k in range(number)]
    names = [FIRST, MIXED, CHUNKED, SMALL_BATCH]
    results = run_all(capacities, [(name, n, tolerance, s) for name in names for s in seeds], progress=progress)
    found = {name: results[i * number : (i + 1) * number] for i, name in enumerate(names)}
    lengths = (LONGEST,) if quick else (512, 1024, 2048, 4096, LONGEST)
    alone, *worst = run_all(stall, [(MIXED, 0), *product((MIXED, CHUNKED), lengths)], progress=progress)
    stalls = pd.DataFrame(
        np.reshape(worst, (2, -1)).T / alone, columns=[MIXED, CHUNKED], index=pd.Index(lengths, name="prompt")
    )
    shown = int(1.5 * DRAWN.rate * DRAWN.stop)
    traces = run_all(served, [(name, "strict", shown, DRAWN.rate, seeds[0]) for name in names[:3]], progress=progress)
    data = {"gaps": gap_table(dict(zip(names, traces, strict=False))), "capacity": rate_table(found, names[:3])}
    footer = (
        f"simulated: Mistral-7B, A100-80GB; lognormal lengths, {n} requests a run, {number} seed"
        f"{'' if number == 1 else 's'} from {seeds[0]}; chunks of 512 (strict) and 2,048 (relaxed)"
    )
    return Study(
        name="sarathi",
        title="Sarathi-Serve: capacity under a limit on the time between tokens",
        source="Agrawal et al., Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve, OSDI 2024",
        setting=f"Mistral-7B (window 4,096) on A100-80GB by roofline, overhead {COST.overhead * 1000:g} ms, "
        f"{COST.kv_tokens(0.9):,} tokens of K/V; {n} requests, Poisson, prompts {PROMPT.describe()}, outputs "
        f"{OUTPUT.describe()}, cut to {LONGEST:,} in all; at most 128 at a time; {number} seed"
        f"{'' if number == 1 else 's'} from {seeds[0]}, the same requests for all; capacity to within {tolerance:.0%}",
        claims=[*gain_claims(found), batch_claim(found), stall_claim(stalls)],
        differences=DIFFERENCES,
        tables={
            "Capacity, requests/s": capacity_table(found),
            "Chunked over the others, mean of the seeds": _gains(found),
            f"Longest TBT of {DECODES} decodes when a prompt comes, over {1000 * alone:.1f} ms": stalls,
        },
        data=data,
        footer=footer,
        figure=figure(data, footer),
    )


def figure(data: dict[str, pd.DataFrame], footer: str) -> Figure:
    return draw(
        data["gaps"].set_index("system"), data["capacity"].set_index(["system", "limit"]), LIMITS, DRAWN, footer
    )


DIFFERENCES = (
    "Lengths are lognormal, independent, and fitted to two percentiles each; the published ones are of a data set.",
    "Runs are a few hundred requests, so they begin empty and end draining; at the capacity a longer run would have a "
    "longer queue. All contenders are treated alike.",
    "The same kernels for all: what chunks cost them is missing, and so is what vLLM's of that time cost.",
    "The prefill-first system admits what fits into 8,320 tokens an iteration; how many vLLM took is not stated.",
    "The systems that do not chunk are one and the same under both limits; Sarathi has two token budgets.",
)
