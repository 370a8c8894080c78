# %% [markdown]
# # 00 · One request
#
# **Question.** One request, alone on the machine: where does its time go?
#
# **You will be able to** say what prefill and decode are, predict from bytes and operations
# how long each takes at least, and read TTFT, TPOT and end-to-end latency from a run.
#
# **Before this:** nothing but a little Python. · **Minutes:** 15 · **Runs:** SmolLM2-135M
# on this machine

# %%
import textwrap
import time

import pandas as pd
import torch

from minibatch import (
    ContiguousKVCache,
    ContinuousBatching,
    Engine,
    Request,
    SamplingParams,
    TransformersModel,
)
from minibatch.compare import machine
from minibatch.explain import describe
from minibatch.llm import chat_prompt
from minibatch.metrics import requests_table, steps_table
from minibatch.notebook import show
from minibatch.plot_style import SERIES, TOKENS, footer, new_axes, sign, tidy

# %% [markdown]
# ## Two kinds of iteration
#
# A language model is a function: tokens in, one next token out. To answer, a server calls
# it again and again; one call is an **iteration**. There are two kinds:
#
# - **Prefill**, the first iteration. All tokens of the prompt go through the model
#   together. Each of them leaves behind a key and a value in every layer, the **KV cache**,
#   and out of the last one comes the first new token.
# - **Decode**, every later iteration. Only the newest token goes through the model; it
#   looks at all earlier ones through the KV cache. Out comes the next token.
#
# Two waiting times matter to the person who asks: **TTFT**, the time to the first token,
# and **TPOT**, the time per output token after that. Here is a real model, and a real
# prompt.

# %%
model = TransformersModel("smollm2-135m")
prompt = chat_prompt(model.tokenizer, [{"role": "user", "content": "What is a queue?"}])
P, G = len(prompt), 24  # tokens of the prompt, tokens to generate
last = model.tokenizer.convert_ids_to_tokens(prompt[-5:])
print(f"{P} prompt tokens, the last five: {last}")

# %% [markdown]
# (The question has four words. The other tokens are the chat template: who speaks, and what
# the model was told to be.)
#
# ## Predict
#
# Before anything runs. With P tokens in the prompt and G to generate: how many iterations
# of which kind are there, how many tokens go through the model, and how many tokens does
# the KV cache hold at the end? Write three numbers down.
#
# The prefill already gives the first token, so G tokens take G - 1 decodes. And the last
# token is never fed back into the model, so it never enters the cache.

# %%
iterations = 1 + (G - 1)
computed = P + (G - 1)
held = P + G - 1
print(f"iterations       1 prefill + {G - 1} decodes = {iterations}")
print(f"tokens computed  {P} + {G - 1} = {computed}")
each = model.kv_bytes_per_token
print(f"KV cache         {held} tokens of {each:,} bytes = {held * each:,} bytes")

# %% [markdown]
# The last two are the same number: what goes through the model stays in the cache, and
# nothing is computed twice.
#
# Now time. The model is 134.5 million numbers of 4 bytes. A decode has one token to
# compute, but *every* weight takes part in it, so all of them have to come from memory into
# the processor. No decode can be faster than
#
# > bytes of the weights / memory bandwidth.
#
# A prefill reads the weights once as well, but does P times the arithmetic: 2 operations
# for each token and each weight of the layers (the output layer, which makes the next
# token, is needed for the last token only). So it also cannot be faster than
#
# > 2 x weights of the layers x P / operations per second.
#
# Both speeds of this machine can be measured without the model: by a matrix times a vector,
# with as many bytes as the model has, and by a matrix product of the shape of one of its
# layers. The fastest of some tries is what counts here, because a floor is what the machine
# can do when nobody disturbs it.

# %% tags=["measured"]
WEIGHTS = sum(weight.numel() for weight in model.model.parameters())
LAYERS = WEIGHTS - model.model.get_input_embeddings().weight.numel()  # no vocabulary


def fastest(work, tries):
    seconds = []
    for _ in range(tries):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


matrix, vector = torch.ones(WEIGHTS // 4096, 4096), torch.ones(4096)
bandwidth = 4 * matrix.numel() / fastest(lambda: matrix @ vector, 12)  # bytes a second
tokens, layer = torch.ones(512, 576), torch.ones(576, 1536)
speed = 2 * 512 * 576 * 1536 / fastest(lambda: tokens @ layer, 60)  # operations a second
print(f"this machine, with {torch.get_num_threads()} thread(s):")
print(f"memory     {bandwidth / 1e9:5.1f} GB/s")
print(f"arithmetic {speed / 1e9:5.0f} GFLOP/s")

# %% tags=["measured"]
decode_floor = 4 * WEIGHTS / bandwidth  # seconds


def prefill_floor(prompt_tokens):
    return max(decode_floor, 2 * LAYERS * prompt_tokens / speed)


megabytes, gflop = 4 * WEIGHTS / 1e6, 2 * LAYERS * P / 1e9
print(f"a decode reads {megabytes:.0f} MB:         at least {1000 * decode_floor:3.0f} ms")
print(f"the prefill does {gflop:.1f} GFLOP:    at least {1000 * prefill_floor(P):3.0f} ms")
meet = decode_floor * speed / (2 * LAYERS)
print(f"the two floors meet at {meet:.0f} tokens an iteration")

# %% [markdown]
# ## Measure
#
# `alone` runs one request on an engine of its own. What comes back is the **trace**, a
# record of every iteration. The first run warms the machine up and is thrown away.


# %% tags=["measured"]
def alone(prompt, new_tokens):
    """The trace and the result of one request; it generates exactly so many tokens."""
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    scheduler, kv = ContinuousBatching(max_num_seqs=1), ContiguousKVCache(1, slot_size=640)
    meta = {"workload": "one request, greedy (no seed)", "dtype": model.dtype}
    meta["machine"] = machine()
    engine = Engine(model, scheduler, kv, meta=meta)
    (result,) = engine.run([Request(prompt, params, request_id="A")])
    return engine.trace, result


alone(prompt, 4)
trace, result = alone(prompt, G)
print(textwrap.fill(result.text, 90))

# %% [markdown]
# First what can be counted. It has to be exact.

# %%
steps = steps_table(trace)
observed = (len(steps), steps.num_tokens.sum(), steps.kv_filled.max())
print("                  predicted  observed")
print(f"iterations        {iterations:9}  {observed[0]:8}")
print(f"tokens computed   {computed:9}  {observed[1]:8}")
print(f"KV cache, tokens  {held:9}  {observed[2]:8}")
assert observed == (iterations, computed, held)

# %% [markdown]
# Then the picture, from the trace: above, the tokens of each iteration; below, how long it
# took.

# %% tags=["measured"]
upper, lower = new_axes(4.2, 2, sharex=True)
colors = [TOKENS["prefill"].color] + [TOKENS["decode"].color] * (len(steps) - 1)
upper.bar(steps["index"], steps.num_tokens, width=0.9, color=colors)
tidy(upper, f"tokens through the model: {P} in the prefill, 1 in each decode", "", "tokens")
lower.bar(steps["index"], 1000 * steps.duration, width=0.9, color=colors)
lower.axhline(
    1000 * decode_floor, color="#999999", linestyle="--", label="floor of a decode"
)
lower.legend(fontsize=8, frameon=False)
tidy(lower, "measured: how long the iteration takes", "iteration", "ms")
sign(lower.figure, footer([trace]))
show(lower, alt="Prefill: many tokens, a tall bar. Decodes: one token each, low flat bars")

# %% [markdown]
# One tall bar, then a low and flat row. In the prefill, all tokens of the prompt share the
# reading of the weights: it computes as many tokens as all decodes together and more, in
# the time of a few of them. A decode reads as much for a single token. That is why servers
# want many requests in one iteration, and what the other notebooks are about.

# %% tags=["measured"]
row = requests_table(trace).iloc[0]
ttft, tpot, e2e = 1000 * row.ttft, 1000 * row.tpot, 1000 * row.e2e  # milliseconds
print("            at least  measured")
print(f"TTFT        {1000 * prefill_floor(P):5.0f} ms  {ttft:5.0f} ms  the first iteration")
print(f"TPOT        {1000 * decode_floor:5.0f} ms  {tpot:5.0f} ms  mean of {G - 1} gaps")
print(f"end to end            {e2e:5.0f} ms  TTFT + {G - 1} x TPOT")
print(f"TTFT is {ttft / e2e:.0%} of it")
assert abs(e2e - (ttft + (G - 1) * tpot)) < 1e-6

# %% [markdown]
# (End to end is that sum by definition, which the `assert` only confirms.) What is on top
# of the floors? With few tokens, hundreds of operations whose start costs more than their
# arithmetic, and Python. With many, attention, norms and activations, which the floors leave
# out, and matrix products that are slower than the one measured above. And always other
# programs: the floors are the fastest of some tries, a run takes the machine as it is. The
# same trace, told as a story (clients and priorities come in notebook 08):

# %% tags=["measured"]
print(describe(trace, "A"))

# %% [markdown]
# ## Predict: a longer prompt
#
# **What do you expect?** The prompt grows from 32 to 512 tokens, 16 times as many. By which
# factor does TTFT grow? And TPOT? Write both down.
#
# From the floors: 16 times the operations, so TTFT grows about 16 times at most. Some of it
# is the same for every prompt (the weights have to be read, each operation has to start),
# and the shorter the prompt, the larger that part: from 32 to 128 tokens we expect clearly
# less than 4 times, from 128 to 512 about 4 times. A decode reads the same weights, and on
# top of them the K/V of the prompt:

# %%
for size in (32, 128, 512):
    kv, weights = size * model.kv_bytes_per_token, 4 * WEIGHTS
    print(f"after {size:3} tokens: {weights / 1e6:.0f} MB of weights", end="")
    print(f" + {kv / 1e6:4.1f} MB of K/V, {kv / weights:.1%} more")

# %% tags=["measured"]
REPEATS = 3  # the machine is noisy: the lengths take turns, and medians count
line = "A queue is a line of those who wait. Who comes first is served first. "
text = model.tokenizer.encode(40 * line)
rows = []
for _ in range(REPEATS):
    for size in (32, 128, 512):
        row = requests_table(alone(text[:size], 6)[0]).iloc[0]
        rows.append({"prompt": size, "TTFT": 1000 * row.ttft, "TPOT": 1000 * row.tpot})
by_prompt = pd.DataFrame(rows).groupby("prompt").median()
by_prompt["floor of TTFT"] = [1000 * prefill_floor(size) for size in by_prompt.index]
by_prompt.round(0).astype(int)  # milliseconds, measured

# %% tags=["measured"]
grows = {"32 to 128": (32, 128), "128 to 512": (128, 512), "32 to 512": (32, 512)}
factors = {name: by_prompt.loc[b] / by_prompt.loc[a] for name, (a, b) in grows.items()}
factors = pd.DataFrame(factors).T.assign(tokens=[b / a for a, b in grows.values()])
factors[["tokens", "floor of TTFT", "TTFT", "TPOT"]].round(1)  # how many times as much

# %% [markdown]
# The part that is paid once an iteration shows between 32 and 128 tokens, where the factor
# of TTFT is furthest below that of the tokens. (It can also exceed it at the long end, by
# attention.) TPOT hardly grows: who sends a long prompt waits for the first token, and then
# gets the others about as fast as everybody else. How far medians of three still go up and
# down says how noisy the machine is.
#
# ## Predict: more tokens
#
# If every decode takes the same time, G tokens take TTFT + (G - 1) x TPOT, a straight line.
# Each round below runs the prompt with 8 new tokens, takes TTFT and TPOT from that run,
# predicts 16 and 24 tokens, and runs those.

# %% tags=["measured"]
rows = []
for _ in range(REPEATS):
    for number in (8, 16, 24):
        row = requests_table(alone(prompt, number)[0]).iloc[0]
        if number == 8:
            ttft, tpot = row.ttft, row.tpot
        predicted = ttft + (number - 1) * tpot
        rows.append({"new tokens": number, "predicted": predicted, "measured": row.e2e})
by_number = pd.DataFrame(rows).groupby("new tokens").median()
by_number.round(2)  # seconds, measured; the first row is what the prediction is made of

# %% tags=["measured"]
BLUE, ORANGE = TOKENS["prefill"].color, TOKENS["decode"].color
left, right = new_axes(3.2, 1, 2)
left.plot(by_prompt["TTFT"], "o-", color=BLUE, label="TTFT")
left.plot(by_prompt["TPOT"], "s-", color=ORANGE, label="TPOT")
left.plot(by_prompt["floor of TTFT"], "--", color="#999999", label="floor of TTFT")
tidy(left, "measured: a longer prompt", "prompt tokens", "ms, median of 3")
right.plot(by_number["predicted"], "--", color="#999999", label="predicted")
right.plot(by_number["measured"], "o", color=SERIES[-1]["color"], label="measured")
tidy(right, "measured: more new tokens", "new tokens", "end to end, s, median of 3")
for ax in (left, right):
    ax.set_xlim(0)
    ax.set_ylim(0)
    ax.legend(fontsize=8, frameon=False)
sign(left.figure, footer([trace]))
show(left, alt="TTFT rises with the prompt, TPOT is flat; end to end is a straight line")

# %% [markdown]
# ## Try
#
# 1. Change the question and `G` near the top, predict again, and run all cells: what is
#    counted has to hold exactly.
# 2. Which prompt takes as long as its answer? An answer of 8 tokens takes 7 decodes after
#    the first token. By the floors that is the time of a prefill of `size` tokens. Run the
#    cell: are the two times equal? If not, which floor was further off?

# %% tags=["measured"]
ANSWER = 8
size = min(int((ANSWER - 1) * decode_floor * speed / (2 * LAYERS)), 600)
row = requests_table(alone(text[:size], ANSWER)[0]).iloc[0]
print(f"prompt of {size} tokens: {row.ttft:.2f} s to the first token")
print(f"the other {ANSWER - 1} tokens: {row.e2e - row.ttft:.2f} s")

# %% [markdown]
# ## What this does not show
#
# - Another request. Nobody waits here, so there is no queueing in TTFT; the next notebooks
#   add it.
# - A GPU. There the two floors are further apart: by its datasheet an A100 (312 TFLOP/s,
#   1,555 GB/s, half precision) can compute 201 tokens in the time in which it reads the
#   weights; for this processor the number is printed above. So a lone decode leaves far
#   more of a GPU idle.
# - Long contexts. After 512 tokens the K/V is 4 % of what a decode reads; after 8,192, the
#   longest context of this model, 41 %. In Llama-3.1-8B (half precision, 16 GB of weights,
#   131,072 bytes of K/V a token) it is half after about 122,000 tokens. Then TPOT grows
#   with the prompt. The operations of attention, which our floor of the prefill leaves out,
#   grow with the square of its length.
# - Exact times. These are single runs or medians of three, of one small model, on a small
#   machine that others may use as well. If it was busy, even the floors above are higher
#   than they could be. Run it yourself.
#
# ## Where it is in the code
#
# `minibatch/request.py` (P, G and the P + G - 1 rows), `minibatch/engine.py` (the loop),
# `minibatch/metrics.py` (what the latencies mean), `minibatch/models/transformers_model.py`
# (one iteration of a real model). Next: [01 · Static batches](01_static_batches.ipynb).
