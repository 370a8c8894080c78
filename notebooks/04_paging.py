# %% [markdown]
# # 04 · Paging the KV cache
#
# **Question.** If memory is handed out in small blocks, as it is needed, what is gained,
# what is still lost, and what remains to be decided?
#
# **You will be able to** read a block table and translate a token's position into a row of
# the cache; say how many rows a block size wastes, and check it; explain why paging lets
# more requests run, and why it brings preemption.
#
# **Before this:** 03 (what a token of context costs, and who may join) · **Minutes:** 25
# · **Runs:** toy model

# %%
import random

import pandas as pd

from minibatch import (
    ContiguousKVCache,
    ContinuousBatching,
    Engine,
    PagedKVCache,
    Request,
    SamplingParams,
    ToyModel,
    accounting,
    metrics,
    plots,
)
from minibatch.explain import describe
from minibatch.notebook import explore, show
from minibatch.plot_style import new_axes, sign

# %% [markdown]
# ## A table for each request
#
# The cache is cut into blocks of a few rows. A request takes a block when its next token
# needs one; *which* one does not matter. A list says where its tokens are: its **block
# table**, like the page table of a process.
#
# Four requests, eight blocks of four rows. `c` comes one second later, `d` five (the toy's
# clock: one iteration a second). An entry of the list below: blocks in the order of the
# tokens, then how many of their rows hold a token.

# %%
engine = Engine(
    ToyModel(),
    ContinuousBatching(max_num_seqs=8),
    PagedKVCache(num_blocks=8, block_size=4),
    meta={"name": "paged", "workload": "a, b, c, d"},
)
for name, prompt, new, arrival in (
    ("a", 6, 10, 0.0),
    ("b", 3, 2, 0.0),
    ("c", 3, 5, 1.0),
    ("d", 9, 8, 5.0),
):
    engine.submit(Request(range(prompt), SamplingParams(max_tokens=new), name, arrival))

for _ in range(6):
    step = engine.step()
    tables = [
        f"{h.request_id} {list(h.units)} {h.filled}/{4 * len(h.units)}"
        for h in step.kv.holdings
    ]
    print(f"iteration {step.index}:  " + "   ".join(f"{table:<17}" for table in tables))

# %% [markdown]
# Follow `a`: its prompt of 6 tokens takes two blocks. Its 7th and 8th token fit into them.
# The 9th needs a third block, and gets the one that happens to be free.
#
# ## Predict: where is the token?
#
# Token *t* (from 0) is in entry `t // 4` of the table, at offset `t % 4` of that block, so
# in row `table[t // 4] * 4 + t % 4`. Where is token 8 of `a`? Where are tokens 7 and 8 of
# `d`? Work it out from the last line above, then look.

# %%
last = {holding.request_id: holding.units for holding in step.kv.holdings}
states = {state.request_id: state for state in engine.active}
for name, token in (("a", 8), ("d", 7), ("d", 8)):
    block, offset = last[name][token // 4], token % 4
    row = block * 4 + offset
    # the one place where the engine translates
    assert row == engine.kv.rows(states[name], token, token + 1)[0]
    print(f"{name}, token {token}: entry {token // 4} of {list(last[name])}", end=" ")
    print(f"is block {block}, offset {offset}: row {row}")

# %% [markdown]
# Token 7 of `d` is in row 31, and token 8, its neighbour, in row 8. Attention must follow
# the table; that is the price of it. The rest of the run, as a picture of the pool:

# %%
while engine.step() is not None:
    pass
show(
    plots.blocks(engine.trace),
    alt="Which request holds which of eight blocks in which iteration",
)

# %% [markdown]
# When `d` came, blocks 2, 6 and 7 were free, not all of them neighbours. For a table that
# does not matter. For an allocator that gives each request one run of rows it may: if two
# requests of 8 rows have ended on both sides of one that stays, 16 rows are free, and a
# request of 16 cannot have them. That is *external fragmentation*; with blocks any free
# one will do, so it cannot occur.
#
# Step through the same run: tables grow, and a block that comes back is taken by somebody
# else.

# %%
from minibatch import player

stepper = player.show(engine.trace)

# %% [markdown]
# ## Predict: what is lost inside blocks
#
# What can still be lost is the end of a request's last block. A request with *c* tokens in
# blocks of *B* leaves `-c mod B` rows empty: 0 at best, *B* − 1 at worst. If all
# remainders of *c* are equally frequent, (B − 1)/2 on average. That is an assumption; it
# is a good one if lengths have nothing to do with *B*, for each request goes through many
# lengths. For B = 16: how many rows a request? And how many entries has a table?
#
# 60 requests with prompts of 5 to 40 tokens and answers of 10 to 60, in a cache of 512
# rows, whatever the block size.

# %%
ROWS, SEED = 512, 0


def requests(number=60):
    draw = random.Random(SEED)
    lengths = [(draw.randint(5, 40), draw.randint(10, 60)) for _ in range(number)]
    return [
        Request([i + 1] * p, SamplingParams(max_tokens=g), f"r{i}", 0.0)
        for i, (p, g) in enumerate(lengths)
    ]


def run(cache, number=60, **knobs):
    meta = {
        "name": f"{cache.unit_name}s of {cache.unit_size}",
        "workload": f"{number} requests at once, 5-40 + 10-60 tokens",
        "seed": SEED,
    }
    engine = Engine(ToyModel(), ContinuousBatching(**knobs), cache, meta=meta)
    engine.run(requests(number))
    return engine.trace


# %%
rows = []
for size in (1, 2, 4, 8, 16, 32, 64):
    trace = run(PagedKVCache(ROWS // size, size))
    held = [holding for step in trace.steps for holding in step.kv.holdings]
    assert all(holding.fragmentation < size for holding in held)
    wasted = sum(holding.fragmentation for holding in held)
    rows.append(
        {
            "block size": size,
            "predicted": (size - 1) / 2,
            "observed": wasted / len(held),
            "entries": sum(len(holding.units) for holding in held) / len(held),
            "wasted %": 100 * wasted / (wasted + sum(holding.filled for holding in held)),
        }
    )
sweep = pd.DataFrame(rows)
sweep.round(2)

# %%
axes = new_axes(3.2, 1, 2)
seen = sweep.rename(
    columns={"observed": "rows wasted a request", "entries": "table entries"}
)
for ax, y in zip(axes, ("rows wasted a request", "table entries"), strict=True):
    plots.curves(seen, "block size", y, ax=ax)
line = {"color": "#999999", "linestyle": "--", "label": "predicted: (B - 1)/2"}
axes[0].plot(sweep["block size"], sweep["predicted"], **line)
axes[0].legend(fontsize=8, frameon=False)
for ax in axes:
    ax.set_xscale("log", base=2)
    ax.set_xticks(sweep["block size"], sweep["block size"])
what = f"simulated · toy · 60 requests, {ROWS} rows · seed {SEED}"
sign(axes[0].figure, what)
show(axes[0], alt="Wasted rows grow with the block size, table entries shrink")

# %% [markdown]
# Every holding in every iteration obeys the bound (the `assert`), and the mean is near (B
# − 1)/2 as long as requests are longer than a block. (At 64 the assumption fails: most of
# these requests end in their first block.) So small blocks waste little. What speaks
# against blocks of one row? The table: it has an entry a block, and a kernel reads memory
# in runs as long as a block. vLLM took 16 as its default (Kwon et al., SOSP 2023).
#
# ## Predict: slots against blocks, at the same bytes
#
# A request needs at most P + G − 1 rows: 99 by the limits above, and the longest that was
# drawn needs 91. Contiguous slots must be that long: how many fit into 512 rows? Blocks
# (of 8) change two things, and we take them one by one. If a request sets aside all the
# blocks that it will need (`ReserveMaximum`), it pays for its own length, not for the
# longest. If it takes them on demand, it holds what it has computed so far and half a
# block: on average over its life about the prompt and half the answer. How many run at
# once in each case?

# %%
lengths = [(len(request.prompt), request.params.max_tokens) for request in requests()]
slot = max(p + g - 1 for p, g in lengths)
slots = ROWS // slot
iterations = sum(g for _, g in lengths)  # of all requests; means are over these
all_of_it = sum(8 * -(-(p + g - 1) // 8) * g for p, g in lengths) / iterations
computed = sum(p + k for p, g in lengths for k in range(g)) / iterations
held = {"slots": slot, "all blocks": all_of_it, "on demand": computed + (8 - 1) / 2}
predicted = {name: ROWS / rows for name, rows in held.items()}
for name, rows in held.items():
    print(f"{name}: {ROWS} rows / {rows:.1f} = {predicted[name]:.1f} requests")
predicted["slots"] = slots
print(f"of slots, {slots} whole ones")

# %%
from minibatch.policies import ReserveMaximum, Watermark

traces = {
    "slots": run(ContiguousKVCache(slots, slot)),
    "all blocks": run(PagedKVCache(ROWS // 8, 8), admission=ReserveMaximum()),
    "on demand": run(PagedKVCache(ROWS // 8, 8)),
}
rows = []
for name, trace in traces.items():
    busy = metrics.steps_table(trace).query("num_waiting > 0")
    rows.append(
        {
            "cache": name,
            "at once, predicted": predicted[name],
            "while somebody waits": busy["num_seqs"].mean(),
            "iterations": trace.num_steps,
            "preemptions": accounting.memory(trace).preemptions,
            "computed again": accounting.work(trace).recomputed,
        }
    )
assert max(len(step.members) for step in traces["slots"].steps) == slots
pd.DataFrame(rows).round(1).set_index("cache")

# %%
show(
    plots.compare_figures(traces)["kv_memory"],
    alt="Memory by iteration: slots, all blocks set aside, blocks on demand",
)

# %% [markdown]
# Both steps gain about as much: 5 to 7.3 at once by not rounding up to the longest, 7.3
# to 11.1 by not setting aside. (7.3 and not 7.6: what is free in the middle picture is
# too little for all of the first in the queue.) The limit of each request is its true
# length here, so *all blocks* knows the future: near what the vLLM paper calls Orca
# (Oracle). With careless limits, as in notebook 03, far fewer would run at once.
#
# ## What paging does not do
#
# It does not make memory larger. With slots a request that is in stays in; on demand
# requests grow while they run, and when the pool is empty *somebody has to give way*. Who,
# and how its K/V come back, is a policy, and the allocator has no opinion about it. Here
# the default decided: the newest goes, and computes everything again later. What that
# costs, and one victim's story. (*Behind r19, one of 40 there*: r19 is first in the queue
# and does not fit, and nobody may overtake it. *Thrash guard*: what was just taken from a
# victim is for those who run, so nobody joins in that iteration.)

# %%
useful = sum(p + g - 1 for p, g in lengths)
again = accounting.work(traces["on demand"]).recomputed
print(f"{again} tokens computed again: {again / useful:.0%} of the {useful} useful ones")
kept = run(PagedKVCache(ROWS // 8, 8), admission=Watermark(share=0.05))
number, again = accounting.memory(kept).preemptions, accounting.work(kept).recomputed
print(
    f"with 5 % kept free: {number} preemptions, {again} tokens, {kept.num_steps} iterations"
)

victims = {t.request_id: t.num_preemptions for t in traces["on demand"].timelines}
victims = {name: number for name, number in victims.items() if number}
print(
    f"{len(victims)} of 60 requests were preempted, {sum(victims.values())} times in all\n"
)
worst = max(victims, key=victims.get)
print(describe(traces["on demand"], worst))

# %% [markdown]
# Those tokens are given away free by this clock. And `r24` is preempted three times in
# nine iterations, for four tokens: it comes back as soon as it fits itself, into a pool in
# which nobody has room to grow. The watermark of notebook 03 is there to prevent that, but
# the default keeps 1 % of the pool, and of 64 blocks that is none. With 5 %, three blocks,
# there are a third fewer preemptions, in as many iterations.
#
# The tokens are right all the same: each request has a prompt of its own, and the toy's
# next token is a hash of all that it reads through the table, so a wrong row would change
# the answer.


# %%
def answers(cache):
    engine = Engine(ToyModel(), ContinuousBatching(), cache)
    return [result.tokens for result in engine.run(requests())]


tight, ample = PagedKVCache(ROWS // 8, 8), PagedKVCache(60 * 16, 8)
assert answers(tight) == answers(ample)  # nobody is preempted in the ample one
print("60 of 60 answers are the same with and without preemptions")

# %% [markdown]
# ## Explore
#
# Move one control at a time. Which one brings the most preemptions? At what batch size
# does memory stop to matter?

# %%
from minibatch.policies import Recompute, Swap

GIVES_WAY = {"recompute": Recompute(), "swap": Swap()}


def draw(block_size=8, pool_rows=384, batch_size=32, preemption="recompute"):
    """Membership above, KV memory below, of 24 requests."""
    cache = PagedKVCache(pool_rows // block_size, block_size)
    trace = run(cache, number=24, max_num_seqs=batch_size, preemption=GIVES_WAY[preemption])
    axes = new_axes(6.4, 2)
    plots.membership(trace, ax=axes[0])
    plots.kv_memory(trace, ax=axes[1])
    what = "simulated · toy · 24 requests at once · seed 0"
    sign(axes[0].figure, what)
    return axes


sliders = explore(
    draw,
    block_size=[1, 2, 4, 8, 16, 32, 64],
    pool_rows=[128, 256, 384, 512, 1024],
    batch_size=[2, 4, 8, 16, 32],
    preemption=list(GIVES_WAY),
)

# %% [markdown]
# ## Try
#
# 1. The assumption behind (B − 1)/2 can be broken: give all prompts a length that is a
#    multiple of 16 and all answers one token. What does a block size of 16 waste then? And
#    with prompts one token longer? Predict, then change the two numbers below.
# 2. Give `run` other values of `admission=Watermark(share=...)`. From where on do the
#    iterations become more, and why?
# 3. Find the smallest pool in which the 60 requests run without any preemption. Which
#    number did you expect?

# %%
prompt, new = 32, 1
engine = Engine(ToyModel(), ContinuousBatching(), PagedKVCache(ROWS // 16, 16))
engine.run([Request([1] * prompt, SamplingParams(max_tokens=new)) for _ in range(20)])
held = [holding for step in engine.trace.steps for holding in step.kv.holdings]
wasted = sum(holding.fragmentation for holding in held) / len(held)
print(f"{wasted:.1f} rows wasted a request; (B - 1)/2 = 7.5")

# %% [markdown]
# ## Where it is in the code
#
# `minibatch/paged_kv_cache.py` (pool, tables, copy-on-write), `kv_cache.py` (`rows` is the
# address translation; the slots), `policies/preemption.py` (who gives way).
# `studies/buddy.py` has the allocators that paging replaced, with external fragmentation;
# `minibatch reproduce vllm` compares them. Next: 05, blocks that are found again.
#
# ## What this does not show
#
# - The toy's clock: an iteration takes one second whoever is in it, a preemption costs
#   nothing but iterations, and following a table is free. On a GPU the attention kernel
#   pays for it (20 to 26 % over FasterTransformer's kernel in the vLLM paper, for
#   attention alone).
# - The five slots of 91 rows leave 57 of the 512 over. Slots of the longest request are
#   the crudest rival. Rounding up to powers of two does better: see the study above, where
#   the published numbers stand.
# - One seed, 60 requests, all there at the beginning. The end of each run, when nobody
#   waits, is in the iteration counts.
# - No request shares a block here. Notebook 05 does that.
