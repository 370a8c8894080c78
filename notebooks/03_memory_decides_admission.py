# %% [markdown]
# # 03 · Memory decides admission
#
# **Question.** A place in the batch is free and a request is waiting. Why may it still not
# join?
#
# **You will be able to** work out by hand how many bytes one token of context costs in a
# given model; say how many requests fit on a given GPU; read from a trace which resource a
# waiting request lacks; choose between admission policies and name the price of each.
#
# **Before this:** 02 (membership changes between iterations) · **Minutes:** 25 ·
# **Runs:** toy model, simulated GPU

# %%
import random

import pandas as pd

from minibatch import (
    ContiguousKVCache,
    ContinuousBatching,
    CostModel,
    Engine,
    PagedKVCache,
    Request,
    SamplingParams,
    ToyModel,
    accounting,
    metrics,
    plots,
)
from minibatch.gpus import GPUS
from minibatch.model_shapes import MODELS
from minibatch.notebook import show

# %% [markdown]
# ## What one token leaves behind
#
# A request that decodes needs the keys and the values of all its earlier tokens, in every
# layer. They are computed once and kept: the KV cache. So each token that a request has,
# prompt or answer, occupies memory until the request ends. How much, follows from the
# shape of the model:
#
# *bytes per token = 2 (K and V) × layers × K/V heads × head dimension × bytes per number*
#
# Llama-2-7B has 32 layers and 32 K/V heads of dimension 128; in fp16 a number takes 2
# bytes.

# %%
by_hand = 2 * 32 * 32 * 128 * 2
assert by_hand == MODELS["llama-2-7b"].kv_bytes_per_token()
print(f"Llama-2-7B: {by_hand:,} bytes = {by_hand / 1024:.0f} KiB a token")

# %% [markdown]
# *Before you go on:* Llama-3-8B also has 32 layers and heads of dimension 128. But groups
# of four query heads share one K/V head (grouped-query attention), so there are 8 K/V
# heads. How many KiB a token? And SmolLM2-135M, with 30 layers and 3 K/V heads of
# dimension 64? Write both down.

# %%
rows = []
for name in ("llama-2-7b", "llama-3-8b", "llama-2-70b", "smollm2-135m"):
    m = MODELS[name]
    kib = 2 * m.num_layers * m.num_kv_heads * m.head_dim * 2 / 1024
    assert kib * 1024 == m.kv_bytes_per_token(bytes_per_value=2)
    sizes = [m.num_layers, m.num_heads, m.num_kv_heads, m.head_dim]
    rows.append([m.name, *sizes, kib, kib * 4096 / 2**20])
columns = (
    "model, layers, query heads, K/V heads, head dim, KiB a token, GiB for 4096 tokens"
)
pd.DataFrame(rows, columns=columns.split(", ")).round(2).set_index("model")

# %% [markdown]
# A conversation of 4,096 tokens takes 2 GiB in Llama-2-7B and half a GiB in Llama-3-8B,
# which has more weights. The number of query heads does not enter at all. (Our laptop runs
# use float32: 4 bytes a number, 45 KiB a token for SmolLM2-135M.)
#
# ## Predict: how many requests fit on one GPU
#
# An A100 with 40 GiB; the engine may use 90 % of them, the rest is left for activations
# and buffers. First the weights, 2 bytes each; what remains is the KV cache. Suppose each
# request is given room for the whole context of the model at once, as early serving
# engines did. How many requests fit? Guess before you run it: 5, 10, 50, 100?

# %%
GPU, SHARE = GPUS["a100-40"], 0.9
fit = {}
for name in ("llama-2-7b", "llama-3-8b"):
    m = MODELS[name]
    weights = 2 * m.num_parameters
    left = SHARE * GPU.memory - weights
    tokens = int(left // m.kv_bytes_per_token())
    fit[name] = tokens // m.max_model_len
    assert tokens == CostModel(m, GPU).kv_tokens(SHARE)  # what the simulator uses
    print(
        f"{m.name}: {SHARE} x {GPU.memory / 1e9:.2f} GB - {weights / 1e9:.2f} GB of weights"
    )
    print(f"   = {left / 1e9:.2f} GB = {tokens:,} tokens of K/V")
    print(f"   = {fit[name]} requests of the full context of {m.max_model_len:,} tokens")

# %% [markdown]
# So: 11 requests of Llama-2-7B. Let us see whether an engine agrees. 60 requests arrive at
# once; prompts have about 500 tokens (median), answers about 150, and every request says
# `max_tokens=1024`, because nobody knows how long its answer will be. The batch has 256
# places.

# %%
from minibatch.arrival_processes import AllAtOnce
from minibatch.distributions import LogNormal
from minibatch.open_loop import synthetic
from minibatch.simulation import simulate

cost = CostModel(MODELS["llama-2-7b"], GPU)
prompts = LogNormal(median=500, p90=1500, cap=3000)
outputs = LogNormal(median=150, p90=450, cap=1000)
workload = synthetic(60, AllAtOnce(), prompts, outputs, seed=0, max_tokens=1024)
scheduler = ContinuousBatching(max_num_seqs=256, max_num_batched_tokens=16384)
slots = ContiguousKVCache(num_slots=cost.kv_tokens(SHARE) // 4096, slot_size=4096)
meta = {"name": "slots of 4,096"}
a100 = simulate(workload, scheduler, slots, cost, record_steps=True, meta=meta)

at_once = max(len(step.members) for step in a100.steps)
request_id, reason = a100.steps[0].waiting[0]
print(f"requests at once: predicted {fit['llama-2-7b']}, observed {at_once}; places: 256")
print(f"why {request_id} waits: {reason}")
print(f"who else waits: {a100.steps[0].rest}")
assert at_once == fit["llama-2-7b"]

# %% [markdown]
# 245 places are free, and `r11` waits: for *rows of the KV cache*. The picture shows what
# these rows are doing.

# %%
show(plots.kv_memory(a100), alt="KV cache: a fifth filled, the rest reserved or fragmented")

# %%
steps = metrics.steps_table(a100)
steps = steps[steps["num_waiting"] > 0]  # later the cache drains, and nobody needs it
rows = steps["kv_capacity"] * steps["duration"]  # weighted by time
for part in ("filled", "reserved", "fragmentation", "free"):
    share = (steps[f"kv_{part}"] * steps["duration"]).sum() / rows.sum()
    print(f"{part:14}{share:6.1%} of the rows, while somebody waits (simulated, seed 0)")

# %% [markdown]
# *Filled* rows hold the K/V of a token. *Reserved* rows are set aside for a token that may
# come (up to `max_tokens`). *Fragmentation* can never be used: a slot has 4,096 rows, and
# prompt plus `max_tokens` of this request is less. As long as somebody waits, not a row is
# free, and a fifth of them holds anything. (The picture's title averages over all
# iterations, also those at the end, when nobody waits any more.)
#
# ## Three things can be missing
#
# A place, memory, and room in the next iteration's token budget are three different
# resources. The first two are held from iteration to iteration, the third is new each
# time. The report of every iteration says who lacked what. Here three requests of 6 + 6
# tokens meet four engines; each engine is short of one thing.


# %%
def why_wait(scheduler, cache):
    engine = Engine(ToyModel(), scheduler, cache)
    for name in "abc":
        engine.submit(Request(range(6), SamplingParams(max_tokens=6), name))
    step = engine.step()
    print(f"in: {' '.join(m.request_id for m in step.members)}   waits: {step.waiting[0]}")


roomy = PagedKVCache(100, block_size=4)  # blocks, handed out one by one: notebook 04
why_wait(ContinuousBatching(max_num_seqs=2), roomy)
why_wait(ContinuousBatching(max_num_seqs=8), PagedKVCache(5, block_size=4))
why_wait(ContinuousBatching(max_num_seqs=8), ContiguousKVCache(1, slot_size=16))
roomy = PagedKVCache(100, block_size=4)  # each engine has a cache of its own
why_wait(ContinuousBatching(max_num_seqs=8, max_num_batched_tokens=16), roomy)

# %% [markdown]
# ("5 free, 4 promised": when the plan was made five blocks were free, and four of them
# went to `a` and `b`, who join in the same iteration.) *Places* are those of the
# batch, *slots* those of the cache.
#
# ## Predict: three ways to admit
#
# With blocks, an admission policy can choose *how much to set aside* when a request joins:
#
# - **ReserveMaximum**: all it may ever need, P + G − 1 tokens (the last token of an answer
#   is never fed back, so it needs no row). Nobody can run out of memory later.
# - **Optimistic**: only what it computes now. Whoever runs will grow; when the cache is
#   full, somebody has to go.
# - **Watermark**: the prompt, if afterwards a share of the blocks stays free for those who
#   grow.
#
# 48 requests of P = 16 and G = 48 wait for a cache of 40 blocks of 8 rows. How many join
# in the first iteration?

# %%
POOL, BLOCK, P, G, KEEP = 40, 8, 16, 48, 0.1


def blocks(tokens):
    return -(-tokens // BLOCK)  # rounded up


predicted = {
    "reserve maximum": POOL // blocks(P + G - 1),
    "watermark": (POOL - int(KEEP * POOL)) // blocks(P),
    "optimistic": POOL // blocks(P),
}
predicted

# %% [markdown]
# Now the run. Each token of the toy model is the last one with probability 1/24, so an
# answer of at most 48 tokens has 21 on average, and no policy knows how many.

# %%
from minibatch.policies import Optimistic, ReserveMaximum, Watermark

NUMBER, VOCABULARY = 48, 24  # token 0 of 24 ends an answer


def requests(seed, new_tokens):
    draw = random.Random(seed)
    prompts = [[draw.randrange(1, VOCABULARY) for _ in range(P)] for _ in range(NUMBER)]
    return [
        Request(prompt, SamplingParams(max_tokens=new_tokens), f"r{i}", 0.0)
        for i, prompt in enumerate(prompts)
    ]


def run(name, admission, seed=0, new_tokens=G, pool=POOL):
    engine = Engine(
        ToyModel(vocab_size=VOCABULARY, eos_token_id=0),
        ContinuousBatching(max_num_seqs=64, admission=admission),
        PagedKVCache(pool, BLOCK),
        meta={
            "name": name,
            "workload": f"{NUMBER} requests at once, {P} + at most {new_tokens} tokens",
            "seed": seed,
        },
    )
    engine.run(requests(seed, new_tokens))
    return engine.trace


# %%
policies = {
    "reserve maximum": ReserveMaximum(),
    "watermark": Watermark(share=KEEP),
    "optimistic": Optimistic(),
}
traces = {name: run(name, policy) for name, policy in policies.items()}
for name, trace in traces.items():
    first = len(trace.steps[0].members)
    print(f"{name}: predicted {predicted[name]}, observed {first}; the next one waits,")
    print(f"    {trace.steps[0].waiting[0][1]}")
    assert first == predicted[name]

# %% [markdown]
# What will that lead to? Five at once without surprises, or twenty that will soon be too
# many. Which run is over first? Which one computes tokens twice?

# %%
show(
    plots.compare_figures(traces)["kv_memory"],
    alt="KV memory by iteration under three admission policies",
)


# %%
def row(trace):
    memory = accounting.memory(trace)
    return {
        "iterations": trace.num_steps,
        "% filled": 100 * memory.mean_filled,
        "% reserved": 100 * memory.mean_reserved,
        "preemptions": memory.preemptions,
        "computed again": accounting.work(trace).recomputed,
    }


pairs = [(name, seed) for name in policies for seed in range(5)]
runs = pd.DataFrame(
    {(name, seed): row(run(name, policies[name], seed)) for name, seed in pairs}
).T
means = runs.groupby(level=0, sort=False).mean()
means.insert(1, "lowest", runs["iterations"].groupby(level=0).min())
means.insert(2, "highest", runs["iterations"].groupby(level=0).max())
took = runs["iterations"].unstack(0)
ratios = took["reserve maximum"] / took["watermark"]
print("iterations, reserve maximum / watermark, by seed:", *map("{:.2f}".format, ratios))
print("means over seeds 0 to 4 (simulated); lowest and highest number of iterations")
means.round(0).astype(int)

# %% [markdown]
# Reserving is safe and slow: almost half of the rows are set aside for tokens that are
# not there yet, or never will be, and every seed takes half to two thirds more iterations
# than with the watermark (the ratios above the table). The other two fill the cache, and
# pay when it is full: somebody is preempted, and its tokens are computed again. Of those
# two, the optimistic one ends a few iterations earlier and computes about twice as many
# tokens again.
#
# That is the shape of the decision, not a ranking. The price of a preemption grows with
# the length of the contexts, and this clock (a second an iteration, whatever is in it)
# does not charge for recomputed tokens at all.
#
# ## What can never fit is refused
#
# A request that does not fit *now* waits. One that would not fit an *empty* cache must not
# wait: it would wait forever, and everybody behind it. It is refused when it is submitted,
# with the numbers that do not fit; the error is of a type of its own, so that a server can
# tell the client what to change.

# %%
from minibatch.request import RequestRefused

engine = Engine(
    ToyModel(max_model_len=512), ContinuousBatching(), PagedKVCache(POOL, BLOCK)
)
for prompt, new_tokens in ((300, 48), (600, 48), (270, 48)):
    try:
        name = engine.submit(
            Request([1] * prompt, SamplingParams(max_tokens=new_tokens), f"p{prompt}")
        )
        print(f"{name} is accepted")
    except RequestRefused as error:
        print(f"{type(error).__name__}: {error}")
while engine.step() is not None:
    pass
print({name: result.finish_reason for name, result in engine.results.items()})

# %% [markdown]
# ## Where it is in the code
#
# `minibatch/model_shapes.py` (bytes per token), `cost_model.py` (`kv_tokens`: what fits
# beside the weights), `kv_cache.py` (slots), `policies/admission.py` (the three policies
# and one more), `plan_draft.py` (`_no_room`: the question itself), `door.py` (refusals).
# Next: 04, what blocks are and what they do not solve.
#
# ## Try
#
# 1. `Forecast` looks at the *peak*: not everybody is at their longest at the same time.
#    How many does it admit in the first iteration, where all are equally long and have the
#    same limit? And later? Does it preempt?
# 2. Clients often ask for far more than they use. With `new_tokens=400` and `pool=60` the
#    answers are nearly as short as before. Which policy notices, and why?
# 3. Change `SHARE`, the GPU or the model in the second prediction. When does a model not
#    fit at all?

# %%
from minibatch.policies import Forecast

forecast = run("forecast", Forecast())
print(f"forecast: {len(forecast.steps[0].members)} join in the first iteration")
print(forecast.steps[0].waiting[0][1])
tries = {"forecast: 48 new, pool 40": forecast}
for name in ("reserve maximum", "watermark"):
    tries[f"{name}: 400 new, pool 60"] = run(name, policies[name], new_tokens=400, pool=60)
pd.DataFrame({name: row(trace) for name, trace in tries.items()}).T.round(0).astype(int)

# %% [markdown]
# ## What this does not show
#
# - The toy's clock counts iterations; an iteration with 20 members is as long as one with
#   5, and recomputing is free. The iteration counts above are therefore no throughput.
#   From notebook 06 on the work in an iteration is charged for.
# - The A100 is simulated from its datasheet. Real engines also lose memory to activations,
#   CUDA graphs and buffers; `SHARE` stands for all of it. Weights are counted in 2 bytes,
#   K/V too; quantisation changes both.
# - Prompts of one length, all there at the start, answers whose lengths nobody could
#   guess: another workload may order the policies differently.
# - Slots of the full context are the worst case of reserving. Orca reserves by
#   `max_tokens`; that is `ReserveMaximum`.
