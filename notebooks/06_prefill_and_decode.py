# %% [markdown]
# # 06 · Prefill and decode are different work
#
# **Question.** Why does a token of a prompt cost so much less than a token of an answer,
# and what does a batch change about it?
#
# **You will be able to** count the bytes and the operations of one iteration from the shape
# of a model, say from these which of the two decides how long it takes, and place an
# iteration on a roofline of a machine that you have measured.
#
# **Before this:** 00 (prefill, decode) and 02 (iterations) · **Minutes:** 20 · **Runs:**
# SmolLM2-135M on this machine, simulated GPU

# %%
import time

import numpy as np
import pandas as pd
import torch
from matplotlib.ticker import LogLocator

from minibatch import (
    ContinuousBatching,
    CostModel,
    Engine,
    PagedKVCache,
    Request,
    SamplingParams,
    TransformersModel,
    metrics,
    plots,
)
from minibatch.compare import machine
from minibatch.cost_model import Counts
from minibatch.gpus import GPUS
from minibatch.model_shapes import MODELS
from minibatch.notebook import show
from minibatch.plot_style import TOKENS, new_axes, sign, tidy

# %% [markdown]
# ## One request, two kinds of iteration
#
# The first iteration of a request computes its whole prompt: *prefill*. Every later one
# computes one token, the one that was just generated: *decode*. Here is one request alone
# on a real model, and what the engine's trace says about it.
#
# (Numbers in this section are measured: on your machine they are others, and beside other
# programs they wobble.)

# %% tags=["measured"]
model = TransformersModel("smollm2-135m")  # float32, on the CPU


def run(batch, prompt, new):
    """The trace of `batch` requests, all at once: `prompt` tokens in, `new` tokens out."""
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    tokens = range(100, 100 + prompt)
    requests = [Request(tokens, params, f"r{i}", arrival_time=0.0) for i in range(batch)]
    scheduler = ContinuousBatching(max_num_batched_tokens=512)
    meta = {"workload": f"{batch} x {prompt} + {new} tokens, greedy (no seed)"}
    meta |= {"dtype": model.dtype, "machine": machine()}
    cache = PagedKVCache(num_blocks=64, block_size=16)
    engine = Engine(model, scheduler, cache, meta=meta)
    engine.run(requests)
    return engine.trace


run(batch=2, prompt=64, new=3)  # not measured: the first run pays for what is done once
trace = run(batch=1, prompt=256, new=12)
steps = metrics.steps_table(trace)
steps["ms"] = 1000 * steps["duration"]
steps["ms a token"] = steps["ms"] / steps["num_tokens"]
steps[["prefill", "decode", "ms", "ms a token"]].head(6).round(1)

# %% tags=["measured"]
alt = "Tokens in each iteration of one request: 256 of prefill, then 1 of decode each"
show(plots.token_budget(trace), alt)

# %% [markdown]
# The first column is one iteration of 256 tokens, each of the others an iteration of one.
# The prefill takes longer, of course; but *per token* it is far cheaper: compare the last
# column of the table. The same weights, the same kind of token: why?
#
# Write down a guess before you go on: if 32 requests decode together, how much does a token
# cost, compared with one request that decodes alone? A half? A thirty-second?

# %% [markdown]
# ## Predict
#
# Two things take time. All weights have to come from memory to the processor once an
# iteration, however many tokens it computes. And each token is multiplied with each weight:
# two operations (a multiplication and an addition) a weight. Both can be counted from the
# shape of the model. The *head* (the matrix that turns a token into a score for each word
# of the vocabulary) is needed only where a token is sampled: for every decode, and once for
# a whole prompt.

# %%
shape, BYTES = MODELS["smollm2-135m"], 4  # float32
LAYERS = shape.num_layers * shape.layer_parameters
HEAD = shape.head_parameters  # which is the table of embeddings too, so it exists once
READ = BYTES * (LAYERS + HEAD)
print(f"weights: {LAYERS / 1e6:.1f} million in the layers and {HEAD / 1e6:.1f} in the head")
print(f"to read: {READ / 1e6:.0f} MB an iteration")

held = sum(weight.numel() for weight in model.model.parameters())  # of the real model
assert abs((LAYERS + HEAD) / held - 1) < 0.001  # we leave out vectors


def flop(tokens, sampled):
    """Operations of an iteration of so many tokens, of which so many are sampled from."""
    return 2 * LAYERS * tokens + 2 * HEAD * sampled


work = {"1 decode": (1, 1), "32 decodes": (32, 32)}
work |= {"prefill of 32": (32, 1), "prefill of 512": (512, 1)}
for name, (tokens, sampled) in work.items():
    count = flop(tokens, sampled)
    print(f"{name:15} {count / 1e9:6.2f} GFLOP, {count / READ:6.1f} operations a byte read")

# %% [markdown]
# The last number is the *arithmetic intensity*. A decode of one request does half an
# operation for each byte that it reads (2 operations a weight of 4 bytes). The processor
# could do more in the time that a byte takes to arrive; so it waits for memory, and more
# decodes in the same iteration could be (nearly) free: as many as it has operations to spare.
#
# How many that is depends on the machine. Measure two numbers of yours: how fast it reads a
# large matrix (times one vector, so that each number is used once), and how fast it
# multiplies two matrices that fit into its caches.


# %% tags=["measured"]
def seconds_of(repeats, what, *arguments):
    """The fastest of some tries: what the machine can do if nobody disturbs it."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        what(*arguments)
        times.append(time.perf_counter() - start)
    return min(times)


large, vector = torch.ones(16384, 8192), torch.ones(8192)  # 537 MB, as large as the weights
bandwidth = large.nbytes / seconds_of(8, torch.mv, large, vector)
small = torch.ones(1024, 1024)
peak = 2 * 1024**3 / seconds_of(40, torch.mm, small, small)
del large
print(f"this machine, {torch.get_num_threads()} thread(s), float32:")
print(f"reads {bandwidth / 1e9:.1f} GB/s, computes {peak / 1e9:.0f} GFLOP/s")
print(f"ratio: {peak / bandwidth:.1f} operations a byte")

# %% [markdown]
# That ratio is the *ridge*. Work with fewer operations a byte waits for memory; work with
# more waits for arithmetic. In tokens: an iteration of `ridge x 4 bytes / 2 operations`
# tokens is as long to compute as to read.
#
# So the prediction for any iteration, called a *roofline*, is the longer of two times. It
# is a lower bound: no program reaches either rate, and we count neither attention nor the
# time that Python takes.


# %% tags=["measured"]
def predict(tokens, sampled):
    """Seconds of an iteration, at the least."""
    return max(READ / bandwidth, flop(tokens, sampled) / peak)


print(f"ridge: {peak / bandwidth * BYTES / 2:.0f} tokens")
for name, (tokens, sampled) in work.items():
    ms = 1000 * predict(tokens, sampled)
    print(f"{name:15} at least {ms:5.0f} ms, {ms / tokens:5.1f} ms a token")

# %% [markdown]
# ## Measure
#
# Prefills of 16 to 512 tokens, and decodes of 1 to 32 requests with short contexts. Each is
# a run of the engine, and the duration is that of the iterations of that kind in its trace.
# Machines are noisy, and noise comes in stretches, so all sizes are measured in turn, a few
# rounds of them, and we take medians.

# %% tags=["measured"]
ROUNDS, DECODES = 3, 3  # rounds of everything; iterations of decodes in a run
PROMPTS, BATCHES = (16, 32, 128, 512), (1, 2, 4, 8, 16, 32)

rows = []
for _ in range(ROUNDS):
    for tokens in PROMPTS:
        steps = metrics.steps_table(run(1, tokens, 1))
        rows += [("prefill", tokens, 1, seconds) for seconds in steps["duration"]]
    for batch in BATCHES:
        steps = metrics.steps_table(run(batch, 2, 1 + DECODES))
        seconds = steps["duration"][steps["decode"] == batch]
        rows += [("decode", batch, batch, each) for each in seconds]

measured = pd.DataFrame(rows, columns=["kind", "tokens", "sampled", "seconds"])
groups = measured.groupby(["kind", "tokens", "sampled"])["seconds"]
table = (1000 * groups.agg(["median", "min", "max"])).reset_index()
pairs = zip(table["tokens"], table["sampled"], strict=True)
table["at least"] = [1000 * predict(*pair) for pair in pairs]
table["ms a token"] = table["median"] / table["tokens"]
ms = table[table["kind"] == "decode"].set_index("tokens")["ms a token"]
print(
    f"a token of 32 decodes: {ms[32]:.1f} ms, 1/{ms[1] / ms[32]:.0f} of that of one alone,"
)
print(
    f"which takes {ms[1]:.0f}; by the roofline 1/{32 * predict(1, 1) / predict(32, 32):.0f}"
)
table.drop(columns="sampled").round(1)


# %% tags=["measured"]
def log_y(ax):
    """Labels 1, 2, 5, 10, ..., whatever the range that this machine gives."""
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("")


ax = new_axes(4.0)
for kind, group in table.groupby("kind"):
    color, x = TOKENS[kind].color, group["tokens"]
    every = measured[measured["kind"] == kind]
    each = 1000 * every["seconds"] / every["tokens"]
    ax.plot(every["tokens"], each, ".", color=color, alpha=0.4, markersize=4)
    ax.plot(x, group["ms a token"], "o-", color=color, label=f"{kind}: median of the dots")
    ax.plot(x, group["at least"] / x, "--", color=color, label=f"{kind}: roofline")
tidy(ax, "Cost of a token (measured)", "tokens in the iteration", "ms a token")
note = f"measured: SmolLM2-135M, float32, {machine()}; {ROUNDS} rounds, greedy (no seed);"
note += " decodes after prompts of 2 tokens"
sign(ax.figure, note)
ax.set_xscale("log", base=2)
log_y(ax)
ax.set_xticks(2 ** np.arange(10), 2 ** np.arange(10))
ax.legend(fontsize=8, frameon=False)
show(ax, "Cost of a token against tokens in the iteration: both kinds fall, then flatten")

# %% [markdown]
# Read it from left to right. A token becomes cheaper the more of them share an iteration,
# whether they are one prompt or many answers: where the two kinds have equally many tokens,
# they cost about the same. So it is not the *kind* of token that is expensive. A decode is
# expensive because it brings one token a request, and a request alone brings one. A prompt
# is a batch by itself; answers need other people's requests to become one.
#
# To the right of the ridge the curves flatten: there every further token brings its own
# arithmetic, and that the weights are read for all of them together hardly counts. So the
# answer to the guess (it stands above the table) is a thirty-second only where the ridge
# lies beyond 32 tokens.
#
# Now the same medians as rates, on the roofline.

# %% tags=["measured"]
ax = new_axes(4.0)
x = np.geomspace(0.3, 300, 200)  # operations a byte
roof = np.minimum(peak, bandwidth * x) / 1e9
ax.plot(x, roof, color="#999999", label="roof: bandwidth (slope), peak (flat)")
for kind, group in table.groupby("kind"):
    count, color = flop(group["tokens"], group["sampled"]), TOKENS[kind].color
    rate = count / (group["median"] / 1000) / 1e9
    ax.plot(count / READ, rate, "o", color=color, label=f"{kind}, median")
    below = {"textcoords": "offset points", "xytext": (4, -9), "fontsize": 7}
    for a, b, tokens in zip(count / READ, rate, group["tokens"], strict=True):
        ax.annotate(str(tokens), (a, b), color=color, **below)
tidy(ax, "Roofline (measured)", "operations a byte read", "GFLOP/s")
sign(ax.figure, note)
ax.set_xscale("log")
log_y(ax)
ax.legend(title="labels: tokens", fontsize=8, title_fontsize=8, frameon=False)
show(ax, "Measured rates: decodes lie under the slope of the roof, prefills under its top")

# %% [markdown]
# Decodes of few requests lie under the slope, long prompts under the flat part. How far a
# point is below the roof is what two numbers cannot say. Part of it can be told apart:
# multiply the model's matrices, all of them, once each, with nothing around them.

# %% tags=["measured"]
matrices = [weight.detach() for weight in model.model.parameters() if weight.ndim == 2]
widths = {matrix.shape[1] for matrix in matrices}
decode = table[table["kind"] == "decode"].set_index("tokens")["median"]


def multiply(tokens):
    inputs = {width: torch.ones(tokens, width) for width in widths}
    for matrix in matrices:
        torch.mm(inputs[matrix.shape[1]], matrix.T)


ms = {"roofline": [], "matrices alone": [], "decode iteration": []}
for tokens in (1, 4, 8, 32):
    ms["roofline"].append(1000 * predict(tokens, tokens))
    ms["matrices alone"].append(1000 * seconds_of(3, multiply, tokens))
    ms["decode iteration"].append(decode[tokens])
pd.DataFrame(ms, index=pd.Index((1, 4, 8, 32), name="tokens; ms:")).round(1)

# %% [markdown]
# From the first column to the second: how well the matrix routines use the machine. If they
# take much longer for 8 rows than for 1, where the roofline says the same, then it is they
# that are poor at a few rows, and not the engine. From the second to the third: attention,
# norms, hundreds of small operations, Python, sampling. (The columns were measured at
# different moments. Beside other programs even "at least" can be off.)

# %% [markdown]
# ## The same on an A100 (simulated)
#
# A GPU does more of both, and much more arithmetic than reading. `CostModel` is the sum of
# the same terms with datasheet rates, times a share of them that real kernels reach, plus
# attention, the K/V that each request reads for itself, and a fixed overhead. In 16 bits a
# weight is 2 bytes, so the ridge in tokens is simply operations a byte.

# %%
gpu, llama = GPUS["a100-80"], MODELS["llama-2-7b"]
cost = CostModel(llama, gpu)
weights = llama.num_layers * llama.layer_parameters + llama.head_parameters

print(f"{cost.name}, by the datasheet:")
print(f"reading all weights {1000 * 2 * weights / gpu.bandwidth:.1f} ms")
print(f"computing a token   {1000 * 2 * weights / gpu.flops:.3f} ms")
print(f"ridge: {gpu.flops / gpu.bandwidth:.0f} tokens")
print(f"(of the A100-40GB, whose memory is slower: {GPUS['a100-40'].ridge:.0f})")
assert gpu.ridge == gpu.flops / gpu.bandwidth
share = cost.efficiency
reached = gpu.ridge * share.compute / share.bandwidth
print(
    f"kernels reach {share.compute:.0%} of the arithmetic, {share.bandwidth:.0%} of the "
    "reading:"
)
print(f"ridge at these rates: {reached:.0f} tokens")

# %% [markdown]
# ### Predict
#
# From how many tokens on does an iteration take twice as long as with one? If reading and
# computing overlapped wholly, it would be at twice the ridge, the one at the rates that
# kernels reach. Write down a number, then look. (Decodes here have a context of one token,
# so that K/V hardly count.)


# %%
def iteration(decodes=0, context=1, prompt=0):
    """Seconds (simulated) of so many decodes with this context each, and one prompt."""
    return cost.seconds(
        Counts(
            tokens=decodes + prompt,
            logits=decodes + (prompt > 0),
            kv_read=decodes * context + prompt,
            kv_written=decodes + prompt,
            attended=decodes * context + prompt * (prompt + 1) // 2,
        )
    )


twice = next(n for n in range(1, 2000) if iteration(n) >= 2 * iteration(1))
print(f"twice the time of one token: predicted {2 * reached:.0f}, observed {twice}")
for n in (1, 2, 32, 128, 256, 512):
    ms = 1000 * iteration(n)
    print(f"{n:4} decodes: {ms:5.1f} ms, {ms / n:6.3f} ms a token")

# %% [markdown]
# Two things that the prediction left out pull in opposite directions: near the ridge
# reading and computing get in each other's way (so it is earlier), and the overhead of 2 ms
# does not grow (so it is later). 32 decodes take hardly longer than one.
#
# But decodes of real requests have contexts. K/V are read by one request only, so a batch
# does not make them cheaper, and they take memory. How many requests fit?

# %%
room = cost.kv_tokens()  # tokens whose K/V fit beside the weights
print(f"room for the K/V of {room:,} tokens, {cost.kv_bytes_per_token / 1e6:.2f} MB each")
for context in (100, 1000, 4000):
    print(f"{context:5,} tokens of context: {room // context:,} requests fit")

# %%
ax = new_axes(4.0)
sizes = [2**k for k in range(13)]
prompts = [1e6 * iteration(prompt=n) / n for n in sizes]
blue, orange = TOKENS["prefill"].color, TOKENS["decode"].color
ax.plot(sizes, prompts, "s-", color=blue, markersize=4, label="prefill of one prompt")
for context, style in {100: "o-", 1000: "o--", 4000: "o:"}.items():
    most = room // context
    batches = [n for n in sizes if n < most] + [most]
    each = [1e6 * iteration(n, context) / n for n in batches]
    label = f"decodes with {context:,} tokens of context"
    ax.plot(batches, each, style, color=orange, markersize=4, label=label)
ax.axvline(gpu.ridge, color="#999999", linewidth=1)
ax.text(1.06 * gpu.ridge, 6000, f"ridge, {gpu.ridge:.0f} tokens", fontsize=8)
title = f"Cost of a token (simulated: {cost.name}, 16 bits)"
tidy(ax, title, "tokens in the iteration", "µs a token")
ax.set_xscale("log", base=2)
ax.set_yscale("log")
ax.set_xticks(sizes, sizes)
ax.legend(fontsize=8, frameon=False, loc="lower left")
show(ax, "Cost of a token on a simulated A100: curves of decodes end where memory ends")

# %% [markdown]
# The curve of short contexts stays near that of prompts. With 1,000 tokens of context the
# memory is full *before* the ridge, and with 4,000 long before; and the curve flattens
# already, because each request reads K/V of its own. So here **decodes leave arithmetic
# unused, and more decodes do not fit**. A prefill has the opposite need. (Llama-2-7B keeps
# K/V for each of its 32 heads. Models with fewer K/V heads have room for more: see *Try*.)
#
# So what if a piece of a prompt joins an iteration of decodes? First by the sum of both
# alone, then together:

# %%
decodes, context, piece = 64, 1000, 128
alone, prompt = 1000 * iteration(decodes, context), 1000 * iteration(prompt=piece)
together = 1000 * iteration(decodes, context, piece)
print(f"{decodes} decodes {alone:.1f} ms, a prefill of {piece} {prompt:.1f} ms")
print(f"one after the other {alone + prompt:.1f} ms, in one iteration {together:.1f} ms")
each = (together - alone) / piece
print(f"a token of the prompt adds {each:.3f} ms, and alone it takes {prompt / piece:.3f}")
print(f"those who decode wait {together / alone - 1:.0%} longer")
assert together < alone + prompt

# %% [markdown]
# The weights are read once instead of twice. And those who decode pay for it with a longer
# wait for their next token: little here, and very much if the piece is a prompt of 4,000
# tokens. That is the next notebook.

# %% [markdown]
# ## Where it is in the code
#
# `minibatch/gpus.py` (peaks, ridge, the smooth maximum), `minibatch/model_shapes.py`
# (weights and K/V of a model), `minibatch/cost_model.py` (an iteration's time),
# `minibatch/models/transformers_model.py` (prompts and decodes packed into one forward
# pass). Next: `07_chunked_prefill`.

# %% [markdown]
# ## Try
#
# - Other GPUs: `GPUS` has eight of them. Which has its ridge farthest to the left, and what
#   does that mean for a server with few users? The cell below prints the list.
# - `torch.set_num_threads(1)`, then run the notebook again from the measurement of
#   bandwidth: two threads may share one memory. Which of the two rates changes more, and
#   where does the ridge go?
# - `MODELS["llama-3-8b"]` shares each K/V head between four query heads, so a token takes a
#   quarter of the memory. Put it in place of `llama-2-7b`. Do 1,000-token contexts reach
#   the ridge now? (Its table of embeddings is apart as well.)

# %%
for name, other in sorted(GPUS.items(), key=lambda item: item[1].ridge):
    rates = f"{other.flops / 1e12:4.0f} TFLOP/s {other.bandwidth / 1e9:5.0f} GB/s"
    print(f"{name:9} {rates}   ridge: {other.ridge:3.0f} tokens")

# %% [markdown]
# ## What this does not show
#
# - One small model on one CPU. Its points lie below the roof by what our engine, Python and
#   the matrix routines lose; a server in production loses other things. The A100 is
#   simulated: a roofline with efficiencies fitted to published measurements of linear
#   layers, not a measured GPU. No curve in it has the steps that real kernels have.
# - Contexts in the measured part are short, and attention is left out of the prediction
#   (for a prompt of 512 tokens it is about 8 % of the operations).
# - Weights in fewer bits, larger batches through parallel GPUs, speculative decoding: each
#   moves the ridge or the points.
# - Nothing here says who *should* share an iteration. That is policy.
