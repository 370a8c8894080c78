# %% [markdown]
# # 05 · Finding a prefix again
#
# **Question.** Many prompts begin with the same tokens. What is saved if their K/V are
# kept and found again, and when are they not found?
#
# **You will be able to** say which blocks of a prompt will be found, and check it; tell
# apart what a hit saves (compute, memory, time to the first token); explain why a block's
# name contains its whole past, and in which order blocks are given up.
#
# **Before this:** 04 (blocks and block tables) · **Minutes:** 30 · **Runs:** toy model,
# simulated GPU

# %%
import numpy as np
import pandas as pd

from minibatch import (
    ContinuousBatching,
    CostModel,
    Engine,
    PagedKVCache,
    PrefixCachedKVCache,
    Request,
    SamplingParams,
    ToyModel,
    accounting,
    metrics,
    plots,
)
from minibatch.notebook import show
from minibatch.plot_style import sign

# %% [markdown]
# ## Why the past is part of the name
#
# Two prompts contain the same four tokens at the same place: `[1 2 3 4 | 5 6 7 8]` and
# `[9 9 9 9 | 5 6 7 8]`. Could the second use the K/V that the first has computed for its
# second block? Think before you run: what are the keys of a layer computed from?
#
# Here is attention with two layers and random weights, without anything else.

# %%
rng = np.random.default_rng(0)
embed, (wq, wk, wv) = rng.standard_normal((16, 8)), rng.standard_normal((3, 8, 8)) / 3


def layer(x):
    scores = (x @ wq) @ (x @ wk).T
    scores[np.triu_indices(len(x), 1)] = -np.inf  # nobody sees the future
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return x + weights / weights.sum(axis=1, keepdims=True) @ (x @ wv)


def keys(tokens):
    x = embed[tokens]
    return x @ wk, layer(x) @ wk  # of the first layer, of the second


pairs = zip(keys([1, 2, 3, 4, 5, 6, 7, 8]), keys([9, 9, 9, 9, 5, 6, 7, 8]), strict=True)
for number, (one, other) in enumerate(pairs, start=1):
    print(f"layer {number}: keys of 5 6 7 8 are equal: {np.allclose(one[4:], other[4:])}")

# %% [markdown]
# In the first layer yes, in the second no: what enters it has already looked at the tokens
# before. So K/V depend on *all* earlier tokens. A full block is therefore named by its own
# tokens *and the name of the block before it*: a chain, in which one name stands for the
# whole past.

# %%
from minibatch.prefix_cache import block_hash

head, other_head, tail = (1, 2, 3, 4), (9, 9, 9, 9), (5, 6, 7, 8)
one = block_hash(block_hash(0, head, None), tail, None)
same = block_hash(block_hash(0, head, None), tail, None)
other = block_hash(block_hash(0, other_head, None), tail, None)
print(f"the same past: {one == same}, another past: {one == other}")

# %% [markdown]
# A hash only says where to look: tokens and predecessor are compared as well, so that a
# collision cannot hand out a stranger's K/V.
#
# ## Predict: which blocks are found
#
# Three rules. Only *full* blocks have a name. Only blocks that have been *computed* can be
# found. And at least one token of a prompt is always computed, because the next token is
# sampled from it: of P tokens at most `(P - 1) // B` blocks are found.
#
# Blocks of 8. Five prompts begin with the same 37 tokens, then each goes its own way; the
# sixth is the fifth again; they come one after the other. How many tokens of each are
# found?

# %%
B, SYSTEM = 8, list(range(100, 137))
tails = [[1] * 5, [2] * 11, [3] * 3, [4] * 20, [5] * 3]
prompts = [SYSTEM + tail for tail in tails] + [SYSTEM + tails[-1]]
# tokens at the beginning that somebody has computed before
common = [0] + 4 * [37] + [40]
pairs = zip(common, prompts, strict=True)
predicted = [B * min(same // B, (len(prompt) - 1) // B) for same, prompt in pairs]

engine = Engine(ToyModel(), ContinuousBatching(), PrefixCachedKVCache(64, B))
params = SamplingParams(max_tokens=4)
results = [engine.run([Request(prompt, params)])[0] for prompt in prompts]
observed = [result.timeline.num_cached for result in results]
assert observed == predicted
columns = ["prompt", "common", "predicted", "found"]
pd.DataFrame(
    zip(map(len, prompts), common, predicted, observed, strict=True), columns=columns
)

# %% [markdown]
# 37 common tokens are four full blocks, 32 tokens. The last prompt was there before, all
# of it, and its 40 tokens are five full blocks; still only 32 are found, because something
# must be computed. Now the same six at once:

# %%
engine = Engine(ToyModel(), ContinuousBatching(), PrefixCachedKVCache(64, B))
together = engine.run([Request(prompt, params, arrival_time=0.0) for prompt in prompts])
print([result.timeline.num_cached for result in together])
assert [r.tokens for r in together] == [r.tokens for r in results]

# %% [markdown]
# Nobody finds anything: when the plan is made, none of these blocks has been computed.
# (So it is in this engine. vLLM V1 also counts blocks of the same step as found, since
# every layer writes K/V before it reads.) The answers are the same.
#
# ## Predict: what a hit saves
#
# Two things: tokens that need not be computed, and rows that exist once. 8 requests have
# 40 common tokens and 8 of their own and generate 8, so each needs 55 rows, 7 blocks of 8.
# Five of the seven are the same for all. The pool has 20 blocks, and who joins sets aside
# all it may need (notebook 03). `r0` comes a second earlier. How many run at once, without
# and with a prefix cache?

# %%
from minibatch.policies import ReserveMaximum

POOL, COMMON, OWN, NEW = 20, 40, 8, 8
each = -(-(COMMON + OWN + NEW - 1) // B)
predicted = {
    "paged": POOL // each,
    "prefix cache": (POOL - COMMON // B) // (each - COMMON // B),
}


def run(name, cache):
    meta = {"name": name, "workload": "8 requests, 40 common + 8 own + 8 new tokens"}
    engine = Engine(
        ToyModel(), ContinuousBatching(admission=ReserveMaximum()), cache, meta=meta
    )
    prompts = [[*range(100, 100 + COMMON), *[i] * OWN] for i in range(8)]
    times = [0.0] + [1.0] * 7
    requests = [
        Request(prompt, SamplingParams(max_tokens=NEW), f"r{i}", time)
        for i, (prompt, time) in enumerate(zip(prompts, times, strict=True))
    ]
    return engine.run(requests), engine.trace


plain, without = run("paged", PagedKVCache(POOL, B))
found, with_cache = run("prefix cache", PrefixCachedKVCache(POOL, B))
traces = {"paged": without, "prefix cache": with_cache}
for name, trace in traces.items():
    at_once = max(len(step.members) for step in trace.steps)
    computed = accounting.work(trace).prefill
    cached = sum(step.cached for step in trace.steps)
    print(f"{name:13} at once: predicted {predicted[name]}, observed {at_once}", end="   ")
    print(f"prompt tokens: {computed} computed + {cached} found = {computed + cached}")
    assert at_once == predicted[name] and computed + cached == 8 * (COMMON + OWN)
assert [result.tokens for result in plain] == [result.tokens for result in found]

# %%
figures = plots.compare_figures(traces)
show(figures["membership"], alt="Membership without and with a prefix cache")
show(figures["kv_memory"], alt="KV memory without and with a prefix cache")

# %% [markdown]
# The light blue beginning of a bar was found. With the cache a request that ends leaves
# its full blocks behind: *free, keeps a prefix*. They are free memory like any other, and
# nobody has to wait because of them; whoever needs a block gets one, and what it
# remembered is forgotten. So a prefix cache costs no capacity. And a row that several
# requests share counts once. In the next picture blocks 0 to 4 are the common ones (in
# the colour of one of those who share them); each request has two more, of its own.

# %%
show(
    plots.blocks(with_cache),
    alt="Which request holds which block; shared blocks are marked",
)

# %% [markdown]
# ## Predict: time to the first token
#
# On a GPU a hit saves time. Llama-3-8B on an A100-40, simulated; prompts of 1,504 common
# tokens (94 blocks of 16) and 200 of their own. An idle engine needs one iteration for a
# prompt, and the cost model says how long that is, for 1,704 tokens and for the last 200
# of them.

# %%
from minibatch.arrival_processes import Evenly, Poisson
from minibatch.cost_model import Counts
from minibatch.distributions import Fixed, LogNormal
from minibatch.gpus import GPUS
from minibatch.model_shapes import MODELS
from minibatch.open_loop import shared_prefix
from minibatch.simulation import simulate

cost = CostModel(MODELS["llama-3-8b"], GPUS["a100-40"])


def prefill(start, stop):  # seconds, by part of the model
    new = stop - start
    pairs = new * (start + stop + 1) // 2  # the query at position i sees i + 1 keys
    return cost.parts(Counts(new, logits=1, kv_read=stop, kv_written=new, attended=pairs))


miss, hit = sum(prefill(0, 1704)), sum(prefill(1504, 1704))
print(f"predicted: {1000 * miss:.1f} ms without, {1000 * hit:.1f} ms with the cache")
print(f"{miss / hit:.1f} times shorter; of the latter:")
for part in ("linear", "head", "attention", "overhead"):
    print(f"  {part:10}{1000 * getattr(prefill(1504, 1704), part):5.1f} ms")

# %% [markdown]
# 8.5 times fewer tokens, and not 8.5 times faster. For so few tokens, reading the weights
# of the linear layers (11.7 ms) takes about as long as computing with them (12.8 ms), and
# where the two are near each other the cost model counts more than the larger one: 18.5
# ms. The overhead of an iteration stays too. Now the engine; one request every five
# seconds, so that each is alone.


# %%
KINDS = {"paged": PagedKVCache, "prefix cache": PrefixCachedKVCache}


def serve(name, arrivals, n, own, groups=1):
    workload = shared_prefix(n, groups, 1504, arrivals, own, Fixed(50), seed=0)
    cache = KINDS[name](cost.kv_tokens() // 16, 16)
    scheduler = ContinuousBatching(max_num_batched_tokens=8192)
    return simulate(workload, scheduler, cache, cost, meta={"name": name})


rows = {}
for name, expected in (("paged", miss), ("prefix cache", hit)):
    alone = serve(name, Evenly(rate=0.2), 10, Fixed(200))
    ttft = metrics.requests_table(alone)["ttft"]
    assert np.isclose(ttft[0], miss) and np.allclose(ttft[1:], expected)
    rows[name] = {"first": 1000 * ttft[0], "others": 1000 * ttft[1:].mean()}
    rows[name] |= {"others, predicted": 1000 * expected}
print("TTFT in ms (simulated)")
pd.DataFrame(rows).T.round(1)

# %% [markdown]
# Exact, but that is the cost model agreeing with itself; new is what follows under load,
# where a prompt also delays everybody else. Four groups with a beginning of their own, 80
# requests, six a second:

# %%
own = LogNormal(median=200, p90=600, cap=2000)
loaded = {name: serve(name, Poisson(rate=6.0), 80, own, groups=4) for name in KINDS}
show(
    plots.compare_figures(loaded)["latency"], alt="Latencies without and with prefix cache"
)

# %%
names = ["prompt_tokens", "cached_tokens", "ttft_p50", "ttft_p99", "tbt_p99", "throughput"]
table = pd.DataFrame({name: metrics.summary(trace) for name, trace in loaded.items()})
turns = {
    t.request_id: (t.num_cached, t.num_prompt) for t in loaded["prefix cache"].timelines
}
times = [
    (sum(prefill(0, stop)), sum(prefill(start, stop))) for start, stop in turns.values()
]
miss, hit = np.median(times, axis=0)
print(
    f"median TTFT of these prompts alone: {miss:.3f} and {hit:.3f} s, {miss / hit:.1f} "
    "times"
)
for name in ("ttft_p50", "ttft_p99"):
    print(
        f"under load, {name}: {table['paged'][name] / table['prefix cache'][name]:.1f} "
        "times"
    )
slowest = metrics.requests_table(loaded["prefix cache"]).nlargest(3, "ttft")
print("slowest with the cache (tokens found):", end=" ")
print(*(f"{name} ({turns[name][0]})" for name in slowest["request_id"]))
print("seconds, and generated tokens a second (simulated)")
table.T[names].round(3)

# %% [markdown]
# At the median TTFT falls 6.8 times; the same prompts alone would fall 5.1 times, and the
# rest is that nobody waits for other people's long prompts. At P99 it is 4.1 times: there
# stand the first of a group, who finds nothing, and two who came just behind it. The time
# between tokens falls too. Throughput hardly moves: the arrivals limit it here, not the
# engine.
#
# ## Predict: what is given up first
#
# The pool is full and a block is needed. Blocks without a name go first, then those idle
# longest. But all blocks of one request become idle in the same instant. In which order?
# Four blocks of 4 rows; `A` has 13 tokens (three full blocks and one row) and ends; `B`
# has 5 other tokens; then `C` comes with the prompt of `A`. How many tokens does `C` find,
# if the head of `A` goes first? And if the tail goes first?


# %%
def abc(cache):
    engine = Engine(ToyModel(), ContinuousBatching(), cache)
    for name, prompt in (("A", range(13)), ("B", range(50, 55)), ("C", range(13))):
        [result] = engine.run([Request(prompt, SamplingParams(max_tokens=1), name)])
        names = sorted(known.tokens for known in cache.pool.known())
        print(f"{name} found {result.timeline.num_cached}; then known: {names}")
    return result.timeline.num_cached


assert abc(PrefixCachedKVCache(num_blocks=4, block_size=4)) == 8

# %% [markdown]
# `B` took the block without a name, and the *last* named block of `A`: `C` still finds the
# first two, 8 tokens. Had the first block gone, the other two would be there and could
# never be found again, because a chain is followed from its head. In the code it is one
# word: a table is given back in `reversed` order.
#
# ## Who may share
#
# A hit is faster than a miss, and somebody who can measure that learns whether a prompt
# has been there before. A `cache_salt` keeps tenants apart: it is part of every name.

# %%
engine = Engine(ToyModel(), ContinuousBatching(), PrefixCachedKVCache(64, 4))
params = SamplingParams(max_tokens=1)
for salt in ("tenant 1", "tenant 2", None, "tenant 1", "tenant 2", None):
    [result] = engine.run([Request(range(9), params, cache_salt=salt)])
    print(f"{salt!s:9} finds {result.timeline.num_cached}")

# %% [markdown]
# ## Several answers to one prompt
#
# Blocks can also be shared without any name: with `n=3` three answers fork off one prompt,
# and their tables point to the same blocks. Who has to write into a block that others read
# takes a copy first (*copy-on-write*). A prompt of 6 tokens in blocks of 4: how many rows
# are copied for three answers?

# %%
engine = Engine(ToyModel(), ContinuousBatching(), PagedKVCache(num_blocks=16, block_size=4))
three = SamplingParams(n=3, max_tokens=4, temperature=1.0, seed=0)
engine.submit(Request(range(6), three, "q"))
for _ in range(3):
    step = engine.step()
    tables = "  ".join(f"{h.request_id} {list(h.units)}" for h in step.kv.holdings)
    print(f"{tables}   copied {step.copied_rows} rows, filled {step.kv.filled}")

# %% [markdown]
# The full block 0 stays shared. Of block 1, two rows are filled; two answers take a copy
# of these, four rows, and the last one keeps the original. (Filled: 4 shared rows and 3
# for each answer, 13.)
#
# ## Conversations
#
# The next turn of a conversation contains all that was said before. Turn *t* + 1 can find
# what turn *t* has computed: prompt and answer, but for the last token, in full blocks.
# With a cache that is large enough that is exact:

# %%
from minibatch.closed_loop import conversations


def talk(num_blocks):
    words, answers = LogNormal(60, p90=150, cap=300), LogNormal(40, p90=80, cap=120)
    arrivals = Poisson(rate=1.0)
    workload = conversations(24, 4, arrivals, words, answers, think_time=10.0, seed=0)
    cache, scheduler = PrefixCachedKVCache(num_blocks, 16), ContinuousBatching()
    return simulate(workload, scheduler, cache, cost, meta={"name": f"{num_blocks} blocks"})


def later_turns(turns):  # with the turn before
    for name, turn in turns.items():
        conversation, number = name.split(".")
        if number != "0":
            yield turns[f"{conversation}.{int(number) - 1}"], turn


turns = {t.request_id: t for t in talk(2048).timelines}
for before, turn in later_turns(turns):
    computed = before.num_prompt + len(before.token_times) - 1
    assert turn.num_cached == 16 * min(computed // 16, (turn.num_prompt - 1) // 16)
for number in range(4):
    turn = turns[f"c0.{number}"]
    print(f"c0, turn {number}: prompt of {turn.num_prompt} tokens, {turn.num_cached} found")

# %% [markdown]
# Between two turns the user reads and writes, and the blocks lie idle: that is when they
# are lost, if others need the room. How large must the cache be? All conversations
# together, at their ends, would fill:

# %%
last = [turn for name, turn in turns.items() if name.endswith(".3")]
total = sum(turn.num_prompt + len(turn.token_times) for turn in last)
print(f"{total:,} tokens = {total / 16:.0f} blocks")
rows = []
for blocks in (64, 128, 192, 256, 384, 512, 768, 1024):
    numbers = metrics.summary(talk(blocks))
    assert numbers["completed"] == 96
    share = 100 * numbers["cached_tokens"] / numbers["prompt_tokens"]
    rows.append({"blocks": blocks, "% found": share})
    if numbers["preemptions"]:
        print(f"{blocks} blocks: {numbers['preemptions']} preemptions as well")
ax = plots.curves(pd.DataFrame(rows), "blocks", "% found")
ax.axvline(total / 16, color="#999999", linestyle="--")
ax.text(total / 16, 5, " all conversations together", fontsize=8)
ax.set_ylim(0)
what = "simulated · Llama-3-8B on A100-40GB · 24 conversations of 4 turns · seed 0"
sign(ax.figure, what)
show(ax, alt="Share of prompt tokens found, by size of the cache")

# %%
pauses = {"nothing": [], "something": []}
for before, turn in later_turns({t.request_id: t for t in talk(256).timelines}):
    found = "something" if turn.num_cached else "nothing"
    pauses[found].append(turn.arrival - before.finish)
for found, seconds in pauses.items():
    pause = f"median pause {np.median(seconds):.1f} s"
    print(f"256 blocks: {len(seconds)} later turns find {found}, {pause} (simulated)")

prompt = sum(turn.num_prompt for turn in turns.values())
said = sum(b.num_prompt + len(b.token_times) for b, _ in later_turns(turns))
hits = sum(turn.num_cached for turn in turns.values())
print(f"2,048 blocks: {hits / prompt:.1%} of the prompt tokens are found,", end=" ")
print(f"{1 - said / prompt:.1%} are new, {(said - hits) / prompt:.1%} neither")

# %% [markdown]
# The share falls without a cliff: a smaller cache loses those who pause longest, and keeps
# the others. Fewer blocks than all conversations would fill are enough here, because not
# all are at their end at once: some are over, others still short. And no cache finds
# everything: 28 % of the prompt tokens are new, and the ends of the turns before do not
# fill a block.
#
# ## Where it is in the code
#
# `minibatch/prefix_cache.py` (names, finding, eviction), `paged_kv_cache.py` (sharing,
# copy-on-write), `policies/queueing.py` (`LongestPrefix`: who finds most goes first),
# `open_loop.py` and `closed_loop.py` (the workloads). Next: 06, prompts and answers in one
# iteration.
#
# ## Try
#
# 1. Give blocks back head first, as below, and predict what `C` finds. Which line makes
#    the difference?
# 2. `serve` with a rate of 10 instead of 6: which column of the table suffers most without
#    the cache?
# 3. In the first table make the blocks 16 or 1 long. What does a shared prefix of 37
#    tokens give then?


# %%
class HeadFirst(PrefixCachedKVCache):
    def release(self, request):
        self.tables.get(request, []).reverse()
        super().release(request)


found = abc(HeadFirst(num_blocks=4, block_size=4))

# %% [markdown]
# ## What this does not show
#
# - That a block is only worth something after the same past is shown by the two layers
#   above. The toy imitates it: each of its rows keeps a hash of all before it. That the
#   project's cache is right with real models is checked by its tests.
# - Simulated times are those of a roofline; looking up and hashing take no time there. The
#   load has one seed, 80 requests, and prefixes that make up most of each prompt: the case
#   that a prefix cache is made for. With prompts that share nothing it finds nothing, and
#   is no slower here.
# - One engine. Where there are many, a request must also be sent to the one that has its
#   prefix.
# - Only full blocks are found. SGLang's radix tree shares to the token.
