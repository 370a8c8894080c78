# %% [markdown]
# # 01 · Static batches
#
# **Question.** What does a batch cost that is formed once and stays together until its
# longest member has ended?
#
# **You will be able to** count the rows that such a batch executes for nothing, say where
# padding comes from, predict the expected waste from the distribution of answer lengths,
# and say who waits.
#
# **Before this:** [00](00_one_request.ipynb) (prefill, decode) · **Minutes:** 20 ·
# **Runs:** toy model

# %%
import numpy as np
import pandas as pd

from minibatch import (
    ContiguousKVCache,
    Engine,
    Request,
    SamplingParams,
    StaticBatching,
    ToyModel,
    plots,
)
from minibatch.accounting import work, work_table
from minibatch.distributions import Exponential, Fixed, Uniform
from minibatch.explain import describe
from minibatch.metrics import requests_table
from minibatch.notebook import show
from minibatch.plot_style import SERIES, new_axes, sign, tidy

# %% [markdown]
# ## A batch is a rectangle
#
# Notebook 00 showed that a decode reads all weights for a single token. Several requests in
# one iteration share that reading: a **batch**. The oldest way to build one is to treat the
# batch like one big request. Take n requests, compute all prompts in one iteration, then
# decode all of them, iteration after iteration, until the last one has ended. Each request
# is a row, each iteration a column, and the rectangle stays shut: a row whose request has
# ended goes on (a **dead row**), and nobody joins.
#
# The unit of cost here is the **row-iteration**: one row in one iteration. It is useful if
# its request needed it.
#
# The toy model of this notebook is a hash function that reads its KV cache. Its clock
# counts iterations, one second each, so all times below are simulated and can be worked out
# on paper.
#
# ## Predict: A, B and C
#
# Three requests are there at time 0, in one batch:
#
# | request | decode iterations |
# |---|---|
# | A | 18 |
# | B | 73 |
# | C | 141 |
#
# How many decode iterations does the batch run? How many row-iterations is that, and how
# many of them are useful? Write them down before you go on.

# %%
DECODES = {"A": 18, "B": 73, "C": 141}  # after the first token, which the prefill gives

longest = max(DECODES.values())
executed, useful = len(DECODES) * longest, sum(DECODES.values())
dead = {name: longest - number for name, number in DECODES.items()}
print(f"executed  3 x {longest} = {executed} row-iterations")
print(f"useful    18 + 73 + 141 = {useful}, or {useful / executed:.1%}")
print(f"dead      {dead}, together {executed - useful}")

# %% [markdown]
# Now the engine. It really executes the dead rows and the padding, and `accounting` counts
# them afterwards in the trace.


# %%
def request(name, prompt_tokens, new_tokens, arrival=0.0):
    params = SamplingParams(max_tokens=new_tokens)
    return Request(range(prompt_tokens), params, name, arrival_time=arrival)


def run(requests, scheduler, workload):
    """The trace of some requests in a static batch; memory is no limit here."""
    cache = ContiguousKVCache(num_slots=scheduler.batch_size, slot_size=160)
    engine = Engine(ToyModel(), scheduler, cache, meta={"workload": workload})
    engine.run(requests)
    return engine.trace


abc = [request(name, 3, 1 + number) for name, number in DECODES.items()]
together = run(abc, StaticBatching(3), "A, B, C")
done = work(together)
print(f"iterations  {len(together.steps)} = 1 prefill + {len(together.steps) - 1} decodes")
print(f"decodes     useful {done.decode}, dead {done.dead_padding}")
assert (done.decode, done.decode + done.dead_padding) == (useful, executed) == (232, 423)

# %%
show(plots.membership(together), alt="A is a dead row from 19 on, B from 74 on")

# %% [markdown]
# The title counts the prefill too, one row-iteration for each request: 423 + 3 executed,
# 232 + 3 useful. Row by row (the first three columns count tokens, and a prefill of three
# tokens is one row-iteration: A has 1 + 18 = 19 useful ones):

# %%
work_table(together)[["prefill", "decode", "dead_padding", "useful_rows", "executed_rows"]]

# %% [markdown]
# The row of A ran 142 times and was needed 19 times. On a GPU a few dead rows hardly make
# the iteration longer, because it reads all weights anyway. What is lost is the *place*, in
# which somebody else could have had a token.
#
# ## Left padding
#
# Rectangles have a second price. Prompts have different lengths, and the prefill of the
# batch is a rectangle as well: the shorter prompts are filled up on the left to the length
# of the longest.
#
# **Predict**: prompts of 4, 12 and 7 tokens. How many tokens does the prefill compute, and
# how many are padding?

# %%
PROMPTS = {"A": 4, "B": 12, "C": 7}
ANSWERS = {"A": 9, "B": 5, "C": 16}

rectangle, real = len(PROMPTS) * max(PROMPTS.values()), sum(PROMPTS.values())
print(f"predicted  {rectangle} tokens, {real} of prompts and {rectangle - real} of padding")

uneven = [request(name, PROMPTS[name], ANSWERS[name]) for name in PROMPTS]
padded = run(uneven, StaticBatching(3), "prompts of 4, 12, 7 tokens")
done, first = work(padded), padded.steps[0].num_tokens
print(f"observed   {first} tokens,", end="")
print(f" {done.prefill} of prompts and {done.left_padding} of padding")
assert (first, done.prefill, done.left_padding) == (rectangle, real, rectangle - real)
show(plots.membership(padded), alt="Prompts with left pads, then a token a row")

# %% [markdown]
# Padding is paid once, at the start; dead rows are paid in every iteration until the end.
# So take the best case for a static batch: all prompts of the same length, no padding. Is
# the waste gone?
#
# ## Predict: answers that nobody knows in advance
#
# No. When the batch is formed nobody knows when the answers will end. Let the lengths of
# the answers be random, with mean m. A batch of n takes as long as its longest: the useful
# share is m / E[longest of n].
#
# For an **exponential** length that can be done in the head. It has no memory: at any
# moment, a request that still runs has m tokens to go on average. While n requests run, the
# first end comes after m / n tokens on average. Then n - 1 run, and the next end comes
# m / (n - 1) tokens later, and so on:
#
# > E[longest of n] = m (1/n + 1/(n - 1) + ... + 1/2 + 1) = m H_n, so the useful share is 1 / H_n.
#
# For a **uniform** length between 0 and 2m, n points cut the range into n + 1 equal parts
# on average, and the longest is at 2m n / (n + 1): the useful share is (n + 1) / 2n. For
# **equal** lengths it is 1.
#
# What do you expect for batches of 8 with exponential lengths: more or less than half?

# %%
SIZES = (1, 2, 4, 8, 16, 32)
PREDICTED = {
    "equal": lambda n: 1.0,
    "uniform": lambda n: (n + 1) / (2 * n),
    "exponential": lambda n: 1 / sum(1 / k for k in range(1, n + 1)),
}
predicted = {name: [share(n) for n in SIZES] for name, share in PREDICTED.items()}
pd.DataFrame(predicted, index=SIZES).round(3)

# %% [markdown]
# First the engine, on a few batches, against the arithmetic of a rectangle (it has to be
# exact). Then, because that arithmetic is confirmed, thousands of batches by arithmetic
# alone, against the closed forms.

# %%
SEED, N = 0, 8
few = Exponential(mean=20, cap=150).draw(np.random.default_rng(SEED), 10 * N)
queue = [request(f"r{i}", 3, length) for i, length in enumerate(few.tolist())]
done = work(run(queue, StaticBatching(N), "10 batches of 8"))

rectangles = few.reshape(-1, N)  # a row a batch, in the order of the queue
by_hand = (few.sum(), N * rectangles.max(axis=1).sum())
print(f"by hand   {by_hand[0]} of {by_hand[1]} row-iterations useful")
print(f"observed  {done.useful_rows} of {done.executed_rows} row-iterations useful")
assert (done.useful_rows, done.executed_rows) == by_hand

# %%
BATCHES, MEAN = 4000, 60
DRAWN = {
    "equal": Fixed(MEAN),
    "uniform": Uniform(1, 2 * MEAN - 1),
    "exponential": Exponential(MEAN),
}


def useful_share(lengths, n):
    """Of static batches of n, formed in this order."""
    batches = np.reshape(lengths, (-1, n))
    return batches.sum() / (n * batches.max(axis=1).sum())


observed = pd.DataFrame(index=SIZES)
for name, kind in DRAWN.items():
    rng = np.random.default_rng(SEED)
    observed[name] = [useful_share(kind.draw(rng, BATCHES * n), n) for n in SIZES]
assert abs(observed / pd.DataFrame(predicted, index=SIZES) - 1).max().max() < 0.02
observed.round(3)

# %%
ax = new_axes(3.4)
sizes = np.arange(1, max(SIZES) + 1)
for name, look in zip(observed, SERIES[-3:], strict=True):
    ax.plot(sizes, [PREDICTED[name](n) for n in sizes], color=look["color"])
    ax.plot(observed[name], look["marker"], color=look["color"], label=f"{name} lengths")
title = "useful share of a static batch: closed forms (lines), simulated (marks)"
tidy(ax, title, "requests in the batch", "useful share")
ax.set_ylim(0, 1.05)
ax.legend(fontsize=8, frameon=False)
what = f"simulated · mean length {MEAN}, {BATCHES:,} batches a mark, seed {SEED}"
sign(ax.figure, what)
show(ax, alt="Equal lengths stay at 1, uniform ones fall to 0.5, exponential ones to 0.25")

# %% [markdown]
# A batch of 8 with exponential answers does 37 % useful work, one of 32 does 25 %. The
# larger the batch, the longer the longest, and the more rows wait for it. Only equal
# lengths waste nothing. (Benchmarks do use exponential lengths: Anyscale's comparison of
# 2023 drew answers with a mean of 128 tokens, up to a limit. Real ones are long-tailed
# too.)
#
# ## Predict: who waits
#
# The last price is not in the rectangle. A batch has *four* places, A, B and C are there at
# time 0, nobody else, so it starts with three. D arrives at time 1, one iteration later,
# and asks for 5 tokens. One place has been empty from the start, and from 19 on A's row is
# dead as well. When does D start, and how long has it waited?

# %%
start = 1 + max(DECODES.values())  # one prefill, then the longest
print(f"predicted  D starts at {start}, after {start - 1} s, and ends at {start + 5}")

late = [*abc, request("D", 3, 5, arrival=1.0)]
waits = run(late, StaticBatching(batch_size=4), "A, B, C at 0, D at 1")
d = requests_table(waits).set_index("request_id").loc["D"]
print(f"observed   D starts at {d.scheduled:g}, after {d.queueing_delay:g} s", end="")
print(f", and ends at {d.finish:g}")
assert (d.scheduled, d.queueing_delay, d.finish) == (start, start - 1, start + 5)

# %%
show(plots.membership(waits), alt="D arrives at 1, waits for C, and runs alone from 142")

# %%
print(describe(waits, "D"))

# %% [markdown]
# D needs 5 seconds and takes 146. It did not wait for memory, nor for a place: it waited
# for C, with which it has nothing to do. The next notebook lets it in.
#
# ## Try
#
# 1. A server can wait a little for the batch to fill: `max_wait` is how long the oldest may
#    be kept. Change `MAX_WAIT` to 1 or 5 and `PLACES` to 4 or 5. Who gains, who pays, and
#    what if the fifth never comes?

# %%
MAX_WAIT, PLACES = 5.0, 5
trace = run(late, StaticBatching(PLACES, max_wait=MAX_WAIT), "A, B, C at 0, D at 1")
columns = ["arrival", "scheduled", "ttft", "e2e"]
requests_table(trace).set_index("request_id")[columns].astype(int)  # seconds, simulated

# %% [markdown]
# 2. If the lengths were known, one could put similar ones together. How much of the waste
#    goes away? Why can a server not do that, and who would wait if it could?

# %%
lengths = Exponential(MEAN).draw(np.random.default_rng(SEED), 800)
print(f"as they come: {useful_share(lengths, 8):.3f} of the row-iterations are useful")
print(f"sorted:       {useful_share(np.sort(lengths), 8):.3f}")

# %% [markdown]
# ## What this does not show
#
# - Time on a machine. Here every iteration takes one second, whether it computes 3 tokens
#   or 300, so padding and dead rows cost no time at all. Row-iterations are what is wasted;
#   what they cost in seconds depends on model and machine.
# - Every static batch there ever was. Ours is kind: it hands out finished answers at once,
#   and it pads only to the longest prompt of the batch. Many servers kept the answers until
#   the batch was over, and some pad to the longest of the whole workload.
# - Your lengths. Exponential and independent is a model; what counts is how long the
#   longest of n is, compared with the mean.
# - Memory: the slots of dead rows stay reserved as well. That is notebook 03.
#
# ## Where it is in the code
#
# `minibatch/static_batching.py` (the whole scheduler), `minibatch/accounting.py` (useful
# and dead rows). Next: [02 · Iteration-level
# scheduling](02_iteration_level_scheduling.ipynb).
