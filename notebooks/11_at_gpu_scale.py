# %% [markdown]
# # 11 · At GPU scale
#
# **Question.** How long does one iteration take on a GPU that we do not have, and how much
# of a published result does that alone explain?
#
# **You will be able to** work out the time of a decode iteration on paper, say which of
# three limits a batch meets first, fit the same model to a machine that you have, and tell
# a result that a simulation can rebuild from one that it cannot.
#
# **Before this:** 03, 04, 06, 07 · **Minutes:** 35 · **Runs:** simulated GPU

# %%
import numpy as np
import pandas as pd

from minibatch import (
    ContinuousBatching,
    CostModel,
    Engine,
    PagedKVCache,
    SimulatedModel,
    metrics,
)
from minibatch.cost_model import Counts
from minibatch.gpus import GPUS, Efficiency
from minibatch.model_shapes import MODELS
from minibatch.notebook import explore, show
from minibatch.plot_style import MEMORY, SHADES, new_axes, tidy

# %% [markdown]
# The schedulers, policies and caches of this project are the same objects whether a real
# model runs or none. On a *simulated* GPU only the clock differs: a function looks at the
# plan of an iteration and says how many seconds it takes. All of this notebook hangs on
# that function, so we begin by doing its work ourselves.
#
# An iteration reads every weight once, however many requests take part. Beside that it
# reads the K/V of each request, which nobody shares. And it computes: two operations for
# each weight and token.

# %% [markdown]
# ## Predict
#
# One request decodes one token with Llama-2-7B in fp16 on an A100 with 40 GB. It has 1,000
# tokens of context. How many milliseconds? Write a number down before you read on.
#
# You need the shape of the model (32 layers, width 4,096, a gated MLP of 11,008, a
# vocabulary of 32,000), the bandwidth of the memory (1,555 GB/s by its datasheet, of which
# a program gets about 77 %), and 2 ms for all that an engine does beside the GPU.

# %%
layers, width, mlp, vocabulary, context = 32, 4096, 11008, 32000, 1000
bandwidth = 0.767 * 1555e9  # bytes a second
attention = 4 * width * width  # query, key, value, output
per_layer = attention + 3 * width * mlp  # a gated MLP has three matrices
weight_bytes = 2 * layers * per_layer
head_bytes = 2 * vocabulary * width
kv_bytes = 2 * 2 * layers * width  # of one token: K and V, two bytes each
by_hand = {
    "linear": weight_bytes / bandwidth,
    "head": head_bytes / bandwidth,
    "attention": kv_bytes * context / bandwidth,
    "overhead": 2e-3,
}
print(f"layers {weight_bytes / 1e9:.2f} GB, K/V {kv_bytes / 2**10:.0f} KiB a token")
print(f"by hand: {1000 * sum(by_hand.values()):.2f} ms")

# %% [markdown]
# (The file of this model has 13.5 GB. The half GB that is missing above is the head, which
# stands in its own line, and the table of embeddings, of which an iteration reads only a
# row a token.)
#
# `CostModel` takes the same numbers from a `ModelShape` and a `GPU`. It is asked with
# *counts*: tokens through the layers, positions through the head, K/V rows read and
# written, pairs of a query and a key.

# %%
cost = CostModel(MODELS["llama-2-7b"], GPUS["a100-40"])
parts = cost.parts(
    Counts(tokens=1, logits=1, kv_read=context, kv_written=1, attended=context)
)
print(f"{'':10} {'by hand':>9} {'CostModel':>10}   (milliseconds)")
for name, seconds in by_hand.items():
    print(f"{name:10} {1000 * seconds:9.3f} {1000 * getattr(parts, name):10.3f}")
print(f"{'sum':10} {1000 * sum(by_hand.values()):9.3f} {1000 * sum(parts):10.3f}")
assert abs(sum(by_hand.values()) / sum(parts) - 1) < 0.01

# %% [markdown]
# The two agree because they are the same arithmetic. That shows that the code does what we
# think, and nothing about real GPUs; for that, see "How far off is it" below.
#
# ## Predict, too: which limit comes first?
#
# Now let a batch grow. Three things can end the gain of one more request, each at a batch
# size that follows from a division. All requests have 1,000 tokens of context. Which of the
# three is the smallest?

# %%
memory = 0.9 * 40 * 2**30 - cost.weight_bytes  # what is left for K/V in 90 % of the memory
limits = {
    "K/V takes as long to read as the weights": weight_bytes / (kv_bytes * context),
    "the memory is full": memory / (kv_bytes * context),
    "arithmetic takes as long as reading the weights (peaks)": 312e12 / 1555e9,
}
for what, batch in limits.items():
    print(f"{what:57} {batch:6.1f} requests")
assert int(limits["the memory is full"]) == cost.kv_tokens() // context
assert cost.gpu.ridge == 312e12 / 1555e9


# %%
def decode(cost, batch, context):
    """The parts of an iteration in which `batch` requests decode, `context` tokens each."""
    return cost.parts(Counts(batch, batch, batch * context, batch, batch * context))


CAUSES = {"overhead": "#D9D9D9", "linear": "#555555", "head": "#999999"}
CAUSES["attention"] = SHADES[1]


def draw(gpu="a100-40", model="llama-2-7b", context=1000):
    cost = CostModel(MODELS[model], GPUS[gpu])
    fits = cost.kv_tokens() // context
    batch = np.linspace(1, max(2 * fits, 8), 200)
    times = decode(cost, batch, context)
    heights = [1000 * (getattr(times, name) + 0 * batch) for name in CAUSES]
    ax = new_axes(3.6)
    ax.stackplot(batch, heights, colors=list(CAUSES.values()), labels=list(CAUSES))
    ax.axvspan(fits, batch[-1], color="white", alpha=0.65, linewidth=0)
    full = f"memory is full: {fits} requests"
    ax.axvline(fits, color="black", linewidth=1.2, linestyle="--", label=full)
    title = f"A decode iteration, {cost.name}, context {context:,} (simulated)"
    tidy(ax, title, "requests", "milliseconds")
    ax.set_xlim(1, batch[-1])
    ax.legend(loc="upper left", fontsize=8, framealpha=1, edgecolor="white", reverse=True)
    return ax


show(
    draw(), alt="Time of a decode iteration by batch size: attention overtakes linear at 25"
)

# %% [markdown]
# Left of the dashed line is what fits. The dark band hardly grows: reading the weights
# costs nearly the same for 1 and for 48 requests. This, the head and the 2 ms of the engine
# are all that batching can save. The violet band grows with every request and is as thick
# as the dark one at 25. The ridge point, which every introduction to rooflines tells of, is
# at 201 tokens by the peaks of the datasheet (at 183 by the shares of them that a program
# gets: see below). A batch of decodes with this context on this GPU never gets there.
# Prompts do: one prompt of 500 tokens is beyond it.

# %%
print(f"{'requests':>8} {'iteration':>10} {'tokens/s':>9} {'a request':>10}")
for batch in (1, 8, 25, 48):
    seconds = sum(decode(cost, batch, context))
    print(
        f"{batch:8} {1000 * seconds:7.1f} ms {batch / seconds:9.0f} {1 / seconds:7.1f} /s"
    )
gain = 48 / sum(decode(cost, 48, context)) * sum(decode(cost, 1, context))
print(f"tokens a second of 48 requests over those of one: {gain:.1f} (simulated)")

# %% [markdown]
# ## How far off is it?
#
# Three numbers in that function are not arithmetic: the share of the bandwidth that a
# program gets, the share of the peak of arithmetic, and how sharp the corner between the
# two is. If reading and computing overlapped perfectly, the longer of the two would count;
# if they took turns, the sum. A GPU does something between, and one number says what: with
# sharpness *p* the time is (read^p + compute^p)^(1/p).
#
# Where both take equally long, a perfect overlap gives once that time, taking turns twice.
# With the 1.68 of the A100 it should be 2^(1/1.68). Predict it, then ask.

# %%
share = cost.gpu.efficiency
corner = cost.gpu.ridge * share.compute / share.bandwidth  # tokens: both take equally long
read = weight_bytes / (share.bandwidth * cost.gpu.bandwidth)
print(f"predicted at {corner:.0f} tokens: {2 ** (1 / 1.68):.3f} times the reading")
print(
    f"{'tokens':>7} {'longer':>7} {'CostModel':>10} {'sum':>7}   (ms, layers of Llama-2-7B)"
)
for tokens in (1, 64, corner, 512, 2048):
    computed = read * tokens / corner
    smooth = cost.parts(Counts(tokens, 1, tokens, tokens, tokens)).linear
    longer, both = max(read, computed), read + computed
    print(f"{tokens:7.0f} {1e3 * longer:7.2f} {1e3 * smooth:10.2f} {1e3 * both:7.2f}")
at_corner = cost.parts(Counts(corner, 1, 1, 1, 1)).linear
assert abs(at_corner / read - 2 ** (1 / share.sharpness)) < 1e-6

# %% [markdown]
# The three numbers were fitted to measured times of single linear layers: those of
# Llama-2-7B, 1 to 4,096 tokens, from the published profiles of Vidur (Agrawal et al., MLSys
# 2024; microsoft/vidur). The mean absolute error there is 3.4 % on the A100, 4.6 % on the
# H100 and 3.2 % on the A40. On other models, which the fit has not seen (Llama-3-8B,
# CodeLlama-34B, Llama-2-70B), it is 4 to 9 %. The tests ask for less than 6 % and 12 %,
# where that data is at hand.
#
# This is about linear layers alone. That attention reaches the same shares, and that an
# engine spends 2 ms an iteration beside the GPU, are assumptions. The second one can be far
# off: the profiles of splitwise-sim give Llama-2-70B on 8 A100 45 ms for one request, where
# reading the weights takes 8.5.

# %% [markdown]
# ## Calibrate it to a machine
#
# On a machine that you have you need not assume. `minibatch calibrate --out here.json`
# times iterations of a real model for about three minutes, fits, and says how far off it is
# on runs that the fit has not seen; `minibatch simulate --gpu here.json --kv-tokens 2304`
# uses it.
#
# Whether such a fit can work at all is best asked where the truth is known. So here is a
# made-up machine, an A100 with other shares and 4 ms of overhead. We let it run 40 requests
# twice, once with exact times and once with every time off by about 5 %, as if somebody
# else were using the machine, and fit each.
#
# What do you expect back: from exact times? From noisy ones?

# %%
from minibatch.arrival_processes import AllAtOnce, Poisson
from minibatch.calibration import held_out_error
from minibatch.clock import VirtualClock
from minibatch.distributions import Uniform
from minibatch.open_loop import from_lengths, synthetic

made_up = Efficiency(bandwidth=0.5, compute=0.6, sharpness=2.0)
truth = CostModel(cost.model, GPUS["a100-80"], efficiency=made_up, overhead=4e-3)


def record(noise, seed):
    """A trace of 40 requests; times are off by a factor exp(normal(0, noise))."""
    random = np.random.default_rng(seed)
    clock = VirtualClock(lambda plan: truth(plan) * random.lognormal(0, noise))
    kv = PagedKVCache(num_blocks=1000, block_size=16)
    engine = Engine(SimulatedModel(truth), ContinuousBatching(16, 2048), kv, clock=clock)
    engine.run(synthetic(40, Poisson(4.0), Uniform(4, 900), Uniform(2, 30), seed).requests)
    return engine.trace


# %%
unseen = record(noise=0.0, seed=1)
rows = {"the truth": (0.5, 0.6, 2.0, 4.0, 0.0)}
for name, noise in (("exact times", 0.0), ("5 % noise", 0.05)):
    found = CostModel.fit(record(noise, seed=0), truth.model, truth.gpu)
    share, error = found.efficiency, held_out_error(found, unseen)
    numbers = (share.bandwidth, share.compute, share.sharpness, 1000 * found.overhead)
    rows[name] = (*numbers, 100 * error.mean)
names = ["bandwidth", "compute", "sharpness", "overhead, ms", "error on an unseen run, %"]
pd.DataFrame.from_dict(rows, orient="index", columns=names).round(2)

# %% [markdown]
# Exact times give all four numbers back. Noise of 5 % does not: the overhead is gone, and a
# smaller bandwidth stands in for it. Both are the same in every iteration, so the times
# hardly tell them apart. Still the error on a run that the fit has not seen stays small. So
# a fitted model can predict well although its parameters mean little: do not read "the
# bandwidth of this machine" off such a fit.
#
# The noise here is independent from one iteration to the next. On a shared machine it is
# not; the README tells of errors of 14 and 18 % on iterations held out, on two cores whose
# speed drifts.

# %% [markdown]
# ## A published result: how many requests fit?
#
# Kwon et al. (PagedAttention, SOSP 2023, figures 2 and 13a) serve OPT-13B on an A100-40GB.
# There is room for the K/V of 15,700 tokens. With lengths like ShareGPT's, means 161 and
# 338 tokens, and more requests than fit, they count how many run together. Three systems
# reserve one run of memory a request, rounded up to a power of two by a buddy allocator:
# *Max* for the longest request there may be (2,048 tokens), *Pow2* for the answer's length
# up to the next power of two, *Oracle* for the exact length. vLLM takes blocks of 16 tokens
# as the request grows, and keeps 1 % of them free.
#
# This is arithmetic on lengths, so a prediction needs no engine. Whoever looks at a random
# moment sees a request in proportion to how many iterations it stays, which is its number
# of output tokens. So each length counts as often as that. A request of the first three
# holds its whole run from its first iteration on; in vLLM, on average, it holds its prompt,
# half of its output, and half a block that is not full.

# %%
from minibatch.studies import vllm

pairs = vllm.lengths(20_000, seed=0)  # exponential with these means, at most 2,048 together
prompt, output = pairs.T.astype(float)


def seen(rows):
    """The mean over requests, each counted as often as it has output tokens."""
    return (output * rows).sum() / output.sum()


def rounded(rows):
    return 2 ** np.ceil(np.log2(rows))


predicted = {
    "Orca (Max)": vllm.SLOTS // vllm.CONTEXT,
    "Orca (Pow2)": vllm.SLOTS / seen(rounded(np.minimum(prompt + rounded(output), 2048))),
    "Orca (Oracle)": vllm.SLOTS / seen(rounded(prompt + output - 1)),
    "vLLM, blocks of 16": 0.99 * vllm.SLOTS / seen(prompt + output / 2 + 15 / 2),
}
print({name: round(float(batch), 1) for name, batch in predicted.items()})

# %% [markdown]
# Before the run: which of the four predictions is too high, and why? (Think of what a buddy
# allocator does with 15,700 rows besides rounding.)
#
# Now the engine, with its real scheduler and caches: 200 requests, all there at the
# beginning, three seeds. `vllm.steady` takes means weighted by time, over the part of a run
# in which somebody waits, without its first 15 %.

# %%
from minibatch.simulation import simulate

n, seeds, names = 200, (0, 1, 2), list(vllm.PUBLISHED)
opt = CostModel(MODELS["opt-13b"], GPUS["a100-40"])


def serve(name, seed):
    workload = from_lengths(vllm.lengths(n, seed), AllAtOnce(), seed)
    scheduler = ContinuousBatching(max_num_batched_tokens=vllm.SLOTS)
    return simulate(workload, scheduler, vllm.cache(name), opt)


traces = {name: [serve(name, seed) for seed in seeds] for name in names}
means = [[vllm.steady(trace) for trace in traces[name]] for name in names]
table = vllm.summarise(names, means)

# %%
print(
    f"{'':18} {'predicted':>10} {'simulated':>12} {'published':>10} {'filled':>9} "
    f"{'no chunk':>9}"
)
for name, row in table.iterrows():
    simulated = f"{row['batch']:.1f} ± {row['batch ±']:.1f}"
    print(
        f"{name:18} {predicted[name]:10.1f} {simulated:>12} {vllm.PUBLISHED[name][0]:10.1f}"
        f" {row['filled']:9.1%} {row['free']:9.1%}"
    )

# %% [markdown]
# (± is half of a 95 % interval of the mean over three seeds; *filled* is the share of the
# rows that hold a token, *no chunk* the share that is free.)
#
# The rounding was in our prediction; that 8 to 10 % of the memory stays free was not. With
# Max no arrangement could use it: beside 7 times 2,048 rows there are 1,364, and an eighth
# request does not fit. With Pow2 and Oracle it is too little, or lies in pieces too small,
# for whoever is next. (Take the free share from those two predictions, and 9.5 and 12.6 are
# left, as simulated. That is bookkeeping and no second test: the share is from the same
# run.) Paged memory has no such pieces: the only rows that hold no token are the ends of
# the last blocks and the 1 % kept free.

# %%
ax, places = new_axes(3.4), np.arange(len(names))
error = {"xerr": table["batch ±"], "capsize": 3}
ax.barh(places, table["batch"], 0.55, color=SHADES[1], label="simulated", **error)
published = [vllm.PUBLISHED[name][0] for name in names]
ends = places - 0.32, places + 0.32
ax.vlines(published, *ends, color="black", linewidth=2.5, label="published")
ours = [predicted[name] for name in names]
ax.plot(ours, places, "o", color="#666666", markerfacecolor="white", label="predicted")
title = f"OPT-13B, 15,700 rows of K/V (simulated: {n} requests, seeds 0 to 2)"
tidy(ax, title, "requests at a time", "")
ax.set_yticks(places, names)
ax.invert_yaxis()
ax.legend(fontsize=8, frameon=False, loc="upper right")
show(
    ax, alt="Requests at a time: simulated bars, published marks and predictions are close"
)

# %% [markdown]
# A study of this project puts that into words, and computes the verdict from the numbers.
# *Holds* means: within a tenth of the requests and 3 points of the share. Two things to
# know before you believe it. That Pow2 never asks for more than 2,048 tokens was decided
# after a first run without that cap had given about 7 requests; the paper does not say. And
# with three short runs the interval of the last row is wider than the tolerance; the study
# takes five runs of 800 requests.

# %%
import textwrap

for name in names:
    claim = vllm.memory_claim(name, table)
    print(f"{claim.claim}\n    published  {claim.published}")
    print(textwrap.fill(f"    ours       {claim.ours}", 92, subsequent_indent=" " * 15))
    print(f"    verdict    {claim.verdict.upper()}\n")

# %% [markdown]
# The same as a picture, from the traces of seed 0. A light trace keeps no step reports,
# only numbers an iteration; for this they are enough.

# %%
shown = ("Orca (Max)", "Orca (Oracle)", "vLLM, blocks of 16")
axes = new_axes(5.2, 3, 1, sharex=True)
for ax, name in zip(axes, shown, strict=True):
    steps, base = metrics.steps_table(traces[name][0]), 0
    for kind in ("filled", "reserved", "fragmentation"):
        top = base + 100 * steps[f"kv_{kind}"] / vllm.SLOTS
        look = MEMORY[kind]
        ax.fill_between(steps["end"], base, top, label=look.label, **look.patch)
        base = top
    took = f"{n} requests in {steps['end'].iloc[-1]:.0f} s"
    tidy(ax, f"{name}: {took} (simulated, seed 0)", "", "% of the rows")
    ax.set_ylim(0, 100)
axes[-1].set_xlabel("seconds (simulated)", fontsize=9)
axes[-1].legend(fontsize=8, frameon=False, loc="upper right")
show(
    axes,
    alt="What fills the rows: with Max mostly fragmentation, with blocks nearly all tokens",
)

# %% [markdown]
# White is free. "Reserved" will be filled later; what was asked for and never will be, or
# was added by rounding, counts as fragmentation. The white notches of Oracle are moments at
# which a long request is next, and no piece is long enough for it. When the queue is empty
# each run drains; the means above leave that part out. And the run with blocks ends first:
# more requests share each reading of the weights.

# %% [markdown]
# ## What such a run cannot show
#
# Equal kernels for everybody are what makes the comparison clean, and what makes some
# claims unreachable. One of them we can see at work. Sarathi-Serve (OSDI 2024) reports that
# computing a prompt in chunks of 512 tokens costs up to 25 % more prefill time than
# computing it whole, and chunks of 2,048 cost about nothing. What does the cost model say,
# for a prompt of 4,096 tokens?

# %%
mistral = CostModel(MODELS["mistral-7b"], GPUS["a100-80"])


def prefill(prompt, chunk):
    """Seconds for a prompt alone, in chunks: on the GPU, and with 2 ms an iteration."""
    gpu = engine = 0.0
    for start in range(0, prompt, chunk):
        stop = start + chunk
        pairs = chunk * (start + stop + 1) // 2  # the query at position i sees i + 1 keys
        parts = mistral.parts(Counts(chunk, int(stop == prompt), stop, chunk, pairs))
        gpu, engine = gpu + sum(parts) - parts.overhead, engine + sum(parts)
    return gpu, engine


whole = prefill(4096, 4096)
print(f"{'':16} {'on the GPU':>18} {'with the overhead':>20}   (simulated)")
for chunk in (4096, 2048, 512, 256):
    times = zip(prefill(4096, chunk), whole, strict=True)
    cells = [f"{1000 * took:7.1f} ms, {took / best - 1:+6.1%}" for took, best in times]
    print(f"chunks of {chunk:5,}:", *cells, sep="  ")

# %% [markdown]
# Chunks of 512 cost 6 % more on the GPU, since a chunk near the corner pays for reading the
# weights as well, and 11 % with the 2 ms of each iteration, which all simulations here pay.
# Theirs, of another model and GPU: up to 25 %. How kernels behave on small or odd shapes is
# not in a roofline, which has no shapes. If that is the rest, a comparison with chunks
# comes out a little too well for them here, and no parameter should be turned until it does
# not.
#
# Of the other claims that the project rebuilds, these "cannot be shown here", and the
# studies say so instead of a number:
#
# - Orca: 36.9 times the throughput of FasterTransformer at equal latency (175B on 16 GPUs).
#   Two engines with other kernels, pipeline stages and microbatches; the study shows the
#   share of the mechanism alone.
# - Anyscale: vLLM 23 times naive static batching. Other kernels, other overheads; the study
#   shows the factors of harness, mechanism and paging apart.
# - vLLM: recomputing costs the same at every block size, swapping is slow with small
#   blocks. Bytes over bandwidth have no block size, and the start of a transfer is not in
#   them.
#
# `minibatch reproduce` runs all six studies, `minibatch reproduce vllm` this one.

# %% [markdown]
# ## Where it is in the code
#
# `cost_model.py`, `gpus.py` and `model_shapes.py` (the time of an iteration),
# `calibration.py` (the fit), `simulation.py` (an engine on a virtual clock), `studies/`
# (published results). Next: 12, workloads that somebody has recorded.

# %% [markdown]
# ## Try
#
# Another GPU, another model, another context. Before you move anything: Llama-2-7B has 32
# K/V heads, Llama-3-8B has 8. Where does the dashed line go? And what happens to the violet
# band if the context is four times as long?

# %%
sliders = explore(
    draw,
    gpu=["l4", "a100-40", "a100-80", "h100", "h200"],
    model=["llama-2-7b", "llama-3-8b", "qwen3-8b", "mistral-7b"],
    context=[250, 1000, 2000, 4000],
)

# %% [markdown]
# And one to write yourself. Sarathi-Serve's limit on the time between tokens is 0.1 s for
# Mistral-7B on an A100-80GB, said to be about five times a decode iteration of 32 requests
# with 4,096 tokens each. Work it out by hand first; then find out what a prompt of 8,192
# tokens in the same iteration would do to it.

# %%
batch, long = 32, 4096
seconds = sum(decode(mistral, batch, long))
print(f"{1000 * seconds:.1f} ms, times five: {5 * seconds:.3f} s (simulated)")
# hint: add the prompt to the counts; the window of 4,096 bounds its pairs at about
# prompt * 4096

# %% [markdown]
# ## What this does not show
#
# - All times are simulated, of one engine that decides in no time, without tokenizer or
#   network. The 2 ms of overhead are an assumption; engines with ten times that exist.
# - The fit was to linear layers. Nothing here was compared with whole iterations of a real
#   engine on a real GPU.
# - The lengths of the vLLM experiment are exponential with the published means, not
#   ShareGPT's own; 200 requests and three seeds are few.
# - That four numbers come out near the published ones shows that memory decides them. It
#   does not show the throughput of vLLM, in which kernels have a part.
