# %% [markdown]
# # 10 · Workload shape
#
# **Question.** By how much is continuous batching faster than static batching - and on
# what does that number depend?
#
# **You will be able to** predict the gain from the distribution of answer lengths; say
# where it is exactly nothing; find the knee of a load-latency curve from two sums before
# you simulate it; and refuse a sentence such as "continuous batching is 3x faster" that
# does not name its workload.
#
# **Before this:** 01 and 02 (static, continuous), 06 (prefill and decode), 09 (measuring)
# · **Minutes:** 30 · **Runs:** simulated GPU

# %%
from dataclasses import replace

import numpy as np
import pandas as pd

from minibatch import (
    ContiguousKVCache,
    ContinuousBatching,
    CostModel,
    StaticBatching,
    metrics,
    plots,
)
from minibatch.arrival_processes import AllAtOnce, Gamma, Poisson
from minibatch.distributions import Exponential, Fixed, LogNormal, Uniform
from minibatch.gpus import GPUS
from minibatch.model_shapes import MODELS
from minibatch.notebook import show
from minibatch.open_loop import synthetic
from minibatch.plot_style import SHADES, new_axes, tidy
from minibatch.simulation import simulate

COST = CostModel(MODELS["llama-2-7b"], GPUS["a100-40"])
SEEDS = (0, 1, 2)

# %% [markdown]
# ## Predict: everybody is there at once
#
# The cleanest comparison: 8 slots of the same cache, the same requests, all at time 0, so
# that there is always somebody to fill a free slot. Prompts have 128 tokens. Answers have
# 32 on average, and only their *spread* differs.
#
# A static batch of n runs until its **longest** answer ends; continuous batching needs,
# for a slot and request, the **mean**. So in iterations the gain is E[max of n] / E[S]:
#
# * all equal: max = mean, the gain is **1**;
# * uniform from 1 to 2 m: the longest of n is at about 2 m n/(n + 1), so 2 n/(n + 1) =
#   **1.78** for n = 8;
# * exponential: the longest of n is at m (1 + 1/2 + ... + 1/n) = m H_n, so H_8 =
#   **2.72**;
# * log-normal: no closed form; drawn.
#
# **Write down** what you expect in *seconds*, where an iteration with dead rows costs
# hardly less than a full one.

# %%
SLOTS, SLOT = 8, 2600  # slots, tokens in each
SPREADS = {
    "equal": Fixed(32),
    "uniform": Uniform(1, 63),
    "exponential": Exponential(32),
    "log-normal": LogNormal(median=16, p90=66),
}


def both(prompts, answers, arrivals, n, seed):
    """The same requests through a static and a continuous scheduler; the traces."""
    workload = synthetic(n, arrivals, prompts, answers, seed)
    schedulers = (
        StaticBatching(SLOTS),
        ContinuousBatching(SLOTS, max_num_batched_tokens=SLOTS * SLOT),
    )
    return [
        simulate(workload, each, ContiguousKVCache(SLOTS, SLOT), COST)
        for each in schedulers
    ]


def longest_over_mean(lengths):
    """Of batches of SLOTS, in the order of the lengths."""
    batches = np.reshape(lengths, (-1, SLOTS))
    return batches.max(axis=1).mean() / batches.mean()


def on_average(answers, batches=20_000):
    return longest_over_mean(answers.draw(np.random.default_rng(0), SLOTS * batches))


def drawn(trace):
    return [len(timeline.token_times) for timeline in trace.timelines]


rows = []
for name, answers in SPREADS.items():
    for seed in SEEDS:
        static, continuous = both(Fixed(128), answers, AllAtOnce(), 160, seed)
        row = {"answers": name, "predicted": on_average(answers)}
        row["for these lengths"] = longest_over_mean(drawn(static))
        row["iterations"] = static.num_steps / continuous.num_steps
        row["seconds"] = metrics.makespan(static) / metrics.makespan(continuous)
        rows.append(row)
gains = pd.DataFrame(rows)
offline = gains.groupby("answers", sort=False).agg(["mean", "min", "max"])
equal = gains[gains["answers"] == "equal"]
assert (equal["iterations"] == 1).all() and (equal["seconds"] == 1).all()
gains.groupby("answers", sort=False).mean().round(2)

# %%
ax = new_axes(3.0)
COLUMNS = {
    "predicted": (-0.27, "#999999"),
    "iterations": (0, SHADES[0]),
    "seconds": (0.27, SHADES[-1]),
}
for what, (shift, color) in COLUMNS.items():
    part = offline[what]
    error = [part["mean"] - part["min"], part["max"] - part["mean"]]
    place = np.arange(len(part)) + shift
    ax.bar(place, part["mean"], 0.25, yerr=error, capsize=3, color=color, label=what)
ax.axhline(1, color="#999999", linewidth=1, linestyle="--")
title = "Static over continuous, all at once (simulated: Llama-2-7B on A100-40, seeds 0-2)"
tidy(ax, title, "answer lengths", "gain")
ax.set_xticks(range(len(offline)), offline.index)
ax.legend(fontsize=8, frameon=False, loc="upper left")
show(
    ax,
    "The gain is 1 for equal answers, 1.7 for uniform, 2.4 for exponential, 2.8 for "
    "log-normal.",
)

# %% [markdown]
# Exactly 1 where all answers are equal (there is an `assert`), and a little less than
# predicted elsewhere. First because the run has an end: when nobody waits any more, a
# slot that falls free stays free. And, for heavy tails, because 160 drawn lengths are not
# the distribution: the column *for these lengths* takes their own longest and mean, and
# what is missing from it to *iterations* is the end alone. And seconds follow iterations
# closely: a decode iteration is **memory-bound**, it reads all weights whether 2 of its
# rows are alive or 8.
#
# ## Predict: a long prompt dilutes it
#
# Both schedulers have to compute all prompts, and that part is **compute-bound**: it
# costs the same in either. If a request spends x times as long in prefill as its share of
# decodes takes, the gain falls from g to (g + x) / (1 + x).

# %%
from minibatch.cost_model import Counts


def seconds(decodes=0, context=0, prompt=0):
    """Of one iteration with so many decodes, each with so much context, and one prompt."""
    return COST.seconds(
        Counts(
            tokens=decodes + prompt,
            logits=decodes + (prompt > 0),
            kv_read=decodes * context + prompt,
            kv_written=decodes + prompt,
            attended=decodes * context + prompt * prompt // 2,
        )
    )


rows = []
for prompt in (16, 256, 1024, 2048):
    decode = seconds(SLOTS, prompt + 16)
    x = (seconds(SLOTS, prompt + 16, prompt) - decode) / (32 * decode / SLOTS)
    for seed in SEEDS:
        static, continuous = both(Fixed(prompt), Exponential(32), AllAtOnce(), 96, seed)
        in_iterations = static.num_steps / continuous.num_steps
        observed = metrics.makespan(static) / metrics.makespan(continuous)
        row = {"prompt": prompt, "x": x, "iterations": in_iterations}
        row["predicted"] = (in_iterations + x) / (1 + x)
        cheaper = seconds(SLOTS / in_iterations, prompt + 16) / decode  # a static iteration
        row["dead rows read no K/V"] = (in_iterations * cheaper + x) / (1 + x)
        rows.append(row | {"seconds": observed})
pd.DataFrame(rows).groupby("prompt").mean().round(2)

# %% [markdown]
# The same answers, the same mechanism, the same gain in iterations; in seconds it shrinks
# as the prompts grow. With long prompts the prediction is a little high: it takes a static
# iteration to cost as much as a continuous one, but here a dead row reads no K/V. If K/V
# are read for the living rows only, 8 / g on average, the formula gives a little less
# than is observed. Where is the border between the two kinds of work? Arithmetic on
# the data sheet: a weight of two bytes takes two operations a token, so computing takes
# as long as reading once there are peak FLOP/s / bandwidth tokens in an iteration.

# %%
print(
    f"ridge of {COST.gpu.name}: {COST.gpu.ridge:.0f} tokens an iteration (at the peaks "
    "of the data sheet)"
)
batches = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
table = pd.DataFrame(
    [
        {
            "batch": batch,
            "context of each": context,
            "ms a token": 1e3 * seconds(batch, context) / batch,
        }
        for context in (0, 256, 2048)
        for batch in batches
    ]
)
ax = plots.curves(table, "batch", "ms a token", by="context of each")
ax.set_xscale("log", base=2)
ax.set_yscale("log")
ax.axvline(COST.gpu.ridge, color="#999999", linestyle="--")
ax.set_title(
    "Why batch: a decode iteration, per token (cost model, Llama-2-7B on A100-40; no "
    "workload)",
    loc="left",
    fontsize=9,
)
ax.set_xticks(batches, batches)
show(
    ax,
    "Milliseconds a token fall with the batch until K/V reads or arithmetic (200 "
    "tokens) stop it.",
)

# %% [markdown]
# Left of the dashed line one more request in the batch is nearly free: that is what every
# batching scheme lives on, and why a slot that stands empty is worth so much. With long
# contexts the curve flattens before the ridge: each request reads its own K/V, which no
# batch shares. (Whether that many K/V fit is another question; here it is ignored.)
#
# ## Predict: low load
#
# Now requests arrive one by one. *Load* is the arrival rate times the time that a request
# takes alone: so many would be inside on average if they did not disturb each other. At
# load 0.05 about one arrival in twenty finds somebody there. **What do you expect** of
# the gain in mean latency at loads 0.05, 1 and 4?
#
# On paper, with *equal* answers: a batch takes about 1, the time alone. Then, with
# probability exp(-load), nobody has come, and the machine is idle for 1 / load. So it is
# busy for the share b = 1 / (1 + exp(-load) / load), and who arrives while it is waits
# half a batch: the gain is 1 + b / 2, **1.02, 1.37 and 1.50**. With *exponential* ones the
# rest of a batch is as long as a whole answer, so at load 0.05 it is 1 + b = **1.05**. At
# load 4 static is lost: 8 requests take H_8 = 2.72, so it serves 8 / 2.72 = 2.94 and
# not 4. Its queue grows with the run, and *throughput* gains up to 4 / 2.94 = **1.36**.


# %%
def mean_latency(trace):
    return metrics.summary(trace)["e2e_mean"]


alone = seconds(prompt=128) + 31 * seconds(
    1, 128 + 16
)  # one prefill and 31 decodes on average
rows = []
for name in ("equal", "uniform", "exponential"):
    for load in (0.05, 1.0, 4.0):
        for seed in SEEDS:
            static, continuous = both(
                Fixed(128), SPREADS[name], Poisson(load / alone), 64, seed
            )
            row = {"answers": name, "load": load}
            row["latency"] = mean_latency(static) / mean_latency(continuous)
            row["throughput"] = metrics.makespan(static) / metrics.makespan(continuous)
            rows.append(row)
busy = [1 / (1 + np.exp(-load) / load) for load in (0.05, 1.0, 4.0)]
print("predicted for equal answers, latency:", [f"{1 + b / 2:.2f}" for b in busy])
print(
    f"alone a request takes {alone:.2f} s; gains, means of {len(SEEDS)} seeds (simulated):"
)
pd.DataFrame(rows).groupby(["answers", "load"], sort=False).mean().unstack().round(2)

# %% [markdown]
# One mechanism, and the "multiplier" is anything from 1.0 to the largest number in this
# table:
#
# * at **low load** it is about 1 in everything: hardly anybody waits for a batch that he
#   could have joined;
# * with **equal answers** throughput hardly gains, but latency does once requests
#   overlap: who arrives a moment after a static batch was formed waits for all of it,
#   whatever the spread. (Above, all were there at once, and it was exactly 1.)
# * **throughput** gains only where static batching can no longer keep up. Below that,
#   both emit what was asked for.
#
# ## Predict: where is the knee?
#
# A system is stable while requests come more slowly than it can serve them. On paper, for
# exponential answers of mean 50, prompts of 150 tokens, and n requests at a time:
#
# * **static**: n requests take a prefill of n prompts and n-th harmonic number x 50
#   decode iterations;
# * **continuous**: a request takes what its prompt adds to an iteration, and 50 times the
#   n-th part of an iteration;
# * **paged**: the same, with a larger n: a slot reserves 600 tokens for the longest
#   answer, blocks only what is there. In 9,600 tokens of K/V: 16 slots, or 9,600 / (150 +
#   50) = 48 requests. (An exponential answer that is looked at while it runs has 50
#   tokens behind it on average, and not 25: long ones are looked at more often.)

# %%
PROMPT, ANSWER, KV, LONGEST = 150, 50, 9600, 600


def continuous_capacity(n):
    decode = seconds(n, PROMPT + ANSWER)
    return 1 / (seconds(n, PROMPT + ANSWER, PROMPT) - decode + ANSWER * decode / n)


n = KV // LONGEST
harmonic = sum(1 / k for k in range(1, n + 1))
batch_seconds = seconds(prompt=n * PROMPT) + harmonic * ANSWER * seconds(n, PROMPT + ANSWER)
knees = {
    "static": n / batch_seconds,
    "continuous": continuous_capacity(n),
    "paged": continuous_capacity(48),
}
print("predicted, requests/s:", {name: round(knee, 1) for name, knee in knees.items()})

# %%
from minibatch.scenario import Scenario
from minibatch.sweep import sweep

LENGTHS = {
    "prompts": f"fixed:{PROMPT}",
    "outputs": f"exponential:{ANSWER},{LONGEST - PROMPT}",
}
BASE = Scenario(**LENGTHS, kv_tokens=KV, slot_size=LONGEST)
RATES = {
    "static": (2, 4, 6, 9),
    "continuous": (2, 8, 18, 22, 26),
    "paged": (2, 8, 28, 36, 44),
    "chunked": (2, 8, 28, 36, 44),
}
SECONDS = 12  # requests arrive for about so long, whatever the rate

scenarios = [
    replace(BASE, scheduler=scheduler, rate=float(rate), num_requests=SECONDS * rate)
    for scheduler, rates in RATES.items()
    for rate in rates
]
swept = sweep(scenarios, seeds=len(SEEDS), jobs=1, progress=False)
assert not swept["cut"].any()
table = swept.pivot_table(index="rate", columns="scheduler", values="e2e_mean")
table[list(RATES)].round(2)

# %%
table = swept.rename(columns={"rate": "requests/s", "e2e_mean": "mean end to end, s"})
ax = plots.curves(table, "requests/s", "mean end to end, s", by="scheduler")
ax.set_yscale("log")
ax.set_yticks([0.5, 1, 2, 5, 10], [0.5, 1, 2, 5, 10])
for name, knee in knees.items():
    ax.axvline(knee, color="#999999", linestyle="--", linewidth=1.2)
    where = {"transform": ax.get_xaxis_transform(), "va": "top", "fontsize": 7}
    ax.text(knee, 0.98, f" {name},\n predicted", **where)
ax.legend(title="scheduler", title_fontsize=8, loc=(0.66, 0.52), fontsize=8, frameon=False)
title = "Load and latency (simulated: Llama-2-7B, A100-40, 12 s, seeds 0-2: mean, range)"
ax.set_title(title, loc="left", fontsize=9)
show(
    ax,
    "Mean latency by rate: static climbs from the start, continuous turns up near 20, "
    "paged rises gently.",
)

# %% [markdown]
# Continuous turns up near 20; paged rises gently and shows no clear turn within 12 s of
# arrivals. Static is never flat (who comes after a batch has formed waits for all of it),
# and beyond its rate it runs away. And the same table gives you any multiplier you like:
#
# * at 2 requests/s continuous is about twice as fast as static, and paged not at all
#   faster than continuous;
# * at 9 requests/s static is past its rate, and any ratio depends on how long its queue
#   may grow;
# * in predicted capacity it is 20 against 6: the harmonic number (H_16 = 3.38), less what
#   prompts cost either way;
# * **chunked** lies on **paged** everywhere: prompts of 150 tokens fit the budget of 512,
#   there is nothing to cut.
#
# ## Burstiness: the same mean rate, another tail
#
# Rates are means. Here are 150 requests at exactly 8 requests/s on average, less than
# half of what continuous can serve, with gaps from nearly regular (coefficient of
# variation 0.3) over Poisson (1) to bursts (4).

# %%
rows = []
for cv in (0.3, 1.0, 2.0, 4.0):
    for seed in SEEDS:
        bursts, lengths = Gamma(8.0, cv), (Fixed(PROMPT), Exponential(ANSWER, 450))
        workload = synthetic(150, bursts, *lengths, seed).at_rate(8.0)
        scheduler, cache = ContinuousBatching(16, 8192), ContiguousKVCache(16, LONGEST)
        ttft = metrics.latencies(simulate(workload, scheduler, cache, COST))["ttft"]
        for p in (50, 90):
            value = np.percentile(ttft, p)
            rows.append({"cv": cv, "TTFT, s": value, "statistic": f"P{p}"})
ax = plots.curves(pd.DataFrame(rows), "cv", "TTFT, s", by="statistic")
ax.set_yscale("log")
ax.set_xlabel("coefficient of variation of the gaps between arrivals")
ax.set_title(
    "150 requests at 8 requests/s (simulated, continuous, 16 slots; mean and range of "
    "seeds 0-2)",
    loc="left",
    fontsize=9,
)
show(
    ax, "From regular to bursty the median TTFT rises threefold, the P90 more than tenfold."
)

# %% [markdown]
# The mean rate, the lengths and the engine are the same; the P90 is not. (A P99 of 150
# requests would be nearly their maximum, see 09.) A capacity that was
# measured with Poisson arrivals is not the capacity for a workload that comes in bursts.
#
# ## Try
#
# 1. Put your own lengths into `SPREADS` and predict their gain with `on_average`
#    before you run it. Half short, half long: `Empirical((4, 4, 4, 60))`, below.
# 2. Make the batch larger: H_32 = 4.06. Is the gain in seconds still close to that in
#    iterations?
# 3. Set `PROMPT = 2000`, `LONGEST = 2450` and all rates to (1, 2, 3). Do chunked and
#    paged still agree? Look at `tbt_p99` in `swept`.

# %%
from minibatch.distributions import Empirical

mine = Empirical((4, 4, 4, 60))
static, continuous = both(Fixed(128), mine, AllAtOnce(), 640, seed=0)
print(
    f"predicted {on_average(mine):.2f}, for these 640 lengths "
    f"{longest_over_mean(drawn(static)):.2f}, "
    f"observed {static.num_steps / continuous.num_steps:.2f} in iterations"
)

# %% [markdown]
# ## What this does not show
#
# * A roofline of one model on one GPU, with an overhead of 2 ms an iteration, equal for
#   all. Other kernels, and static servers that return nothing before the batch ends, give
#   other numbers.
# * Here a dead row of a static batch costs its linear layers but reads no K/V; a real one
#   that does makes static slower.
# * Runs of a few hundred requests and three seeds: near a knee, latency depends on how
#   long the run is. A capacity needs a load that lasts (`minibatch sweep --slo`).
# * Schedulers know the longest possible answer of each request exactly, and prompts are
#   all equal. Left padding, which static batching also pays, is left out on purpose
#   (notebook 01 has it).
#
# ## Where it is in the code
#
# `minibatch/sweep.py`, `scenario.py`, `distributions.py`, `arrival_processes.py`;
# `minibatch/studies/negative.py` has the controls at the scale of Orca and FastGen
# (`minibatch reproduce negative`). Next: 11, how far such a simulated GPU can be trusted.
