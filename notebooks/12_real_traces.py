# %% [markdown]
# # 12 · Real traces
#
# **Question.** What does a recorded trace know about a service, and what does it not know?
#
# **You will be able to** read a public trace as a workload; say how bursty it is and how
# much of it is shared, from the file alone; predict the most that a prefix cache can find,
# and see how much of that a finite one finds; replay at another speed, and tell when a
# replay is no longer something that could have happened.
#
# **Before this:** 05, 07, 09, 11 · **Minutes:** 35 · **Runs:** simulated GPU

# %%
import itertools
import json
import tempfile
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd

from minibatch import (
    ChunkedPrefill,
    CostModel,
    PagedKVCache,
    PrefixCachedKVCache,
    metrics,
    plots,
)
from minibatch.arrival_processes import Poisson
from minibatch.cost_model import Counts
from minibatch.distributions import LogNormal
from minibatch.gpus import GPUS
from minibatch.model_shapes import MODELS
from minibatch.notebook import show
from minibatch.plot_style import SERIES, SHADES, new_axes, sign, tidy
from minibatch.simulation import simulate
from minibatch.workload_files import read_azure, read_lengths, read_mooncake

# %% [markdown]
# ## Three files
#
# The project contains no recorded data and needs none. If you have a file, write its path
# here, and all cells below use it. With `None` they use **files made up here in the format
# of the public ones; they are not the data**.
#
# - Azure LLM inference trace 2023, `AzureLLMInferenceTrace_conv.csv` or `_code.csv`, linked
#   from `AzureLLMInferenceDataset2023.md` in the repository Azure/AzurePublicDataset
#   (CC-BY-4.0; Patel et al., Splitwise, ISCA 2024): when a request came, tokens of its
#   prompt, tokens of its answer.
# - Mooncake, `FAST25-release/traces/conversation_trace.jsonl` in kvcache-ai/Mooncake
#   (Apache-2.0; Qin et al., FAST 2025): the same, and an id for each block of 512 tokens of
#   the prompt. Equal ids are equal blocks.
# - A table of lengths of ShareGPT conversations, such as the one in project-etalon/etalon
#   (Apache-2.0): no times at all.

# %%
AZURE = None
MOONCAKE = None
LENGTHS = None

# %% [markdown]
# What we make up follows what is known of the originals. Azure's conversations: prompts
# with a median of 1,020 tokens, nine tenths below 2,735; answers 129 and 424, never more
# than 1,000; 5.53 requests a second. ShareGPT, by Sarathi-Serve's table: prompts 1,730 and
# 5,696, answers 415 and 834. We draw lognormal lengths with these two percentiles, and let
# the rate of arrivals drift from minute to minute.

# %%
folder = Path(tempfile.mkdtemp())


def write_azure(path, seed=0, rate=5.53, drift=0.22, minutes=60):
    """Poisson arrivals whose rate is drawn for each minute: normal, with this spread."""
    random = np.random.default_rng(seed)
    rates = np.maximum(rate * (1 + drift * random.standard_normal(minutes)), 0)
    numbers = random.poisson(60 * rates)
    times = [60 * (i + np.sort(random.random(number))) for i, number in enumerate(numbers)]
    prompts = LogNormal(1020, 2735).draw(random, sum(numbers))
    outputs = LogNormal(129, 424, 1000).draw(random, sum(numbers))
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for second, prompt, output in zip(np.concatenate(times), prompts, outputs, strict=True):
        time = datetime(2030, 1, 1) + timedelta(seconds=float(second))
        lines.append(f"{time.isoformat(' ', 'microseconds')}0,{prompt},{output}")
    path.write_text("\n".join(lines) + "\n")


def write_lengths(path, seed=0, n=5000):
    random = np.random.default_rng(seed)
    prompts = LogNormal(1730, 5696).draw(random, n)
    outputs = LogNormal(415, 834).draw(random, n)
    lines = [f"{p},{o}\n" for p, o in zip(prompts, outputs, strict=True)]
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "".join(lines))


# %%
azure, lengths = (
    AZURE or folder / "made-up-azure-seed0.csv",
    LENGTHS or folder / "made-up-lengths-seed0.csv",
)
if AZURE is None:
    write_azure(azure)
if LENGTHS is None:
    write_lengths(lengths)
conversations, table = read_azure(azure), read_lengths(lengths)
print(conversations.description)
print(f"{Path(lengths).name}: {len(table):,} pairs of lengths")

# %% [markdown]
# A reader takes a file as it is, or says what is wrong with it. A row without a prompt or
# without an answer is no request to an engine, which always generates something; such rows
# are left out, and counted. Anything else that is not of the form is an error with file,
# line and content:

# %%
head = "TIMESTAMP,ContextTokens,GeneratedTokens\n2030-01-01 00:00:00.0,374,44\n"
broken = folder / "broken.csv"
for row in ("2030-01-01 00:00:01.0,374,0", "2030-01-01 00:00:01.0,374,many"):
    broken.write_text(head + row + "\n")
    try:
        print(read_azure(broken).description)
    except ValueError as error:
        print(str(error).replace(f"{folder}/", ""))

# %% [markdown]
# ## Predict: two percentiles are not a distribution
#
# A lognormal length with median *m* and 90th percentile *q* has a spread *s* of ln(*q*/*m*)
# / 1.2816, and its mean is *m* times e to the power *s*²/2. What is the mean of a prompt in
# our made-up conversations? Work it out before you read on.

# %%
prompts = np.array([len(request.prompt) for request in conversations.requests])
outputs = np.array([request.output_length for request in conversations.requests])
rows = {}
for name, values in (("prompts", prompts), ("answers", outputs)):
    median, p90 = np.percentile(values, [50, 90])
    lognormal = median * np.exp((np.log(p90 / median) / 1.2816) ** 2 / 2)
    rows[name] = (median, p90, values.max(), lognormal, values.mean())
names = ["median", "P90", "longest", "mean, if lognormal", "mean, observed"]
pd.DataFrame.from_dict(rows, orient="index", columns=names).round().astype(int)

# %% [markdown]
# For prompts the two means agree, as they must: we drew from that distribution. (For
# answers the limit of 1,000 takes away from the mean.)
#
# Now the lie in it. In Azure's own file median and 90th percentile of the prompts are the
# same, and the mean is 1,155; the longest prompt has 14,050 tokens. Two percentiles fix
# neither the mean nor the tail, and it is the mean that decides the load. Whoever draws
# lognormal lengths from two published percentiles, as this project does in its study of
# Sarathi-Serve, should know that here it would have meant 19 % more prompt tokens than the
# original.

# %%
axes = new_axes(3.2, 1, 2, sharey=True)
LINES = [series | {"marker": ""} for series in (SERIES[-1], SERIES[1])]
sources = {"conversations": (prompts, outputs), "ShareGPT's lengths": table.T}
for ax, column, what in zip(axes, (0, 1), ("prompts", "answers"), strict=True):
    for (name, pair), style in zip(sources.items(), LINES, strict=True):
        values = np.sort(pair[column])
        shares = 100 * np.arange(1, len(values) + 1) / len(values)
        ax.plot(values, shares, **style, label=name)
    tidy(ax, f"Lengths of {what}", "tokens (log)", "% that are no longer")
    ax.set_xscale("log")
axes[0].legend(fontsize=8, frameon=False)
files = f"{Path(azure).name}, {Path(lengths).name}"
sign(axes[0].figure, f"counted in the files {files}")
show(axes, alt="Cumulative distributions of prompt and answer lengths, on logarithmic axes")

# %% [markdown]
# ## Predict: how bursty is it?
#
# Count the arrivals in windows of *w* seconds. If users are independent and the rate is
# constant (a Poisson process), the variance of these counts equals their mean: their ratio,
# the *index of dispersion*, is 1 for every *w*. If the rate itself drifts slowly, with
# relative spread *s* around a mean of *r* a second, the index is 1 + *r* *s*² *w*: the
# longer one looks, the burstier it gets.
#
# The counts of whole minutes give us *s*, and the formula then predicts what shorter
# windows show. And the *gaps* between arrivals? In a Poisson process their standard
# deviation equals their mean. Will they show the drift?


# %%
def dispersion(times, window):
    """Variance over mean of the counts in windows of so many seconds."""
    counts = np.bincount((times // window).astype(int))[:-1]  # the last one is not complete
    return counts.var(ddof=1) / counts.mean()


times = np.array([request.arrival_time for request in conversations.requests])
slope = (dispersion(times, 60) - 1) / 60  # r s^2
gaps, mean_rate = np.diff(times), conversations.rate
print(f"{mean_rate:.2f} requests a second, drift s = {np.sqrt(slope / mean_rate):.2f}")
print(f"gaps: standard deviation over mean = {gaps.std() / gaps.mean():.2f}\n")
print(f"{'window':>7} {'predicted':>10} {'observed':>9}")
for window in (1, 5, 10, 30, 60):
    print(f"{window:5} s {1 + slope * window:10.2f} {dispersion(times, window):9.2f}")

# %% [markdown]
# The gaps look like those of a Poisson process: each is so short that it sees nothing of
# the drift. The counts do see it. (At 60 s prediction and observation agree because *s*
# comes from there.) In Azure's own conversation file the same cell (run with its path
# above) finds *s* = 0.22, gaps of 1.09, and an index of 1.39, 2.5, 3.9, 9.0 and 16.4 where
# the formula says 1.26, 2.3, 3.6, 8.7 and 16.4: a slow drift, with a little more on top at
# short range. Its file of code requests is another world: gaps of 13, an index of 13 in one
# second.

# %%
window = 10
counts = np.bincount((times // window).astype(int))[:-1] / window
ax = new_axes(2.9)
minutes = np.arange(len(counts)) * window / 60
ax.step(minutes, counts, where="post", color=SHADES[-1], linewidth=0.9)
low, high = (mean_rate + side * 1.96 * np.sqrt(mean_rate / window) for side in (-1, 1))
ax.axhspan(low, high, color="#999999", alpha=0.35, linewidth=0)
outside = np.mean((counts < low) | (counts > high))
title = (
    f"Arrivals in windows of {window} s, {Path(azure).name}: {outside:.0%} outside the band"
)
tidy(ax, title, "minute (band: 95 % of a Poisson process)", "requests/s")
ax.set_ylim(0)
show(
    ax,
    alt="Arrival rate in windows of 10 s; many lie outside the band of a Poisson process",
)

# %% [markdown]
# ## Predict: does it matter?
#
# One GPU, Qwen3-8B on an A100-80GB, chunked prefill with 512 tokens an iteration. Where is
# its limit? Under load every iteration is full: 512 tokens. A request needs as many as its
# prompt and its answer have.

# %%
cost = CostModel(MODELS["qwen3-8b"], GPUS["a100-80"])
work = prompts + outputs  # tokens of each request
weights = cost.model.num_layers * cost.model.layer_parameters
seconds = 2 * weights * 512 / (cost.gpu.flops * cost.gpu.efficiency.compute)
limit = 512 / seconds / work.mean()
print(f"{work.mean():.0f} tokens a request, {1000 * seconds:.0f} ms of arithmetic for 512")
print(f"at most {limit:.1f} requests a second, fewer for all else in an iteration")

# %% [markdown]
# The engine says how many it is. We replay the first 1,200 requests at 6 a second, and look
# at the iterations in which somebody waits.

# %%
rate, size, tally = 6.0, 1200, []


def watched(plan):
    """The clock, which also keeps what it counted in each iteration."""
    tally.append(Counts.of(plan))
    return cost.seconds(tally[-1])


def replay(workload):
    kv = PagedKVCache(cost.kv_tokens() // 16, 16)
    return simulate(workload, ChunkedPrefill(512), kv, watched, check_plans=False)


part = conversations.head(size).at_rate(rate)
trace = replay(part)
steps = metrics.steps_table(trace)
busy = steps[steps["num_waiting"] > 0]
speed = busy["num_tokens"].sum() / busy["duration"].sum()
print(f"{speed:,.0f} tokens a second, which is {speed / work.mean():.1f} requests a second")
parts = cost.parts(Counts(*np.array(tally)[busy.index].T))
print(f"milliseconds of {len(busy):,} iterations in which somebody waits, mean:")
for name in ("linear", "attention", "head", "overhead"):
    print(f"{name:>10} {1000 * np.mean(getattr(parts, name)):5.1f}")
print(f"{'observed':>10} {1000 * busy['duration'].mean():5.1f}")

# %% [markdown]
# That is 28 % less than the limit of 10, which took an iteration for 33 ms of arithmetic. It
# has 45: the linear layers take 35, as 512 tokens are near enough to the corner of notebook
# 11 to pay for reading, too; the rest is attention, the head, and 2 ms of the engine.
#
# To simulate the whole hour many times would take minutes. So we predict with less: one
# server that computes so many tokens a second, and serves in order of arrival. Who comes
# finds the backlog of the one before, plus that one's own work, less the time that has
# passed since (D. V. Lindley, 1952). Is such a queue good enough? The speed comes from the
# first 1,200 requests, so compare it with the engine there, and on more, which it has not
# seen.


# %%
def waits(times, work):
    """Seconds that each request waits for one server that does `speed` tokens a second."""
    growth = np.append(0.0, work[:-1] / speed - np.diff(times))
    backlog = np.cumsum(growth)
    return backlog - np.minimum.accumulate(backlog)  # it never falls below 0


longer = conversations.at_rate(rate).head(3000)
print(f"{'wait, s':>20} {'queue':>8} {'engine':>8}   (simulated)")
for workload, run in ((part, trace), (longer, replay(longer))):
    sent = np.array([request.arrival_time for request in workload.requests])
    queue, numbers = waits(sent, work[: len(sent)]), metrics.summary(run)
    for name, value in (("mean", queue.mean()), ("P99", np.percentile(queue, 99))):
        engine = numbers[f"queueing_delay_{name.lower()}"]
        print(f"{len(sent):,} requests, {name:4} {value:8.2f} {engine:8.2f}")

# %% [markdown]
# Not good enough for a number: where queues get long the P99 is too low by a third, for
# more requests decode at a time then, and attention takes longer. But all arrivals get the
# same server, so it may say which of them wait much longer.
#
# All requests of the file, in the same order and at the same mean rate: once at the
# recorded times, and twenty times at those of a Poisson process. What do you expect: a
# little longer, twice as long, ten times?

# %%
recorded = times * mean_rate / rate
results = {"recorded": waits(recorded, work)}
for seed in range(20):
    poisson = Poisson(rate).times(np.random.default_rng(seed), len(work))
    poisson *= recorded[-1] / poisson[-1]  # exactly the same mean rate
    results[f"Poisson, seed {seed}"] = waits(poisson, work)
p99 = {name: np.percentile(wait, 99) for name, wait in results.items()}
others = [value for name, value in p99.items() if name != "recorded"]
print(f"P99 of the wait in the queue (not the engine) at {rate:g} requests a second:")
print(
    f"recorded {p99['recorded']:.1f} s, Poisson {min(others):.1f} to {max(others):.1f} "
    "s (20 seeds)"
)

# %%
ax = new_axes(2.9)
for name, color in (("recorded", SHADES[-1]), ("Poisson, seed 0", SHADES[0])):
    ax.plot(recorded / 60, results[name], color=color, linewidth=1.1, label=name)
tidy(
    ax,
    f"Wait in the queue at {rate:g} requests a second",
    "minute (as recorded)",
    "seconds",
)
sign(ax.figure, f"simulated: a queue with one server, not the engine · {Path(azure).name}")
ax.legend(fontsize=8, frameon=False)
show(
    ax,
    alt="Wait over the hour: recorded arrivals queue in some minutes, Poisson ones hardly",
)

# %% [markdown]
# Same requests, same mean rate, same server. In a minute in which more come than can be
# served the queue grows for the whole minute; in a Poisson process such a stretch lasts a
# few seconds. With Azure's own file these cells say 59 s for the recorded arrivals and 1.7
# to 2.7 s for Poisson ones. (29.5 and 59 s are the queue's. The engine, run once on each
# whole file at the recorded times, has 45 and 51 s.) A load test with Poisson arrivals tells
# little about a service whose users come in waves. (Nor do a few minutes of a trace: the
# 1,200 requests above, 200 seconds of them, look harmless.)
#
# ## Predict: what can be shared?
#
# Mooncake's files say which blocks of a prompt are equal to blocks of other prompts. Here
# is a made-up one. All requests begin with the same system prompt of one block (in the real
# conversation file, too, all 12,031 requests begin with block 0). A conversation has
# several turns, and the prompt of each is the prompt before, the answer, and something new.


# %%
def write_mooncake(path, seed=0, conversations=130, every=2.0):
    random, fresh, rows = np.random.default_rng(seed), itertools.count(1), []
    for start in np.cumsum(random.exponential(every, conversations)):
        second, prompt, answer, ids = float(start), 512, 0, [0]
        for _ in range(random.geometric(0.35)):
            kept = ids[: prompt // 512]  # what was a full block stays the same block
            new = int(LogNormal(2500, 9000, 9000).draw(random, 1)[0])
            prompt = min(prompt + answer + new, 39_000)
            ids = kept + [next(fresh) for _ in range(-(-prompt // 512) - len(kept))]
            answer = int(LogNormal(350, 600).draw(random, 1)[0])
            row = {"timestamp": int(1000 * second), "input_length": prompt}
            rows.append(row | {"output_length": answer, "hash_ids": ids})
            second += 5 + random.exponential(40)
    rows.sort(key=lambda row: row["timestamp"])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


mooncake = MOONCAKE or folder / "made-up-mooncake-seed0.jsonl"
if MOONCAKE is None:
    write_mooncake(mooncake)
sharing = read_mooncake(mooncake).head(160)
print(f"{sharing.description}; {sharing.rate:.2f} requests a second")

# %% [markdown]
# A prefix cache finds blocks from the beginning of a prompt up to the first that it does
# not know, and never the last token, since there must be logits to sample from (notebook
# 05). So the file alone gives an upper bound: for each request, the leading blocks that
# some request before it had. No cache of earlier prompts can find more, however large it
# is.

# %%
with open(mooncake, encoding="utf-8") as file:
    lines = sorted(map(json.loads, file), key=lambda row: row["timestamp"])
lines = [row for row in lines if row["input_length"] and row["output_length"]]
lines = lines[: len(sharing)]
known, findable = set(), 0
for row in lines:
    leading = len(list(itertools.takewhile(known.__contains__, row["hash_ids"])))
    findable += 512 * min(leading, (row["input_length"] - 1) // 512)
    known.update(row["hash_ids"])
total = sum(row["input_length"] for row in lines)
print(f"{total:,} prompt tokens, {len(known):,} different blocks of 512")
print(f"at most {findable:,} tokens can be found: {findable / total:.1%}")

# %% [markdown]
# Now finite pools. Beside the weights of Qwen3-8B, an H100-80GB has room for about 800 such
# blocks, and active requests need some of them for themselves. What do you expect of a pool
# of a quarter of that? Of ten times as much?

# %%
h100 = CostModel(MODELS["qwen3-8b"], GPUS["h100"])
fits = h100.kv_tokens() // 512


def serve(workload, blocks, **options):
    kv = PrefixCachedKVCache(blocks, block_size=512)
    return simulate(workload, ChunkedPrefill(2048), kv, h100, check_plans=False, **options)


rows, traces = [], {}
for blocks in (fits // 4, fits // 2, fits, 10 * fits):
    traces[blocks] = serve(sharing, blocks)
    numbers = metrics.summary(traces[blocks])
    share = 100 * numbers["cached_tokens"] / total
    rows.append((blocks, share, numbers["ttft_p50"], numbers["ttft_p99"]))
    assert numbers["cached_tokens"] <= findable
found = pd.DataFrame(rows, columns=["blocks", "found, %", "TTFT P50, s", "TTFT P99, s"])
if MOONCAKE is None:
    assert numbers["cached_tokens"] == findable  # of the largest pool
found.round(2)

# %%
ax = new_axes(3.0)
ax.plot(found["blocks"], found["found, %"], **SERIES[-1], label="found (simulated)")
bound = 100 * findable / total
grey, label = {"color": "#999999"}, f"upper bound by the file: {bound:.1f} %"
ax.axhline(bound, **grey, linestyle="--", label=label)
ax.axvline(fits, **grey, linestyle=":", label="room on an H100-80GB")
title = f"Prompt tokens found in the cache, {Path(mooncake).name}, {len(sharing)} requests"
tidy(ax, title, "blocks of 512 tokens (log)", "%")
ax.set_xscale("log")
ax.set_xticks(found["blocks"], [f"{blocks:,}" for blocks in found["blocks"]])
ax.minorticks_off()
ax.set_ylim(0)
ax.legend(fontsize=8, frameon=False, loc="lower right")
show(ax, alt="Share that is found by size of the pool rises towards the bound of the file")

# %% [markdown]
# A pool that is large enough finds exactly what the file says can be found. One of the size
# of the GPU does not: what is not asked for again soon is evicted. A share that is computed
# from a file is the upper bound; what an engine gets of it depends on its memory, and on
# how long people take to answer.
#
# A file is also a window: what was sent before it is not in it. In Mooncake's own
# conversation file the same arithmetic finds at most 37.3 % of all prompt tokens in 12,031
# requests, but only 5.9 % in its first 200.
#
# The same from inside: the first 40 requests, with a quarter of the pool. Light blue is
# memory that nobody uses and that still keeps a prefix. When no empty block is left, each
# new one takes the place of such a block, and its prefix is forgotten.

# %%
trace = serve(
    sharing.head(40), fits // 4, record_steps=True, meta={"name": "a quarter of the pool"}
)
show(
    plots.kv_memory(trace),
    alt="What fills the cache in each iteration: soon all is active or keeps a prefix",
)

# %% [markdown]
# ## Predict: a replay that could not have happened
#
# A trace has planned times. In truth the second turn of a conversation is sent by somebody
# who has read the first answer: had the answer come later, so had the question. A replay
# does not wait. At twice the speed all gaps between turns are half as long, and the answers
# are not.
#
# The file lets us find the turns: a request goes on where an earlier one ended if it has
# the earlier one's last full block.

# %%
last, turns = {}, []  # last full block -> its request; pairs (earlier, later)
for later, row in enumerate(lines):
    ids = row["hash_ids"]
    earlier = next((last[block] for block in reversed(ids) if block in last), None)
    if earlier is not None:
        turns.append((earlier, later))
    full = ids[: row["input_length"] // 512]
    if len(full) > 1:  # the first block is everybody's
        last[full[-1]] = later
print(f"{len(turns)} of {len(lines)} requests go on where an earlier one ended")

# %% [markdown]
# At the recorded speed we measure how long each answer takes (with all the memory of the
# GPU). If they took just as long at *k* times the speed, a turn would come too early
# whenever its gap, divided by *k*, is shorter than the answer before it. That is the
# prediction. Will the truth be higher or lower?

# %%
earlier, later = np.array(turns).T
sent = np.array([request.arrival_time for request in sharing.requests])
rows = []
for factor in (1, 2, 3):
    if factor == 1:
        trace = traces[fits]  # served above
        took = metrics.requests_table(trace)["e2e"].to_numpy()
    else:
        trace = serve(sharing.at_rate(factor * sharing.rate), fits)
    requests = metrics.requests_table(trace)
    predicted = np.mean((sent[later] - sent[earlier]) / factor < took[earlier])
    arrival, finish = requests["arrival"].to_numpy(), requests["finish"].to_numpy()
    early = np.mean(arrival[later] < finish[earlier])
    numbers = metrics.summary(trace)
    rows.append(
        (factor, 100 * predicted, 100 * early, numbers["ttft_p50"], numbers["e2e_p50"])
    )
names = ["speed", "predicted, %", "observed, %", "TTFT P50, s", "end to end P50, s"]
pd.DataFrame(rows, columns=names).round(2)

# %% [markdown]
# (The two columns of per cent: turns that were sent before the answer that they reply to
# was there. At speed 1 they are equal by construction: the lengths of answers are from that
# run.)
#
# At the recorded speed the replay is plausible. At a higher one more and more questions
# reply to answers that do not exist yet, and more than predicted, because the load makes
# answers slower. Real users would have waited, and by waiting would have lowered the load:
# a closed loop limits itself, a replay does not. So a sped-up trace is a stress test, not a
# forecast. For conversations whose turns wait for each other see `closed_loop.py`.
#
# ## What else a trace does not tell
#
# - **Who gave up.** Somebody who closed the window after ten seconds left an answer of so
#   many tokens. On a faster engine it would have been longer.
# - **What the scheduler could know.** The file has the true length of each answer. An
#   engine sees a limit. By default the readers let schedulers see the exact length;
#   `read_azure(path, max_tokens=1000)` hides it behind a limit, which matters for whoever
#   reserves memory by it.
# - **How it was sampled.** Several answers to one prompt, retries after errors, a system
#   prompt that was cut: not recorded, or recorded as more requests.
# - **What the answers were.** In the next turn the answer is part of the prompt. Its K/V
#   are in the cache already, but the ids of Mooncake's file are of prompts; a replay here
#   finds the earlier prompt and computes the answer again.
# - **Whose tokens.** Lengths were counted with one tokenizer. Another model needs more or
#   fewer for the same text.

# %% [markdown]
# ## Where it is in the code
#
# `workload_files.py` (the readers), `workloads.py` (`at_rate`, `slice`, `head`, `sample`),
# `contents.py` (prompts that nobody writes down), `prefix_cache.py`. On the command line:
# `minibatch simulate --workload azure:FILE.csv --model qwen3-8b --gpu a100-80
# --num-requests 1500`. Next: 13, what happens inside the executor.

# %% [markdown]
# ## Try
#
# 1. Half the load can mean two things: everybody comes half as often (`at_rate`), or half
#    of them stay away (`sample`). The mean rate is the same. What does each do to a busy
#    minute, and so to the index of dispersion at 60 s? Write down both before you run this.

# %%
halves = {
    "as recorded": conversations,
    "slower": conversations.at_rate(mean_rate / 2),
    "half of them": conversations.sample(len(conversations) // 2, seed=0),
}
for name, workload in halves.items():
    when = np.array([request.arrival_time for request in workload.requests])
    minute, two = dispersion(when, 60), dispersion(when, 120)
    print(
        f"{name:13} {workload.rate:.2f} a second, index {minute:.1f} (60 s), {two:.1f} "
        "(120 s)"
    )

# %% [markdown]
# 2. Serve ShareGPT's lengths: `from minibatch.open_loop import from_lengths`, then
#    `from_lengths(table, Poisson(2.0), seed=0, n=300)`. Its prompts are longer than those
#    of the conversations above; guess what happens to the highest rate that 512 tokens an
#    iteration can carry.
# 3. Get one of the public files, write its path into the cell with the three names, and run
#    all again. Which of the predictions still hold?

# %% [markdown]
# ## What this does not show
#
# - With `None` above, the files are made up: independent lognormal lengths, a rate that
#   changes once a minute, conversations from a recipe. The numbers are those of the recipe.
#   The few numbers said to be of the public files are.
# - Times are simulated, of one GPU. The services behind the traces ran on many, behind a
#   router, which decides what shares a cache.
# - One seed of each file, and percentiles of 160 requests where the engine runs. The waits
#   of the whole hour are those of the one-server queue. Its P99 was too low by a third
#   here, and too high by 15 % with Azure's own file. The engine had no Poisson arrivals.
# - One eviction rule: the block that is idle longest goes first. Others would find more or
#   less, but never more than the bound.
