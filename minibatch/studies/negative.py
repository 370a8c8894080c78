"""Where continuous batching gains nothing, and where chunking only moves the wait. Three negative controls.

*Low load.* A request that meets nobody is served alone by either scheduler. What Orca (Yu et al., OSDI 2022) gains
needs a queue. Here: OPT-13B on one A100-40GB, Orca's lengths, static batches of up to 24 against as many places that
are given anew at every iteration. Load is the arrival rate times what a request takes alone.

*Equal lengths, all at once.* If everybody comes and ends at the same time, both schedulers make the same plans. A gap
needs prompts that differ (left padding) or answers that differ (dead rows); here each is let differ alone.

*Chunking.* Cutting prompts bounds the time between tokens; the prompt that is cut waits for it (Sarathi-Serve, OSDI
2024). DeepSpeed-FastGen (2024) reports 1.36 against vLLM's 0.67 requests/s at 9 s, for Llama-2-70B on 4 A100-80GB,
prompts of 2600 tokens and answers of 60, normal with a spread of 30 %; vLLM's answer was that the gain holds for long
prompts with short answers only. Here: the same model and GPUs, three regimes from FastGen's to ShareGPT's means (161
and 338, of the vLLM paper), and schedulers on one paged cache: iterations of prompts only that come first (vLLM then),
prompts whole among the decodes, and prompts cut to a budget of 512 tokens an iteration (Dynamic SplitFuse, Sarathi).

What a simulation can show: all of this, as far as it is scheduling; of FastGen's factor of two not what its kernels are
worth, nor what vLLM then spent beside the GPU's work.

Chosen before any run: no prompt above 3,700 tokens, for the context is 4,096; 4,096 tokens an iteration where prompts
are whole; memory as it is (nobody is short of it). 9 s are some multiple of what one of FastGen's requests takes alone,
and the other regimes are held to the same multiple. Waits are compared at 0.7 of the throughput that prompts first
reaches when all wait. Changed after a first run: the budget of 2048 was added, to see what the loss with 512 comes
from; at low load the mean latency is judged and no longer the median, which jumps with 150 requests a run; and the
regimes are judged by requests/s at the limit, as FastGen publishes them, no longer by the time between tokens.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from minibatch.studies.negative_plot import draw
from minibatch.studies.negative_runs import (
    AT,
    COARSE,
    CUT,
    FIRST,
    LIMIT,
    LLAMA,
    LONG,
    LONGEST,
    OPT,
    REGIMES,
    SHORT,
    SLOTS,
    WHOLE,
    Chunking,
    Runs,
    chunking,
    equal_lengths,
    low_load,
)
from minibatch.studies.study import Claim, Study

LOADS = (0.02, 0.1, 0.3, 1.0, 2.0, 3.0)
SHARES = (0.5, 0.7, 0.85, 1.0, 1.15)
FASTGEN = 1.36 / 0.67
SAME = 0.05  # two numbers that differ by less count as the same: no user sees it, and no capacity is planned by it


def same(value: float, half: float = 0.0) -> bool:
    """Whether a ratio, with all of its interval, is within SAME of 1."""
    return bool(abs(value - 1) + half <= SAME)


def low_load_claim(table: pd.DataFrame) -> Claim:
    row, last = table.iloc[0], table.iloc[-1]
    names = ("throughput", "mean latency")
    values = ", ".join(f"{name} {row[name]:.3f} ± {row[f'{name} ±']:.1g}" for name in names)
    return Claim(
        claim="at low load continuous batching gains nothing",
        conditions=f"load {table.index[0]:g}: so many requests in the system, on average",
        published="follows from the mechanism: hardly anybody waits for a batch that he could have joined",
        ours=f"continuous over static: {values} (holds: both within {SAME:.0%} of 1, intervals included). The few that "
        f"do meet somebody show in the mean time to first token: {row['mean TTFT']:.2f}. At load {table.index[-1]:g} "
        f"the mean latency is {last['mean latency']:.2f} of static's, the throughput {last['throughput']:.2f}",
        holds=all(same(row[name], row[f"{name} ±"]) for name in names),
    )


def only_by_padding(table: pd.DataFrame) -> bool:
    """Whether there is no gap where all is equal, exactly, and one where both lengths differ."""
    gains = table["throughput"]
    return bool(abs(gains["all equal"] - 1) < 1e-9 and gains["both differ"] > 1 + SAME)


def equal_claim(table: pd.DataFrame) -> Claim:
    ratios = ", ".join(f"{case} {row['throughput']:.3f} ± {row['throughput ±']:.1g}" for case, row in table.iterrows())
    both = table.loc["both differ"]
    return Claim(
        claim="with equal lengths, all at once, continuous batching gains nothing",
        conditions="same maximum batch, same memory",
        published="Orca: on homogeneous traces the gap shrinks; here it has to vanish, for nobody comes late",
        ours=f"throughput, continuous over static: {ratios}. In the last case {both['left_padding']:.0%} of the tokens "
        f"of the static batches are left padding and {both['dead_padding']:.0%} dead rows (holds: exactly 1 if all is "
        f"equal, more than {1 + SAME:g} if both differ)",
        holds=only_by_padding(table),
    )


def moves_the_wait(tbt: float, ttft: float, throughput: float) -> bool:
    """Ratios, cut over uncut: shorter gaps, a later first token, the same throughput."""
    return bool(tbt < 1 - SAME and ttft > 1 + SAME and same(throughput))


def wait_claim(waits: pd.DataFrame) -> Claim:
    def ratios(who: str) -> tuple[float, float, float]:
        row = waits.loc[(LONG, who)]
        return row["P99 TBT, ratio"], row["P50 TTFT, ratio"], row["full, ratio"]

    row, others = waits.loc[(LONG, CUT)], {"budget 2048": COARSE, "whole prompts among the decodes": WHOLE}
    text = "; ".join(f"{what}: " + ", ".join(f"x{x:.2f}" for x in ratios(who)) for what, who in others.items())
    return Claim(
        claim="chunking only moves the wait: shorter gaps, a later first token, the same throughput",
        conditions=f"long prompts, {LONG}; budget 512, against prompts first",
        published="Sarathi-Serve, table 4: chunks alone P50 TTFT 1.04 s and P99 TBT 0.17 s, hybrid batches alone 0.53 "
        "and 0.68; a chunk of 512 costs up to 25 % of prefill time, of 2048 about nothing",
        ours=f"P99 TBT x{row['P99 TBT, ratio']:.3f} ± {row['P99 TBT ±']:.1g}, P50 TTFT x{row['P50 TTFT, ratio']:.2f} ± "
        f"{row['P50 TTFT ±']:.1g}, throughput when all wait x{row['full, ratio']:.3f} ± {row['full ±']:.1g} (holds: "
        f"the first two move by more than {SAME:.0%}, the third by less). The same three with {text}. With 512, "
        "weights are read and an iteration's overhead is paid five times more for a prompt of 2600",
        holds=moves_the_wait(*ratios(CUT)),
    )


def gain_claim(gains: pd.DataFrame) -> Claim:
    first, whole, cut = (gains.loc[(LONG, who)] for who in (FIRST, WHOLE, CUT))
    return Claim(
        claim="Dynamic SplitFuse serves twice the requests of vLLM at the same latency",
        conditions=f"{LONG} tokens, mean latency {LIMIT:g} s",
        published=f"1.36 against 0.67 requests/s: {FASTGEN:.2f}x",
        ours=f"{cut['1/s']:.2f} against {first['1/s']:.2f} requests/s: {cut['gain']:.2f} ± {cut['gain ±']:.1g}; "
        f"mixing phases without cutting already {whole['gain']:.2f} ± {whole['gain ±']:.1g}. That is what the "
        "schedule is worth; both engines' kernels and overheads are missing here",
        holds=None,
    )


def regimes_differ(long: float, half: float, short: float) -> bool:
    """Whether the long regime gains, with all of its interval, and the short one less than SAME."""
    return bool(long - half > 1 and long > 1 + SAME and short <= 1 + SAME)


def regime_claim(chunks: Chunking) -> Claim:
    gains, waits = chunks.gains.xs(CUT, level="scheduler"), chunks.waits.xs(CUT, level="scheduler")
    text = ", ".join(
        f"{regime}: {gains.loc[regime, 'gain']:.2f} ± {gains.loc[regime, 'gain ±']:.1g} "
        f"(P99 TBT x{waits.loc[regime, 'P99 TBT, ratio']:.2f})"
        for regime in REGIMES
    )
    return Claim(
        claim="the gain holds for long prompts with short answers, elsewhere there is none",
        conditions=f"requests/s at the same limit on mean latency: {LIMIT:g} s for {LONG}, elsewhere the same multiple "
        "of the time alone",
        published="vLLM's answer to FastGen; elsewhere vLLM was up to 1.8 times faster",
        ours=f"cut over prompts first: {text} (holds: {LONG} gains more than {SAME:.0%}, interval above 1, and {SHORT} "
        "does not; 1.8 the other way is of kernels and overheads, and cannot be shown)",
        holds=regimes_differ(*gains.loc[LONG, ["gain", "gain ±"]], gains.loc[SHORT, "gain"]),
    )


def run(seed: int = 0, quick: bool = False, progress: bool = True) -> Study:
    n, number = (12, 2) if quick else (144, 3)  # whole batches of 24
    loads, shares = ((LOADS[0], LOADS[-1]), (AT, 1.15)) if quick else (LOADS, SHARES)
    seeds = [1000 * seed + k for k in range(number)]
    runs = Runs(n, seeds, progress)
    load, equal, chunks = low_load(runs, loads), equal_lengths(runs), chunking(runs, shares)
    what = f"{n} requests a run, seeds {seeds[0]} to {seeds[-1]}"
    tables = {"load": load, "equal": equal, "waits": chunks.waits, "gains": chunks.gains}
    data = {name: table.reset_index() for name, table in tables.items()}
    footer = f"simulated: {OPT.name} (top), {LLAMA.name} (bottom); {what}"
    return Study(
        name="negative",
        title="Where continuous batching gains nothing, and where chunking only moves the wait",
        source="Orca (OSDI 2022); Sarathi-Serve (OSDI 2024); DeepSpeed-FastGen (2024) and vLLM's answer to it",
        setting=f"by roofline: {OPT.name}, {SLOTS} slots, Orca's lengths; {LLAMA.name}, normal lengths with a spread "
        f"of 30 %; {what}, the same requests for all; ratios seed by seed, ± half of a 95 % confidence interval",
        claims=[
            low_load_claim(load),
            equal_claim(equal),
            wait_claim(chunks.waits),
            gain_claim(chunks.gains),
            regime_claim(chunks),
        ],
        differences=DIFFERENCES,
        tables={
            "Low load: continuous over static": load,
            "All at once: continuous over static": equal,
            f"Chunking: waits at {AT:g} of saturation, ratios over prompts first": chunks.waits,
            "Chunking: requests/s at the limit on mean latency, gain over prompts first": chunks.gains,
        },
        data=data,
        footer=footer,
        figure=figure(data, footer),
    )


def figure(data: dict[str, pd.DataFrame], footer: str) -> Figure:
    chunks = Chunking(*(data[name].set_index(["prompt + answer", "scheduler"]) for name in ("waits", "gains")))
    return draw(data["load"].set_index("load"), data["equal"].set_index("lengths"), chunks, footer)


DIFFERENCES = (
    "Equal kernels and the same overhead of 2 ms an iteration for all; FastGen and vLLM are two code bases.",
    f"Prompts above {LONGEST:,} tokens are cut to that, so that prompt and answer fit the context.",
    "FastGen's clients form a closed loop; here arrivals are Poisson, and the mean latency is that of a run of finite "
    "length.",
    "The regime of short prompts has ShareGPT's published means, with a spread of 30 %; vLLM's own comparison used "
    "other data.",
    "Of what a chunk costs, a roofline has the reads, and not the kernels' lower efficiency at odd sizes.",
    "A dead row of the static batch reads no K/V, and a finished answer leaves at once.",
)
